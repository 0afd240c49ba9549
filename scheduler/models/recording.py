"""Recorded programs of the virtual GPU: launches and copies in a list, with the arrays that they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paellapy.instrument.device.launcher import check_grid
from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.scheduler.models.capture import LaneCapture, code_digest
from paellapy.scheduler.models.guarded_array import GuardedArray, without_guard
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.program import Cuts, Node, Part


@dataclass(frozen=True, slots=True)
class Recorded:
    """One replayable item on the virtual GPU: a launch of some blocks, or a copy."""

    node: Node
    launcher: Any = None
    grid: tuple[int, int, int] = (1, 1, 1)
    values: tuple[Any, ...] = ()
    first: int = 0
    target: Any = None
    source: Any = None
    cost: BlockCost | None = None  # the cost of another library's kernel
    compute: Callable[[], None] | None = None  # a computation on the host that stands in for the kernel

    def run(self) -> Any:
        """Computes the data; returns a launch's cost per block."""
        if self.launcher is not None:
            return self.launcher.evaluate(self.values, self.grid, self.first, self.node.blocks // self.node.cluster)
        if self.compute is not None:
            self.compute()
        elif self.target is not None and not _same_memory(self.target, self.source):
            np.copyto(self.target, self.source)
        return None

    def moved(self, move: Callable[[Any], Any]) -> Recorded:
        """The same item with other arrays, chosen by `move`."""
        return replace(self, values=move(self.values), target=move(self.target), source=move(self.source))

    def prepare(self) -> Callable[[], Any] | None:
        """A prepared `run`, with all work done that needs doing only once. It returns no cost and expects
        floating-point warnings to be off.

        None: the item has nothing to do.
        """
        if self.launcher is not None:
            count = self.node.blocks // self.node.cluster
            prepared: Callable[[], Any] | None = self.launcher.prepare(self.values, self.grid, self.first, count)
            return prepared or self.run
        if self.compute is None and self.target is not None:
            return None if _same_memory(self.target, self.source) else partial(np.copyto, self.target, self.source)
        return self.run

    def block_cost(self) -> BlockCost | None:
        """The cost of a kernel's blocks, measured by running it; None for a copy."""
        counted = self.run()
        return self.cost if self.launcher is None else self.launcher.block_cost(counted, self.values)


def _same_memory(a: Any, b: Any) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


class Recording(LaneCapture):
    """The virtual GPU's capture, which records launches in a list."""

    def __init__(self, lane: Lane, cuts: Cuts) -> None:
        super().__init__(lane, cuts)
        self.items: list[Recorded] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return super().empty(shape, dtype).view(GuardedArray)

    def compute(self, kernels: Sequence[tuple[Node, BlockCost]], function: Callable[[], None]) -> None:
        """Records kernels of another library: the host computes their data where the first of them starts."""
        for k, (node, cost) in enumerate(kernels):
            grid = (node.blocks, 1, 1)
            self.items.append(Recorded(node, grid=grid, cost=cost, compute=function if k == 0 else None))
        self.launches += len(kernels)

    def copy(self, kind: Any, target: Any, source: Any) -> None:
        self.items.append(Recorded(Node(kind, nbytes=source.nbytes), target=target, source=source))

    def launch(
        self,
        launcher: Any,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...],
        shared_bytes: int,
        part: Part | None,
    ) -> None:
        gx, gy, gz = (*grid, 1, 1)[:3]
        check_grid(launcher.compiled.name, (gx, gy, gz))
        total = gx * gy * gz
        if total == 0:
            return
        compiled, cluster = launcher.compiled, launcher.compiled.source.cluster
        number, parts = self.next_parts(part)
        plain = tuple(without_guard(v) for v in values)
        for each in parts:
            first, count = each or (0, total)
            node = Node(
                "kernel",
                compiled.name,
                count * cluster,
                launcher.threads,
                compiled.registers,
                compiled.shared_bytes,
                launch=number,
                part=each,
                cluster=cluster,
                divisible=cluster == 1 and not compiled.source.cooperative,
                digest=code_digest(compiled),
            )
            self.items.append(Recorded(node, launcher, (gx, gy, gz), plain, first))
