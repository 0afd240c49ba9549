"""Descriptors of launches that Triton makes itself: handed out without a copy or a wait, and kept for CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paellapy.instrument.device import CudaDevice, Device
from paellapy.instrument.kernels import torch_hook
from paellapy.instrument.kernels.torch_hook import LoadedKernels, _Hook
from paellapy.instrument.records import DESCRIPTOR, MAGIC, RING_RECORD, SM_LINE, Records
from paellapy.instrument.traces.session import trace

_BLOCKS = 6


class HostMemory:
    """An array of the GPU, in host memory."""

    def __init__(self, data: Any) -> None:
        self.data = np.array(data)
        self.ptr, self.shape = self.data.ctypes.data, self.data.shape

    def set(self, data: Any) -> None:
        self.data[...] = data


class Gpu(CudaDevice):
    """Runs one kernel of Triton's, with six blocks on one SM each; waits and copies are refused while it captures."""

    def _setup(self, which: str) -> None:
        self.name, self.title, self.index, self.sm_ids = "cuda:0", "a stand-in", 0, 1
        self.capability, self.limits = (9, 0), SimpleNamespace(warps=64)
        self.lines, self._memory = HostMemory(np.zeros(1, SM_LINE)), {}
        self.rings, self.capturing, self.now, self._clock = None, False, 1000, SimpleNamespace(offset_ns=0)

    def synchronize(self) -> None:
        assert not self.capturing, "a wait breaks a capture"

    def array_beside(self, data: Any) -> Any:
        return HostMemory(data)

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def function_resources(self, function: int) -> tuple[int, int]:
        return 32, 0

    def begin_trace(self, records_per_sm: int) -> None:
        self.synchronize()
        self.rings = self._memory.setdefault(records_per_sm, HostMemory(np.zeros((1, records_per_sm), RING_RECORD)))
        self.rings.data[...], self.lines.data[...] = 0, 0

    def read_trace(self) -> tuple[Records, Records]:
        return self.lines.data.copy(), self.rings.data.copy()

    def clock_ns(self) -> int:
        self.now += 1000
        return self.now

    def host_ns(self) -> int:
        return self.now

    def range_events(self, launches: Any) -> Any:
        return ()

    def run(self, descriptor: int) -> None:
        """The kernel's work with its descriptor."""
        rows = (np.ctypeslib.ctypes.c_uint8 * DESCRIPTOR.itemsize).from_address(descriptor)
        row = np.frombuffer(rows, DESCRIPTOR)[0]
        if row["magic"] != MAGIC:
            return
        (rings,) = (m for m in self._memory.values() if m.ptr == row["rings"])
        for block in range(_BLOCKS):
            self.now += 10
            slot = int(self.lines.data["tail"][0]) & int(row["ring_mask"])
            rings.data[0, slot] = (self.now, self.now + 5, block, row["launch"])
            self.lines.data["tail"][0] += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setitem(Device.kinds, "cuda", Gpu)
    monkeypatch.setattr(Device, "_open", {})
    monkeypatch.setattr(Device, "at_traces", [])
    device = Device.open("cuda")
    yield device
    device.session = None


class Triton:
    """Launches as Triton does: it asks for a descriptor, says the kernel's name, and launches or captures."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.hook = gpu, _Hook()
        Device.at_traces.append(self.hook.begin_trace)

    def launch(self, name: str) -> int:
        descriptor = self.hook.descriptor(_BLOCKS, 8, 0)
        self.hook.entered(SimpleNamespace(get=lambda: {"name": name, "function": 0}))
        if not self.gpu.capturing:
            self.gpu.run(descriptor)
        return descriptor

    def capture(self, *names: str) -> list[int]:
        self.gpu.capturing = True
        graph = [self.launch(name) for name in names]
        self.gpu.capturing = False
        return graph

    def replay(self, graph: list[int]) -> None:
        for descriptor in graph:
            self.gpu.run(descriptor)


def ran(t: Any) -> dict[str, int]:
    """The number of runs of each kernel in a trace."""
    names = [t.kernels[k] for k in t.blocks["kernel"]]
    assert all(names.count(name) % _BLOCKS == 0 for name in names)
    return {name: names.count(name) // _BLOCKS for name in set(names)}


def test_the_first_launch_of_a_trace_may_be_captured(gpu: Gpu) -> None:
    triton = Triton(gpu)
    with trace(device=gpu) as t:
        graph = triton.capture("first")
        triton.replay(graph)
        triton.launch("second")
    assert ran(t) == {"first": 1, "second": 1}


def test_a_graph_captured_outside_traces_reports_in_all_of_them(gpu: Gpu) -> None:
    triton = Triton(gpu)
    graph = triton.capture("a", "b")  # before there is any ring
    triton.replay(graph)
    for size, times in ((16, 1), (64, 3)):  # the second trace has other rings
        with trace(size, device=gpu) as t:
            triton.launch("c")
            for _ in range(times):
                triton.replay(graph[1:])
        assert ran(t) == {"b": times, "c": 1}
        assert t.dropped == 0


def test_a_graphs_rows_are_not_given_to_other_launches(gpu: Gpu) -> None:
    triton = Triton(gpu)
    with trace(64, device=gpu) as t:
        graph = triton.capture("kept", "kept")
        given = [triton.launch("free") for _ in range(3)]
        triton.replay(graph)
    assert ran(t) == {"kept": 2, "free": 3}
    with trace(64, device=gpu) as t:
        again = [triton.launch("free") for _ in range(5)]
        triton.replay(graph)
    assert ran(t) == {"kept": 2, "free": 5}
    assert given == again[:3]
    assert not set(graph) & set(again)


def test_launches_outside_a_trace_write_nothing(gpu: Gpu) -> None:
    triton = Triton(gpu)
    triton.launch("before any")
    with trace(device=gpu) as t:
        pass
    triton.launch("after it")
    assert len(t.blocks) == 0
    assert gpu.lines.data["tail"][0] == 0


def test_a_trace_inside_another_has_the_replays_of_its_time(gpu: Gpu) -> None:
    triton = Triton(gpu)
    graph = triton.capture("g")
    with trace(64, device=gpu) as outer:
        triton.replay(graph)
        with trace(64, device=gpu) as inner:
            triton.replay(graph)
    assert ran(inner) == {"g": 1}
    assert ran(outer) == {"g": 2}
    assert len(outer.launches) == 1


def test_a_hook_installed_during_a_trace_reports_in_it(gpu: Gpu, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with trace(device=gpu) as t:
        triton = Triton(gpu)
        Device.at_traces.clear()
        triton.hook.install()
        try:
            triton.launch("late")
        finally:
            triton.hook.remove()
    assert ran(t) == {"late": 1}


def test_a_trace_states_the_plain_registers_of_every_launch(gpu: Gpu, tmp_path: Path, monkeypatch: Any) -> None:
    stored = tmp_path / "kernel.json"
    facts = {"warps": 4, "dynamic_shared_bytes": 512, "spill_bytes": 8, "plain_registers": 30}
    stored.write_text(json.dumps({"name": "kernel", "num_warps": 4, "paellapy": facts}))
    kernels = LoadedKernels()
    monkeypatch.setattr(torch_hook, "_kernels", kernels)
    kernels.loaded(None, 0, "kernel", {"kernel.cubin": "elsewhere", "kernel.json": str(stored)}, "digest")
    triton = Triton(gpu)
    graph = triton.capture("kernel")
    with trace(device=gpu) as t:
        triton.launch("kernel")
        triton.replay(graph)
    assert ran(t) == {"kernel": 2}
    assert t.work["plain_registers"].tolist() == [30, 30]
    assert t.work["spill_bytes"].tolist() == [8, 8]
    assert t.launches[["warps", "registers", "shared_bytes"]].tolist() == [(4, 32, 512)] * 2
    stored.unlink()
    kernels.loaded(None, 0, "another", {"kernel.json": str(stored)}, "digest")  # under the same handle
    with trace(device=gpu) as t:
        triton.launch("another")
    assert len(t.work) == 0
