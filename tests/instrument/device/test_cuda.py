"""Memory for events of ranges on a real GPU, over a device that only notes what it gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paellapy.instrument.device import cuda
from paellapy.instrument.device.cuda import EventMemory


class Cleared:
    """A device that has nothing but cleared memory."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def cleared(self, nbytes: int) -> Any:
        self.given.append(nbytes)
        return SimpleNamespace(ptr=sum(self.given) << 10, nbytes=nbytes)


def test_launches_in_graphs_get_cleared_memory_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(nbytes=900, ring_bytes=100, heads_bytes=100)
    monkeypatch.setattr(cuda, "MOST_BYTES", 3500)
    device = Cleared()
    memory = EventMemory(device)
    memory.begin()
    assert all(memory.place(layout, launch, captured=True) for launch in (1, 2, 3))
    assert memory.place(layout, 4, captured=True) == 0
    assert (device.given, memory.unplaced) == ([1000] * 3, 1)
    memory.forget([2, 4])
    assert memory.place(layout, 5, captured=True)
    assert memory.unplaced == 1
