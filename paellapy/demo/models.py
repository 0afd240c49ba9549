"""The demo models: three classifiers of handwritten digits, from three kernels to seventy-five.

| model | layers | kernels |
|---|---|---|
| `mlp` | 64 → 256 → 128 → 10 | 3 |
| `cnn` | image doubled to 16x16; 6 convolutions to 16, 32 and 64 channels, 2 max pools, mean pool, linear | 11 |
| `transformer` | image doubled, 16 patches; 10 blocks of width 64 with 4 heads; layer norm, mean pool, linear | 75 |

Each takes `image` (8, 8), values from 0 to 1, and returns `scores` (10,), probabilities. train.py makes their weights;
reference.py computes the same in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.demo import kernels as _kernels
from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import UnknownModelError
from paellapy.scheduler.models.model import Arrays, Model, ModelFunction, TensorSpec
from paellapy.scheduler.sim.workload import TraceWorkload

kernels: Any = _kernels  # launched as kernel[grid](…)

SIDE = 8  # pixels of an image's side
CLASSES = 10
HEADS = 4
PATCH = 4  # side of a patch of the doubled image
NORM_EPS = 1e-5
AUSTEN = Path(__file__).parent / "austen"  # a language model, for `LanguageModel` and `language_model` in TOML
TARGETS_MS = {"mlp": 50.0, "cnn": 100.0, "transformer": 200.0}  # within reach of a virtual GPU on a laptop's CPU


def names() -> list[str]:
    """The demo models, from the shortest to the longest."""
    return list(FORWARDS)


def load(name: str, batch: Sequence[int] = (1, 2, 4, 8), target_ms: float | None = None) -> Model:
    """A demo model with its weights, ready for an engine.

    >>> load("mlp").outputs
    {'scores': TensorSpec((10,), 'float32')}
    """
    if name not in FORWARDS:
        raise UnknownModelError(f"no demo model is named {name!r}: choose one of {', '.join(names())}", model=name)
    return Model(
        name,
        FORWARDS[name],
        inputs={"image": TensorSpec((SIDE, SIDE), np.float32)},
        outputs={"scores": TensorSpec((CLASSES,), np.float32)},
        weights=load_weights(name),
        batch=batch,
        target_ms=target_ms,
    )


def load_weights(name: str) -> dict[str, NDArray[np.float32]]:
    """A model's weights by name. They are stored as float16."""
    return {key: value.astype(np.float32) for key, value in _read(name).items()}


def held_out() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images (n, 8, 8) and labels (n,) that no model was trained on."""
    data = _read("digits_test")
    return (data["images"] / 16).astype(np.float32), data["labels"].astype(np.int64)


def _read(name: str) -> dict[str, NDArray[Any]]:
    with (files("paellapy.demo") / "weights" / f"{name}.npz").open("rb") as file:
        return dict(np.load(file, allow_pickle=False))


# ---- the models ------------------------------------------------------------------------------------------------------


def mlp(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
    image = inputs["image"]
    batch = image.shape[0]
    wide, narrow = _empty(batch, weights["0.bias"].shape[0]), _empty(batch, weights["1.bias"].shape[0])
    _linear(image, weights, "0", wide, activation="relu")
    _linear(wide, weights, "1", narrow, activation="relu")
    _classify(narrow, weights, outputs["scores"])


def cnn(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
    x = _double(inputs["image"])
    x = _convolve(x, weights, ("0", "1"))
    x = _convolve(_pool(x), weights, ("2", "3"))
    x = _convolve(_pool(x), weights, ("4", "5"))
    _classify(_mean(x), weights, outputs["scores"])


def transformer(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
    doubled = _double(inputs["image"])
    batch, side = doubled.shape[:2]
    tokens, width = weights["position"].shape
    # Every block uses the same memory; the tokens alternate between x and y.
    x, y, normed, mixed = (_empty(batch, tokens, width) for _ in range(4))
    qkv, hidden = _empty(batch, tokens, 3 * width), _empty(batch, tokens, weights["0.up.bias"].shape[0])
    kernels.patch_embed[batch, math.ceil(width / 16)](
        doubled, weights["patch.weight"], weights["patch.bias"], weights["position"], x,
        H=side, W=side, P=PATCH, N=width, BT=_power(tokens), BN=16, BK=_power(PATCH**2),
    )  # fmt: skip
    head = width // HEADS
    for i in range(_blocks(weights)):
        _norm(x, weights, f"{i}.norm1", normed)
        _linear(normed, weights, f"{i}.qkv", qkv)
        kernels.attention[HEADS, batch](qkv, mixed, head**-0.5, T=tokens, HEADS=HEADS, D=head, BT=_power(tokens))
        _linear(mixed, weights, f"{i}.mix", y, residual=x)
        _norm(y, weights, f"{i}.norm2", normed)
        _linear(normed, weights, f"{i}.up", hidden, activation="gelu")
        _linear(hidden, weights, f"{i}.down", x, residual=y)
    _norm(x, weights, "norm", normed)
    _classify(_mean(normed), weights, outputs["scores"])


FORWARDS: dict[str, ModelFunction] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


# ---- one kernel each -------------------------------------------------------------------------------------------------
# The kernels use small tiles: a request has few rows, and small blocks on all SMs finish them sooner than large blocks
# on a few SMs.


def _linear(x: Any, weights: Arrays, name: str, out: Any, activation: str = "none", residual: Any = None) -> None:
    weight = weights[f"{name}.weight"]
    k, n = weight.shape
    m = math.prod(out.shape) // n
    kernels.linear[math.ceil(m / 16), math.ceil(n / 16)](
        x, weight, weights[f"{name}.bias"], residual, out, m, K=k, N=n, ACTIVATION=activation, BM=16, BN=16, BK=64
    )


def _classify(x: Any, weights: Arrays, out: Any) -> None:
    weight = weights["classes.weight"]
    m, (k, n) = x.shape[0], weight.shape
    kernels.classify[(math.ceil(m / 16),)](
        x, weight, weights["classes.bias"], out, m, K=k, N=n, BM=16, BN=_power(n), BK=64
    )


def _convolve(x: Any, weights: Arrays, layers: Sequence[str]) -> Any:
    batch, height, width = x.shape[:3]
    for name in layers:
        weight = weights[f"{name}.weight"]
        channels, filters = weight.shape[2:]
        out = _empty(batch, height, width, filters)
        kernels.conv3x3[math.ceil(batch * height * width / 16), math.ceil(filters / 16)](
            x, weight, weights[f"{name}.bias"], out, batch,
            H=height, W=width, C=channels, F=filters, BM=16, BN=16, BK=min(64, _power(channels)),
        )  # fmt: skip
        x = out
    return x


def _pool(x: Any) -> Any:
    batch, height, width, channels = x.shape
    out = _empty(batch, height // 2, width // 2, channels)
    kernels.max_pool2x2[(math.ceil(math.prod(out.shape) / 256),)](
        x, out, batch, H=height, W=width, C=channels, BLOCK=256
    )
    return out


def _double(image: Any) -> Any:
    batch, height, width = image.shape
    out = _empty(batch, 2 * height, 2 * width)
    kernels.upsample2x[(math.ceil(math.prod(out.shape) / 256),)](image, out, batch, H=height, W=width, BLOCK=256)
    return out


def _mean(x: Any) -> Any:
    batch, n = x.shape[0], x.shape[-1]
    positions = math.prod(x.shape[1:-1])
    out = _empty(batch, n)
    kernels.mean_pool[batch, math.ceil(n / 32)](x, out, T=positions, N=n, BT=_power(positions), BN=32)
    return out


def _norm(x: Any, weights: Arrays, name: str, out: Any) -> None:
    n = x.shape[-1]
    m = math.prod(x.shape) // n
    kernels.layer_norm[(math.ceil(m / 4),)](
        x, weights[f"{name}.gain"], weights[f"{name}.bias"], out, m, NORM_EPS, N=n, BM=4, BN=_power(n)
    )


def _blocks(weights: Arrays) -> int:
    return sum(key.endswith(".qkv.weight") for key in weights)


def _power(n: int) -> int:
    """The next power of two, at least 16: the size of a product's tile."""
    return max(16, 1 << (n - 1).bit_length())


def _empty(*shape: int) -> Any:
    return Device.current().empty(shape, np.float32)


# Two models that compete for a GPU, `short` and `long`: they show the effect of scheduling and compute nothing useful.
#
# A request is one vector, which is added in the first of several layers of the demo models' `linear`; each layer works
# on a table of the model's own. One layer of `long` has two blocks for every SM of an H200; one of `short` an eighth of
# that.


BM, BN = 64, 32  # sides of a block
WIDTH = 33 * BN  # 8 x 33 blocks are two for each of 132 SMs


@dataclass(frozen=True, slots=True)
class _Kind:
    rows: int
    layers: int
    target_ms: float


KINDS = {"short": _Kind(BM, 3, 1.0), "long": _Kind(8 * BM, 12, 12.0)}


def rivals() -> list[Model]:
    """`short` and `long`, each with a target, batches of one request, and up to sixteen batches at once.

    >>> [model.name for model in rivals()]
    ['short', 'long']
    """
    rng = np.random.default_rng(0)
    weights = {
        "weight": rng.standard_normal((WIDTH, WIDTH), np.float32) / math.sqrt(WIDTH),
        "bias": np.zeros(WIDTH, np.float32),
        "classes.weight": rng.standard_normal((WIDTH, CLASSES), np.float32) / math.sqrt(WIDTH),
        "classes.bias": np.zeros(CLASSES, np.float32),
    }
    return [_model(name, kind, weights) for name, kind in KINDS.items()]


def rush(longs: int = 12, shorts: int = 24) -> TraceWorkload:
    """Requests for both: a long one arrives every 0.3 ms, a short one every 0.6 ms, which continue after the
    last long.
    """
    rows = [(k * 0.3e-3, "long") for k in range(longs)] + [(0.1e-3 + k * 0.6e-3, "short") for k in range(shorts)]
    return TraceWorkload(tuple((at, name, None, None, 0) for at, name in sorted(rows)))


def _model(name: str, kind: _Kind, weights: Arrays) -> Model:
    own = {"table": np.random.default_rng(kind.rows).standard_normal((kind.rows, WIDTH), np.float32), **weights}

    def fn(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        device = Device.current()
        source, bias = weights["table"], inputs["x"]
        for _ in range(kind.layers):
            out = device.empty((kind.rows, WIDTH), np.float32)
            kernels.linear[kind.rows // BM, WIDTH // BN](
                source, weights["weight"], bias, None, out, kind.rows,
                K=WIDTH, N=WIDTH, ACTIVATION="gelu", BM=BM, BN=BN, BK=32,
            )  # fmt: skip
            source, bias = out, weights["bias"]
        kernels.classify[(kind.rows // 16,)](
            source, weights["classes.weight"], weights["classes.bias"], outputs["scores"], kind.rows,
            K=WIDTH, N=CLASSES, BM=16, BN=16, BK=64,
        )  # fmt: skip

    return Model(
        name,
        fn,
        inputs={"x": TensorSpec((WIDTH,), np.float32)},
        outputs={"scores": TensorSpec((kind.rows, CLASSES), np.float32)},
        weights=own,
        batch=(1,),
        target_ms=kind.target_ms,
        instances=16,
    )
