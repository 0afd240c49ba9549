"""What is read from a model's folder, and what is said of folders that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import failing
from language_families import FAMILIES, edited_config, family

from paellapy.scheduler.language.config import decoder_config, read_config
from paellapy.scheduler.language.weights import decoder_weights, read_tensors
from paellapy.scheduler.models.model_folder import LanguageModelError
from paellapy.scheduler.models.weights import WeightFileError

PLAIN = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_frequencies_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    model = family(name, tmp_path)
    config = read_config(tmp_path)
    frequencies, factor = config.rotary.frequencies(config.head_width, config.context)
    rotary = model.model.rotary_emb
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=1e-6)
    assert factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"), ({"architectures": None}, "architectures"),
        ({"hidden_size": "wide"}, "hidden_size"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 80}, "head_dim"), ({"head_dim": 16}, "head_dim"),
        ({"hidden_act": "relu"}, "hidden_act"), ({"dtype": "int8"}, "dtype"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"), ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8,
          "num_hidden_layers": 4, "max_window_layers": 2}, "sliding_window"),
    ],
)  # fmt: skip
def test_a_decoder_that_is_not_supported_is_refused(changes: dict[str, Any], field: str) -> None:
    with failing(LanguageModelError, field=field):
        decoder_config({**PLAIN, **changes}, Path("config.json"))


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with failing(LanguageModelError, path=tmp_path / "config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with failing(LanguageModelError, path=tmp_path / "config.json"):
        read_config(tmp_path)
    with failing(LanguageModelError, path=tmp_path):
        read_tensors(tmp_path)


def test_weights_in_several_files_are_found_and_wrong_ones_are_named(tmp_path: Path) -> None:
    model = family("Qwen2", tmp_path)
    whole = decoder_weights(read_tensors(tmp_path), read_config(tmp_path), 64)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = decoder_weights(read_tensors(tmp_path), read_config(tmp_path), 64)
    for key, value in whole.items():
        np.testing.assert_array_equal(parts[key], value)
    edited_config(tmp_path, vocab_size=301)
    with failing(LanguageModelError, field="embed_tokens.weight", given=(300, 64), limit=(301, 64)):
        decoder_weights(read_tensors(tmp_path), read_config(tmp_path), 64)
    file = next(iter(tmp_path.glob("*.safetensors")))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightFileError):
        read_tensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(WeightFileError):
        read_tensors(tmp_path)
