"""Admission's arithmetic: the same in a server's objects and in the core's tables; and in simulated time."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from core_bench import Bench, profile
from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.core.admission import (
    ADMISSION_LIMIT,
    longest_admitted_ns,
    new_limits,
    note_latency,
    predict_finish,
)
from paellapy.scheduler.core.codes import OK, QUEUE_FULL
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.policies.policy import policy_names
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, TraceWorkload, WorkloadError
from paellapy.serving.admission import AdmissionLimit

pytestmark = pytest.mark.quick

MS = 1_000_000

TUNING = Tuning.for_part("h200")


@numba.njit(error_model="numpy")  # not kept on disk, where edits of what it calls would not be seen
def note(limits, tuning, entered, now, limit_ns, number):
    note_latency(limits, 0, entered, now, limit_ns, number, tuning[0])
    return longest_admitted_ns(limits, 0, limit_ns, limit_ns / 4, 32, now, tuning[0])


@given(
    some.lists(some.tuples(some.integers(1, 300), some.integers(0, 100), some.integers(1, 40)), max_size=60),
    some.integers(1, 16),
)
def test_a_servers_admission_limit_is_a_row_of_the_table(events, slots):
    table, limit = new_limits([slots], TUNING), AdmissionLimit(slots, TUNING)
    now = 0
    for took, pause, number in events:
        now += pause * MS
        limit.done(now - took * MS, now, 100.0 * MS, number)
        reach = limit.longest_admitted_ns(100.0 * MS, 25.0 * MS, 32, now)
        assert note(table, TUNING.row(), now - took * MS, now, 100.0 * MS, number) == reach
        for name in ADMISSION_LIMIT.names:
            if name != "in_flight":
                assert table[name][0] == getattr(limit, name), name


NET = ModelProfile(
    "net", {1: [SegmentProfile(50e3)] * 10}, target_ms=2.0, instances=16, demand={1: 0.3}, together={1: 8}
)


def test_in_simulated_time_late_requests_are_refused_and_the_others_are_in_time():
    """Some 6700 a second can be done; 16000 are asked for."""
    load = Poisson(16000, "net", duration=1.0)
    without, admitted = (simulate([NET], load, "slack", admission=asked) for asked in (False, True))
    refused = admitted.jobs["status"] == QUEUE_FULL
    done = admitted.jobs[~refused]
    took = done["finish_ns"] - done["arrival_ns"]
    assert without.all.within_target < 0.1
    assert 0.3 < refused.mean() < 0.9
    assert (took <= 2 * MS).mean() > 0.97
    assert admitted.all.throughput > 0.7 * without.all.throughput


def test_deadlines_are_kept_as_targets_are():
    """What expires is late, and makes room for fewer."""
    free = ModelProfile("net", NET.sizes, instances=16, demand=NET.demand, together=NET.together)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.lognormal(np.log(1 / 12000) - 1.125, 1.5, 12000))
    rows = tuple((float(t), "net", 2.0, None, 0) for t in times)
    result = simulate([free], TraceWorkload(rows), "slack", admission=True)
    let_in = result.jobs[result.jobs["status"] != QUEUE_FULL]
    in_time = (let_in["status"] == OK) & (let_in["finish_ns"] - let_in["arrival_ns"] <= 2 * MS)
    assert 0.2 < len(let_in) / len(rows) < 0.9
    assert in_time.mean() > 0.97


@pytest.mark.parametrize("other", [{"fidelity": "blocks"}, {"workload": ClosedLoop("net", 4, duration=0.1)}])
def test_admission_is_not_simulated_with_blocks_or_closed_loops(other):
    with pytest.raises(WorkloadError) as caught:
        simulate([NET], other.pop("workload", Poisson(100, "net", duration=0.1)), admission=True, **other)
    assert caught.value.field == "admission"


def test_an_impossible_deadline_leaves_the_admission_limit_unchanged():
    limit = AdmissionLimit(16.0, TUNING)
    for k in range(300):
        limit.done(100 * MS * k, 100 * MS * k + 50 * MS, 120.0 * MS, 32)
    size = limit.size
    for k in range(300, 400):
        limit.done(100 * MS * k, 100 * MS * k + 2 * MS, 1.0 * MS, 32)  # it expired
    assert limit.size == size
    assert limit.shortest_ns == 50 * MS
    assert limit.longest_admitted_ns(120.0 * MS, 50.0 * MS, 32, 100 * MS * 400) == 120.0 * MS


def test_an_admission_limit_shrinks_if_no_request_was_ever_in_time():
    limit = AdmissionLimit(16.0, TUNING)
    for k in range(50):
        limit.done(100 * MS * k, 100 * MS * k + 30 * MS, 20.0 * MS, 16)
    assert limit.size == 1.0
    limit.in_flight = 1
    assert limit.longest_admitted_ns(20.0 * MS, 15.0 * MS, 32, 0) == pytest.approx((15 + TUNING.least_margin * 5) * MS)


def test_a_full_instance_that_waits_is_work_ahead():
    bench = Bench([profile(batch=(1, 2), instances=4)], policy="fifo")
    bench.state.core["max_active"][0] = 1
    predicted = []
    for _ in range(7):
        predicted.append(predict_finish(bench.state, 0, bench.now))
        bench.submit(0)
        bench.step()
    assert predicted == sorted(predicted)
    bench.run_dry()


@pytest.mark.parametrize(("sizes", "whole"), [((1,), 150_000), ((1, 2, 4), 300_000)])
def test_predictions_count_slots_that_the_core_does_not_know_yet(sizes, whole):
    bench = Bench([profile(batch=sizes, instances=4)], policy="fifo")
    bench.step()
    predicted = []
    for _ in range(sizes[-1] + 1):
        predicted.append(predict_finish(bench.state, 0, bench.now))
        bench.submit(0, direct=True)
    assert predicted == sorted(predicted)
    assert predicted[0] < predicted[-2] or sizes == (1,)
    assert predicted[-1] == bench.now + whole + predicted[0] - bench.now  # behind a full instance
    bench.step()
    bench.run_dry()


def test_no_request_is_refused_below_capacity_or_without_a_target():
    load = Poisson(300, "net", duration=1.0)
    assert set(simulate([NET], load, admission=True).statuses()) == {"ok"}
    lazy = ModelProfile("net", NET.sizes, instances=16, demand=NET.demand, together=NET.together)
    assert set(simulate([lazy], Poisson(8000, "net", duration=0.2), admission=True).statuses()) == {"ok"}


def test_jobs_on_the_gpu_make_a_request_take_longer():
    """Whatever the policy puts first: what is on the GPU already stays there."""
    for policy in policy_names():
        bench = Bench(
            [profile(instances=1, demand={1: 0.9}), profile("other", instances=4, demand={1: 0.9})], policy=policy
        )
        bench.state.core["max_active"][0] = 16
        alone = predict_finish(bench.state, 0, bench.now)
        for _ in range(4):
            bench.submit(1)
        bench.step()
        beside = predict_finish(bench.state, 0, bench.now)
        assert beside > alone, policy
        bench.run_dry()


def test_a_flood_on_an_idle_server_makes_few_requests_late_from_the_start():
    """What comes first is predicted for an idle GPU: what follows is in its way, and was not known of."""
    load = Poisson(20000, "net", duration=0.05)
    late = let_in = 0
    for seed in range(8):
        jobs = simulate([NET], load, "slack", admission=True, seed=seed).jobs
        done = jobs[jobs["status"] != QUEUE_FULL]
        late += int((done["finish_ns"] - done["arrival_ns"] > 2 * MS).sum())
        let_in += len(done)
    assert late < 0.01 * let_in
    assert let_in > 8 * 100


def test_a_model_with_few_requests_is_served_beside_one_that_fills_the_queue():
    """Its first requests would be in time, though not by as much as a margin wants that begins low."""
    step = [SegmentProfile(100e3)] * 10
    often, seldom = (
        ModelProfile(name, {1: step}, target_ms=target, instances=16, demand={1: 0.9}, together={1: 8})
        for name, target in (("often", 20.0), ("seldom", 11.0))
    )
    rng = np.random.default_rng(0)
    times = {name: np.cumsum(rng.exponential(1 / n, 10 * n)) for name, n in (("often", 2000), ("seldom", 20))}
    rows = tuple((float(t), name, None, None, 0) for name, found in times.items() for t in found)
    jobs = simulate([often, seldom], TraceWorkload(rows), "fifo", admission=True).jobs
    let_in = jobs[(jobs["model"] == 1) & (jobs["status"] != QUEUE_FULL)]
    assert len(let_in) > 50
    assert (let_in["finish_ns"] - let_in["arrival_ns"] <= 11 * MS).mean() > 0.97


def test_tables_begin_with_room_for_two_batches():
    assert np.array_equal(new_limits([1, 8], TUNING)["size"], [2.0, 16.0])


def test_predictions_grow_with_the_work_ahead() -> None:
    models = [profile(segments=4, ns=100e3, instances=2), profile("short", ns=1e3, instances=1)]
    bench, shortest_first = Bench(models, policy="fifo"), Bench(models, policy="srpt")
    assert predict_finish(bench.state, 0, bench.now) == 400_000
    predicted = []
    for _ in range(6):
        for each in (bench, shortest_first):
            each.submit(0)
            each.step()
        predicted.append(predict_finish(bench.state, 0, bench.now))
    assert predicted == sorted(predicted)
    assert predicted[-1] > 2 * 400_000
    assert predict_finish(shortest_first.state, 1, 0) < predicted[-1] / 2
