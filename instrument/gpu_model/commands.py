"""Kernels of a program on the SM model: checked once, launched often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model import tables
from paellapy.instrument.gpu_model.blocks import attach_within
from paellapy.instrument.gpu_model.costs import BlockCost, cost_table
from paellapy.instrument.gpu_model.parts import Part, footprint, occupancy
from paellapy.instrument.gpu_model.tables import doubled, more_commands
from paellapy.instrument.records import MOST_EPOCHS


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
    counts: bool = True  # whether its blocks are in `SmModel.lines`


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


Footprint = tuple[int, int, int, int]  # of a block: warps, and the threads, registers and shared bytes of its SM


def launch_row(kernel: Kernel, takes: Footprint, overhead_ns: float, **more: float) -> tuple[float, ...]:
    """A launch as a row of COMMAND."""
    more["warps"], more["threads"], more["registers"], more["shared"] = takes
    more["kind"], more["blocks"], more["cluster"] = tables.LAUNCH, kernel.n_blocks, kernel.cluster
    more["kernel"], more["first"], more["counts"] = kernel.kernel, kernel.first, kernel.counts
    more["latency_ns"] = overhead_ns if kernel.latency_ns is None else kernel.latency_ns
    return tables.command(more)


def checked_program(
    kernels: Sequence[Kernel], footprints: Sequence[Footprint], partition: int, overhead_ns: float
) -> Program:
    """The program of kernels whose blocks take these footprints."""
    commands = np.zeros(len(kernels), tables.COMMAND)
    costs = []
    row = 0
    for k, (each, takes) in enumerate(zip(kernels, footprints, strict=True)):
        table = cost_table(each.n_blocks, each.cost, each.duration_ns)
        commands[k] = launch_row(
            each, takes, overhead_ns,
            cost=row, cost_stride=len(table) > 1, report=k == len(kernels) - 1, partition=partition,
        )  # fmt: skip
        costs.append(table)
        row += len(table)
    if not kernels:
        raise LaunchError("a program without kernels: give it at least one", field="kernels")
    if any(each.under is not None for each in kernels):
        raise LaunchError(
            "the kernels of a program cannot run under a flag: launch them one by one with `launch`", field="under"
        )
    clusters = any(each.cluster > 1 for each in kernels)
    return Program(commands, np.concatenate(costs), sum(each.n_blocks for each in kernels), clusters)


def placed_commands(commands: NDArray[Any], epoch: int) -> Placed:
    """Commands on one stream (COMMAND), whose costs are in the table of this epoch."""
    kernels = np.flatnonzero(commands["kind"] == tables.LAUNCH)
    _, graphs = np.unique(commands["graph"][kernels], return_inverse=True)
    return Placed(Commands(commands, kernels, graphs), int(commands["stream"][0]), epoch)


# --- flags of the SM model: words that launches read, and the blocks that did not run because of them -----------------


class Flags:
    """The flags made so far, and the rows of the state's block numbers that are in use."""

    def __init__(self) -> None:
        self._made = 0
        self._rows = 0
        self._launches = 0  # launches whose remaining blocks were not taken yet

    def make(self, s: tables.State) -> tuple[tables.State, int]:
        """A new flag, at 0: no launch is preempted."""
        self._made += 1
        if self._made == len(s.flag):
            s = s._replace(flag=doubled(s.flag))
        s.flag[self._made] = 0
        return s, self._made

    def check(self, flag: int) -> int:
        if not 1 <= flag <= self._made:
            raise LaunchError(
                f"no flag {flag}: {self._made} exist; make one with `flag()`",
                field="flag", given=flag, limit=self._made,
            )
        return flag

    def keep(self, s: tables.State, kernel: Kernel) -> tuple[tables.State, int]:
        """Reserves room for the numbers of a launch's blocks and of those that do not run; returns its place."""
        under = kernel.under
        assert under is not None
        self.check(under.flag)
        if kernel.cluster > 1:
            raise LaunchError(
                "a launch with clusters cannot be preempted, because the blocks of a cluster run together: use "
                "cluster=1", field="cluster", given=kernel.cluster, limit=1
            )
        if not 1 <= under.epoch <= MOST_EPOCHS:
            raise LaunchError(
                f"epoch={under.epoch}: a launch's epoch must be from 1 to {MOST_EPOCHS}",
                field="epoch", given=under.epoch, limit=MOST_EPOCHS,
            )
        if under.blocks.shape != (kernel.n_blocks,):
            raise LaunchError(
                f"{len(under.blocks)} numbers were given for {kernel.n_blocks} blocks: give one per block",
                field="blocks", given=len(under.blocks), limit=kernel.n_blocks,
            )
        row = self._rows
        while row + 2 * kernel.n_blocks > len(s.ids):
            s = s._replace(ids=doubled(s.ids))
        s.ids[row : row + kernel.n_blocks] = under.blocks
        self._rows += 2 * kernel.n_blocks
        self._launches += 1
        return s, row

    def left(self, s: tables.State, i: int) -> NDArray[np.int64]:
        """The numbers of the blocks that did not run so far, of the launch in row `i`."""
        if not s.command["flag"][i]:
            raise LaunchError(
                "the launch has no remaining blocks to take: it has no flag, or they were taken already", field="left"
            )
        row = s.command["ids"][i] + s.command["blocks"][i]
        return s.ids[row : row + s.command["left"][i]].copy()

    def release(self, s: tables.State, i: int) -> None:
        """Frees the room of the launch in row `i`, which is over."""
        s.command["flag"][i] = 0
        self._launches -= 1
        if self._launches == 0:
            self._rows = 0


# --- partitions of the SM model: the SMs that a launch may use, and the blocks that fit there -------------------------


class Partitions:
    """The partitions made so far, and the sizes of blocks that were checked in them."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._made: dict[tuple[int, int], int] = {}
        self._footprints: dict[tuple[int, int, int, int, int], Footprint] = {}

    def make(self, s: tables.State, first: int, n: int) -> tuple[tables.State, int]:
        """The number of the partition of `n` SMs from `first` on."""
        sms = self._part.sms
        if not (0 <= first < sms and 1 <= n <= sms):
            raise LaunchError(
                f"a partition of {n} SMs from SM {first} on: choose 1 to {sms} of SMs 0 to {sms - 1}",
                field="partition", given=(first, n), limit=sms,
            )
        if (first, n) not in self._made:
            number = len(self._made) + 1
            if number == len(s.partition):
                s = s._replace(partition=doubled(s.partition))
            s.partition[number] = (first, n, 0)
            self._made[first, n] = number
            attach_within(s)
        return s, self._made[first, n]

    def check_program(self, s: tables.State, program: Program) -> None:
        """Checks a program that may come from another model of the same part."""
        self.check(int(program.commands["partition"][0]))
        if program.clusters and not s.gpu["place_within"][0]:
            attach_within(s)

    def check(self, partition: int) -> None:
        if not 0 <= partition <= len(self._made):
            raise LaunchError(
                f"no partition {partition}: {len(self._made)} exist; create one with `partition(first, n)`",
                field="partition", given=partition, limit=len(self._made),
            )

    def footprint(self, s: tables.State, kernel: Kernel, partition: int) -> Footprint:
        """Warps of a block, and the threads, registers and shared bytes that it takes from its SM."""
        n_blocks, cluster = kernel.n_blocks, kernel.cluster
        threads, registers, shared = kernel.threads, kernel.registers, kernel.shared_bytes
        key = (threads, registers, shared, cluster, partition)
        if key not in self._footprints:
            occupancy(self._part, threads, registers, shared, cluster)  # refuses a block that fits in no SM or no GPC
            self.check(partition)
            if partition > 0 and cluster > 1:
                self._check_cluster(s, threads, registers, shared, cluster, partition)
            if cluster > 1:
                attach_within(s)
            block = footprint(self._part.sm, threads, registers, shared)
            self._footprints[key] = (block.warps, block.threads, block.registers, block.shared_bytes)
        if n_blocks < 1 or n_blocks % cluster:
            raise LaunchError(
                f"a grid of {n_blocks} blocks in clusters of {cluster}: the blocks must be a positive multiple of the "
                "cluster", field="n_blocks", given=n_blocks, limit=cluster
            )
        return self._footprints[key]

    def _check_cluster(
        self, s: tables.State, threads: int, registers: int, shared: int, cluster: int, partition: int
    ) -> None:
        """Refuses a cluster that no GPC's part of the partition could hold, since it would wait for ever."""
        each = occupancy(self._part.sm, threads, registers, shared).blocks_per_sm
        sms = _most_in_a_gpc(s, partition)
        if sms * each < cluster:
            raise LaunchError(
                f"a cluster of {cluster} blocks fits in no GPC's part of partition {partition}: at most {sms} of "
                f"its SMs lie in one GPC, with {each} such blocks each; choose a larger partition or a smaller cluster",
                field="cluster", given=cluster, limit=sms * each,
            )


def _most_in_a_gpc(s: tables.State, partition: int) -> int:
    """The largest number of the partition's SMs that are in one GPC."""
    first, n = s.partition[partition, tables.W_FIRST], s.partition[partition, tables.W_SMS]
    sms = (first + np.arange(n)) % len(s.free)
    return int(np.bincount(np.searchsorted(s.gpc, sms, side="right")).max())


# --- rows of the SM model's commands: handles are given out in order, and commands that are over may be forgotten -----


class CommandRows:
    """The handles given out so far. A state that needs more room is replaced by a larger one."""

    def __init__(self, history: int | None) -> None:
        """`history`: number of commands already reported that are kept; None keeps all."""
        self._history = history
        self.base = 0  # handles below are forgotten
        self.next = 0

    def row(self, s: tables.State, handle: int) -> int:
        if not self.base <= handle < self.next:
            raise LaunchError(
                f"no command {handle}: the model knows {self.base} to {self.next - 1}",
                field="handle", given=handle, limit=(self.base, self.next),
            )
        return handle & (len(s.command) - 1)

    def reserve(self, s: tables.State, n: int = 1) -> tuple[tables.State, int]:
        """The first of n new handles; the core sees their commands at its next call."""
        handle = self.next
        if handle + n - self.base > len(s.command):
            s = self._make_room(s, handle, n)
        self.next = handle + n
        s.gpu["next"][0] = self.next
        return s, handle

    def _make_room(self, s: tables.State, handle: int, n: int) -> tables.State:
        status = s.command["status"]
        mask = len(status) - 1
        if self._history is not None:
            while self.base < handle - self._history and status[self.base & mask] == tables.REPORTED:
                self.base += 1
        # half, so that the next enlargement is that far away
        while handle + n - self.base > len(s.command) // 2:
            s = more_commands(s, self.base, handle)
        return s
