"""Simulated clusters: requests are answered once, wherever they go, and routers differ as they should."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.codes import NEVER, OK
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.cluster import ROUTINGS, Failure, Straggler, simulate_cluster
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Lognormal, Poisson, WorkloadError

pytestmark = pytest.mark.quick

SHORT = ModelProfile("short", {1: [SegmentProfile(100e3)] * 2}, target_ms=1.0, instances=4)
LONG = ModelProfile("long", {1: [SegmentProfile(500e3)] * 4}, target_ms=10.0, instances=4)
BOTH = [SHORT, LONG]


def test_one_gpu_of_a_cluster_is_a_gpu():
    """Reports change nothing on it: every request, with its priority, deadline and client, is done when it is without a
    router.
    """
    workload = (
        Poisson(300, "short", duration=0.2, priority=3, client="alice")
        + Poisson(200, "short", duration=0.2, deadline_ms=2.0)
        + Poisson(400, "long", duration=0.2, clients=3)
    )
    for policy in ("paella", "priority", "edf"):
        alone = simulate(BOTH, workload, policy)
        rows = simulate_cluster(BOTH, workload, gpus=1, policy=policy).requests
        answered = alone.jobs["status"] == OK
        finish_ns = np.where(answered, alone.jobs["finish_ns"], NEVER)
        assert sorted(rows["finish_ns"]) == sorted(finish_ns)
        assert (alone.jobs["priority"] == 3).sum() == (rows["priority"] == 3).sum() > 0


def test_a_straggler_that_failed_returns_as_slow_as_it_was():
    slow = Straggler(0, 4.0, at_s=0.0, for_s=0.1)
    load = Poisson(50, "long", duration=0.3)
    found = simulate_cluster(LONG, load, gpus=1, stragglers=[slow], failures=[Failure(0, 0.05, 0.01)])
    rows = found.requests
    took_ns = rows["finish_ns"] - rows["time_ns"]
    assert took_ns.min() >= 0.999 * LONG.alone_ns()
    assert took_ns[rows["time_ns"] < 0.095e9].min() >= 3.999 * LONG.alone_ns()


def test_requests_wait_while_no_gpu_is_up():
    away = [Failure(gpu, 0.05, 0.05) for gpu in range(3)]
    found = simulate_cluster(SHORT, Poisson(3000, "short", duration=0.2), gpus=3, failures=away)
    assert found.lost == 0
    rows = found.requests
    held = rows[(rows["first_ns"] > 0.052e9) & (rows["first_ns"] < 0.1e9)]
    assert len(held) > 100
    assert (held["time_ns"] >= 0.1e9).all()
    longer = simulate_cluster(SHORT, Poisson(3000, "short", duration=0.1), gpus=1, failures=[Failure(0, 0.05, 30.0)])
    assert 0 < longer.lost == len(longer.requests) - longer.done.sum()


def test_failures_of_one_gpu_may_overlap():
    away = [Failure(0, 0.02, 0.02), Failure(0, 0.03, 0.05)]
    rows = simulate_cluster(SHORT, Poisson(2000, "short", duration=0.15), gpus=2, failures=away).requests
    there = rows[rows["gpu"] == 0]["time_ns"]
    assert not ((there > 0.022e9) & (there < 0.08e9)).any()
    assert (there > 0.08e9).any()


@given(st.sampled_from(ROUTINGS), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=15)
def test_every_request_is_answered_once(router, gpus, routers, seed, fails, slow):
    failures = [Failure(gpus - 1, 0.01, 0.02)] if fails else []
    stragglers = [Straggler(0, 3.0, 0.01, 0.01)] if slow else []
    found = simulate_cluster(
        BOTH, Lognormal(800 * gpus, ["short", "long"], duration=0.05), gpus=gpus, router=router, routers=routers,
        seed=seed, failures=failures, stragglers=stragglers, threads=2,
    )  # fmt: skip
    asked = Lognormal(800 * gpus, ["short", "long"], duration=0.05).arrivals(["short", "long"], seed)
    rows = found.requests
    assert sorted(rows["first_ns"]) == sorted(asked["time_ns"])
    answered = rows[rows["finish_ns"] != NEVER]
    assert (answered["finish_ns"] > answered["first_ns"]).all()
    assert found.lost == 0
    assert (rows["sent"] <= 2).all()


def test_a_cluster_is_the_same_however_many_threads_advance_it():
    runs = [
        simulate_cluster(BOTH, Poisson(4000, ["short", "long"], duration=0.03), gpus=6, threads=threads)
        for threads in (1, 3)
    ]
    np.testing.assert_array_equal(runs[0].requests, runs[1].requests)


def test_requests_go_where_their_model_is():
    placement = [["short"], ["long"], ["short", "long"]]
    found = simulate_cluster(BOTH, Poisson(1500, ["short", "long"], duration=0.1), gpus=3, placement=placement)
    rows = found.requests
    assert set(rows["gpu"][rows["model"] == 0]) == {0, 2}
    assert set(rows["gpu"][rows["model"] == 1]) == {1, 2}


@pytest.mark.parametrize("router", ["weighted", "predicted"])
def test_predictions_know_slow_gpus_and_learn_of_stragglers(router):
    workload = Poisson(3000, "short", duration=0.3)
    slow = {"gpus": 4, "stragglers": [Straggler(0, 8.0)]}
    found, other = (simulate_cluster(SHORT, workload, router=each, **slow) for each in (router, "round_robin"))
    assert found.summary()["p99_ms"] < 0.7 * other.summary()["p99_ms"]
    assert (found.requests["gpu"] == 0).mean() < 0.15


def test_weighted_routing_is_within_a_hundredth_of_the_best_rule():
    profiles = mix_profiles()
    for speeds in ((1.0,), (1.0, 0.75, 0.5)):
        load = Lognormal(4900 * sum(speeds[k % len(speeds)] for k in range(6)), MIX, duration=0.2)
        for stale_ms in (0.5, 5.0):
            found = {
                router: simulate_cluster(profiles, load, gpus=6, router=router, speeds=speeds, stale_ms=stale_ms)
                for router in ROUTINGS
            }
            part = {router: each.attainment() for router, each in found.items()}
            assert part["weighted"] > max(part.values()) - 0.01


def test_a_failed_gpu_gets_nothing_and_its_requests_are_sent_again():
    found = simulate_cluster(LONG, Poisson(2500, "long", duration=0.1), gpus=3, failures=[Failure(1, 0.05)])
    rows = found.requests
    assert found.lost == 0
    assert found.again > 0
    assert (rows["time_ns"][rows["gpu"] == 1] <= 0.05e9).all()


@pytest.mark.parametrize(("options", "field"), [
    ({"gpus": 0}, "gpus"), ({"router": "best"}, "router"), ({"stale_ms": 0}, "stale_ms"), ({"speeds": ()}, "speeds"),
    ({"gpus": 2, "placement": [["short"]]}, "placement"), ({"gpus": 1, "placement": [["other"]]}, "placement"),
    ({"gpus": 1, "failures": [Failure(3, 0.1)]}, "failures"), ({"routr": "predicted"}, "routr"),
])  # fmt: skip
def test_clusters_without_sense_are_refused(options, field):
    with failing(ArgumentError, field=field):
        simulate_cluster(BOTH, Poisson(100, "short", duration=0.01), **options)


def test_closed_loops_are_refused():
    with failing(WorkloadError, field="workload"):
        simulate_cluster(BOTH, ClosedLoop("short"), gpus=2)
