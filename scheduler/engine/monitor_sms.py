"""Samples the occupancy of each SM on a GPU that does not report it exactly, by reading counters many times a second.

Kernels take microseconds, so one sample shows only a moment. A sample that is taken while this process is busy shows a
GPU that the process has not fed for a while.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.traces.live import Counts, counts

_PERIOD_S = 0.0097  # a period that is in step with nothing else; one sample takes about 50 µs


class SmSampler:
    """A thread that samples periodically. `take` returns the mean of the samples since the last call."""

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
            except PaellaError:  # the GPU is gone; the code that uses it reports the error
                return
            self.add(seen)

    def add(self, seen: Counts) -> None:
        with self._lock:
            self._n += 1
            self._occupancy = self._occupancy + seen.occupancy
            self._busy = self._busy + (seen.resident_blocks > 0)

    def take(self) -> tuple[Any, Any] | None:
        """For each SM, its occupancy and the fraction of time with any block; None without a new sample."""
        with self._lock:
            n, occupancy, busy = self._n, self._occupancy, self._busy
            self._n, self._occupancy, self._busy = 0, 0.0, 0.0
        return (np.asarray(occupancy) / n, np.asarray(busy) / n) if n else None

    def close(self) -> None:
        self._end.set()
        self._thread.join()
