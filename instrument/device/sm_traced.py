"""Records of traced blocks on the SM model: room for them, read once the blocks have ended, and forgotten."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.sm_state import doubled, unfinished_launches


class TracedRows:
    """The rows of the state's records that are in use. A state that needs more room is replaced by a larger one."""

    def __init__(self) -> None:
        self._rows = 0

    def reserve(self, s: lay.State, n: int) -> tuple[lay.State, int]:
        """The first of n rows for the blocks of a launch."""
        row = self._rows
        while row + n > len(s.trace):
            s = s._replace(trace=doubled(s.trace))
        s.trace["end_ns"][row : row + n] = -1
        self._rows += n
        return s, row

    def ended(self, s: lay.State) -> NDArray[Any]:
        """The blocks that have ended (BLOCK), launch after launch, in order of block."""
        rows = s.trace[: self._rows]
        return rows[rows["end_ns"] >= 0].copy()

    def forget(self, s: lay.State, base: int) -> None:
        """Forgets the blocks of finished launches. Commands before handle `base` are forgotten already."""
        rows = unfinished_launches(s, base)
        rows = rows[s.command["trace"][rows] >= 0]
        kept = [s.trace[s.command["trace"][i] :][: s.command["blocks"][i]].copy() for i in rows]
        self._rows = 0
        for i, blocks in zip(rows, kept, strict=True):
            s.command["trace"][i] = self._rows
            s.trace[self._rows :][: len(blocks)] = blocks
            self._rows += len(blocks)
