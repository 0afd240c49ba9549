"""Simulations against queueing theory: each policy keeps what it promises on one resource.

Equal jobs wait as in M/D/1, unequal ones in order of arrival as in M/G/1; processor sharing slows all alike; `srpt` has
the mean of an ideal preemptive server, `edf` and `lax` meet all deadlines that can be met. Little's law and the
utilisation hold for all policies, shares of the GPU's time for those that divide it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ideal_server import ideal_ends
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tenants import Tenant
from paellapy.scheduler.policies.policy import policy_names
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, TraceWorkload

FULL = {"blocks": 4224, "warps": 8448}  # an H200, so that a second job would slow the first
NO_GAPS: dict[str, Any] = {"host_launch_ns": 0, "tuning": {"segment_gap_ns": 0, "hand_over_ns": 0}}
IN_ORDER = ["fifo", "serial", "priority"]
ONE_SERVER: dict[str, Any] = {**NO_GAPS, "active": 1, "max_in_flight": 1}


def net(name: str, us: float, segments: int = 1, **options: Any) -> ModelProfile:
    return ModelProfile(name, {1: [SegmentProfile(us * 1e3, **FULL)] * segments}, instances=64, **options)


PAIR = [net("short", 50, 2), net("long", 50, 18)]
PAIR_NS = np.array([each.alone_ns() for each in PAIR])


def pair_at(load: float, seconds: float) -> Poisson:
    return Poisson(load * 1e9 / PAIR_NS.mean(), ["short", "long"], duration=seconds)


def mean_wait_ns(run: Any) -> float:
    return float((run.jobs["started_ns"] - run.jobs["arrival_ns"]).mean())


def sojourn_ns(jobs: Any) -> NDArray[np.float64]:
    return np.asarray(jobs["finish_ns"] - jobs["arrival_ns"], float)


@pytest.mark.parametrize("policy", [*IN_ORDER, "srpt", "edf", "hrrn", "paella"])  # equal jobs: any order will do
def test_equal_jobs_wait_as_in_an_m_d_1_queue(policy):
    model, load = net("net", 200), 0.7
    arrivals = Poisson(load / 200e-6, "net", duration=4.0)
    waits = [mean_wait_ns(simulate(model, arrivals, policy, seed=k, **ONE_SERVER)) for k in range(2)]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)) * model.alone_ns(), rel=0.1)


@pytest.mark.parametrize("policy", IN_ORDER)
def test_unequal_jobs_in_order_wait_as_in_an_m_g_1_queue(policy):
    load, second_moment = 0.6, (PAIR_NS**2).mean()
    waits = [mean_wait_ns(simulate(PAIR, pair_at(load, 6.0), policy, seed=k, **ONE_SERVER)) for k in range(3)]
    assert np.mean(waits) == pytest.approx(load / PAIR_NS.mean() * second_moment / (2 * (1 - load)), rel=0.1)


def test_streams_slow_all_jobs_alike_as_processor_sharing_does():
    load = 0.6
    jobs = np.concatenate([simulate(PAIR, pair_at(load, 6.0), "streams", seed=k, **NO_GAPS).jobs for k in range(3)])
    for k, alone_ns in enumerate(PAIR_NS):
        assert sojourn_ns(jobs[jobs["model"] == k]).mean() == pytest.approx(alone_ns / (1 - load), rel=0.1)


@pytest.mark.parametrize("load", [0.6, 0.85])
def test_srpt_has_the_mean_of_an_ideal_server(load):
    jobs = np.sort(simulate(PAIR, pair_at(load, 1.0), "srpt", **ONE_SERVER).jobs, order="arrival_ns")
    ideal = ideal_ends(jobs["arrival_ns"], PAIR_NS[jobs["model"]], lambda _, left: left) - jobs["arrival_ns"]
    assert ideal.mean() <= sojourn_ns(jobs).mean() <= 1.06 * ideal.mean()  # it waits for segments
    others = [simulate(PAIR, pair_at(load, 1.0), each, **ONE_SERVER).jobs for each in ("fifo", "edf", "fair", "mlfq")]
    assert sojourn_ns(jobs).mean() <= min(sojourn_ns(each).mean() for each in others)


def feasible(seed: int, load: float) -> TraceWorkload:
    """Deadlines 1 ms after the ends of a schedule in a random order, so that an ideal server can meet all of them."""
    random, pieces, n = np.random.default_rng(seed), np.array([1, 4, 16, 64]), 300
    arrival_ns = np.cumsum(random.exponential(pieces.mean() * 200e3 / load, n)).astype(np.int64)
    of, order = random.integers(0, 4, n), random.permutation(n)
    due_ns = ideal_ends(arrival_ns, pieces[of] * 200e3, lambda k, _: order[k]) + 1e6
    rows = zip(arrival_ns.tolist(), pieces[of].tolist(), due_ns.tolist(), strict=True)
    return TraceWorkload(tuple((at / 1e9, f"net{k}", (due - at) / 1e6, None, 0) for at, k, due in rows))


@pytest.mark.parametrize("policy", ["edf", "lax"])
@pytest.mark.parametrize("load", [0.6, 0.85])
def test_deadlines_that_can_be_met_are_met(policy, load):
    models = [net(f"net{k}", 200, k, demand={1: 1.0}, together={1: 8}) for k in (1, 4, 16, 64)]
    met = []
    for k in (2, 6, 7):  # with long queues, in which short programs are in one piece where nobody overtakes them
        jobs = np.sort(simulate(models, feasible(k, load), policy, **NO_GAPS).jobs, order="arrival_ns")
        jobs = jobs[20:]  # the first programs are alone, and in one piece until others have to overtake them
        met.append(((jobs["status"] == codes.OK) & (jobs["finish_ns"] <= jobs["deadline_ns"])).mean())
    assert np.mean(met) >= 0.998


@pytest.mark.parametrize("policy", policy_names())
def test_littles_law_and_the_utilisation_hold(policy):
    run = simulate(PAIR, pair_at(0.6, 0.3), policy)
    jobs = run.jobs
    changes = np.concatenate([jobs["arrival_ns"], jobs["finish_ns"]])
    step = np.repeat([1, -1], len(jobs))[np.argsort(changes, kind="stable")]
    in_system = float((np.cumsum(step)[:-1] * np.diff(np.sort(changes))).sum()) / (run.seconds * 1e9)
    assert in_system == pytest.approx(len(jobs) / run.seconds * sojourn_ns(jobs).mean() / 1e9, rel=1e-6)
    work_ns, busy_ns = PAIR_NS[jobs["model"]].sum(), run.gpu_ms["busy"][""] * 1e6
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
        assert run.part_of_gpu("models", name) == pytest.approx(weight / 10, rel=0.03)
