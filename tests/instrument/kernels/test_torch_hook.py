"""Kernels that Triton compiles itself: instrumented through its hook, with descriptors that CUDA graphs keep."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import _allocation

from paellapy.instrument.device import CudaDevice, Device
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.kernels import torch_hook
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.torch_hook import LoadedKernels, _Hook, instrument_torch
from paellapy.instrument.kernels.triton_source import TRITON_VERSION
from paellapy.instrument.ptx.descriptor import pass_version
from paellapy.instrument.records import DESCRIPTOR, MAGIC, RING_RECORD, SM_LINE, Records
from paellapy.instrument.traces.session import trace


@triton.jit
def double(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    instrument_torch(False)


def compiled(target: int = 90) -> Any:
    """Compiles as Inductor does, by calling `triton.compile`."""
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32", "B": "constexpr"}
    source = ASTSource(fn=double, signature=signature, constexprs={"B": 64})
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"enable_fp_fusion": True})


def is_instrumented(built: Any) -> bool:
    reported = "%paellapy" in built.asm["ptx"]
    assert bool(built.metadata.profile_scratch_size) == reported, "asked for a descriptor exactly where one is read"
    return reported


@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernels_compiled_while_enabled_are_instrumented(target: int) -> None:
    instrument_torch()
    built = compiled(target)
    assert is_instrumented(built)
    assert built.metadata.profile_scratch_size == 1
    assert built.asm["cubin"]
    entry = built.asm["ptx"].split(".entry", 1)[1].split("{")[0]
    assert "paellapy" not in entry, "the signature is Triton's"


def test_disabling_gives_plain_kernels_again() -> None:
    instrument_torch()
    assert is_instrumented(compiled())
    instrument_torch(False)
    assert not is_instrumented(compiled())
    assert knobs.runtime.add_stages_inspection_hook is None


def test_the_cache_never_mixes_the_two() -> None:
    plain = compiled()
    assert not is_instrumented(plain)
    for _ in range(2):  # the second time from the cache
        instrument_torch()
        assert is_instrumented(compiled())
        instrument_torch(False)
        again = compiled()
        assert not is_instrumented(again)
        assert again.asm["ptx"] == plain.asm["ptx"]


def test_kernels_of_our_own_stay_plain_underneath() -> None:
    before = kernel(double).compile("*fp32", "*fp32", "i32", B=64, target="sm_90")
    instrument_torch()
    meanwhile = kernel(double).compile("*fp32", "*fp32", "i32", B=64, target="sm_90")
    assert meanwhile.original_ptx == before.original_ptx
    assert meanwhile.cubin == before.cubin
    # Also where nothing is in the cache yet; and they leave nothing there that Triton would take for something else.
    other = kernel(double).compile("*fp16", "*fp16", "i32", B=64, target="sm_90")
    assert "%paellapy" not in other.original_ptx
    assert is_instrumented(compiled())


def test_enabling_twice_is_enabling_once() -> None:
    instrument_torch()
    hook = knobs.runtime.add_stages_inspection_hook
    instrument_torch()
    assert knobs.runtime.add_stages_inspection_hook == hook
    instrument_torch(False)
    instrument_torch(False)
    assert knobs.runtime.add_stages_inspection_hook is None


def test_somebody_elses_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any) -> Any:
        return None if args else ("key", "hash")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs)
    for _ in range(2):
        with failing(InstrumentError, field="hook"):
            instrument_torch()
    instrument_torch(False)
    assert knobs.runtime.add_stages_inspection_hook is theirs


def test_everything_is_put_back() -> None:
    def state() -> list[Any]:
        # Of the launch hook only our own entry is looked at: Triton keeps an empty chain where there was none.
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.kernel_load_end_hook)
        chains = [list(getattr(hook, "calls", [])) for hook in hooks]
        return [_allocation._profile_allocator.get(), knobs.compilation.instrumentation_mode, *chains]

    before = state()
    instrument_torch()
    assert state() != before
    instrument_torch(False)
    assert state() == before


def test_a_kernel_that_cannot_be_instrumented_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise InstrumentError("not this one")

    monkeypatch.setattr(torch_hook.passes, "apply", refuse)
    instrument_torch()
    assert not is_instrumented(compiled())


def test_a_kernel_that_proton_instruments_is_left_to_it() -> None:
    hook = torch_hook._Hook()
    stages = {"ptx": lambda source, metadata: "its PTX"}
    hook.stages(None, stages, None, None, None)
    assert stages["ptx"](None, {"profile_scratch_size": 128}) == "its PTX"


@pytest.mark.skipif(TRITON_VERSION < (3, 7), reason="Triton 3.6 does not ask")
def test_the_key_of_the_cache_changes_with_the_passes() -> None:
    key, digest = torch_hook._Hook().stages()
    assert pass_version() in key
    assert len(digest) == 64


def test_the_caches_of_torch_compile_tell_instrumented_kernels_from_plain_ones() -> None:
    pytest.importorskip("torch")
    from torch._inductor import config as inductor
    from torch.compiler import config

    before = config.cache_key_tag, inductor.compile_threads, inductor.use_static_cuda_launcher
    instrument_torch()
    assert "paellapy" in config.cache_key_tag
    assert inductor.compile_threads == 1
    assert not inductor.use_static_cuda_launcher
    instrument_torch(False)
    assert (config.cache_key_tag, inductor.compile_threads, inductor.use_static_cuda_launcher) == before


def test_inductors_settings_are_made_when_it_is_imported() -> None:
    script = """
import sys
import paellapy as pp
pp.instrument_torch()
assert "torch" not in sys.modules, "a program without PyTorch does not wait for it"
from torch._inductor import config
from torch.compiler import config as keys
assert (config.compile_threads, config.use_static_cuda_launcher) == (1, False)
assert "paellapy" in keys.cache_key_tag
pp.instrument_torch(False)
assert keys.cache_key_tag == ""
"""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_inductor_asks_for_other_entries_of_its_disk_cache() -> None:
    torch = pytest.importorskip("torch")
    from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails

    graph = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))

    def key() -> str:
        return FxGraphCachePickler(graph).get_hash(FxGraphHashDetails(graph, [torch.ones(2)], {}, []))

    plain = key()
    instrument_torch()
    assert key() != plain
    instrument_torch(False)
    assert key() == plain


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

    current_index = 0  # of the GPU on which PyTorch launches

    def _setup(self, which: str) -> None:
        self.name, self.title, self.index, self.sm_ids = f"cuda:{which or 0}", "a stand-in", int(which or 0), 1
        self.capability, self.limits = (9, 0), SimpleNamespace(warps=64)
        self.lines, self._memory = HostMemory(np.zeros(1, SM_LINE)), {}
        self.rings, self.capturing, self.now, self._clock = None, False, 1000, SimpleNamespace(offset_ns=0)
        self.tables: list[HostMemory] = []

    @classmethod
    def of_thread(cls) -> Gpu:
        found: Gpu = cls.open(f"cuda:{cls.current_index}")
        return found

    def synchronize(self) -> None:
        assert not self.capturing, "a wait breaks a capture"

    def array_beside(self, data: Any) -> Any:
        self.tables.append(HostMemory(data))
        return self.tables[-1]

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
        """The kernel's work with its descriptor, which must be in this GPU's memory."""
        assert any(t.ptr <= descriptor < t.ptr + t.data.nbytes for t in self.tables)
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
    for each in Device.opened():
        each.session = None


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


def test_graphs_of_a_server_have_more_launches_than_a_table_has_rows(gpu: Gpu) -> None:
    triton, count = Triton(gpu), 8200
    graph = triton.capture(*["before"] * count)
    assert len(set(graph)) == count
    with trace(64, device=gpu) as t:
        inside = triton.capture(*["inside"] * count)  # its table is made during the capture
        triton.replay([*graph[-2:], graph[0], *inside[-3:]])
        triton.launch("free")
    assert not set(graph) & set(inside)
    assert ran(t) == {"before": 3, "inside": 3, "free": 1}
    with trace(64, device=gpu) as t:
        triton.replay([*graph[-3:], *inside[:2]])
    assert ran(t) == {"before": 3, "inside": 2}


def test_a_graph_that_is_captured_in_a_trace_and_not_replayed_is_not_in_it(gpu: Gpu) -> None:
    triton = Triton(gpu)
    with trace(64, device=gpu) as t:
        graph = triton.capture("later")
        triton.launch("now")
    assert t.kernels == ("now",)
    with trace(64, device=gpu) as t:
        triton.replay(graph)
    assert ran(t) == {"later": 1}


def test_each_gpu_has_descriptors_of_its_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    triton, other = Triton(gpu), Device.open("cuda:1")
    first = triton.capture("first")
    monkeypatch.setattr(Gpu, "current_index", 1)
    beside = Triton(other)
    beside.hook = triton.hook
    second = beside.capture("second")
    with trace(64, device=other) as t:
        beside.replay(second)
        beside.launch("free")
    assert ran(t) == {"second": 1, "free": 1}
    with trace(64, device=gpu) as t:
        triton.replay(first)
        beside.replay(second)  # no trace of its GPU
    assert ran(t) == {"first": 1}


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
