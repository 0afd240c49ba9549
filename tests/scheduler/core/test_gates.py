"""Gates of other processes in the core: closed from the moment a request comes until its last segment has ended."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from core_bench import Bench, profile
from moving_bench import CHUNK, MovingBench

from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.concurrency import LEASE_NS, LINGERS, WAITS_NS


@pytest.fixture
def bench() -> Bench:
    return Bench([profile(segments=5, instances=2)], "priority", now=1)


def add_gate(bench: Bench, row: int, priority: int) -> np.ndarray:
    word = np.zeros(1, np.uint64)
    bench.state.gate["priority"][row], bench.state.gate["word"][row] = priority, word.ctypes.data
    bench.state.core["gates"][0] += 1
    return word


def test_a_gate_closes_while_the_inputs_of_a_request_are_still_being_written(bench: Bench) -> None:
    low, high = add_gate(bench, 0, -1), add_gate(bench, 3, 5)
    serial = bench.submit(direct=True, ready=False)
    bench.step(1000)
    assert not bench.running
    assert low[0] == bench.now + LEASE_NS
    bench.step(1000)
    assert low[0] > bench.now, "it stays closed"
    bench.write()
    bench.step(1000)
    assert bench.running
    assert low[0] > bench.now
    bench.run_dry()
    assert serial in bench.done
    assert (low[0], high[0]) == (0, 0)
    assert bench.state.gate["closes"].tolist()[:4] == [1, 0, 0, 0]


def test_a_gate_closes_for_requests_that_have_no_slot_yet(bench: Bench) -> None:
    word = add_gate(bench, 0, -1)
    bench.submit()
    bench.submit()
    bench.step(1000)
    assert word[0] == bench.now + LEASE_NS
    bench.run_dry()
    assert word[0] == 0


def test_a_slot_that_is_never_written_holds_other_processes_only_for_a_while(bench: Bench) -> None:
    word = add_gate(bench, 0, -1)
    serial = bench.submit(direct=True, ready=False)
    bench.step(1000)
    assert codes.READY_WAIT in bench.state.instance["state"]
    bench.step(WAITS_NS)
    assert word[0] == 0
    bench.write()  # late, but it is a request as any other
    bench.step(1000)
    assert bench.running
    assert word[0] > bench.now
    bench.run_dry()
    assert bench.status(serial) == codes.OK
    assert word[0] == 0


def test_a_slot_that_is_never_written_does_not_open_the_gate_for_other_requests(bench: Bench) -> None:
    word = add_gate(bench, 0, -1)
    bench.submit(direct=True, ready=False)
    bench.step(1000)
    bench.submit()
    bench.step(WAITS_NS)
    assert bench.running
    assert word[0] > bench.now


def test_a_program_whose_next_weights_do_not_come_holds_other_processes_only_for_a_while() -> None:
    needs = {1: [CHUNK, 2 * CHUNK, 2 * CHUNK]}
    about = profile(segments=3, ns=500.0, weight_bytes=2 * CHUNK, needs=needs)
    bench = MovingBench([about], budget=2 * CHUNK, policy="priority", now=1)
    bench.state.tuning["cold_lead_ns"][0] = 1e9  # it starts with its first weights
    word = add_gate(bench, 0, -1)
    serial = bench.submit(0)
    bench.step(1000)
    bench.chunk()
    bench.step(1000)
    (instance,) = bench.running
    assert word[0] > bench.now
    bench.finish_segment(instance)
    bench.step(1000)
    assert not bench.running
    assert word[0] > bench.now
    bench.step(WAITS_NS)
    assert word[0] == 0
    bench.chunk()
    bench.step(1000)
    bench.step(1000)
    assert bench.running
    assert word[0] > bench.now
    bench.settle()
    assert bench.status(serial) == codes.OK


def test_a_lease_is_renewed_while_a_request_runs(bench: Bench) -> None:
    word = add_gate(bench, 0, -1)
    bench.submit()
    bench.step(1000)
    bench.step(LEASE_NS * 3 // 4)
    assert word[0] == bench.now + LEASE_NS
    bench.run_dry()
    assert word[0] == 0


def test_the_loop_stays_awake_longer_while_there_are_gates(bench: Bench) -> None:
    """By a clock that each look at it moves on by a microsecond."""
    looks = [0]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    def clock(_, into):
        looks[0] += 1
        into[0], into[1] = 0, 1000 * looks[0]
        return 0

    step.attach_loop(bench.state)
    bench.state.call["clock"][0] = ctypes.cast(clock, ctypes.c_void_p).value
    stop, scratch = np.zeros(1, np.uint64), np.zeros(4, np.int64)
    counted = []
    for gates in (0, 1):
        if gates:
            add_gate(bench, 0, -1)
        looks[0] = 0
        assert step.run(bench.state, stop, 100_000, scratch) == 0
        counted.append(looks[0])
    assert counted == [101, 100 * LINGERS + 1]
