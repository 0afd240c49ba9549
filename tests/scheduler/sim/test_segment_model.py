"""The segment model: how concurrent segments share the simulated GPU."""

from __future__ import annotations

import pytest

from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop


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
