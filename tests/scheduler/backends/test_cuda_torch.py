"""PyTorch's libraries are loaded beside the user's own work."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

import paellapy as pp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
cuda_torch = pytest.importorskip("paellapy.scheduler.backends.cuda_capture")


def test_steps_run_in_a_thread_that_a_capture_elsewhere_forbids_nothing(monkeypatch):
    modes, seen = ["global"], []

    @contextlib.contextmanager
    def relaxed():
        modes.append("relaxed")
        yield
        modes.pop()

    stream = SimpleNamespace(synchronize=lambda: seen.append(modes[-1]))
    monkeypatch.setattr(cuda_torch, "relaxed_capture", relaxed, raising=False)
    monkeypatch.setattr(cuda_torch, "device_lock", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    device = SimpleNamespace(index=0, activate=lambda: seen.append("active"))
    cuda_torch.run_steps(device, [lambda where: seen.append(modes[-1])])
    assert seen == ["active", "relaxed", "relaxed"]
    assert modes == ["global"]


@pytest.mark.gpu
def test_a_capture_of_the_user_goes_on_while_libraries_are_loaded():
    failed = []
    with pp.Engine("cuda") as engine:
        x = torch.ones(8, device="cuda")

        def load() -> None:
            try:
                cuda_torch.run_steps(engine.device, [lambda where: torch.zeros(77 << 20, device=where)])
            except Exception as e:
                failed.append(e)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in global mode
            y = x + 1
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
            y = y + 1
        graph.replay()
        assert y.tolist() == [3.0] * 8
    assert not failed
