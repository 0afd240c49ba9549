"""SM partitions: where many jobs share the GPU each keeps to some SMs; alone, it has all of them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile
from core_check import IntegrityError, check_at_rest, check_integrity
from engine_models import mlp_model, mlp_reference, random_inputs, scale_model, scale_reference
from hypothesis import given, settings
from hypothesis import strategies as some

import paellapy as pp
from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.concurrency import count_in_partition
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.install import install, remove
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.loading import install_partitions
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.policies.policy import policy_names

TUNING = Tuning.for_part("h200")

DEVICE = "virtual:h200"
PARTITIONS = 4

# --- in the core ----------------------------------------------------------------------------------------------------


def bench_with_partitions(policy: str = "srpt", instances: int = 4) -> Bench:
    bench = Bench(
        [profile(instances=instances), profile("b", instances=instances), profile("c", instances=instances)],
        policy=policy,
    )
    s = bench.state
    s.core["max_active"][0] = 16
    install_partitions(s, [{(33 * k + i) % 132 for i in range(48)} for k in range(PARTITIONS)])
    used = np.flatnonzero(s.instance["model"] >= 0)
    s.instance_partition[used, 0], s.instance_partition[used, 1] = (
        used % PARTITIONS,
        (used + PARTITIONS // 2) % PARTITIONS,
    )
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
def test_a_job_stays_with_its_stream_and_its_partition_unless_another_is_much_emptier(fuller: int, moves: bool) -> None:
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
    s.partition_load[:PARTITIONS] = (
        100 + s.overlap[here, :PARTITIONS]
    )  # as if as many were everywhere, and the instance here
    s.partition_load[here] += fuller
    bench.finish_segment(instance)
    with pytest.raises(IntegrityError):  # that load is made up
        bench.step()
    assert s.instance["flight_at"][instance] >= 0
    assert s.instance["stream_at"][instance] == stream
    assert s.instance["partition"][instance] == (there if moves else here)


@compiled
def fill(state: State, partition: int, change: int) -> None:
    count_in_partition(state, partition, change)


def test_partitions_that_share_sms_fill_each_other() -> None:
    state = bench_with_partitions().state
    assert state.overlap[0, :PARTITIONS].tolist() == [48, 15, 0, 15]
    fill(state, 3, 1)
    assert state.partition_load[:PARTITIONS].tolist() == [15, 0, 15, 48]
    fill(state, 3, -1)
    assert not state.partition_load.any()


@pytest.mark.parametrize(("policy", "confinable"), [("streams", True), ("srpt", False)])
def test_all_sms_are_for_what_hardware_orders_and_what_cannot_be_confined(policy: str, confinable: bool) -> None:
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


# --- which programs are confined --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partition_ns", "confined"), [(0.0, False), (100.0, True), (130.0, True), (200.0, False)])
def test_a_program_is_confined_if_that_hardly_slows_it(partition_ns: float, confined: bool) -> None:
    profile = ProgramProfile(1, ((0, 1),), (), 100.0, {}, True, partition_ns=partition_ns)
    assert (profile.stretch_in_partition <= TUNING.most_partition_stretch) is confined


# --- on the virtual GPU -----------------------------------------------------------------------------------------------

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


def test_blocks_keep_to_their_partitions_in_a_crowd_and_to_nothing_alone():
    """Seen in traces: blocks of one job at a time are on more SMs than a partition has."""
    wide = scale_model("wide", steps=40, n=128 * 100, batch=(1,), instances=12)
    with Engine(DEVICE, "srpt", quantum_us=10, max_active=12, sm_partitions=8) as engine:
        engine.load(wide)
        assert engine.profile("wide")[0].stretch_in_partition <= TUNING.most_partition_stretch
        x = random_inputs(wide, np.random.default_rng(2))

        async def crowd(n):
            await asyncio.gather(*(engine.infer("wide", x) for _ in range(n)))

        with engine.trace() as alone:
            engine.infer_sync("wide", x)
        with engine.trace() as together:
            asyncio.run(crowd(12))
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
    def segments(**how):
        with Engine(DEVICE, **how) as engine:
            engine.load(scale_model(steps=60, batch=(1,), n=1 << 20, instances=1))
            return len(engine.profile("scale")[0].segments)

    assert segments(quantum_us=100) == segments() > segments(sm_partitions=8) == segments(quantum_us=150)
