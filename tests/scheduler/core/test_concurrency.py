"""How many jobs share the GPU, which of them yield, SM partitions, and gates of other processes."""

from __future__ import annotations

import asyncio
import ctypes
import math
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile
from core_check import IntegrityError, check_at_rest, check_integrity
from core_scripts import actions, play
from engine_models import mlp_model, mlp_reference, random_inputs, scale_model, scale_reference
from hypothesis import given, settings
from hypothesis import strategies as some
from moving_bench import CHUNK, MovingBench

import paellapy as pp
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.concurrency import LEASE_NS, LINGERS, WAITS_NS
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.profiles import ModelProfile, install, remove
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.loading import install_partitions
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.policies.policy import find_policy, policy_names

TUNING = Tuning.for_part("h200")
LARGE = replace(LIMITS, instances=80, instances_per_model=60, requests=160, segments=20)


def wait_long(bench: Bench) -> None:
    """The requests that wait now, wait for ten times as long as the length of the queue is averaged."""
    bench.step()
    bench.step(500_000_000)


def large_bench(*models: ModelProfile, policy: str = "fifo", active: int = 60, demand: float = np.inf) -> Bench:
    return Bench(list(models), policy=replace(find_policy(policy), active=active), demand=demand, limits=LARGE)


@pytest.mark.parametrize(("limit", "together"), [(0.0, 1), (1.0, 2), (1.3, 3), (np.inf, 4)])
def test_jobs_share_the_gpu_until_their_demand_fills_it(limit: float, together: int) -> None:
    bench = Bench([profile(segments=4, instances=4, demand={1: 0.4})], policy="fifo", demand=limit)
    for _ in range(4):
        bench.submit()
        bench.step()
    assert len(bench.running) == together
    bench.run_dry()


def test_more_jobs_share_the_gpu_where_each_keeps_to_a_partition_of_it() -> None:
    bench = Bench([profile(segments=4, instances=4, demand={1: 0.4})], policy="fifo", demand=1.0)
    install_partitions(bench.state, [set(range(44 * k, 44 * k + 44)) for k in range(3)])
    for handle, together in ((0, 2), (1, 3)):  # what cannot be confined shares the GPU as without partitions
        bench.state.confined[:, :, -1, 0] = handle
        for _ in range(4):
            bench.submit()
            bench.step()
        assert len(bench.running) == together
        bench.run_dry()


def test_more_jobs_share_the_gpu_where_a_queue_stays() -> None:
    bench = large_bench(profile(segments=2, instances=60, demand={1: 0.1}), demand=0.2)
    for _ in range(60):
        bench.submit()
    bench.step()
    assert len(bench.running) == 2  # a burst changes nothing
    wait_long(bench)  # but one that has not gone after a while does
    bench.finish_segment(bench.running[0])
    bench.step()
    assert len(bench.running) == 6  # 0.2 times 1 + 2.5 (the largest growth) times 0.9, and no more
    bench.run_dry()
    wait_long(bench)
    for _ in range(4):
        bench.submit()
    bench.step()
    assert len(bench.running) == 2


def test_where_a_queue_stays_short_jobs_go_in_one_piece_and_long_ones_do_not() -> None:
    bench = large_bench(profile("short", segments=2, instances=40), profile("long", segments=20, instances=2), active=2)
    for k in range(40):
        bench.submit(1 if k in (2, 3) else 0)
    bench.step()
    assert all(codes.WHOLE not in launches for launches in bench.history.values())  # a burst changes nothing
    wait_long(bench)
    for _ in range(30):
        bench.finish()
    launched: dict[int, set[int]] = {0: set(), 1: set()}
    for instance, launches in bench.history.items():
        launched[int(bench.state.instance["model"][instance])] |= set(launches)
    assert launched == {0: {codes.WHOLE}, 1: set(range(20))}
    bench.run_dry()


def oversubscribed_bench(policy: str = "srpt", deadline: int = codes.NEVER) -> Bench:
    """Sixteen jobs of twenty segments share the GPU, where five would without a queue: demand 0.1 each, limit 0.5."""
    shapes = (("short", 2, 8), ("long", 20, 60), ("other", 20, 2))
    models = [profile(name, segments, instances=n, demand={1: 0.1}) for name, segments, n in shapes]
    bench = large_bench(*models, policy=policy, demand=0.5)
    for _ in range(60):
        bench.submit(1, deadline=deadline)
    wait_long(bench)
    bench.finish_segment(bench.running[0])
    bench.step()
    assert len(bench.running) == 16  # 0.5 times 1 + 2.5 (the largest growth) times 0.9
    return bench


def test_long_jobs_yield_to_a_short_one_on_an_oversubscribed_gpu() -> None:
    bench = oversubscribed_bench()
    bench.submit(0)
    bench.step()
    short = bench.instance_of(0)
    assert bench.history[short] == [0]  # one segment is enough on an oversubscribed GPU
    for _ in range(3):
        for instance in [instance for instance in bench.running if instance != short]:
            bench.finish_segment(instance)
        bench.step()
    assert len(bench.running) == 5  # what they would be without a queue: 0.5, the short one among them
    bench.finish_segment(short)
    bench.step()
    assert bench.history[short] == [0, 1]
    bench.finish_segment(short)
    bench.step()
    assert len(bench.running) == 16  # it is done: all of them go on
    bench.run_dry()


def test_a_job_that_ranks_first_does_not_yield() -> None:
    bench = oversubscribed_bench("edf", deadline=20_000_000_000)
    bench.submit(0, deadline=10_000_000_000)
    bench.step()
    bench.submit(2, deadline=bench.now + 3_000_000)
    bench.step()
    instance = bench.instance_of(2)
    assert bench.history[instance] == [0]
    for k in range(1, 6):
        for each in bench.running:
            if each != bench.instance_of(0):
                bench.finish_segment(each)
        bench.step()
        assert bench.history[instance] == list(range(k + 1))
    bench.run_dry()


def test_no_job_yields_to_one_that_admit_has_stopped() -> None:
    low = profile("low", segments=2, instances=60, demand={1: 0.1})
    high = profile("high", segments=20, instances=8, demand={1: 0.1}, priority=1)
    bench = large_bench(low, high, policy="priority", demand=0.5)
    for _ in range(60):
        bench.submit(0)
    wait_long(bench)
    bench.finish_segment(bench.running[0])
    bench.step()
    for instance in bench.running:
        bench.finish_segment(instance)
    bench.submit(1, priority=1)
    bench.step()
    assert bench.history[bench.instance_of(1)]
    bench.run_dry()


def test_no_job_yields_where_short_jobs_are_the_load() -> None:
    bench = oversubscribed_bench()
    bench.submit(0)
    bench.step()
    short = bench.instance_of(0)
    for k in range(60):  # there is one to yield to all the time
        for instance in [instance for instance in bench.running if instance != short and k % 4 == 0]:
            bench.finish_segment(instance)
        bench.step(1_000_000)
    assert len(bench.running) > 5
    bench.run_dry()


def test_a_batch_that_is_not_full_waits_for_room() -> None:
    plain = profile("plain", instances=30, demand={1: 0.1})
    batches = profile("batches", batch=(1, 4), instances=30, demand={1: 0.1, 4: 0.1})
    bench = large_bench(plain, batches, demand=0.2)
    for _ in range(40):
        bench.submit(0)
    wait_long(bench)
    bench.submit(1)  # the only one of its model: three slots are free
    for _ in range(200):
        bench.finish(1_000)
        running = bench.state.instance["model"][bench.running]
        if (running == 1).any():
            assert len(running) <= 2 or bench.state.core["waiting_jobs"][0] < 1
    bench.run_dry()


@pytest.mark.parametrize(
    ("demand", "limit", "partitions", "running"),
    [
        (0.4, 4.0, 0, int(TUNING.most_demand / 0.4)),
        (0.4, 4.0, 8, int(TUNING.most_confined_demand / 0.4)),
        (1.0, 2.0, 0, 2),  # jobs that fill the GPU, each in one piece
    ],
)
def test_a_queue_admits_no_more_jobs_than_hardware_queues_or_partitions_take(
    demand: float, limit: float, partitions: int, running: int
) -> None:
    bench = large_bench(profile(segments=2, instances=60, demand={1: demand}), demand=limit)
    bench.state.core["partitions"][0] = partitions
    bench.state.confined[...] = 1
    for _ in range(60):
        bench.submit()
    wait_long(bench)
    for _ in range(10):
        bench.finish_segment(bench.running[0])
        bench.step()
    assert len(bench.running) == running
    bench.run_dry()


def test_a_better_job_takes_the_place_of_a_worse_one_where_demand_is_the_limit() -> None:
    long = profile(segments=8, instances=1, ns=1e6, demand={1: 0.9})
    bench = Bench([long, profile("s", instances=1, ns=1e3, demand={1: 0.9})], policy="srpt", demand=1.0)
    bench.submit(0)
    bench.submit(0)
    bench.step()
    quick = bench.submit(1)
    bench.step()
    while quick not in bench.done:
        bench.finish_segment(bench.running[-1])
        bench.step()
    assert bench.state.core["preemptions"][0] >= 1
    bench.run_dry()


@settings(max_examples=20, deadline=None)
@given(script=actions, name=some.sampled_from(["srpt", "paella", "slack", "edf"]), end=some.sampled_from(["", "drain"]))
def test_each_request_completes_once_on_an_oversubscribed_gpu(
    script: list[tuple[object, ...]], name: str, end: str
) -> None:
    bench = oversubscribed_bench(name)
    two = [(entry[0], cast(int, entry[1]) % 2, *entry[2:]) if entry[0] == "submit" else entry for entry in script]
    submitted = 60 + play(bench, two)
    for instance in bench.running[::2]:
        bench.finish_segment(instance)
    bench.step(50_000_000)
    if end == "drain":
        bench.tell(codes.DRAIN)
    bench.run_dry()
    assert len(bench.done) == submitted


DEVICE = "virtual:h200"
PARTITIONS = 4


def bench_with_partitions(policy: str = "srpt") -> Bench:
    bench = Bench([profile(name, instances=4) for name in "abc"], policy=policy)
    s = bench.state
    s.core["max_active"][0] = 16
    install_partitions(s, [{(33 * k + i) % 132 for i in range(48)} for k in range(PARTITIONS)])
    used = np.flatnonzero(s.instance["model"] >= 0)
    for k in range(2):
        s.instance_partition[used, k] = (used + k * PARTITIONS // 2) % PARTITIONS
    s.launch["handle"] = s.whole["handle"] = 1
    s.confined[used, :, :, 0], s.confined[used, :, :, 1] = 2, 3
    return bench


def partitions_in_use(bench: Bench) -> list[int]:
    flight = bench.state.flight[: bench.state.core["flight"][0]]
    return sorted(int(w) for w in bench.state.instance["partition"][flight])


def test_few_jobs_have_all_sms_and_more_are_spread_over_the_partitions() -> None:
    bench = bench_with_partitions()
    for k in range(TUNING.roomy_jobs):
        bench.submit(k % 3)
        bench.step()
    assert partitions_in_use(bench) == [codes.NONE] * TUNING.roomy_jobs
    for k in range(PARTITIONS):
        bench.submit(k % 3)
        bench.step()
        check_integrity(bench.state)
    found = partitions_in_use(bench)
    assert found[: TUNING.roomy_jobs] == [codes.NONE] * TUNING.roomy_jobs
    for one in range(PARTITIONS // 2):  # each went to the emptier of its two
        assert abs(found.count(one) - found.count(one + PARTITIONS // 2)) <= 1
    assert bench.state.core["confined_launches"][0] >= PARTITIONS
    bench.run_dry()
    assert not bench.state.partition_load.any()


@pytest.mark.parametrize(("partitions", "long", "pieces"), [(PARTITIONS, 1, 1), (PARTITIONS, 6, 2), (0, 1, 2)])
def test_few_short_jobs_go_in_one_piece_where_there_are_partitions(partitions: int, long: int, pieces: int) -> None:
    models = [profile(segments=3 * long, instances=4), profile("b", segments=3 * long, instances=4)]
    bench = Bench(models, policy="srpt", limits=replace(LIMITS, segments=32))
    bench.state.core["partitions"][0] = partitions
    bench.state.confined[...] = 1
    for k in range(2):
        bench.submit(k)
        bench.step()
    first, second = bench.state.flight[: bench.state.core["flight"][0]]
    assert bench.state.instance["whole"][first]  # alone
    assert bench.state.instance["issued"][second] == pieces
    assert bench.state.instance["whole"][second] == (pieces == 1)
    bench.run_dry()


def partition_of_stream(bench: Bench, instance: int) -> int:
    at = bench.state.instance["stream_at"][instance]
    return int(at - codes.OF_PARTITIONS) // codes.QUEUES if at >= codes.OF_PARTITIONS else codes.NONE


@pytest.mark.parametrize(("fuller", "moves"), [(0, False), (int(48 * TUNING.staying_jobs) - 1, False), (48, True)])
def test_a_job_keeps_its_stream_and_partition_unless_another_is_much_emptier(fuller: int, moves: bool) -> None:
    bench = bench_with_partitions()
    s = bench.state
    for k in range(TUNING.roomy_jobs + 2):
        bench.submit(k % 3)
    bench.step()
    flight = s.flight[: s.core["flight"][0]].tolist()
    for instance in flight:
        assert partition_of_stream(bench, instance) == s.instance["partition"][instance]
    assert (s.stream_jobs <= 1).all()  # each in a hardware queue of its own
    instance = next(each for each in flight if s.instance["partition"][each] >= 0 and s.instance["issued"][each] > 1)
    here, stream = int(s.instance["partition"][instance]), int(s.instance["stream_at"][instance])
    there = next(int(w) for w in s.instance_partition[instance, :2] if w != here)
    # As if as many were everywhere, and the instance here.
    s.partition_load[:PARTITIONS] = 100 + s.overlap[here, :PARTITIONS]
    s.partition_load[here] += fuller
    bench.finish_segment(instance)
    with pytest.raises(IntegrityError):  # that load is made up
        bench.step()
    assert s.instance["flight_at"][instance] >= 0
    assert s.instance["stream_at"][instance] == stream
    assert s.instance["partition"][instance] == (there if moves else here)


def test_partitions_know_how_many_sms_they_share() -> None:
    assert bench_with_partitions().state.overlap[0, :PARTITIONS].tolist() == [48, 15, 0, 15]


@pytest.mark.parametrize(("policy", "confinable"), [("streams", True), ("srpt", False)])
def test_launches_under_streams_and_without_confined_graphs_have_all_sms(policy: str, confinable: bool) -> None:
    bench = bench_with_partitions(policy)
    bench.state.confined[...] *= confinable
    for k in range(12):
        bench.submit(k % 3)
    bench.step()
    assert partitions_in_use(bench) == [codes.NONE] * 12
    bench.run_dry()


def test_a_model_that_takes_the_rows_of_another_does_not_take_its_partitions() -> None:
    bench = bench_with_partitions()
    for m in range(3):
        bench.tell(codes.CLOSE_MODEL, m)
    bench.step()
    for m in range(3):
        remove(bench.state, m)
    _, instances = install(bench.state, profile("later", instances=4))
    assert (bench.state.instance_partition[instances] == codes.NONE).all()
    assert not bench.state.confined[instances].any()


@given(some.lists(some.tuples(some.integers(0, 2), some.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_jobs_in_partitions_are_counted_whatever_happens(events: list[tuple[int, bool]]) -> None:
    bench = bench_with_partitions()
    for model, finish in events:
        if finish:
            flight = bench.state.flight[: bench.state.core["flight"][0]]
            if len(flight):
                bench.finish_segment(int(flight[0]))
        elif bench.free:
            bench.submit(model)
        bench.step(1000)
        check_integrity(bench.state)
    bench.run_dry()
    assert not bench.state.partition_load.any()
    assert (bench.state.instance["partition"] == codes.NONE).all()


@pytest.mark.parametrize(("partition_ns", "confined"), [(0.0, False), (100.0, True), (130.0, True), (200.0, False)])
def test_a_program_is_confined_if_that_hardly_slows_it(partition_ns: float, confined: bool) -> None:
    profile = ProgramProfile(1, ((0, 1),), (), 100.0, {}, True, partition_ns=partition_ns)
    assert (profile.slowdown_in_partition <= TUNING.most_partition_stretch) is confined


KINDS = {
    "short": (scale_model("short", 3.0, batch=(1, 4)), scale_reference(3.0)),
    "long": (scale_model("long", 2.0, steps=30, batch=(1, 2)), scale_reference(2.0, 30)),
    "mlp": (mlp_model("mlp", batch=(1, 2, 4)), mlp_reference()),
}


@pytest.fixture(scope="module")
def loaded():
    with Engine(DEVICE, quantum_us=10, sm_partitions=8) as engine:
        for model, _ in KINDS.values():
            engine.load(model)
        yield engine


@pytest.mark.parametrize("name", policy_names())
def test_every_answer_is_right_with_partitions_under_every_policy(loaded, name):
    loaded.set_policy(name)
    rng = np.random.default_rng(1)
    work = [(str(kind), random_inputs(KINDS[kind][0], rng)) for kind in rng.choice(list(KINDS), 60)]

    async def main():
        return await asyncio.gather(*(loaded.infer(kind, inputs) for kind, inputs in work))

    for (kind, inputs), outputs in zip(work, asyncio.run(main()), strict=True):
        for key, value in KINDS[kind][1](inputs).items():
            np.testing.assert_allclose(outputs[key], value, rtol=1e-4, atol=1e-6)
    check_at_rest(loaded.state)


def spans(engine, trace):
    """For each launch, the number of adjacent SMs, counted cyclically, that hold all of its blocks."""
    n = engine.device.sm_count
    for launch in np.unique(trace.blocks["launch"]):
        on = np.unique(trace.blocks["sm"][trace.blocks["launch"] == launch])
        yield n - int(np.diff(np.append(on, on[0] + n)).max()) + 1


def test_blocks_keep_to_their_partitions_beside_others_and_to_nothing_alone():
    """Seen in traces: blocks of one job at a time are on more SMs than a partition has."""
    wide = scale_model("wide", steps=40, n=128 * 100, batch=(1,), instances=12)
    with Engine(DEVICE, "srpt", quantum_us=10, max_active=12, sm_partitions=8) as engine:
        engine.load(wide)
        assert engine.profile("wide")[0].slowdown_in_partition <= TUNING.most_partition_stretch
        x = random_inputs(wide, np.random.default_rng(2))

        async def infer_all(n):
            await asyncio.gather(*(engine.infer("wide", x) for _ in range(n)))

        with engine.trace() as alone:
            engine.infer_sync("wide", x)
        with engine.trace() as together:
            asyncio.run(infer_all(12))
        partition = math.ceil(TUNING.partition_share * engine.device.sm_count)
        assert min(spans(engine, alone)) > partition
        assert min(spans(engine, together)) <= partition < max(spans(engine, together))
        assert 0 < engine.stats()["confined_launches"] < engine.stats()["launches"]
        check_at_rest(engine.state)


def test_there_are_partitions_only_where_they_are_asked_for():
    with Engine(DEVICE) as engine:
        engine.load(KINDS["short"][0])
        assert (engine.state.instance_partition == codes.NONE).all()
        assert engine.profile("short")[0].partition_ns == 0.0


@pytest.mark.parametrize("wrong", [-1, 1, 2, 65])
def test_a_number_of_partitions_that_cannot_be_is_refused(wrong):
    with pytest.raises(ModelError):
        pp.Engine(DEVICE, sm_partitions=wrong)


def test_segments_are_longer_with_partitions_unless_said_otherwise():
    tuning = {"quantum_us": 10, "partitions_quantum_us": 20}

    def segments(**how):
        with Engine(DEVICE, tuning=tuning, **how) as engine:
            engine.load(scale_model(steps=30, batch=(1,), instances=1))
            return len(engine.profile("scale")[0].segments)

    assert segments(quantum_us=10) == segments() > segments(sm_partitions=8) == segments(quantum_us=20) > 1


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


def test_a_slot_that_is_never_written_closes_gates_only_for_a_while(bench: Bench) -> None:
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


def test_a_program_that_waits_for_weights_closes_gates_only_for_a_while() -> None:
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
