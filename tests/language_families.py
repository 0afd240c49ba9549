"""Small decoders with random weights, as libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paellapy.scheduler.models.weights import write_weights

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
    "Llama": {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "Mistral": {"sliding_window": 24, "head_dim": 32, "tie_word_embeddings": False},
    "Qwen2": {"head_dim": 32, "tie_word_embeddings": True},
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


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token for each byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: k for k, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"chat_template": TEMPLATE, "eos_token": {"content": "|"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def edited_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def small_model(folder: Path, context: int = 256) -> None:
    """Writes a whole folder: a small Qwen3 with random weights that writes bytes. It needs no other library."""
    about = {**BASE, **FAMILIES["Qwen3"], "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "dtype": "float32",
             "max_position_embeddings": context, "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    byte_tokenizer(folder)
    width, ffn, head = about["hidden_size"], about["intermediate_size"], about["head_dim"]
    q, kv = (about[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
        "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn),
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    shapes = {"embed_tokens": (256, width), "norm": (width,)}
    shapes |= {f"layers.{k}.{name}": shape for k in range(about["num_hidden_layers"]) for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    made = {
        f"model.{name}.weight": rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    write_weights(folder / "model.safetensors", made)
