"""A real GPU's memory for events of ranges, and errors of blocks that run, without a GPU."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paellapy.instrument.device import cuda
from paellapy.instrument.device.cuda import EventMemory

pytestmark = pytest.mark.xdist_group("fake GPU")  # one process that all are forked from


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


# ---- errors that a later call reports --------------------------------------------------------------------------------


def test_an_error_found_later_names_the_launches_that_it_may_belong_to(forked: Any, tmp_path: Path) -> None:
    """With CUDA_LAUNCH_BLOCKING=1 the driver lets a launch report its own error."""
    forked.run(textwrap.dedent("""
        from paellapy.instrument.errors import LaunchError
        device = pp.Device("cuda")
        device.__enter__()
        kernel, side = pp.kernel(scale.jit, report=None), device.stream()
        x, out = device.array(np.ones(5120, np.float32)), device.empty(5120)
        launch = lambda blocks: kernel[(blocks,)](x, out, 2.0, 5120, B=128)

        def found(call):
            fake.lost = 0
            launch(1)
            device.synchronize()
            launch(2)
            with side:
                launch(3)
                side.synchronize()
            launch(4)
            launch(4)
            event = device.record()
            fake.lost = 700
            try:
                call(event)
            except LaunchError as error:
                return error.status, [grid for name, grid in error.launches if name == "scale"]

        def poll(event):
            while not event.done():
                pass

        waits = [lambda event: device.synchronize(), lambda event: side.synchronize(), lambda event: x.numpy(),
                 lambda event: event.synchronize(), poll, lambda event: launch(5)]
        for wait in waits:
            assert found(wait) == (700, [(2,), (4,)])
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
        assert found(waits[-1]) == (700, [(5,)])
    """), tmp_path, tmp_path)  # fmt: skip
