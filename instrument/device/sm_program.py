"""Kernels of a program on the SM model: checked once, launched often."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.device.sm_costs import BlockCost


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch as a program holds it: what `SmModel.launch` takes, less the stream and the time."""

    n_blocks: int
    threads: int
    registers: int = 32
    shared_bytes: int = 0
    cost: BlockCost | None = None
    duration_ns: ArrayLike | None = None
    latency_ns: float | None = None
    cluster: int = 1
    kernel: int = 0
    first: int = 0


@dataclass(slots=True)
class Program:
    """Kernels checked once, to be launched often as one graph: see `SmModel.program`."""

    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    costs: NDArray[np.float64]
    n_blocks: int
    epoch: int = field(default=-1)  # of the cost table that `ints` refers to


@dataclass(slots=True)
class Placed:
    """Commands of one piece of work, as the core's tables have them."""

    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    kernels: NDArray[np.int64]  # which of them are kernels,
    graphs: NDArray[np.int64]  # and of which graph, counted from 0
    stream: int
    epoch: int
