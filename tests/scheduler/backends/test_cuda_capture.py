"""Threads for batch sizes, and PyTorch beside captures of the user."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import paellapy as pp
from paellapy.instrument.device import Device
from paellapy.scheduler.backends import cuda_capture
from paellapy.scheduler.backends.cuda_capture import in_thread_of, side_by_side

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


WAIT_S = 60


def test_a_batch_size_always_runs_in_its_thread():
    first = {batch: in_thread_of(batch, threading.get_ident) for batch in (1, 2, 4)}
    assert len({*first.values(), threading.get_ident()}) == 4
    assert side_by_side([4, 2, 1], lambda batch: threading.get_ident()) == first


def test_sizes_run_at_once_and_those_that_fail_are_left_out():
    meet = threading.Barrier(3)

    def run(batch):
        meet.wait(WAIT_S)
        if batch == 2:
            raise ValueError(batch)
        return 10 * batch

    assert side_by_side([1, 2, 4], run) == {1: 10, 4: 40}


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    with pytest.raises(ZeroDivisionError):
        in_thread_of(8, lambda: 1 // 0)
    assert in_thread_of(8, max, 1, 2) == 2


class Tensor:
    """Stands for memory of a GPU."""


def test_a_size_that_failed_holds_no_memory_while_it_is_tried_again():
    held = []

    def fails(batch):
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        raise MemoryError(batch)

    gc.disable()  # memory of a GPU makes no collection begin
    try:
        assert side_by_side([1, 2], fails) == {}
        with contextlib.suppress(MemoryError):
            in_thread_of(1, fails, 1)
        for batch in (1, 2):
            in_thread_of(batch, int)  # the thread is done with its earlier calls
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()


def test_threads_of_a_size_are_one_though_several_callers_come_at_once(monkeypatch):
    made, meet = [], threading.Barrier(2)

    class Slow(ThreadPoolExecutor):
        def __init__(self, *given):
            made.append(given)
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(0.2)  # lets another caller in, if it may come
            super().__init__(*given)

    monkeypatch.setattr(cuda_capture, "ThreadPoolExecutor", Slow)
    monkeypatch.setattr(cuda_capture, "_threads", {})
    callers = [threading.Thread(target=in_thread_of, args=(3, int)) for _ in range(2)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert len(made) == 1


def test_the_callers_context_holds_in_the_thread():
    name = contextvars.ContextVar("name", default="")
    name.set("mine")
    assert in_thread_of(2, name.get) == "mine"


def test_a_device_is_entered_in_several_threads_at_once():
    device, meet = Device("virtual:h200"), threading.Barrier(3)

    def run(batch):
        with device:
            meet.wait(WAIT_S)
            found = Device.current()
            meet.wait(WAIT_S)
        return found

    for _ in range(20):
        assert side_by_side([1, 2, 4], run) == dict.fromkeys((1, 2, 4), device)


def test_a_size_that_fails_beside_others_is_tried_again_alone():
    pytest.importorskip("cuda.bindings.driver")
    from paellapy.scheduler.backends.cuda_capture import warm_up_in_threads

    class Backend:
        def __init__(self):
            self.alone, self.at_once = [], threading.Barrier(2)

        def first_run(self, model, weights, batch):
            self.at_once.wait(WAIT_S)
            if batch == 4:
                raise RuntimeError("beside another")
            return {"x": batch}, {"y": batch}

        def warm_up(self, model, weights, batch, ran):
            self.alone.append((batch, ran, threading.current_thread().name))
            return 100 * batch

    backend = Backend()
    assert warm_up_in_threads(backend, None, {}, [2, 4]) == 400
    assert [(batch, ran) for batch, ran, _ in backend.alone] == [(2, ({"x": 2}, {"y": 2})), (4, None)]
    assert len({thread for *_, thread in backend.alone}) == 2


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
