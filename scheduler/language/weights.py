"""A decoder's weights from the files of its folder, under the names that the steps use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.language.config import DecoderConfig
from paellapy.scheduler.models.model_folder import LanguageModelError, read_json
from paellapy.scheduler.models.weights import map_weights

Tensors = Mapping[str, NDArray[Any]]
_INDEX = "model.safetensors.index.json"


def read_tensors(folder: str | Path) -> dict[str, NDArray[Any]]:
    """The tensors of all safetensors files of a folder, mapped into memory."""
    folder = Path(folder)
    index = folder / _INDEX
    if index.exists():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise LanguageModelError(
            f"{folder} has no *.safetensors file: download the model's weights in that format", path=folder
        )
    found: dict[str, NDArray[Any]] = {}
    for name in files:
        found |= map_weights(folder / name)
    return found


def decoder_weights(tensors: Tensors, config: DecoderConfig, context: int) -> dict[str, NDArray[Any]]:
    """The arrays that `Decoder` reads. Products that read the same input are joined into one."""
    c = config
    named = {name.removeprefix("model."): array for name, array in tensors.items()}

    def get(name: str, *shape: int) -> NDArray[Any]:
        if name not in named:
            raise LanguageModelError(
                f"the weights have no tensor {name!r}, which {c.architecture} needs: download the folder again",
                field=name,
            )  # fmt: skip
        if named[name].shape != shape:
            raise LanguageModelError(
                f"tensor {name!r} has shape {named[name].shape}; config.json says {shape}: the files do not belong "
                "together", field=name, given=named[name].shape, limit=shape,
            )  # fmt: skip
        return named[name]

    def joined(*parts: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate(parts)

    q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
    made = {"embed": get("embed_tokens.weight", c.vocabulary, c.width)}
    for k in range(c.layers):
        at, attn, mlp = f"layers.{k}.", f"layers.{k}.self_attn.", f"layers.{k}.mlp."
        made[f"{k}.norm1"] = get(at + "input_layernorm.weight", c.width)
        sizes = {"q": q, "k": kv, "v": kv}
        made[f"{k}.qkv"] = joined(*(get(f"{attn}{name}_proj.weight", n, c.width) for name, n in sizes.items()))
        if c.qkv_bias:
            made[f"{k}.qkv_bias"] = joined(*(get(f"{attn}{name}_proj.bias", n) for name, n in sizes.items()))
        if c.qk_norm:
            made[f"{k}.q_norm"] = get(attn + "q_norm.weight", c.head_width)
            made[f"{k}.k_norm"] = get(attn + "k_norm.weight", c.head_width)
        made[f"{k}.out"] = get(attn + "o_proj.weight", c.width, q)
        made[f"{k}.norm2"] = get(at + "post_attention_layernorm.weight", c.width)
        made[f"{k}.gate_up"] = joined(
            get(mlp + "gate_proj.weight", c.ffn_width, c.width), get(mlp + "up_proj.weight", c.ffn_width, c.width)
        )
        made[f"{k}.down"] = get(mlp + "down_proj.weight", c.width, c.ffn_width)
    made["norm"] = get("norm.weight", c.width)
    made["head"] = made["embed"] if c.tied else get("lm_head.weight", c.vocabulary, c.width)
    made["cosines"], made["sines"] = c.rotary.table(c.head_width, context)
    return made
