"""PyTorch's pools as instances use them, where there is no GPU: what is asked of PyTorch, and what is not."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

from paellapy.scheduler.models import torch_capture
from paellapy.scheduler.models.torch_capture import TorchPool


@pytest.fixture
def torch(monkeypatch):
    """The part of PyTorch that a pool needs. A pool's own snapshot must not be used: it spoils the numbers in
    its id.
    """

    class MemPool:
        id = (0, 300)

        def snapshot(self):
            raise AssertionError("a pool's own snapshot gives back references it does not own")

    segments = [
        {"total_size": size, "segment_pool_id": pool}
        for pool, size in (((0, 0), 1 << 30), ((0, 300), 2 << 20), ((0, 299), 5), ((0, 300), 20 << 20))
    ]
    cuda = SimpleNamespace(
        MemPool=MemPool, device=lambda index: contextlib.nullcontext(), memory_snapshot=lambda: segments
    )
    fake = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_pool_holds_its_own_segments_and_is_not_asked_for_them(torch):
    assert TorchPool(0).nbytes == 22 << 20


@pytest.mark.parametrize("uses", [1, 2])
def test_a_pool_that_a_graph_still_holds_is_kept(torch, uses):
    """PyTorch ends the process when a pool in use is deleted."""
    deleted = []
    torch.cuda.MemPool.use_count = lambda self: uses
    torch.cuda.MemPool.__del__ = lambda self: deleted.append(uses)
    torch.cuda.empty_cache = lambda: None
    pool = TorchPool(0)
    pool.free()
    assert deleted == [1] * (uses == 1)
    torch.cuda.MemPool.__del__ = lambda self: None


@pytest.mark.parametrize(("status", "kept"), [(0, False), (201, False), (710, True)])
def test_a_pool_of_a_lost_gpu_is_kept(torch, monkeypatch, status, kept):
    """PyTorch ends the process if it cannot free the memory of a pool that is deleted."""
    deleted, emptied = [], []
    torch.cuda.MemPool.use_count = lambda self: 1
    torch.cuda.MemPool.__del__ = lambda self: deleted.append(self)
    torch.cuda.empty_cache = lambda: emptied.append(True)
    monkeypatch.setattr(torch_capture, "driver", lambda: SimpleNamespace(cuMemGetInfo=lambda: (status, 0, 0)))
    monkeypatch.setattr(torch_capture, "_in_use", [])
    pool = TorchPool(0)
    pool.free()
    assert (len(deleted), len(emptied)) == ((0, 0) if kept else (1, 1))
    assert pool.nbytes == 0
    pool.free()
    assert len(deleted) == (not kept)
    torch.cuda.MemPool.__del__ = lambda self: None


def test_a_first_graph_keeps_the_pool_until_it_is_freed(torch, monkeypatch):
    """PyTorch refuses captures with a pool whose graphs are all gone."""
    begun, alive = [], []

    class Graph:
        def __init__(self, keep_graph):
            alive.append(self)

        def capture_end(self):
            begun.append("end")

    monkeypatch.setattr(torch_capture, "begin_capture", lambda graph, pool: begun.append((graph, pool)))
    torch.cuda.MemPool.use_count = lambda self: 1
    torch.cuda.CUDAGraph, torch.zeros, torch.cuda.empty_cache = Graph, lambda *a, **k: None, lambda: None
    pool, graphs = TorchPool(0), [object(), object()]
    for graph in graphs:
        pool.begin(graph)
    (first,) = alive
    assert begun == [(first, (0, 300)), "end", (graphs[0], (0, 300)), (graphs[1], (0, 300))]
    pool.free()
    assert pool._first is None


def test_a_capture_that_cannot_begin_leaves_no_recording_on(torch, monkeypatch):
    ended = []

    def refuse(graph, pool):
        raise RuntimeError("no")

    monkeypatch.setattr(torch_capture, "begin_capture", refuse)
    torch._C = SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: ended.append((index, pool)))
    torch.cuda.CUDAGraph = lambda keep_graph: None
    with pytest.raises(RuntimeError, match="no"):
        TorchPool(0).begin(object())
    assert ended == [(0, (0, 300))]
