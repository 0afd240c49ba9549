"""Costs of blocks: given for all alike or one by one, and kept in the SM model's table while they are in use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.sm_state import unfinished_launches
from paellapy.instrument.errors import LaunchError


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block's work: numbers for all blocks alike, or one value per block.

    `bytes` is traffic to memory, beyond L2. `tensor_flops` counts fp16: tf32 counts double, fp8 half. `wait_ns` is the
    time the block waits regardless of other work (dependent loads, barriers), before its work flows.
    """

    bytes: ArrayLike = 0.0
    flops: ArrayLike = 0.0
    tensor_flops: ArrayLike = 0.0
    wait_ns: ArrayLike = 0.0


class Costs:
    """The rows of the state's cost table that are in use. A state that needs more room is replaced by a larger one."""

    def __init__(self) -> None:
        self.epoch = 0  # rows of an earlier epoch have moved, or are gone
        self._rows = 0
        self._known: dict[tuple[float, ...], int] = {}

    def of_launch(
        self, s: lay.State, base: int, n_blocks: int, cost: BlockCost | None, duration_ns: ArrayLike | None
    ) -> tuple[lay.State, int, int]:
        """The first row of the blocks' costs, and the distance of rows. Costs equal for all blocks have one row."""
        if cost is None and isinstance(duration_ns, int | float):
            key: tuple[float, ...] = (duration_ns,)
        elif cost is not None and duration_ns is None:
            key = (cost.bytes, cost.flops, cost.tensor_flops, cost.wait_ns)  # type: ignore[assignment]
        else:
            key = ()
        known = self._known.get(key) if all(isinstance(value, int | float) for value in key) else None
        if known is not None:
            return s, known, 0
        table = cost_table(n_blocks, cost, duration_ns)
        s, row = self.keep(s, base, table)
        if len(table) == 1 and all(isinstance(value, int | float) for value in key):
            self._known[key] = row
        return s, row, int(len(table) > 1)

    def keep(self, s: lay.State, base: int, table: NDArray[np.float64]) -> tuple[lay.State, int]:
        """Adds these rows; returns their place. Commands before handle `base` are forgotten."""
        if self._rows + len(table) > len(s.cost):
            s = self._make_room(s, base, len(table))
        row = self._rows
        self._rows += len(table)
        s.cost[row : self._rows] = table
        return s, row

    def _make_room(self, s: lay.State, base: int, n: int) -> lay.State:
        """Keeps only rows that unfinished launches use, in an array at least twice as large."""
        self.epoch += 1
        self._known.clear()
        rows = unfinished_launches(s, base)
        lengths = np.where(s.command["cost_stride"][rows] > 0, s.command["blocks"][rows], 1)
        kept = [s.cost[row : row + k] for row, k in zip(s.command["cost"][rows], lengths, strict=True)]
        self._rows = int(lengths.sum())
        size = len(s.cost)
        while 2 * (self._rows + n) > size:
            size *= 2
        cost = np.zeros((size, lay.COST_COLUMNS))
        if kept:
            cost[: self._rows] = np.concatenate(kept)
        s.command["cost"][rows] = np.cumsum(lengths) - lengths
        return s._replace(cost=cost)


def cost_table(n_blocks: int, cost: BlockCost | None, duration_ns: ArrayLike | None) -> NDArray[np.float64]:
    """The core's cost rows: one for all blocks, or one for each."""
    if cost is not None and duration_ns is None:
        values = (cost.bytes, cost.flops, cost.tensor_flops, cost.wait_ns)
        given = [np.asarray(value, np.float64) for value in values]
    elif cost is None and duration_ns is not None:
        given = [np.asarray(duration_ns, np.float64)]
    else:
        raise LaunchError("a launch takes either a cost or a duration_ns: give exactly one")
    for column in given:
        if column.shape not in ((), (n_blocks,)) or not (np.isfinite(column) & (column >= 0)).all():
            raise LaunchError(f"costs must be zero or more: one number, or one for each of the {n_blocks} blocks")
    table = np.zeros((n_blocks if any(column.ndim for column in given) else 1, lay.COST_COLUMNS))
    table[:, lay.DURATION] = given[0] if cost is None else -1.0
    if cost is not None:
        table[:, : lay.POOLS] = np.stack(np.broadcast_arrays(*given[: lay.POOLS]), axis=-1)
        table[:, lay.WAIT_NS] = given[lay.POOLS]
    return table
