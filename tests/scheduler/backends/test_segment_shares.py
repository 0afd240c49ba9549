"""What segments take of the GPU's arithmetic and bandwidth: derived on a virtual GPU, measured on a real one."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.backends.cuda_hogs import HOGS, part_taken
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
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


def test_parts_follow_from_how_much_longer_a_segment_took() -> None:
    alone, hog = np.array([100.0, 200.0, 50.0]), 0.9
    for parts in ([0.2, 0.5, 1.0], [1.0, 1.0, 0.15]):
        beside = alone * np.maximum(1.0, hog + np.array(parts))
        assert part_taken(list(alone), list(beside), hog) == pytest.approx(parts, abs=1e-3)


def test_the_hogs_are_kernels_of_ptx() -> None:
    assert HOGS.count(".visible .entry") == 2
    assert HOGS.count("mma.sync") == 8
    assert HOGS.count("{") == HOGS.count("}")


def bound(name: str, **parts: float) -> ModelProfile:
    segment = SegmentProfile(100e3, blocks=200, warps=1500, **parts)
    return ModelProfile(name, {1: [segment] * 4}, lanes=2)


def rate(*models: ModelProfile) -> float:
    """Of the first, while all ask again and again."""
    load = ClosedLoop(models[0].name, duration=0.05)
    for other in models[1:]:
        load = load + ClosedLoop(other.name, duration=0.05)  # type: ignore[assignment]
    return simulate(list(models), load, "streams").model(models[0].name).throughput


@pytest.mark.parametrize("measured", [True, False])
def test_like_jobs_slow_each_other_in_simulations(measured: bool) -> None:
    seen = {"demand": {1: 0.2}, "together": {1: 8}} if measured else {}
    segments = {"m": {"memory": 0.9, "compute": 0.05}, "c": {"memory": 0.05, "compute": 0.9}}
    models = {name: ModelProfile(name, bound(name, **parts).sizes, lanes=2, **seen) for name, parts in segments.items()}
    other = ModelProfile("other", models["m"].sizes, lanes=2, **seen)
    unlike, like = rate(models["m"], models["c"]), rate(models["m"], other)
    assert unlike > 1.4 * like


def test_higher_stream_priority_is_slowed_less() -> None:
    wide = SegmentProfile(100e3, blocks=2000, warps=7000)
    usual = ModelProfile("usual", {1: [wide] * 4}, lanes=2)
    low = ModelProfile("low", {1: [wide] * 4}, lanes=2)
    high = ModelProfile("high", {1: [wide] * 4}, lanes=2, priority=1)
    assert rate(high, low) > 1.1 * rate(usual, low)


@pytest.mark.gpu
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
            self.register_buffer("matrix", torch.randn(3072, 3072) / 55)

        def forward(self, x):
            y = self.matrix + x.reshape(-1)[:1]
            for _ in range(6):
                y = y @ self.matrix
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
