"""Memory for events of ranges on a real GPU: assigned launch by launch while a trace runs, read when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.driver import relaxed_capture
from paellapy.instrument.device.range_events import MOST_BYTES, EventLayout, Events

_CHUNK_BYTES = 64 << 20


class EventMemory:
    """Memory for the events of a trace's launches. It needs no clearing: every block records how much it used.

    A launch inside a CUDA graph keeps its memory permanently, since the graph may be replayed in a later trace.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._chunks: list[Any] = []
        self._taken: list[tuple[int, EventLayout, Any, int]] = []  # launch, layout, memory and offset
        self._captured: dict[int, tuple[int, EventLayout, Any, int]] = {}
        self._chunk = self._used = 0
        self.unplaced = 0  # launches for which there was no room

    def begin(self) -> None:
        self._taken, self._chunk, self._used, self.unplaced = [], 0, 0, 0

    def place(self, layout: EventLayout, launch: int, captured: bool) -> int:
        """The address of a launch's events; 0 if the trace has no room for more."""
        if captured:
            with relaxed_capture():
                memory = self._device.empty((layout.nbytes,), np.uint8)
            self._captured[launch] = (launch, layout, memory, 0)
            return int(memory.ptr)
        nbytes = layout.nbytes + -layout.nbytes % 256
        while self._chunk < len(self._chunks) and self._used + nbytes > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            if sum(chunk.nbytes for chunk in self._chunks) + nbytes > MOST_BYTES:
                self.unplaced += 1
                return 0
            self._chunks.append(self._device.empty((max(nbytes, _CHUNK_BYTES),), np.uint8))
        memory, at = self._chunks[self._chunk], self._used
        self._used += nbytes
        self._taken.append((launch, layout, memory, at))
        return int(memory.ptr) + at

    def read(self, launches: NDArray[np.uint32]) -> Iterator[Events]:
        """The events of these launches, including those of replayed graphs."""
        wanted = set(launches.tolist())
        for launch, layout, memory, at in [*self._taken, *self._captured.values()]:
            if launch in wanted:
                out = np.empty(layout.nbytes, np.uint8)
                self._device.copy_out(out, int(memory.ptr) + at)
                yield layout.read(launch, out)
