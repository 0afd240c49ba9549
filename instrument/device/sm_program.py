"""Kernels of a program on the SM model: checked once, launched often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.sm_costs import BlockCost, cost_table
from paellapy.instrument.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Under:
    """The flag that a launch reads when its blocks start. They run only while the flag's word is below `epoch`.

    `blocks` are the numbers of the launch's blocks in their grid, in order of start.
    """

    flag: int
    epoch: int
    blocks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch without its stream and time. Its blocks take `cost` at shared rates, or exactly `duration_ns`."""

    n_blocks: int
    threads: int
    registers: int = 32
    shared_bytes: int = 0
    cost: BlockCost | None = None
    duration_ns: ArrayLike | None = None
    latency_ns: float | None = None
    cluster: int = 1
    kernel: int = 0
    first: int = 0  # number of the first block, for a slice of a larger grid
    under: Under | None = None  # set if its blocks may be kept from running


@dataclass(slots=True)
class Program:
    """Kernels checked once, to be launched often as one graph: see `SmModel.program`."""

    commands: NDArray[Any]  # COMMAND
    costs: NDArray[np.float64]
    n_blocks: int
    clusters: bool  # whether blocks of a kernel run in clusters
    epoch: int = field(default=-1)  # epoch of the cost table that the commands refer to


class Commands(NamedTuple):
    """Commands of one piece of work in the layout of the core's tables. A tuple, because compiled code takes it."""

    rows: NDArray[Any]  # COMMAND
    kernels: NDArray[np.int64]  # indices of the kernels among them
    graphs: NDArray[np.int64]  # the graph of each of these, counted from 0


@dataclass(slots=True)
class Placed:
    """Commands that were submitted to a stream once, and may be submitted again."""

    commands: Commands
    stream: int
    epoch: int


def checked_program(
    kernels: Sequence[Kernel], footprints: Sequence[tuple[int, int, int, int]], window: int, overhead_ns: float
) -> Program:
    """The program of kernels whose blocks take these warps, threads, registers and shared bytes."""
    commands = np.zeros(len(kernels), lay.COMMAND)
    costs = []
    row = 0
    for k, (each, takes) in enumerate(zip(kernels, footprints, strict=True)):
        warps, threads, registers, shared = takes
        table = cost_table(each.n_blocks, each.cost, each.duration_ns)
        latency = overhead_ns if each.latency_ns is None else each.latency_ns
        commands[k] = lay.command(
            kind=lay.LAUNCH, blocks=each.n_blocks, warps=warps, threads=threads, registers=registers, shared=shared,
            cluster=each.cluster, cost=row, cost_stride=len(table) > 1, kernel=each.kernel, first=each.first,
            report=k == len(kernels) - 1, window=window, latency_ns=latency,
        )  # fmt: skip
        costs.append(table)
        row += len(table)
    if not kernels:
        raise LaunchError("a program without kernels: give it at least one")
    if any(each.under is not None for each in kernels):
        raise LaunchError("the kernels of a program cannot run under a flag: launch them one by one with `launch`")
    clusters = any(each.cluster > 1 for each in kernels)
    return Program(commands, np.concatenate(costs), sum(each.n_blocks for each in kernels), clusters)


def placed_commands(commands: NDArray[Any], epoch: int) -> Placed:
    """Commands on one stream (COMMAND), whose costs are in the table of this epoch."""
    kernels = np.flatnonzero(commands["kind"] == lay.LAUNCH)
    _, graphs = np.unique(commands["graph"][kernels], return_inverse=True)
    return Placed(Commands(commands, kernels, graphs), int(commands["stream"][0]), epoch)
