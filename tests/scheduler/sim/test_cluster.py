"""Simulated clusters: requests are answered once, wherever they go, and routers differ as they should."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.cluster import ROUTINGS, Failure, Straggler, simulate_cluster
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Lognormal, Poisson, WorkloadError

pytestmark = pytest.mark.quick

SHORT = ModelProfile("short", {1: [SegmentProfile(100e3)] * 2}, target_ms=1.0, instances=4)
LONG = ModelProfile("long", {1: [SegmentProfile(500e3)] * 4}, target_ms=10.0, instances=4)
BOTH = [SHORT, LONG]


def test_one_gpu_of_a_cluster_is_a_gpu():
    """Reports change nothing on it: every request is done when it is without a router."""
    workload = Poisson(500, ["short", "long"], duration=0.2)
    alone = simulate(BOTH, workload)
    found = simulate_cluster(BOTH, workload, gpus=1)
    assert sorted(found.requests["finish_ns"]) == sorted(alone.jobs["finish_ns"])


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
    if not fails or gpus > 1:  # a lone GPU is missed while it is gone
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


def test_predictions_know_slow_gpus_and_learn_of_stragglers():
    workload = Poisson(3000, "short", duration=0.3)
    slow = {"gpus": 4, "stragglers": [Straggler(0, 8.0)]}
    by_router = {each: simulate_cluster(SHORT, workload, router=each, **slow) for each in ROUTINGS}
    p99 = {name: found.summary()["p99_ms"] for name, found in by_router.items()}
    assert p99["predicted"] < 0.7 * p99["round_robin"]
    rows = by_router["predicted"].requests
    assert (rows["gpu"] == 0).mean() < 0.15


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
