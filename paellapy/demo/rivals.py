"""Two models that compete for a GPU, `short` and `long`: they show the effect of scheduling and compute nothing useful.

A request is one vector, which is added in the first of several layers of the demo models' `linear`; each layer works on
a table of the model's own. One layer of `long` has two blocks for every SM of an H200; one of `short` an eighth of
that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.demo import kernels as _kernels
from paellapy.instrument.device.base import Device
from paellapy.scheduler.models.model import Arrays, Model, TensorSpec
from paellapy.scheduler.sim.trace_workload import TraceWorkload

kernels: Any = _kernels  # launched as kernel[grid](…)

BM, BN = 64, 32  # sides of a block
WIDTH = 33 * BN  # 8 x 33 blocks are two for each of 132 SMs
CLASSES = 10


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
        lanes=16,
    )
