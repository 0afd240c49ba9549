"""Moves of weights: evictions that fail are told to everybody who waits for the memory, and policies see arrivals."""

from __future__ import annotations

from core_bench import profile
from moving_bench import CHUNK, MovingBench

from paellapy.scheduler.core import codes
from paellapy.scheduler.policies.policy import policy


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


def test_requests_for_the_memory_are_told_and_the_weights_that_stay_serve():
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
    bench.ask(0, evict_requested=1)
    bench.settle()
    assert bench.location(0) == codes.RESIDENT
    assert bench.state.weights["stuck"][0] == 1
    assert bench.status(served(bench, 0)) == codes.OK


def test_weights_that_only_come_for_requests_are_not_evicted_again_and_again():
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
    bench.ask(0, prefetch=1)
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
    for given, order in (("fifo", [0, 1]), (soonest_ready, [1, 0])):
        bench = MovingBench(models, budget=5 * CHUNK, policy=given)
        for k in range(2):
            bench.submit(k)
        bench.settle()
        assert bench.brought == order
