"""More models than memory in simulated time: hit rates, copies that are hidden, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing
from sim_models import requests

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, load_profiles, save_profiles
from paellapy.scheduler.policies.policy import policy
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import Poisson

GB = 1_000_000_000


def net(name, gb=0.64, ms=2.0, segments=20, **more):
    nbytes = int(gb * GB)
    needs = {1: [nbytes * (k + 1) // segments for k in range(segments)]}
    sizes = {1: [SegmentProfile(ms * 1e6 / segments, blocks=60, warps=240)] * segments}
    return ModelProfile(name, sizes, weight_bytes=nbytes, needs=needs, **more)


def zipf(n):
    return {f"m{k}": 1 / (k + 1) for k in range(n)}


def test_a_cold_request_takes_about_as_long_as_the_copy():
    load = requests((0.0, "a"), (0.1, "b"))
    result = simulate([net("a"), net("b")], load, "fifo", memory_bytes=GB, pcie_gbps=50)
    first, second = result.latency_ms
    assert first == pytest.approx(2.0, rel=0.1)
    copy = 0.64 * 1e3 / 50
    assert copy < second < 1.1 * copy + 0.2
    assert result.counters["brought"] == result.counters["evicted"] == 1


def test_recent_demand_keeps_more_requests_warm_than_least_recent_use():
    models = [net(f"m{k}", gb=0.5) for k in range(20)]
    load = Poisson(60, zipf(20), duration=30)
    rates = {}
    for name in ("paella", "lru"):
        counters = simulate(models, load, name, memory_bytes=3 * GB, pcie_gbps=50).counters
        rates[name] = counters["weight_hits"] / (counters["weight_hits"] + counters["weight_misses"])
    assert rates["paella"] > rates["lru"] > 0.3


def test_whoever_stays_is_never_cold():
    models = [net("m0", resident=True), *(net(f"m{k}") for k in range(1, 5))]
    result = simulate(models, Poisson(40, zipf(5), duration=5), "paella", memory_bytes=int(1.4 * GB), pcie_gbps=50)
    assert result.model("m0").p99_ms < 8.0
    assert result.model("m4").p50_ms > 10.0


def test_a_model_that_could_never_come_beside_higher_priorities_is_refused():
    models = [net("low", gb=0.5), *(net(name, gb=0.5, priority=1) for name in ("high", "higher"))]
    load = requests(*((0.1 * k, each.name) for k, each in enumerate(models)))
    with failing(ProfileError, field="memory_bytes", given=GB, needed_bytes=1_500_000_000):
        simulate(models, load, "priority", memory_bytes=GB)
    assert simulate(models, load, "priority", memory_bytes=int(1.5 * GB)).counters["weight_hits"] == 3


def test_a_policy_may_choose_who_leaves():
    def largest(model):
        return -model.bytes

    @policy(victim=largest)
    def oldest(job):
        return job.arrival_ns

    models = [net("small", gb=0.2), net("large", gb=0.5), net("third", gb=0.3)]
    load = requests(*((0.1 * k, name) for k, name in enumerate(("small", "large", "third", "small"))))
    result = simulate(models, load, oldest, memory_bytes=int(0.9 * GB))
    assert result.counters["weight_misses"] == 1


def test_a_policy_sees_what_is_missing():
    @policy
    def warm_first(job):
        return job.missing_bytes + 1e-6 * job.arrival_ns

    models = [net(f"m{k}") for k in range(4)]
    result = simulate(models, Poisson(100, zipf(4), duration=2), warm_first, memory_bytes=int(1.4 * GB))
    assert not warm_first.timeless
    assert result.all.completed == result.all.submitted


@pytest.mark.parametrize(("model", "options", "field"), [
    (net("m"), {"memory_bytes": GB // 2}, "weight_bytes"),
    (ModelProfile("m", {1: [SegmentProfile(1e5)]}), {"memory_bytes": GB}, "weight_bytes"),
    (net("m"), {"memory_bytes": GB, "fidelity": "blocks"}, "fidelity"),
    (net("m"), {"memory_bytes": GB, "pcie_gbps": 0}, "pcie_gbps"),
    (net("m"), {"pcie_gbps": 50}, "memory_bytes"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_refused(model, options, field):
    with failing(PaellaError, field=field):
        simulate(model, Poisson(10, "m", duration=1), **options)


def test_profiles_carry_weights(tmp_path):
    save_profiles(tmp_path / "models.json", [net("m", resident=False)])
    (found,) = load_profiles(tmp_path / "models.json")
    assert (found.weight_bytes, found.resident) == (640_000_000, False)
    assert np.diff(found.needs[1]).tolist() == [32_000_000] * 19
