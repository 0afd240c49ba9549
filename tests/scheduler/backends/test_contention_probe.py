"""What segments take of the GPU's arithmetic and bandwidth: derived on a virtual GPU, measured on a real one."""

from __future__ import annotations

import math
from dataclasses import replace

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
from paellapy.scheduler.backends.contention_probe import (
    ROUND_BYTES,
    Hogs,
    Work,
    memory_hog,
    of_trials,
    part_of_bandwidth,
    part_of_units,
    part_without_place,
    tensor_hog,
)
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.models.program import Node
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop


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


def beside_hog(part: float, hog: float, favour: float) -> tuple[float, float]:
    """The slowdown of a segment and the pace of a hog that share one resource. `favour` 1: both are slowed equally;
    0: only the hog is, as far as that suffices.
    """
    if part + hog <= 1.0:
        return 1.0, 1.0
    stretch = 1.0 + favour * (part + hog - 1.0)
    return stretch, (1.0 - part / stretch) / hog


@given(st.floats(0.0, 0.95), st.floats(0.4, 1.0), st.floats(0.0, 1.0), st.floats(0.98, 1.02), st.floats(0.98, 1.02))
def test_bandwidth_follows_from_both_slowdowns(
    part: float, hog: float, favour: float, error: float, hog_error: float
) -> None:
    stretch, pace = beside_hog(part, hog, favour)
    found = part_of_bandwidth(error * stretch, hog_error * pace, hog)
    if found:
        assert found == pytest.approx(part, abs=0.08)
    else:
        assert part < 1.12 - hog  # there was bandwidth for both, or nearly


@given(st.floats(1.0, 3.9), st.floats(0.95, 1.05), st.floats(0.4, 1.0))
def test_contention_for_sms_alone_is_no_use_of_bandwidth(stretch: float, pace: float, hog: float) -> None:
    assert part_of_bandwidth(stretch, pace, hog) == 0.0


@given(st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_tensor_units_follow_from_both_slowdowns(part: float, favour: float) -> None:
    assert part_of_units(*beside_hog(part, 1.0, favour)) == pytest.approx(part, abs=1e-3)


def test_only_trials_beside_the_hog_count() -> None:
    waited, never_counted = (6.9, 1.0, 6.0), (1.0, 0.0, 0.0)
    assert of_trials([waited, never_counted, (1.5, 0.7, 1.4), waited]) == (1.5, 0.7)
    stretch, pace = of_trials([waited, waited, never_counted])
    assert stretch == 6.9
    assert math.isnan(pace)
    assert part_of_units(stretch, pace) == part_of_bandwidth(stretch, pace, 0.9) == 0.0


def test_kernels_that_leave_no_place_take_the_sms_they_are_on() -> None:
    limits, hog = part("h200").sm, footprint(part("h200").sm, 128, 64, 0)
    product = Node("kernel", blocks=132, threads=384, registers=168, shared_bytes=200_000)
    few, small = replace(product, blocks=33), replace(product, blocks=5000, threads=128, registers=32, shared_bytes=0)
    cases = [product], [small, few], [small], [Node("h2d")]
    found = [part_without_place(nodes, [hog], limits, 132) for nodes in cases]
    assert found == [1.0, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("work", [memory_hog(), tensor_hog()], ids=lambda work: work.name)
def test_the_hogs_can_be_assembled(work: Work, arch: str) -> None:
    found = assemble(work.ptx, arch, work.name)
    assert found.registers < 64
    assert found.spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_loads_of_a_round_do_not_wait_for_each_other(arch: str) -> None:
    work = memory_hog()
    loaded = ROUND_BYTES // work.threads // 4  # registers
    others = 12  # at least: three addresses, the time of the end, and the counts
    assert assemble(work.ptx, arch, work.name).registers > loaded + others


def bound(name: str, **parts: float) -> ModelProfile:
    segment = SegmentProfile(100e3, blocks=200, warps=1500, **parts)
    return ModelProfile(name, {1: [segment] * 4}, instances=2)


def rate(*models: ModelProfile, **tuning: float) -> float:
    """Rate of the first program while all run again and again."""
    load = ClosedLoop(models[0].name, duration=0.05)
    for other in models[1:]:
        load = load + ClosedLoop(other.name, duration=0.05)  # type: ignore[assignment]
    return simulate(list(models), load, "streams", tuning=tuning or None).model(models[0].name).throughput


@pytest.mark.parametrize("measured", [True, False])
def test_like_jobs_slow_each_other_in_simulations(measured: bool) -> None:
    seen = {"demand": {1: 0.2}, "together": {1: 8}} if measured else {}
    segments = {"m": {"memory": 0.9, "compute": 0.05}, "c": {"memory": 0.05, "compute": 0.9}}
    models = {
        name: ModelProfile(name, bound(name, **parts).sizes, instances=2, **seen) for name, parts in segments.items()
    }
    other = ModelProfile("other", models["m"].sizes, instances=2, **seen)
    unlike, like = rate(models["m"], models["c"]), rate(models["m"], other)
    assert unlike > 1.4 * like


def test_higher_stream_priority_is_slowed_less() -> None:
    wide = SegmentProfile(100e3, blocks=2000, warps=7000)
    usual = ModelProfile("usual", {1: [wide] * 4}, instances=2)
    low = ModelProfile("low", {1: [wide] * 4}, instances=2)
    high = ModelProfile("high", {1: [wide] * 4}, instances=2, priority=1)
    rates = [rate(high, low, priority_share=share) / rate(usual, low, priority_share=share) for share in (0.0, 0.25)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[1] > 1.1
    assert 1.0 < rate(high, low) / rate(usual, low) < rates[1]  # on an H200 priorities have little influence


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
def test_hogs_want_most_of_their_resource() -> None:
    device = Device.open("cuda")
    assert isinstance(device, CudaDevice)
    hogs = Hogs(device)
    try:
        assert 0.5 < hogs.memory.part <= 1.0
        assert 0.5 < hogs.tensor.part <= 1.0
    finally:
        hogs.close()
