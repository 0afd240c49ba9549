"""Use of bandwidth and tensor units by segments: known on a virtual GPU, measured beside probes on a real one."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import paellapy as pp
from paellapy import demo
from paellapy.instrument.device import Device
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.gpu_model.parts import footprint, part
from paellapy.instrument.ptx.compiled import assemble
from paellapy.scheduler.backends import contention_probe
from paellapy.scheduler.backends.contention_probe import (
    ROUND_BYTES,
    ContentionProbe,
    ProbeCode,
    ProbeKernel,
    bandwidth_probe,
    bandwidth_share,
    blocked_share,
    median_of_runs,
    tensor_probe,
    tensor_share,
)
from paellapy.scheduler.models.program import Node


def test_a_virtual_gpu_knows_what_its_blocks_cost() -> None:
    with pp.Engine("virtual:h200") as engine:
        engine.load(demo.load("cnn", batch=(1, 8)))
        found = engine.model_profile("cnn")
        rows = [engine.loaded_rows()[row].row for row in engine.loaded_rows()]
        memory = engine.state.segment["memory"][rows[0], 0, : len(found.sizes[1])]
    parts = [(each.compute, each.memory) for program in found.sizes.values() for each in program]
    assert all(0 <= part <= 1 for pair in parts for part in pair)
    assert any(compute > 0 for compute, _ in parts)
    assert memory.tolist() == pytest.approx([each.memory for each in found.sizes[1]])


def beside_probe(part: float, probe: float, favour: float) -> tuple[float, float]:
    """The slowdown of a segment and the rate of a probe that share one resource. `favour` 1: both are slowed equally;
    0: only the probe is, as far as that suffices.
    """
    if part + probe <= 1.0:
        return 1.0, 1.0
    slowdown = 1.0 + favour * (part + probe - 1.0)
    return slowdown, (1.0 - part / slowdown) / probe


@given(st.floats(0.0, 0.95), st.floats(0.4, 1.0), st.floats(0.0, 1.0), st.floats(0.98, 1.02), st.floats(0.98, 1.02))
def test_bandwidth_follows_from_both_slowdowns(
    part: float, probe: float, favour: float, error: float, probe_error: float
) -> None:
    slowdown, rate = beside_probe(part, probe, favour)
    found = bandwidth_share(error * slowdown, probe_error * rate, probe)
    if found:
        assert found == pytest.approx(part, abs=0.08)
    else:
        assert part < 1.12 - probe  # there was bandwidth for both, or nearly


@given(st.floats(1.0, 3.9), st.floats(0.95, 1.05), st.floats(0.4, 1.0))
def test_contention_for_sms_alone_is_no_use_of_bandwidth(slowdown: float, rate: float, probe: float) -> None:
    assert bandwidth_share(slowdown, rate, probe) == 0.0


@given(st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_tensor_units_follow_from_both_slowdowns(part: float, favour: float) -> None:
    assert tensor_share(*beside_probe(part, 1.0, favour)) == pytest.approx(part, abs=1e-3)


def test_only_runs_beside_the_probe_count() -> None:
    waited, never_counted = (6.9, 1.0, 6.0), (1.0, 0.0, 0.0)
    assert median_of_runs([waited, never_counted, (1.5, 0.7, 1.4), waited]) == (1.5, 0.7)
    slowdown, rate = median_of_runs([waited, waited, never_counted])
    assert slowdown == 6.9
    assert math.isnan(rate)
    assert tensor_share(slowdown, rate) == bandwidth_share(slowdown, rate, 0.9) == 0.0


def test_kernels_that_leave_no_place_take_the_sms_they_are_on() -> None:
    limits, probe = part("h200").sm, footprint(part("h200").sm, 128, 64, 0)
    product = Node("kernel", blocks=132, threads=384, registers=168, shared_bytes=200_000)
    few, small = replace(product, blocks=33), replace(product, blocks=5000, threads=128, registers=32, shared_bytes=0)
    cases = [product], [small, few], [small], [Node("h2d")]
    found = [blocked_share(nodes, [probe], limits, 132) for nodes in cases]
    assert found == [1.0, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("code", [bandwidth_probe(), tensor_probe()], ids=lambda code: code.name)
def test_the_probes_can_be_assembled(code: ProbeCode, arch: str) -> None:
    found = assemble(code.ptx, arch, code.name)
    assert found.registers < 64
    assert found.spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_loads_of_a_round_do_not_wait_for_each_other(arch: str) -> None:
    code = bandwidth_probe()
    loaded = ROUND_BYTES // code.threads // 4  # registers
    others = 12  # at least: three addresses, the time of the end, and the counts
    assert assemble(code.ptx, arch, code.name).registers > loaded + others


# -- a GPU of which only the driver's calls exist

SMS, RUN_NS = 4, 200_000.0
PROBE_STREAM, STREAM, GRAPH = 1, 2, 77


class Gpu:
    """Counts of a probe whose rate and whose effect on a graph are given. Its clock moves only while something runs."""

    def __init__(self, slowdown: float, rate: float, waits: bool = False) -> None:
        self.slowdown, self.rate, self.waits = slowdown, rate, waits
        self.now_ns, self.word, self.since_ns = 0.0, 0, 0.0
        self.probe: tuple[int, float] | None = None  # its blocks per SM, and when it ends by itself
        self.counts = np.zeros((SMS * 4, 2), np.uint64)
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_NUM_REGS=0, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=1
        )

    def write(self, stream: int, word: int) -> None:
        self.word = word
        if word == 1:
            self.since_ns = self.now_ns
        if word == 2 and self.probe is not None:
            self._end(self.now_ns - self.since_ns, self.rate)

    def _end(self, ns: float, rate: float) -> None:
        assert self.probe is not None
        each, self.probe = self.probe[0], None
        self.counts[: SMS * each] = (rate * ns / max(each, 2), ns)  # two or more on an SM have all of the resource

    def launch(self, each: int, longest_ns: int) -> None:
        self.probe = each, self.now_ns + longest_ns
        if self.word == 1:  # nothing else runs
            self.now_ns += longest_ns
            self._end(float(longest_ns), 1.0)

    def run_graph(self) -> None:
        if self.probe is not None and self.waits:
            self.now_ns = max(self.now_ns, self.probe[1])
            self._end(self.now_ns - self.since_ns, 1.0)
        self.now_ns += RUN_NS * (self.slowdown if self.probe is not None else 1.0)

    # -- calls of the driver

    def cuModuleLoadData(self, text: bytes) -> str:
        assert text.endswith(b"\0")
        return "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> int:
        return 5

    def cuModuleUnload(self, module: str) -> None: ...

    def cuFuncGetAttribute(self, attribute: int, function: int) -> int:
        return 40

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None: ...

    def CUfunction(self, function: int) -> int:
        return function

    def cuStreamWriteValue32(self, stream: int, ptr: int, word: int, flags: int) -> None:
        self.write(stream, word)

    def cuStreamSynchronize(self, stream: int) -> None: ...

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        assert (executable, stream) == (GRAPH, STREAM)
        self.run_graph()

    def cuLaunchKernel(self, function: int, blocks: int, *rest: Any) -> None:
        (_, longest_ns, _, _), kinds = rest[-2]
        assert len(kinds) == 4
        self.launch(blocks // SMS, longest_ns)


def probe_on(gpu: Gpu, code: ProbeCode, patch: pytest.MonkeyPatch) -> ProbeKernel:
    def array(device: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return SimpleNamespace(ptr=4096, numpy=lambda: gpu.counts)

    def event(stream: int) -> Any:
        at = gpu.now_ns
        return SimpleNamespace(at=at, elapsed_ns=lambda earlier: at - earlier.at)

    patch.setattr(contention_probe, "driver", lambda: gpu)
    patch.setattr(contention_probe, "check", lambda found, doing: found)
    patch.setattr(contention_probe, "CudaArray", array)
    patch.setattr(contention_probe, "CudaEvent", event)
    stream = SimpleNamespace(handle=PROBE_STREAM, synchronize=lambda: None)
    patch.setattr(contention_probe, "CudaStream", lambda *_: stream)
    device: Any = SimpleNamespace(sm_count=SMS, limits=part("h200").sm, zero=lambda _: None)
    return ProbeKernel(device, code)


@pytest.mark.parametrize("code", [bandwidth_probe(), tensor_probe()], ids=lambda code: code.name)
def test_slowdown_and_rate_are_measured_in_one_window(code: ProbeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(1.5, 0.6)
    probe = probe_on(gpu, code, monkeypatch)
    assert probe.alone_share == pytest.approx(code.blocks / 2, rel=1e-3)
    assert probe.footprint.threads == code.blocks * code.threads
    assert probe.measure(GRAPH, RUN_NS, STREAM) == pytest.approx((1.5, 0.6), rel=1e-3)
    probe.close()


def test_a_graph_that_waits_for_the_probe_s_end_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_on(Gpu(1.0, 1.0, waits=True), tensor_probe(), monkeypatch)
    slowdown, rate = probe.measure(GRAPH, RUN_NS, STREAM)
    assert slowdown > 4.0
    assert math.isnan(rate)


# -- a real GPU


@triton.jit
def products(x, out, tiles, times, B: tl.constexpr):
    """Products that stay in registers: one block on each SM, which leaves most places free."""
    i = tl.arange(0, B)
    for k in range(tiles):
        at = ((tl.program_id(0) * tiles + k) * B + i[:, None]) * B + i[None, :]
        y = tl.load(x + at)
        for _ in range(times):
            y = tl.dot(y, y).to(tl.float16)
        tl.store(out + at, y)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_tells_memory_from_compute() -> None:
    torch = pytest.importorskip("torch")

    class Moves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.randn(1 << 26))

        def forward(self, x):
            y = self.first + x.reshape(-1)[:1]
            for _ in range(6):
                y = y * 0.9375
            return y[:16].reshape(1, 16)

    class Multiplies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.randn(4 * 132 * 128, 128) / 12)

        def forward(self, x):
            y = self.first + x.reshape(-1)[:1]
            for _ in range(6):
                out = torch.empty_like(y)
                products[(132,)](y, out, 4, 200, B=128)
                y = out
            return y[:1, :16]

    with pp.Engine("cuda", segment_shares=True) as engine:
        found = {}
        for module in (Moves().cuda(), Multiplies().cuda()):
            name = type(module).__name__
            engine.load(pp.Model.from_torch(module, torch.zeros(1, 1), name=name, dtype=torch.float16, batch=(1,)))
            segments = engine.model_profile(name).sizes[1]
            found[name] = (np.median([s.compute for s in segments]), np.median([s.memory for s in segments]))
    assert found["Moves"][1] > found["Moves"][0] + 0.2
    assert found["Multiplies"][0] > found["Multiplies"][1] + 0.2
    assert found["Multiplies"][1] < 0.3  # contention for the SMs is no use of bandwidth


@pytest.mark.gpu
@pytest.mark.alone
def test_probes_want_most_of_their_resource() -> None:
    device = Device.open("cuda")
    assert isinstance(device, CudaDevice)
    probes = ContentionProbe(device)
    try:
        assert 0.5 < probes.memory.alone_share <= 1.0
        assert 0.5 < probes.tensor.alone_share <= 1.0
    finally:
        probes.close()
