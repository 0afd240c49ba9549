"""Simulations against queueing theory: M/D/1, M/G/1, Little's law, utilisation, and shares of the GPU's time."""

from __future__ import annotations

import numpy as np
import pytest

from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tenants import Tenant
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson

FULL = {"blocks": 4224, "warps": 8448}  # an H200, so that a second job would slow the first
NO_GAPS = {"host_launch_ns": 0, "tuning": {"segment_gap_ns": 0, "hand_over_ns": 0}}


def net(name: str, us: float, segments: int = 1, **options) -> ModelProfile:
    return ModelProfile(name, {1: [SegmentProfile(us * 1e3, **FULL)] * segments}, instances=64, **options)


def mean_wait_ns(jobs, name_at: int | None = None) -> float:
    mine = jobs if name_at is None else jobs[jobs["model"] == name_at]
    return float((mine["started_ns"] - mine["arrival_ns"]).mean())


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_equal_jobs_wait_as_in_an_m_d_1_queue(load):
    model = net("net", 200)
    waits = [
        mean_wait_ns(simulate(model, Poisson(load / 200e-6, "net", duration=4.0), "serial", seed=k, **NO_GAPS).jobs)
        for k in range(3)
    ]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)) * model.alone_ns(), rel=0.1)


def test_unequal_jobs_wait_as_in_an_m_g_1_queue():
    models = [net("short", 100), net("long", 100, 9)]
    rate, load = 1e9 * 0.6 / np.mean([each.alone_ns() for each in models]), 0.6
    second_moment = np.mean([each.alone_ns() ** 2 for each in models])
    waits = [
        mean_wait_ns(simulate(models, Poisson(rate, ["short", "long"], duration=8.0), "serial", seed=k, **NO_GAPS).jobs)
        for k in range(3)
    ]
    expected = rate * 1e-9 * second_moment / (2 * (1 - load))
    assert np.mean(waits) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("policy", ["fifo", "srpt", "paella", "fair", "edf", "hrrn", "streams", "mlfq"])
def test_littles_law_and_the_utilisation_hold(policy):
    models = [net("short", 100), net("long", 100, 9)]
    rate = 1e9 * 0.6 / np.mean([each.alone_ns() for each in models])
    run = simulate(models, Poisson(rate, ["short", "long"], duration=1.0), policy)
    jobs = run.jobs
    changes = np.concatenate([jobs["arrival_ns"], jobs["finish_ns"]])
    step = np.repeat([1, -1], len(jobs))[np.argsort(changes, kind="stable")]
    live = np.cumsum(step)[:-1]
    in_system = float((live * np.diff(np.sort(changes))).sum()) / (run.seconds * 1e9)
    sojourn_s = float((jobs["finish_ns"] - jobs["arrival_ns"]).mean()) / 1e9
    assert in_system == pytest.approx(len(jobs) / run.seconds * sojourn_s, rel=1e-6)
    work_ns = sum((jobs["model"] == k).sum() * each.alone_ns() for k, each in enumerate(models))
    busy_ns = run.gpu_ms["busy"][""] * 1e6
    assert 0.99 * work_ns <= busy_ns <= 1.12 * work_ns


@pytest.mark.parametrize("by_tenant", [False, True])
def test_fair_divides_the_gpus_time_by_shares_among_unlike_models(by_tenant):
    shapes, weights = {"a": (20, 40), "b": (90, 11), "c": (900, 1)}, {"a": 1.0, "b": 3.0, "c": 6.0}
    models = [net(name, *shapes[name], share=1.0 if by_tenant else weights[name]) for name in shapes]
    load = ClosedLoop("a", clients=4, client="alice") + ClosedLoop("b", clients=4, client="bob")
    load += ClosedLoop("c", clients=4, client="carol")
    tenants = {name: Tenant(share=each) for name, each in zip(("alice", "bob", "carol"), (1, 3, 6), strict=True)}
    run = simulate(models, load, "fair", tenants=tenants if by_tenant else {})
    for name, weight in weights.items():
        assert run.part_of_gpu("models", name) == pytest.approx(weight / 10, abs=0.01)
