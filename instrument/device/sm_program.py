"""Kernels of a program on the SM model: checked once, launched often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.device.sm_costs import BlockCost


@dataclass(frozen=True, slots=True)
class Under:
    """The flag a launch looks at when its blocks start. They do not run while the flag's word is not below `epoch`.

    `blocks` are the numbers of the launch's blocks in their grid, in order of start.
    """

    flag: int
    epoch: int
    blocks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch, less the stream and the time. Its blocks take `cost` at shared rates, or exactly `duration_ns`."""

    n_blocks: int
    threads: int
    registers: int = 32
    shared_bytes: int = 0
    cost: BlockCost | None = None
    duration_ns: ArrayLike | None = None
    latency_ns: float | None = None
    cluster: int = 1
    kernel: int = 0
    first: int = 0  # number of the first block: a slice of a larger grid begins there
    under: Under | None = None  # where its blocks may be kept from running


@dataclass(slots=True)
class Program:
    """Kernels checked once, to be launched often as one graph: see `SmModel.program`."""

    commands: NDArray[Any]  # COMMAND
    costs: NDArray[np.float64]
    n_blocks: int
    epoch: int = field(default=-1)  # of the cost table that the commands refer to


class Commands(NamedTuple):
    """Commands of one piece of work, as the core's tables have them. A tuple, because compiled code takes it."""

    rows: NDArray[Any]  # COMMAND
    kernels: NDArray[np.int64]  # which of them are kernels,
    graphs: NDArray[np.int64]  # and of which graph, counted from 0


@dataclass(slots=True)
class Placed:
    """Commands that were submitted to a stream once, and may be again."""

    commands: Commands
    stream: int
    epoch: int
