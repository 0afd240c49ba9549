"""PyTorch under captures: pools, captures that PyTorch begins, and libraries loaded ahead."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest

import paellapy as pp
from paellapy.scheduler.models import torch_capture
from paellapy.scheduler.models.torch_capture import TorchPool, begin_capture

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def fake_torch(monkeypatch):
    """The part of PyTorch that a pool needs. A pool's own snapshot must not be used: it spoils the numbers in
    its id.
    """

    class MemPool:
        id = (0, 300)

        def snapshot(self):
            raise AssertionError("a pool's own snapshot gives back references it does not own")

        def use_count(self):
            return fake.uses

        def __del__(self):
            fake.deleted += 1

    def empty_cache():
        fake.emptied += 1

    segments = [
        {"total_size": size, "segment_pool_id": pool}
        for pool, size in (((0, 0), 1 << 30), ((0, 300), 2 << 20), ((0, 299), 5), ((0, 300), 20 << 20))
    ]
    cuda = SimpleNamespace(
        MemPool=MemPool, device=lambda index: contextlib.nullcontext(), memory_snapshot=lambda: segments,
        empty_cache=empty_cache,
    )  # fmt: skip
    fake = SimpleNamespace(cuda=cuda, uses=1, deleted=0, emptied=0)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_pool_holds_its_own_segments_and_is_not_asked_for_them(fake_torch):
    assert TorchPool(0).nbytes == 22 << 20


@pytest.mark.parametrize("uses", [1, 2])
def test_a_pool_that_a_graph_still_holds_is_kept(fake_torch, uses):
    """PyTorch ends the process when a pool in use is deleted."""
    fake_torch.uses = uses
    TorchPool(0).free()
    assert fake_torch.deleted == (uses == 1)


@pytest.mark.parametrize(("status", "kept"), [(0, False), (201, False), (710, True)])
def test_a_pool_of_a_lost_gpu_is_kept(fake_torch, monkeypatch, status, kept):
    """PyTorch ends the process if it cannot free the memory of a pool that is deleted."""
    monkeypatch.setattr(torch_capture, "driver", lambda: SimpleNamespace(cuMemGetInfo=lambda: (status, 0, 0)))
    monkeypatch.setattr(torch_capture, "_in_use", [])
    pool = TorchPool(0)
    pool.free()
    assert (fake_torch.deleted, fake_torch.emptied) == ((0, 0) if kept else (1, 1))
    assert pool.nbytes == 0
    pool.free()
    assert fake_torch.deleted == (not kept)


def test_a_first_graph_keeps_the_pool_until_it_is_freed(fake_torch, monkeypatch):
    """PyTorch refuses captures with a pool whose graphs are all gone."""
    begun, alive = [], []

    class Graph:
        def __init__(self, keep_graph):
            alive.append(self)

        def capture_end(self):
            begun.append("end")

    monkeypatch.setattr(torch_capture, "begin_capture", lambda graph, pool: begun.append((graph, pool)))
    fake_torch.cuda.CUDAGraph = Graph
    fake_torch.zeros = lambda *_, **__: None
    pool, graphs = TorchPool(0), [object(), object()]
    for graph in graphs:
        pool.begin(graph)
    (first,) = alive
    assert begun == [(first, (0, 300)), "end", (graphs[0], (0, 300)), (graphs[1], (0, 300))]
    pool.free()
    assert pool._first is None


def test_a_capture_that_cannot_begin_leaves_no_recording_on(fake_torch, monkeypatch):
    ended = []

    def refuse(graph, pool):
        raise RuntimeError("no")

    monkeypatch.setattr(torch_capture, "begin_capture", refuse)
    fake_torch._C = SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: ended.append((index, pool)))
    fake_torch.cuda.CUDAGraph = lambda keep_graph: None
    with pytest.raises(RuntimeError):
        TorchPool(0).begin(object())
    assert ended == [(0, (0, 300))]


def test_nothing_is_filled_when_a_capture_begins():
    word = torch.tensor([7])
    made, given = [], {}

    class Graph:
        def capture_begin(self, **options):
            given.update(options)
            word.fill_(0)
            made.append(torch.zeros(2) + 1)

    begin_capture(Graph(), pool=(0, 3))
    assert word.item() == 7  # left alone
    assert made[0].tolist() == [1, 1]  # other operations run
    assert given["pool"] == (0, 3)
    assert word.fill_(1).item() == 1  # afterwards as usual


@pytest.fixture
def gpu(monkeypatch):
    """Opens engines on GPUs, and notes the steps that are run on each."""
    for name, empty in (("_open", {}), ("_wanted", {}), ("_begun", set())):
        monkeypatch.setattr(torch_capture, name, empty)
    ran: dict[int, list[int]] = {}

    def open_on(engine: int, index: int) -> None:
        def run(steps):
            assert threading.current_thread() is not threading.main_thread()
            for step in steps:
                step(torch.device("cpu"))
            ran.setdefault(index, []).append(len(steps))

        torch_capture.opened(engine, index, run)

    open_on.ran = ran
    return open_on


def network(*layers):
    return torch.nn.Sequential(*layers)


def test_a_model_of_convolutions_runs_layers_on_every_open_gpu_once(gpu):
    gpu(1, 0)
    gpu(2, 1)
    net = network(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    for name in ("a", "b"):
        pp.Model.from_torch(net, torch.zeros(1, 3, 8, 8), name=name)
    torch_capture.closed(1)
    torch_capture.closed(2)
    assert gpu.ran == {0: [6], 1: [6]}


def test_layers_run_on_a_gpu_that_is_opened_after_the_model_was_made(gpu):
    torch_capture.want(torch, network(torch.nn.Linear(4, 4)), None)
    gpu(1, 0)
    torch_capture.closed(1)
    gpu(2, 0)  # the libraries stay loaded
    torch_capture.closed(2)
    assert gpu.ran == {0: [1]}


@pytest.mark.parametrize("made_from", [network(torch.nn.ReLU()), torch.relu])
def test_other_models_load_nothing(gpu, made_from):
    gpu(1, 0)
    torch_capture.want(torch, made_from, None)
    torch_capture.closed(1)
    assert not gpu.ran


def test_a_failure_is_left_to_the_model_itself(gpu):
    def fails(steps):
        raise RuntimeError("no such library")

    torch_capture.opened(1, 0, fails)
    pp.Model.from_torch(network(torch.nn.Linear(4, 4)), torch.zeros(1, 4), name="a")
    torch_capture.closed(1)
