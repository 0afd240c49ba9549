"""Small decoders with random weights, as libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "Mistral": {"sliding_window": 24, "head_dim": 32, "tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": False},
}


def family(name: str, folder: Path) -> Any:
    """A model of transformers with random weights, also written to the folder."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**BASE, **FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:
                parameter += torch.randn_like(parameter) * 0.2
            else:
                parameter *= 3  # the initial weights give almost equal logits
    model.save_pretrained(folder)
    return model


def edited_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
