"""The GPU time that models and tenants used in the last seconds, by the core's account."""

from __future__ import annotations

from collections import deque

import numpy as np

from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table

SPAN_NS = 2_000_000_000


class GpuTimes:
    """Reads the core's counts with every snapshot; shares cover about the last two seconds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._read: deque[tuple[int, float, tuple[Table, Table]]] = deque()

    def look(self, now_ns: int) -> None:
        s = self._state
        had = s.model["gpu_ns"].copy(), s.client["gpu_ns"].copy()
        self._read.append((now_ns, float(s.core["gpu_ns"][0]), had))
        while len(self._read) > 2 and self._read[1][0] <= now_ns - SPAN_NS:
            self._read.popleft()

    @property
    def busy(self) -> float:
        """The fraction of time in which the GPU was busy."""
        (since, before, _), (now, after, _) = self._read[0], self._read[-1]
        return min((after - before) / max(now - since, 1), 1.0)

    def of_model(self, row: int) -> float:
        return self._share(0, row)

    def of_tenant(self, number: int) -> float:
        return self._share(1, number)

    def _share(self, whose: int, row: int) -> float:
        first, last = self._read[0], self._read[-1]
        had = last[2][whose][row] - first[2][whose][row]
        # A model that was loaded again counts from zero.
        return float(np.clip(had / max(last[0] - first[0], 1), 0.0, 1.0))
