"""Memory for events of ranges on a real GPU: assigned launch by launch while a trace runs, read when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.range_events import MOST_BYTES, EventLayout, Events

_CHUNK_BYTES = 64 << 20


class EventMemory:
    """Memory for the events of a trace's launches. A launch need not clear it: every block records how much it used.

    A launch inside a CUDA graph keeps its memory until it is forgotten, since a later trace may replay the graph.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._chunks: list[Any] = []
        self._taken: list[tuple[int, EventLayout, int, Any]] = []  # launch, layout, address of its rings, and memory
        self._captured: dict[int, tuple[int, EventLayout, int, Any]] = {}
        self._chunk = self._used = 0
        self.unplaced = 0  # launches for which there was no room

    def begin(self) -> None:
        self._taken, self._chunk, self._used, self.unplaced = [], 0, 0, 0

    def place(self, layout: EventLayout, launch: int, captured: bool) -> int:
        """The address of a launch's rings, behind their heads; 0 if the trace has no room for more."""
        room = layout.nbytes + layout.ring_bytes  # with room to align them
        # Memory is cleared once: rings are read whole, and a sanitizer reports parts that no block wrote.
        if captured:
            if sum(kept.nbytes for *_, kept in self._captured.values()) + room > MOST_BYTES:
                self.unplaced += 1
                return 0
            memory = self._device.cleared(room)
            rings = _rings(layout, int(memory.ptr))
            self._captured[launch] = (launch, layout, rings, memory)
            return rings
        while self._chunk < len(self._chunks) and self._used + room > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            if sum(chunk.nbytes for chunk in self._chunks) + room > MOST_BYTES:
                self.unplaced += 1
                return 0
            self._chunks.append(self._device.cleared(max(room, _CHUNK_BYTES)))
        memory = self._chunks[self._chunk]
        rings = _rings(layout, int(memory.ptr) + self._used)
        self._used += room
        self._taken.append((launch, layout, rings, memory))
        return rings

    def forget(self, launches: Iterable[int]) -> None:
        """Frees the memory of launches in graphs that will not be replayed again."""
        for launch in launches:
            self._captured.pop(launch, None)

    def read(self, launches: NDArray[np.uint32]) -> Iterator[Events]:
        """The events of these launches, including those of replayed graphs."""
        wanted = set(launches.tolist())
        for launch, layout, rings, _ in [*self._taken, *self._captured.values()]:
            if launch in wanted:
                out = np.empty(layout.nbytes, np.uint8)
                self._device.copy_out(out, rings - layout.heads_bytes)
                yield layout.read(launch, out)


def _rings(layout: EventLayout, address: int) -> int:
    """The first address for rings with their heads behind `address`."""
    rings = address + layout.heads_bytes
    return rings + -rings % layout.ring_bytes
