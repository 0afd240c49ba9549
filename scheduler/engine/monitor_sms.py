"""Samples of how full each SM is, of a GPU that does not say it exactly: its counters, read many times a second.

Kernels take microseconds, so one look shows a moment; and a look that is taken while this process is busy with
something else shows a GPU that has just been left alone by it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.traces.live import Counts, counts

_PERIOD_S = 0.0097  # not in step with anything; a look takes some 50 µs


class SmSampler:
    """A thread that looks from time to time. `take` is the mean of what it saw since the last one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._n = 0
        self._occupancy: Any = 0.0
        self._busy: Any = 0.0
        self._thread = threading.Thread(target=self._run, name="paellapy-sms", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_PERIOD_S):
            try:
                seen = counts(self._device)
            except PaellaError:  # the GPU is gone; whoever uses it says so
                return
            self.add(seen)

    def add(self, seen: Counts) -> None:
        with self._lock:
            self._n += 1
            self._occupancy = self._occupancy + seen.occupancy
            self._busy = self._busy + (seen.resident_blocks > 0)

    def take(self) -> tuple[Any, Any] | None:
        """Occupancy and share of time with any block of each SM; None: it has not looked since."""
        with self._lock:
            n, occupancy, busy = self._n, self._occupancy, self._busy
            self._n, self._occupancy, self._busy = 0, 0.0, 0.0
        return (np.asarray(occupancy) / n, np.asarray(busy) / n) if n else None

    def close(self) -> None:
        self._end.set()
        self._thread.join()
