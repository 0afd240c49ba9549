"""Weights that come and go: budgets, victims, priorities, copies under way, and moves that fail."""

from __future__ import annotations

import numpy as np
import pytest
from core_bench import Bench, profile
from hypothesis import given, settings
from hypothesis import strategies as some
from moving_bench import CHUNK, MovingBench

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.residency import set_weight_budget
from paellapy.scheduler.core.tenants import Tenant, set_tenant
from paellapy.scheduler.policies.policy import policy


def model(name, chunks, **more):
    needs = {1: [-(-chunks * (k + 1) // 3) * CHUNK for k in range(3)]}
    return profile(name, segments=3, ns=500.0, weight_bytes=chunks * CHUNK, needs=needs, **more)


def models(*chunks, **more):
    return [model(f"m{k}", n, **more) for k, n in enumerate(chunks)]


def test_a_request_brings_the_weights_and_the_next_finds_them():
    bench = MovingBench(models(2, 3), budget=5 * CHUNK)
    for _ in range(2):
        bench.submit(0)
        bench.settle()
    assert bench.brought == [0]
    row = bench.state.weights[0]
    assert (row["hits"], row["misses"], row["brought"]) == (1, 1, 1)


def test_segments_start_as_soon_as_their_own_weights_are_there():
    bench = MovingBench([model("m", 3)], budget=3 * CHUNK)
    serial = bench.submit(0)
    bench.step()
    seen = []
    for _ in range(3):
        bench.chunk()
        for _ in range(3):
            bench.step(CHUNK)
            for instance in bench.running:
                bench.finish_segment(instance)
        seen.append(int(bench.state.core["segments_done"][0]))
    bench.settle()
    # It starts when the rest will come no later than it is needed: segments take half as long as a chunk here.
    assert seen[0] == 0 or seen[0] == 1
    assert seen[1] >= 1
    assert bench.status(serial) == codes.OK


def test_with_a_lead_a_program_starts_with_its_first_weights():
    bench = MovingBench([model("m", 3)], budget=3 * CHUNK)
    bench.state.tuning["cold_lead_ns"][0] = 1e9
    bench.submit(0)
    bench.step()
    for k in range(1, 4):
        bench.chunk()
        bench.step(10)
        bench.finish(10)
        assert bench.state.core["segments_done"][0] == k
    bench.settle()


def test_models_that_do_not_fit_together_alternate():
    bench = MovingBench(models(3, 3), budget=4 * CHUNK)
    serials = [bench.submit(k % 2) for k in range(6)]
    bench.settle()
    assert [bench.status(each) for each in serials] == [codes.OK] * 6
    assert bench.evicted


def test_the_model_with_the_lowest_value_leaves_first():
    bench = MovingBench(models(1, 1, 1, 1), budget=3 * CHUNK)
    for m in (0, 1, 1, 2, 2, 0, 0):
        bench.submit(m)
        bench.settle()
    bench.submit(3)
    bench.settle()
    assert bench.evicted == [1]  # as many requests as 2 had, but longer ago


def test_a_busy_model_is_evicted_for_a_model_that_has_waited_long():
    bench = MovingBench(models(3, 3), budget=4 * CHUNK)
    for _ in range(3):
        bench.submit(0)
    bench.settle()
    waiting = bench.submit(1)
    for _ in range(200):
        bench.submit(0)
        bench.chunk()
        bench.finish(CHUNK)
        if waiting in bench.done:
            break
    assert bench.status(waiting) == codes.OK
    bench.settle()


def test_a_model_is_never_evicted_for_one_of_lower_priority():
    bench = MovingBench([model("low", 3), model("high", 3, priority=1)], budget=4 * CHUNK)
    bench.submit(1, priority=1)
    bench.settle()
    low = bench.submit(0)
    for _ in range(100):
        bench.chunk()
        bench.step(CHUNK)
    assert low not in bench.done
    assert bench.evicted == []
    bench.order(1, evict_requested=1)
    bench.settle()
    assert bench.status(low) == codes.OK
    bench.submit(1, priority=1)
    bench.settle()
    assert bench.evicted == [1, 0]


def test_a_waiting_model_is_evicted_for_higher_priority_and_comes_back():
    bench = MovingBench([model("low", 3), model("high", 3, priority=1)], budget=4 * CHUNK)
    bench.submit(0)
    bench.settle()
    low, high = bench.submit(0), bench.submit(1, priority=1)
    bench.settle()
    assert bench.status(low) == bench.status(high) == codes.OK


@pytest.mark.parametrize("keep", [codes.PINNED, codes.TRANSIENT])
def test_models_that_stay_and_models_that_go(keep):
    bench = MovingBench(models(2, 2), budget=4 * CHUNK, resident=[keep, codes.AUTO])
    bench.submit(0)
    bench.submit(1)
    bench.settle()
    assert bench.location(1) == codes.RESIDENT
    assert bench.location(0) == (codes.RESIDENT if keep == codes.PINNED else codes.OFF_GPU)


def test_prefetching_and_evicting_by_hand():
    bench = MovingBench(models(2), budget=2 * CHUNK)
    bench.order(0, prefetch=1)
    bench.settle()
    assert bench.location(0) == codes.RESIDENT
    serial = bench.submit(0)
    bench.step()
    bench.order(0, evict_requested=1)  # while a request runs
    bench.step()
    assert bench.location(0) == codes.RESIDENT
    bench.settle()
    assert bench.status(serial) == codes.OK
    assert bench.location(0) == codes.OFF_GPU
    assert bench.state.residency["held_bytes"][0] == 0


def test_requests_fail_if_their_weights_cannot_come():
    bench = MovingBench(models(2, 2), budget=2 * CHUNK)
    bench.broken.add(0)
    lost, other = bench.submit(0), bench.submit(1)
    bench.settle()
    assert bench.status(lost) == codes.NO_WEIGHTS
    assert bench.status(other) == codes.OK
    bench.broken.clear()
    again = bench.submit(0)
    bench.settle()
    assert bench.status(again) == codes.OK


def test_requests_that_a_limit_holds_back_keep_no_memory_from_others():
    bench = MovingBench(models(3, 3), budget=4 * CHUNK)
    bench.submit(0, client=1)
    bench.settle()
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.5))
    bench.state.client["resume_ns"][1] = 1e10  # she has used up her limit
    held = bench.submit(0, client=1)
    for _ in range(3):
        other = bench.submit(1)
        for _ in range(40):
            bench.chunk()
            bench.finish(CHUNK)
        assert bench.status(other) == codes.OK
    assert bench.brought == [0, 1]
    assert bench.state.client["held_back"][1] == 1
    bench.step(10_000_000_000)
    bench.settle()
    assert bench.status(held) == codes.OK
    assert bench.brought == [0, 1, 0]


def test_a_load_gets_its_memory_from_idle_models():
    bench = MovingBench(models(2, 2), budget=4 * CHUNK)
    bench.submit(0)
    bench.submit(1)
    bench.settle()
    bench.state.residency["load_bytes"], bench.state.residency["pending"] = 3 * CHUNK, 1
    for _ in range(3):
        bench.step(1)
    assert bench.state.residency["load_granted"][0] == 1
    assert len(bench.evicted) == 2


def test_permanent_memory_comes_from_the_lowest_priority_that_is_there():
    bench = MovingBench([model("high", 2, priority=1), model("low", 2), model("lower", 2, priority=-1)], 6 * CHUNK)
    for m, priority in ((0, 1), (1, 0), (1, 0), (2, -1), (2, -1), (2, -1)):  # the most urgent model is wanted least
        bench.submit(m, priority=priority)
        bench.settle()
    r = bench.state.residency
    for nbytes, leaves in ((1, [2]), (3 * CHUNK, [2, 1])):
        r["load_priority"], r["load_bytes"], r["load_granted"], r["pending"] = codes.NEVER, nbytes, 0, 1
        for _ in range(3):
            bench.step(1)
        assert r["load_granted"][0] == 1
        assert bench.evicted == leaves
        for name in ("budget_bytes", "held_bytes"):  # it keeps what it was given
            r[name] -= nbytes
        r["load_bytes"] = r["load_granted"] = 0


@pytest.mark.parametrize(("requests", "leaves"), [(3, [0]), (9, [1])])
def test_priority_counts_in_the_value_of_a_model(requests, leaves):
    """Each step of priority is worth as much as twice the requests."""
    made = [model("low", 2), model("high", 2, priority=2), model("top", 2, priority=3)]
    bench = MovingBench(made, budget=4 * CHUNK)
    bench.submit(1, priority=2)
    bench.submit(1, priority=2)
    bench.settle()
    for _ in range(requests):
        bench.submit(0)
        bench.settle()
    bench.submit(2, priority=3)
    bench.settle()
    assert bench.evicted == leaves


def test_a_prediction_knows_of_the_copy():
    bench = MovingBench(models(8), budget=8 * CHUNK)
    cold = predict_finish(bench.state, 0, bench.now) - bench.now
    bench.submit(0)
    bench.settle()
    warm = predict_finish(bench.state, 0, bench.now) - bench.now
    assert warm == 1500
    assert cold > 8 * CHUNK


def test_without_a_budget_weights_never_delay_a_request():
    bench = MovingBench(models(8), budget=1)
    bench.state.residency["managed"] = 0
    serial = bench.submit(0)
    bench.step()
    for _ in range(3):
        bench.finish(1)
    assert bench.status(serial) == codes.OK


CHUNKS = (1, 2, 3, 4)
PRIORITIES = (0, 0, 1, 2)
actions = some.lists(
    some.tuples(some.sampled_from(["submit", "chunk", "chunk", "finish", "finish", "step", "evict", "prefetch",
                                   "cancel", "break", "mend"]), some.integers(0, 3)),
    min_size=140, max_size=150,
)  # fmt: skip


@settings(max_examples=36, deadline=None)
@given(
    actions,
    some.integers(4, 10),
    some.lists(some.sampled_from([codes.AUTO, codes.AUTO, codes.TRANSIENT]), min_size=4, max_size=4),
    some.booleans(),
)
def test_bytes_of_weights_are_counted_once_after_any_operations(todo, budget, keep, one_by_one):
    """Five thousand operations in all; the bench and the integrity check look after each of them."""
    made = [model(f"m{k}", n, priority=p) for k, (n, p) in enumerate(zip(CHUNKS, PRIORITIES, strict=True))]
    bench = MovingBench(made, budget * CHUNK, resident=keep)
    bench.one_by_one = bench.state.core["one_by_one"][0] = one_by_one
    for what, which in todo:
        if what == "submit" and bench.free:
            bench.submit(which, priority=PRIORITIES[which])
        elif what == "chunk":
            bench.chunk()
        elif what == "finish" and bench.running:
            bench.finish_segment(bench.running[which % len(bench.running)])
        elif what == "evict" and bench.location(which) == codes.RESIDENT:
            bench.order(which, evict_requested=1)
        elif what == "prefetch" and bench.location(which) == codes.OFF_GPU:
            bench.order(which, prefetch=1)
        elif what == "cancel" and bench.rows:
            bench.cancel(sorted(bench.rows)[which % len(bench.rows)])
        elif what == "break":
            bench.broken.add(which)
        elif what == "mend":
            bench.broken.discard(which)
        bench.step(CHUNK // 2)
    bench.broken.clear()
    bench.state.weights["prefetch"] = 0
    for k in range(4):  # what is of low priority may wait for as long as others keep their place
        bench.keep[k] = codes.TRANSIENT
    bench.state.weights["keep"][:4] = codes.TRANSIENT
    bench.state.residency["pending"] = 1
    bench.settle()
    bench.step()
    assert bench.state.residency["held_bytes"][0] == 0
    assert bench.on_gpu == {}
    assert not np.any(bench.state.weights["stopped"])


def test_functions_that_move_weights_are_reached_only_where_a_budget_is_set():
    state = Bench(models(2)).state
    assert state.residency["poll_moves"][0] == state.residency["order_moves"][0] == 0
    set_weight_budget(state, 1 << 20)
    assert state.residency["poll_moves"][0] != state.residency["order_moves"][0] != 0
    assert state.residency["poll_moves"][0] != 0


def bench_of(*keep):
    """Models of which one fits at a time. The first one is on the GPU and cannot leave."""
    models = [profile(f"m{k}", segments=1, ns=500.0, weight_bytes=CHUNK) for k in range(len(keep))]
    bench = MovingBench(models, budget=CHUNK, resident=keep)
    bench.stuck.add(0)
    assert bench.status(served(bench, 0)) == codes.OK
    return bench


def served(bench, model):
    serial = bench.submit(model)
    bench.settle()
    return serial


def test_after_a_failed_eviction_waiting_requests_fail_and_the_weights_serve():
    bench = bench_of(codes.AUTO, codes.AUTO)
    lost, other = bench.submit(1), bench.submit(0)
    bench.settle()
    assert bench.status(lost) == codes.NO_WEIGHTS
    assert bench.status(other) == codes.OK
    assert bench.location(0) == codes.RESIDENT
    row = bench.state.residency[0]
    assert (row["held_bytes"], row["evicting"], row["evicted"]) == (CHUNK, 0, 0)
    bench.stuck.clear()
    assert bench.status(served(bench, 1)) == codes.OK
    assert bench.evicted == [0]


def test_other_weights_leave_once_an_eviction_has_failed():
    models = [profile(f"m{k}", segments=1, ns=500.0, weight_bytes=CHUNK) for k in range(3)]
    bench = MovingBench(models, budget=2 * CHUNK, resident=(codes.AUTO,) * 3)
    bench.stuck.add(0)
    for model in (0, 1, 1, 1):  # the first one is the cheapest to leave
        assert bench.status(served(bench, model)) == codes.OK
    assert bench.status(served(bench, 2)) == codes.NO_WEIGHTS
    assert bench.status(served(bench, 2)) == codes.OK
    assert bench.evicted == [1]


def test_an_eviction_by_hand_is_tried_once():
    bench = bench_of(codes.AUTO)
    bench.order(0, evict_requested=1)
    bench.settle()
    assert bench.location(0) == codes.RESIDENT
    assert bench.state.weights["stuck"][0] == 1
    assert bench.status(served(bench, 0)) == codes.OK


def test_transient_weights_that_cannot_leave_are_evicted_once():
    bench = bench_of(codes.TRANSIENT, codes.AUTO)
    assert bench.location(0) == codes.RESIDENT
    assert bench.state.weights["stuck"][0] == 1
    bench.stuck.clear()
    assert bench.status(served(bench, 1)) == codes.OK  # their memory is needed
    assert bench.location(0) == codes.OFF_GPU


def test_a_load_that_waits_for_the_memory_is_refused():
    bench = bench_of(codes.AUTO)
    bench.state.residency["load_bytes"], bench.state.residency["pending"] = CHUNK, 1
    bench.settle()
    assert bench.state.residency["load_granted"][0] == codes.NONE
    assert bench.location(0) == codes.RESIDENT


def bench_with_a_prefetched_model_of_higher_priority():
    """Models of which one fits at a time. The first one is there, and was prefetched while its request ran."""
    models = [profile(f"m{k}", segments=1, ns=500.0, weight_bytes=CHUNK, priority=1 - k) for k in range(2)]
    bench = MovingBench(models, budget=CHUNK, resident=(codes.TRANSIENT, codes.AUTO))
    serial = bench.submit(0, priority=1)
    bench.step()
    bench.order(0, prefetch=1)
    bench.settle()
    assert bench.status(serial) == codes.OK
    assert bench.location(0) == codes.RESIDENT
    return bench


def test_a_load_of_lower_priority_gets_the_memory_of_prefetched_weights_that_go():
    bench = bench_with_a_prefetched_model_of_higher_priority()
    bench.state.residency["load_bytes"], bench.state.residency["pending"] = CHUNK, 1
    for _ in range(20):
        bench.step(CHUNK)
    assert bench.state.residency["load_granted"][0] == 1
    assert bench.location(0) == codes.OFF_GPU


def test_a_request_of_lower_priority_gets_the_memory_of_prefetched_weights_that_go():
    bench = bench_with_a_prefetched_model_of_higher_priority()
    assert bench.status(served(bench, 1)) == codes.OK


@policy
def soonest_ready(job):
    return job.ready_ns


def test_a_policy_sees_when_the_weights_will_be_there():
    """Both models are cold. The second one is smaller, so its weights could be there sooner."""
    models = [profile(f"m{k}", segments=1, ns=500.0, weight_bytes=n * CHUNK) for k, n in enumerate((4, 1))]
    for name, order in (("fifo", [0, 1]), (soonest_ready, [1, 0])):
        bench = MovingBench(models, budget=5 * CHUNK, policy=name)
        for k in range(2):
            bench.submit(k)
        bench.settle()
        assert bench.brought == order
