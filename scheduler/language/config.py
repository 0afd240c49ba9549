"""The shape of a decoder, read from a folder's `config.json` as the hub has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.models.model_folder import LanguageModelError, read_json

# By architecture: whether products of queries, keys and values have biases, and whether queries and keys are normed.
_FAMILIES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
_TYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions turn queries and keys: the frequencies of `rope_parameters` (or `rope_theta`, `rope_scaling`)."""

    base: float
    kind: str = "default"
    scaling: Mapping[str, float] | None = None

    def frequencies(self, width: int, context: int) -> tuple[NDArray[np.float64], float]:
        """The angle per position of each pair of a head's elements, and the factor of sines and cosines."""
        plain = self.base ** (-np.arange(0, width, 2) / width)
        about = dict(self.scaling or {})
        factor = about.get("factor", 1.0)
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "linear":
            return plain / factor, 1.0
        original = about.get("original_max_position_embeddings", context)
        if self.kind == "llama3":
            low, high = about["low_freq_factor"], about["high_freq_factor"]
            turns = original * plain / (2 * math.pi)  # of each pair over the original context
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return plain * kept + plain / factor * (1 - kept), 1.0
        return _yarn(plain, self.base, width, factor, original, about)

    def table(self, width: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of all positions: two arrays (context, width / 2)."""
        angles, factor = self.frequencies(width, context)
        # Libraries compute these angles in float32, and models were trained with them.
        turned = np.arange(context, dtype=np.float32)[:, None] * angles.astype(np.float32)[None, :]
        return (np.cos(turned) * factor).astype(np.float32), (np.sin(turned) * factor).astype(np.float32)


def _yarn(
    plain: NDArray[np.float64], base: float, width: int, factor: float, original: float, about: Mapping[str, float]
) -> tuple[NDArray[np.float64], float]:
    """Frequencies after YaRN (arXiv:2309.00071): fast pairs stay, slow ones are divided, those between are mixed."""

    def pair(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(about.get("beta_fast", 32.0)), pair(about.get("beta_slow", 1.0))
    if about.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = about.get("attention_factor")
    if given is None and about.get("mscale") and about.get("mscale_all_dim"):
        given = magnitude(about["mscale"]) / magnitude(about["mscale_all_dim"])
    return plain / factor * slow + plain * (1 - slow), magnitude(1.0) if given is None else given


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family."""

    architecture: str
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocabulary: int
    context: int  # positions that the model was made for
    norm_eps: float
    rotary: Rotary
    dtype: str
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the last product uses the table of embeddings
    window: int = 0  # tokens that attention sees; 0: all
    eos: tuple[int, ...] = ()
    bos: int | None = None

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Memory for the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder that a folder's config.json describes; LanguageModelError says why there is none."""
    path = Path(folder) / "config.json"
    return decoder_config(read_json(path), path)


def decoder_config(about: Mapping[str, Any], path: Path) -> DecoderConfig:
    """The decoder that a configuration describes. `path` is for errors."""
    names = about.get("architectures") or ["?"]
    known = next((name for name in names if name in _FAMILIES), None)
    if known is None:
        raise LanguageModelError(
            f"{path} describes {names[0]}, which is not supported; supported: {', '.join(_FAMILIES)}", path=path,
            field="architectures", given=names[0],
        )  # fmt: skip
    read = _Reader(about, path)
    bias, qk_norm = _FAMILIES[known]
    width, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    layers = read.count("num_hidden_layers")
    if heads % kv_heads:
        read.fail("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    head_width = read.count("head_dim", width // heads)
    # The GPU multiplies 16 numbers or more at a time, and a query is two halves.
    if head_width & (head_width - 1) or not 32 <= head_width <= 256:
        read.fail("head_dim", head_width, "is not a power of two from 32 to 256")
    if about.get("hidden_act", "silu") != "silu":
        read.fail("hidden_act", about["hidden_act"], "is not silu")
    for key in ("mlp_bias", *(() if bias else ("attention_bias",))):
        if about.get(key):
            read.fail(key, True, "is not supported")
    dtype = str(about.get("dtype") or about.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _TYPES:
        read.fail("dtype", dtype, f"is none of {', '.join(_TYPES)}")
    eos = about.get("eos_token_id")
    return DecoderConfig(
        architecture=known, layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_width=head_width,
        ffn_width=read.count("intermediate_size"), vocabulary=read.count("vocab_size"),
        context=read.count("max_position_embeddings"), norm_eps=float(about.get("rms_norm_eps", 1e-6)),
        rotary=_rotary(about, read), dtype=dtype, qkv_bias=bias, qk_norm=qk_norm,
        tied=bool(about.get("tie_word_embeddings")), window=_window(about, known, layers, read), eos=token_ids(eos),
        bos=about.get("bos_token_id"),
    )  # fmt: skip


def token_ids(given: Any) -> tuple[int, ...]:
    """Ids of tokens: configurations have one, a list, or none."""
    return () if given is None else tuple(given) if isinstance(given, list) else (int(given),)


def _window(about: Mapping[str, Any], architecture: str, layers: int, read: _Reader) -> int:
    window = about.get("sliding_window")
    if not window or (architecture.startswith("Qwen") and not about.get("use_sliding_window")):
        return 0
    kinds = set(about.get("layer_types") or ())
    if len(kinds) > 1 or 0 < (about.get("max_window_layers") or 0) < layers:
        read.fail("sliding_window", window, "differs between layers, which is not supported")
    return 0 if kinds == {"full_attention"} or about.get("max_window_layers") == layers else int(window)


def _rotary(about: Mapping[str, Any], read: _Reader) -> Rotary:
    scaling = dict(about.get("rope_parameters") or about.get("rope_scaling") or {})
    base = float(scaling.pop("rope_theta", None) or about.get("rope_theta") or 10_000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        read.fail("rope_type", kind, "is none of default, linear, llama3, yarn")
    if scaling.get("partial_rotary_factor", about.get("partial_rotary_factor", 1.0)) != 1.0:
        read.fail("partial_rotary_factor", scaling.get("partial_rotary_factor"), "is not 1")
    return Rotary(base, kind, {key: value for key, value in scaling.items() if isinstance(value, int | float)})


class _Reader:
    """Numbers of a configuration, checked."""

    def __init__(self, about: Mapping[str, Any], path: Path) -> None:
        self._about, self._path = about, path

    def count(self, key: str, default: int | None = None) -> int:
        value = self._about.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(key, value, "is not an integer of at least 1")
        return int(value)  # type: ignore[arg-type]

    def fail(self, key: str, value: Any, why: str) -> None:
        raise LanguageModelError(f"{self._path}: {key}={value!r} {why}", path=self._path, field=key, given=value)
