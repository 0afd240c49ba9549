"""Descriptors of launches that Triton makes itself: rows of one table in device memory, filled when a trace begins.

A launch needs no copy and no wait, so launches can be captured. A row that went into a CUDA graph is never given to
another launch: the graph's replays read it for as long as the graph lives. Each trace gives it a new number, by which
it recognises the replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.records import DESCRIPTOR, MAGIC

_TABLE = 8192  # rows: the most launches of PyTorch's kernels in a trace, minus those in graphs


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a launch that traces record."""

    kernel: str
    blocks: int
    warps: int
    registers: int
    shared_bytes: int
    stream: int
    spill_bytes: int = 0
    plain_registers: int = 0  # 0: unknown


class Rows:
    """The table. Row 0 has no magic number: a kernel that reads it writes nothing."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._host = np.zeros(_TABLE + 1, DESCRIPTOR)
        self._memory = device.array_beside(self._host)
        self._next = 1
        self._in_graphs: dict[int, Facts | None] = {}

    def begin(self, session: Any) -> None:
        """Begins a trace on an idle GPU: every row gets a launch number of the trace, and the address of its rings."""
        rows, device = self._host, self._device
        rows["lines"], rows["rings"] = device.lines.ptr, device.rings.ptr
        rows["ring_mask"] = device.rings.shape[1] - 1
        rows["launch"][1:] = session.reserve(_TABLE)
        rows["magic"][1:] = MAGIC
        self._memory.set(rows)
        self._next = 1
        for row, facts in self._in_graphs.items():
            if facts is not None:
                session.may_replay(int(rows["launch"][row]), facts)

    def take(self, in_graph: bool) -> int:
        """A row for a launch, permanently if it goes into a graph; 0 if none is left."""
        while self._next in self._in_graphs:
            self._next += 1
        if self._next > _TABLE:
            return 0
        row, self._next = self._next, self._next + 1
        if in_graph:
            self._in_graphs[row] = None
        return row

    def name(self, row: int, facts: Facts) -> None:
        """Records the launch for which a row was taken."""
        if row in self._in_graphs:
            self._in_graphs[row] = facts

    def launch(self, row: int) -> int:
        """The number under which the row's launch reports."""
        return int(self._host["launch"][row])

    def address(self, row: int) -> int:
        return int(self._memory.ptr) + row * DESCRIPTOR.itemsize
