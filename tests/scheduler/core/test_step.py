"""The dispatcher core, driven by hand: what each party may rely on, and everything at random."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from core_bench import LIMITS, Bench, ask_to_be_woken, claim, mark_ready, profile, take_done
from core_check import IntegrityError, check_integrity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st_

from paellapy.scheduler.core import codes, rings, step, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.install import estimate, install, remove
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, load_profiles, save_profiles
from paellapy.scheduler.core.tenants import Tenant, set_tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.loading import install_partitions
from paellapy.scheduler.engine.stats import occupancy
from paellapy.scheduler.policies.policy import Policy, attach_policy, find_policy, policy, policy_names

pytestmark = pytest.mark.quick

TUNING = Tuning.for_part("h200")

# --- one request ----------------------------------------------------------------------------------------------------


def test_a_lone_request_is_one_launch() -> None:
    bench = Bench([profile(segments=5)])
    serial = bench.submit()
    bench.step()
    assert bench.history[bench.running[0]] == [codes.WHOLE]
    bench.finish_segment(bench.running[0])
    assert bench.step(100) == [serial]
    assert bench.status(serial) == codes.OK
    assert bench.done[serial]["finish_ns"] == 100


def test_beside_another_job_a_program_goes_in_segments_two_ahead() -> None:
    bench = Bench([profile(segments=5, instances=2)])
    bench.submit()
    bench.step()
    bench.submit()
    bench.step()
    second = bench.running[1]
    assert bench.history[second] == [0, 1]
    bench.finish_segment(second)
    bench.step()
    assert bench.history[second] == [0, 1, 2]


def test_staged_inputs_are_copied_into_the_slot() -> None:
    bench = Bench([])
    m, instances = install(bench.state, profile(batch=(1, 2), instances=1))
    first, second = np.zeros((2, 3), np.uint8), np.zeros((2, 2), np.int16)
    bench.state.model["n_inputs"][m] = 2
    bench.state.input_bytes[m, :2] = (3, 4)
    bench.state.input_address[instances[0], :2] = (first.ctypes.data, second.ctypes.data)
    bench.tell(codes.OPEN_MODEL, m)
    bench.step()
    staged = np.arange(1, 8, dtype=np.uint8)
    bench.submit(m)
    bench.submit(m, source=staged.ctypes.data)
    bench.step()
    np.testing.assert_array_equal(first[1], staged[:3])
    np.testing.assert_array_equal(second[1].view(np.uint8), staged[3:])


def test_a_instance_waits_for_inputs_that_are_still_being_written() -> None:
    bench = Bench([profile(batch=(1, 4), instances=2)])
    first = bench.submit(direct=True, ready=False)
    bench.step()
    assert not bench.running
    assert codes.READY_WAIT in bench.state.instance["state"]
    other = bench.submit()  # goes on in another instance meanwhile
    bench.step()
    assert len(bench.running) == 1
    bench.write()
    bench.step()
    assert len(bench.running) == 2
    bench.run_dry()
    assert {bench.status(first), bench.status(other)} == {codes.OK}


def test_outputs_are_held_until_they_are_read() -> None:
    bench = Bench([profile(instances=1)], hold=True)
    first, second = bench.submit(), bench.submit()
    bench.step()
    bench.finish_segment(0)
    bench.step()
    while bench.running:
        bench.finish_segment(0)
        bench.step()
    assert first in bench.done
    assert second not in bench.done
    assert bench.state.instance["state"][0] == codes.HELD
    bench.read()
    bench.step()
    assert bench.running == [0]
    bench.run_dry()


def test_nothing_begins_before_it_has_come() -> None:
    """A request may come after the core has read the clock, and before it looks for requests."""
    bench = Bench([profile(batch=(1, 2), instances=1)])
    first = bench.submit()
    bench.now += 5000
    second = bench.submit()
    bench.now -= 3000
    bench.step()
    instance = bench.running[0]
    bench.step(10_000)
    bench.run_dry()
    began = int(bench.state.segment_ns[instance, 0, 0])
    assert [int(bench.done[each]["batch"]) for each in (first, second)] == [2, 2]
    assert [int(bench.done[each]["started_ns"]) for each in (first, second)] == [began, began]
    assert began == bench.done[second]["arrival_ns"] > bench.done[first]["arrival_ns"]


# --- batches --------------------------------------------------------------------------------------------------------


def test_batches_form_while_the_gpu_is_busy_and_leave_in_the_smallest_size_that_fits() -> None:
    bench = Bench([profile(batch=(1, 2, 8), instances=2)], policy="serial")
    first = bench.submit()
    bench.step()
    more = [bench.submit() for _ in range(3)]
    bench.step()
    bench.finish_segment(bench.running[0])
    bench.step()
    bench.run_dry()
    assert bench.done[first]["batch"] == 1
    assert [bench.done[each]["batch"] for each in more] == [3, 3, 3]
    assert bench.done[more[0]]["size"] == 2


def test_a_direct_reservation_and_the_core_share_one_instance() -> None:
    bench = Bench([profile(batch=(8,), instances=1)])
    serials = [bench.submit(direct=k % 2 == 0) for k in range(8)]
    bench.step()
    bench.run_dry()
    assert {int(bench.done[each]["batch"]) for each in serials} == {8}
    assert len({int(bench.done[each]["slot"]) for each in serials}) == 8


# --- ends -----------------------------------------------------------------------------------------------------------


def test_cancelled_while_queued_in_a_instance_and_between_segments() -> None:
    bench = Bench([profile(segments=6, instances=1), profile("other", segments=6, instances=1)])
    bench.submit(1)
    running = bench.submit()
    bench.step()
    queued = bench.submit()
    bench.step()
    bench.cancel(queued)
    assert bench.step() == [queued]
    instance = int(np.flatnonzero(bench.state.instance["model"] == 0)[0])
    assert bench.history[instance] == [0, 1]
    bench.cancel(running)
    assert bench.step() == [running]
    bench.finish_segment(instance)
    bench.step()
    bench.finish_segment(instance)
    bench.step()
    assert bench.history[instance] == [0, 1]  # the rest was never launched
    assert bench.state.instance["state"][instance] != codes.RUNNING
    assert {bench.status(queued), bench.status(running)} == {codes.CANCELLED}
    bench.run_dry()


def test_a_late_cancel_does_not_hit_the_next_request_of_the_row() -> None:
    bench = Bench([profile()])
    first = bench.submit()
    bench.step()
    row = bench.rows[first]
    bench.run_dry()
    second = bench.submit()
    assert bench.rows[second] == row
    bench.tell(codes.CANCEL, request=row, serial=first)
    bench.run_dry()
    assert bench.status(second) == codes.OK


def test_deadlines_expire_in_the_queue_and_between_segments_but_not_on_the_gpu() -> None:
    bench = Bench([profile(segments=4, instances=1), profile("other", instances=1)])
    bench.submit(1)
    between = bench.submit(deadline=500)
    bench.step()
    waiting = bench.submit(deadline=300)
    past = bench.submit(deadline=0)
    assert bench.step() == [past]
    assert bench.step(300) == [waiting]
    assert bench.step(300) == [between]
    assert {bench.status(each) for each in (past, waiting, between)} == {codes.EXPIRED}
    bench.run_dry()
    launched = bench.submit(deadline=bench.now + 10)
    bench.step()  # whole: all of it is on the GPU
    bench.step(1000)
    bench.run_dry()
    assert bench.status(launched) == codes.OK


def test_a_full_queue_refuses() -> None:
    bench = Bench([profile(instances=1, queue_limit=2)])
    serials = [bench.submit() for _ in range(5)]
    assert bench.step() == serials[3:]  # one runs, two wait
    bench.run_dry()
    assert [bench.status(each) for each in serials] == [codes.OK] * 3 + [codes.QUEUE_FULL] * 2


def test_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    bench = Bench([profile(instances=2)])
    accepted = [bench.submit() for _ in range(5)]
    bench.tell(codes.DRAIN)
    late = [bench.submit(), bench.submit(direct=True)]
    bench.run_dry()
    assert {bench.status(each) for each in accepted} == {codes.OK}
    assert {bench.status(each) for each in late} == {codes.DRAINING}


def test_an_unknown_model_is_refused() -> None:
    bench = Bench([profile()])
    serial = bench.submit(3)
    assert bench.step() == [serial]
    assert bench.status(serial) == codes.NO_MODEL


def test_a_failure_answers_everybody_and_refuses_from_then_on() -> None:
    bench = Bench([profile(instances=2), profile("b", instances=1)])
    serials = [bench.submit(k % 2) for k in range(6)]
    bench.step()
    bench.tell(codes.FAIL, tag=719)
    assert sorted(bench.step()) == serials
    on_gpu = [each for each in serials if bench.status(each) == codes.SUSPECTED]
    assert 0 < len(on_gpu) == bench.state.core["suspects"][0] < len(serials)
    assert {k for k in (0, 1) if bench.state.model["lost"][k]} == {serials.index(each) % 2 for each in on_gpu}
    assert {bench.status(each) for each in serials if each not in on_gpu} == {codes.FAILED}
    assert {int(bench.done[each]["error"]) for each in serials} == {719}
    late = bench.submit()
    assert bench.step() == [late]
    assert bench.status(late) == codes.FAILED


def test_a_launch_that_the_backend_refuses_fails_the_engine() -> None:
    calls: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)
    def launch(graph: int, stream: int) -> int:
        calls.append((graph, stream))
        return 0 if len(calls) < 2 else 700

    bench = Bench([profile(instances=2)])
    bench.state.call["graph_launch"][0] = ctypes.cast(launch, ctypes.c_void_p).value
    bench.state.core["backend"][0] = codes.CUDA
    step.attach_loop(bench.state)
    bench.state.whole["handle"], bench.state.launch["handle"] = 77, 78
    bench.state.stream[0, :2] = 5, 6
    first = bench.submit()
    bench.step()
    assert calls == [(77, 5)]
    second = bench.submit()
    assert sorted(bench.step()) == [first, second]
    assert calls[1] == (78, 6)
    assert bench.done[first]["error"] == 700
    # The second one never was on the GPU: the first one was alone there.
    assert [bench.status(each) for each in (first, second)] == [codes.SUSPECTED, codes.FAILED]
    assert bench.state.core["suspects"][0] == 1
    assert bench.state.core["flight"][0] == 0
    assert bench.state.model["lost"][0] == 1  # for the engine's error, although nothing flies any more


def test_what_has_ended_when_the_failure_is_noticed_is_not_suspected() -> None:
    bench = Bench([profile(instances=2, segments=1)])
    serials = bench.submit(), bench.submit()
    bench.step()
    assert len(bench.running) == 2
    bench.finish_segment(bench.running[0])
    bench.tell(codes.FAIL, tag=719)
    assert sorted(bench.step()) == list(serials)
    assert {bench.status(each) for each in serials} == {codes.FAILED, codes.SUSPECTED}
    assert bench.state.core["suspects"][0] == 1


def test_work_from_outside_is_suspected_beside_requests() -> None:
    """Such as a load: a request is not to blame because it was the only one."""
    bench = Bench([profile()])
    bench.submit()
    bench.step()
    bench.state.core["outside"][0] = 1
    bench.tell(codes.FAIL, tag=719)
    bench.step()
    assert bench.state.core["suspects"][0] == 2


def test_models_come_and_go_while_others_run() -> None:
    bench = Bench([profile(instances=2), profile("b", instances=2)])
    first = [bench.submit(0), bench.submit(0), bench.submit(0)]
    bench.step()
    bench.tell(codes.CLOSE_MODEL, 0)
    late = bench.submit(0)
    bench.step()
    assert bench.status(late) == codes.NO_MODEL
    with pytest.raises(ProfileError) as caught:
        remove(bench.state, 0)
    assert caught.value.field == "state"
    other = bench.submit(1)
    bench.run_dry()
    assert {bench.status(each) for each in [*first, other]} == {codes.OK}
    assert bench.closed == [0]
    remove(bench.state, 0)
    m, _ = install(bench.state, profile("c", instances=3))
    bench.tell(codes.OPEN_MODEL, m)
    again = bench.submit(m)
    bench.run_dry()
    assert bench.status(again) == codes.OK


def test_the_ring_says_when_it_is_full() -> None:
    state = st.new_state(LIMITS)
    message = rings.Message(kind=codes.CANCEL)
    answers = [rings.post(state, 0, message.address) for _ in range(state.submit.shape[1] + 1)]
    assert answers == [True] * state.submit.shape[1] + [False]


def test_a_message_arrives_as_it_was_written() -> None:
    state = st.new_state(LIMITS)
    values = {name: 3 + k for k, name in enumerate(tables.SUBMISSION.names or ())}
    assert rings.post(state, 0, rings.Message(**values).address)
    arrived = {name: int(state.submit[0, 0][name]) for name in values}
    assert arrived == {**values, "sequence": 1}


# --- in real time ---------------------------------------------------------------------------------------------------


class RealTime:
    """The core's own loop in a thread, on a GPU whose launches are done at once."""

    def __init__(self, models: list[ModelProfile]) -> None:
        self.bench = Bench(models, policy="edf", limits=replace(LIMITS, requests=1024))
        s = self.state = self.bench.state
        self.launched: list[int] = []

        @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)
        def launch(word: int, instance: int) -> int:
            self.launched.append(instance)
            ctypes.c_uint64.from_address(word).value = 1
            return 0

        self._launch = launch
        step.attach_loop(s)
        s.call["graph_launch"][0] = ctypes.cast(launch, ctypes.c_void_p).value
        s.core["backend"][0] = codes.CUDA
        s.launch["handle"], s.whole["handle"] = s.launch["word"], s.whole["word"]
        s.stream[0] = np.arange(codes.POOL_STREAMS)
        self.stop = np.zeros(1, np.uint64)
        self.eventfd = os.eventfd(0)
        s.wake_fd[0, 0] = self.eventfd

    def run(self, linger_ns: int) -> int:
        return step.run(self.state, self.stop, linger_ns, np.zeros(4, np.int64))


def test_the_loop_runs_until_idle_and_rings_the_bell() -> None:
    real = RealTime([profile(instances=2)])
    assert real.run(0) == 0
    serials = [real.bench.submit() for _ in range(5)]
    assert real.run(1000) == 0
    assert os.eventfd_read(real.eventfd) > 0
    os.close(real.eventfd)
    assert sorted(real.bench.take()) == serials
    real.stop[0] = 1
    assert real.run(10**15) == 1


def test_many_threads_submit_while_the_core_runs() -> None:
    real = RealTime([profile("a", instances=3, batch=(1, 8)), profile("b", instances=2)])
    s = real.state
    each, threads = 200, 4

    def producer(k: int) -> None:
        for i in range(each):
            row = serial = k * each + i
            model, claimed = i % 2, rings.STAGED
            if i % 3 > 0:
                claimed = claim(s, 0, model)
            place = None if claimed == rings.STAGED else divmod(claimed, rings.SLOTS)
            instance, slot = place or (codes.NONE, codes.NONE)
            message = rings.Message(
                kind=codes.SUBMIT,
                request=row,
                serial=serial,
                model=model,
                instance=instance,
                slot=slot,
                client=k,
                arrival_ns=i,
            )
            assert rings.post(s, 0, message.address)
            if place is not None:
                mark_ready(s, *place)

    step.step(s, 0)
    loop = threading.Thread(target=real.run, args=(10**15,))
    loop.start()
    producers = [threading.Thread(target=producer, args=(k,)) for k in range(threads)]
    for thread in producers:
        thread.start()
    into = np.zeros(64, tables.COMPLETION)
    serials: list[int] = []
    asked = False
    while len(serials) < each * threads:
        n = take_done(s, 0, into)
        assert (into["status"][:n] == codes.OK).all()
        serials += into["serial"][:n].tolist()
        if not n and asked:
            os.eventfd_read(real.eventfd)
        asked = not n
        if asked:
            ask_to_be_woken(s, 0)
    for thread in producers:
        thread.join()
    real.stop[0] = 1
    loop.join()
    os.close(real.eventfd)
    assert sorted(serials) == list(range(each * threads))
    step.step(s, 1 << 60)
    check_integrity(s)


# --- order ----------------------------------------------------------------------------------------------------------


def test_a_better_job_takes_the_place_of_a_worse_one_between_segments() -> None:
    long, short = profile("long", segments=8, ns=1e6, instances=2), profile("short", segments=2, ns=1e4, instances=1)
    bench = Bench([long, short], policy="srpt")
    bench.state.core["max_active"][0] = 1
    bench.submit(0)
    bench.submit(0)
    bench.step()
    (instance,) = bench.running
    quick = bench.submit(1)
    bench.step()
    assert len(bench.running) == 2  # what was launched runs on
    bench.finish_segment(instance)
    bench.finish_segment(instance)
    bench.step()
    assert bench.running == [instance_of(bench, 1)]
    while quick not in bench.done:
        bench.finish_segment(instance_of(bench, 1))
        bench.step()
    assert bench.running == [instance]
    bench.run_dry()


def instance_of(bench: Bench, model: int) -> int:
    return int(
        np.flatnonzero((bench.state.instance["model"] == model) & (bench.state.instance["state"] == codes.RUNNING))[0]
    )


def test_occupancy_follows_what_is_launched() -> None:
    bench = Bench([profile(segments=3, instances=2)])
    assert occupancy(bench.state).share == 0.0
    bench.submit()
    bench.step()
    bench.submit()
    bench.step()
    seen = occupancy(bench.state)
    assert (seen.jobs_on_gpu, seen.jobs_active, seen.jobs_waiting, seen.requests) == (2, 2, 0, 2)
    assert seen.blocks.resident == 16  # the whole program of the first, the first segment of the second
    assert seen.blocks.pending == 8
    assert seen.fullest == "issue"
    assert 0 < seen.share < 1
    bench.run_dry()
    assert occupancy(bench.state).share == 0.0


def test_predictions_grow_with_the_work_ahead() -> None:
    bench = Bench([profile(segments=4, ns=100e3, instances=2), profile("short", ns=1e3, instances=1)], policy="fifo")
    assert predict_finish(bench.state, 0, bench.now) == 400_000
    predicted = []
    for _ in range(6):
        bench.submit(0)
        bench.step()
        predicted.append(predict_finish(bench.state, 0, bench.now))
    assert predicted == sorted(predicted)
    assert predicted[-1] > 2 * 400_000
    shortest_first = Bench(
        [profile(segments=4, ns=100e3, instances=2), profile("short", ns=1e3, instances=1)], policy="srpt"
    )
    for _ in range(6):
        shortest_first.submit(0)
        shortest_first.step()
    assert predict_finish(shortest_first.state, 1, 0) < predicted[-1] / 2
    bench.run_dry()


WHOLE = [("priority", 1, True), ("priority", 0, False), ("orion", 1, False)]


@pytest.mark.parametrize(("policy", "high", "whole"), WHOLE)
def test_high_priority_goes_in_one_piece_beside_lower_ones(policy: str, high: int, whole: bool) -> None:
    bench = Bench([profile("low", segments=4, instances=2), profile("high", instances=2, priority=high)], policy=policy)
    bench.submit(0)
    bench.submit(0)
    bench.step()
    serial = bench.submit(1, priority=high)
    bench.step()
    (instance,) = [each for each in bench.running if bench.state.instance["model"][each] == 1]
    assert bool(bench.state.instance["whole"][instance]) is whole
    bench.run_dry()
    assert bench.done[serial]["status"] == codes.OK


def test_one_segment_at_a_time_the_next_is_sent_when_the_last_block_has_started() -> None:
    bench = Bench([profile(segments=4, instances=2)], policy=careful)
    bench.submit()
    bench.submit()
    bench.step()
    instance = next(each for each in bench.running if not bench.state.instance["whole"][each])
    assert len(bench.launched[instance]) == 1
    bench.step()
    assert len(bench.launched[instance]) == 1
    bench.drain(instance)
    bench.step()
    assert bench.history[instance] == [0, 1]
    bench.step()
    assert bench.history[instance] == [0, 1], "the second has not started"
    bench.drain(instance)  # the second's word counts only once the first is done
    bench.step()
    assert bench.history[instance] == [0, 1]
    bench.finish_segment(instance)
    bench.step()
    assert bench.history[instance] == [0, 1, 2]
    bench.run_dry()


def test_where_kernels_do_not_report_the_next_is_sent_just_before_the_end_that_is_predicted() -> None:
    bench = Bench([profile(segments=5, instances=2, ns=100e3)], policy=careful, reports=False)
    bench.submit()
    bench.submit()
    bench.step()
    instance = next(each for each in bench.running if not bench.state.instance["whole"][each])
    soon = int(100e3 - TUNING.just_ahead_ns)
    assert bench.state.core["wake_at_ns"][0] == soon
    bench.step(soon - 1)
    assert bench.history[instance] == [0]
    bench.step(1)
    assert bench.history[instance] == [0, 1]
    assert bench.state.core["wake_at_ns"][0] == np.inf
    bench.step(150_000 - soon)
    bench.finish_segment(instance)
    bench.step()  # the first took half as long again as alone: so the second will
    assert bench.state.core["wake_at_ns"][0] == 300_000 - TUNING.just_ahead_ns
    bench.step(140_000 - int(TUNING.just_ahead_ns))
    assert bench.history[instance] == [0, 1]
    bench.step(10_000)
    assert bench.history[instance] == [0, 1, 2]
    bench.step(10_000_000)
    bench.finish_segment(instance)
    bench.step()  # it stood still, which says nothing of the next
    assert bench.state.core["wake_at_ns"][0] == bench.now + TUNING.most_stretch * 100e3 - TUNING.just_ahead_ns
    bench.run_dry()


def test_a_better_job_goes_before_the_next_segment_of_one_that_drains() -> None:
    long, short = profile(segments=8, instances=1, ns=1e6), profile("short", instances=1, ns=1e3)
    bench = Bench([long, short], policy=replace(careful, active=1))
    bench.submit(0)
    bench.submit(0)
    bench.step()
    (instance,) = bench.running
    bench.submit(1)
    bench.drain(instance)
    bench.step()
    assert bench.history[instance] == [0]
    assert bench.history[instance_of(bench, 1)] == [0]
    bench.run_dry()


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


@pytest.mark.parametrize("hold", [False, True])
def test_one_request_at_a_time_stays_on_one_instance(hold: bool) -> None:
    bench = Bench([profile(segments=2, instances=3)], hold=hold)
    instances = set()
    for _ in range(5):
        bench.submit(direct=True)
        bench.step()
        instances.add(instance_of(bench, 0))
        bench.run_dry()
        bench.step()
    assert len(instances) == 1


def test_a_slot_reserved_just_before_its_instance_gives_way_is_served() -> None:
    bench = Bench([profile(segments=2, instances=3)])
    bench.submit(direct=True)
    bench.step()
    first = instance_of(bench, 0)
    serial = bench.submit(direct=True, ready=False)  # has a slot of the other instance, and has not written it
    bench.finish_segment(first)
    bench.step()
    third = bench.submit(direct=True)
    bench.step()
    bench.run_dry()
    assert set(bench.done) == {1, serial, third}


def test_more_jobs_share_the_gpu_where_a_queue_stays() -> None:
    limits = replace(LIMITS, instances=64, instances_per_model=60, requests=80)
    models = [profile(segments=2, instances=60, demand={1: 0.1})]
    bench = Bench(models, policy=replace(find_policy("fifo"), active=60), demand=0.2, limits=limits)
    for _ in range(60):
        bench.submit()
    bench.step()
    assert len(bench.running) == 2  # a burst changes nothing
    for _ in range(40):  # but one that has not gone after a while does
        bench.step(1_000_000)
    bench.finish_segment(bench.running[0])
    bench.step()
    assert len(bench.running) == 5  # 0.2 times 1 + 2 (two times 16 wait) times 0.9, and no more
    bench.run_dry()
    bench.step(500_000_000)
    for _ in range(4):
        bench.submit()
    bench.step()
    assert len(bench.running) == 2


def test_where_a_queue_stays_short_jobs_go_in_one_piece_and_long_ones_do_not() -> None:
    limits = replace(LIMITS, instances=80, instances_per_model=40, requests=80, segments=20)
    models = [profile("short", segments=2, instances=40), profile("long", segments=20, instances=2)]
    bench = Bench(models, policy=replace(find_policy("fifo"), active=2), limits=limits)
    for k in range(40):
        bench.submit(1 if k in (2, 3) else 0)
    bench.step()
    assert all(codes.WHOLE not in launches for launches in bench.history.values())  # a burst changes nothing
    for _ in range(60):
        bench.step(1_000_000)
    for _ in range(30):
        for instance in bench.running:
            bench.finish_segment(instance)
        bench.step()
    launched: dict[int, set[int]] = {0: set(), 1: set()}
    for instance, launches in bench.history.items():
        launched[int(bench.state.instance["model"][instance])] |= set(launches)
    assert launched == {0: {codes.WHOLE}, 1: set(range(20))}
    bench.run_dry()


def crowd_of_long_jobs(policy: str = "srpt", deadline: int = codes.NEVER) -> Bench:
    """Fifteen jobs of twenty segments share the GPU, where five would without a queue: demand 0.1 each, limit 0.5."""
    limits = replace(LIMITS, instances=80, instances_per_model=60, requests=160, segments=20)
    each = {"demand": {1: 0.1}}
    models = [profile("short", segments=2, instances=8, **each), profile("long", segments=20, instances=60, **each)]
    models.append(profile("other", segments=20, instances=2, **each))
    bench = Bench(models, policy=replace(find_policy(policy), active=60), demand=0.5, limits=limits)
    for _ in range(60):
        bench.submit(1, deadline=deadline)
    for _ in range(60):
        bench.step(1_000_000)
    bench.finish_segment(bench.running[0])
    bench.step()
    assert len(bench.running) == 15  # 0.5 times 1 + 2.4 (times 16 wait) times 0.9
    return bench


def test_in_a_crowd_long_jobs_stand_back_for_a_short_one() -> None:
    bench = crowd_of_long_jobs()
    bench.submit(0)
    bench.step()
    short = instance_of(bench, 0)
    assert bench.history[short] == [0]  # one segment ahead is enough in a crowd
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
    assert len(bench.running) == 15  # it is done: all of them go on
    bench.run_dry()


def test_who_is_first_by_the_policy_does_not_stand_back() -> None:
    bench = crowd_of_long_jobs("edf", deadline=20_000_000_000)
    bench.submit(0, deadline=10_000_000_000)
    bench.step()
    bench.submit(2, deadline=bench.now + 3_000_000)
    bench.step()
    instance = instance_of(bench, 2)
    assert bench.history[instance] == [0]
    for k in range(1, 6):
        for each in bench.running:
            if each != instance_of(bench, 0):
                bench.finish_segment(each)
        bench.step()
        assert bench.history[instance] == list(range(k + 1))
    bench.run_dry()


def test_nobody_stands_back_for_a_job_that_the_policy_has_stopped() -> None:
    limits = replace(LIMITS, instances=80, instances_per_model=60, requests=160, segments=20)
    each = {"demand": {1: 0.1}}
    models = [
        profile("low", segments=2, instances=60, **each),
        profile("high", segments=20, instances=8, priority=1, **each),
    ]
    bench = Bench(models, policy=replace(find_policy("priority"), active=60), demand=0.5, limits=limits)
    for _ in range(60):
        bench.submit(0)
    for _ in range(60):
        bench.step(1_000_000)
    bench.finish_segment(bench.running[0])
    bench.step()
    for instance in bench.running:
        bench.finish_segment(instance)
    bench.submit(1, priority=1)
    bench.step()
    assert bench.history[instance_of(bench, 1)]
    bench.run_dry()


def test_where_short_jobs_are_the_load_nobody_stands_back_for_them() -> None:
    bench = crowd_of_long_jobs()
    bench.submit(0)
    bench.step()
    short = instance_of(bench, 0)
    for k in range(60):  # there is one to stand back for all the time
        for instance in [instance for instance in bench.running if instance != short and k % 4 == 0]:
            bench.finish_segment(instance)
        bench.step(1_000_000)
    assert len(bench.running) > 5
    bench.run_dry()


def test_a_batch_that_is_not_full_waits_rather_than_crowd_the_gpu() -> None:
    limits = replace(LIMITS, instances=64, instances_per_model=30, requests=160)
    sizes = {1: 0.1, 4: 0.1}
    models = [
        profile("plain", instances=30, demand={1: 0.1}),
        profile("batches", batch=(1, 4), instances=30, demand=sizes),
    ]
    bench = Bench(models, policy=replace(find_policy("fifo"), active=60), demand=0.2, limits=limits)
    for _ in range(40):
        bench.submit(0)
    for _ in range(60):
        bench.step(1_000_000)
    bench.submit(1)  # the only one of its model: three slots are free
    for _ in range(200):
        for instance in bench.running:
            bench.finish_segment(instance)
        bench.step(1_000)
        running = bench.state.instance["model"][bench.running]
        if (running == 1).any():
            assert len(running) <= 2 or bench.state.core["waiting_jobs"][0] < 1
    bench.run_dry()


@pytest.mark.parametrize(("partitions", "most"), [(0, TUNING.most_demand), (8, TUNING.most_confined_demand)])
def test_no_queue_lets_in_more_jobs_than_hardware_queues_or_partitions_can_take(partitions: int, most: float) -> None:
    limits = replace(LIMITS, instances=64, instances_per_model=60, requests=80)
    policy = replace(find_policy("fifo"), active=60)
    bench = Bench([profile(segments=2, instances=60, demand={1: 0.4})], policy=policy, demand=4.0, limits=limits)
    bench.state.core["partitions"][0] = partitions
    bench.state.confined[...] = 1
    for _ in range(60):
        bench.submit()
    for _ in range(200):
        bench.step(1_000_000)
    for _ in range(10):
        bench.finish_segment(bench.running[0])
        bench.step()
    assert len(bench.running) == int(most / 0.4)
    bench.run_dry()


def test_a_queue_does_not_crowd_the_gpu_with_jobs_that_fill_it() -> None:
    limits = replace(LIMITS, instances=64, instances_per_model=60, requests=80)
    bench = Bench([profile(segments=2, instances=60, demand={1: 1.0})], policy="fifo", demand=2.0, limits=limits)
    for _ in range(60):
        bench.submit()
    for _ in range(40):
        bench.step(1_000_000)
    bench.finish_segment(bench.running[0])
    bench.step()
    assert len(bench.running) == 2
    bench.run_dry()


def test_beside_a_higher_priority_an_idle_gpu_is_not_given_away_in_one_piece() -> None:
    bench = Bench([profile("high", priority=1, instances=2), profile("low", instances=2)], policy="priority")
    bench.submit(1)
    bench.step()
    assert bench.history[instance_of(bench, 1)] == [0]
    bench.run_dry()
    bench.submit(0, priority=1)
    bench.step()
    assert bench.history[instance_of(bench, 0)] == [codes.WHOLE]
    bench.run_dry()
    bench.tell(codes.CLOSE_MODEL, 0)
    bench.step()
    bench.submit(1)
    bench.step()
    assert bench.history[instance_of(bench, 1)] == [codes.WHOLE]  # nobody is above it any more


def test_jobs_in_flight_have_streams_of_their_own() -> None:
    bench = Bench([profile(instances=4), profile("b", instances=4), profile("c", instances=4)], policy="srpt")
    bench.state.core["max_active"][0] = 16
    for k in range(12):
        bench.submit(k % 3)
    bench.step()
    flight = bench.state.flight[: bench.state.core["flight"][0]]
    assert sorted(bench.state.instance["stream_at"][flight]) == list(range(12))
    bench.run_dry()
    assert not bench.state.stream_jobs.any()


def test_where_the_hardware_decides_every_instance_has_its_own_stream() -> None:
    bench = Bench([profile(instances=4), profile("b", instances=4)], policy="streams")
    for _ in range(3):
        for k in range(8):
            bench.submit(k % 2)
        bench.step()
        flight = bench.state.flight[: bench.state.core["flight"][0]]
        assert (bench.state.instance["stream_at"][flight] == codes.QUEUES + flight).all()
        bench.run_dry()


def test_a_better_job_takes_the_place_of_a_worse_one_where_demand_is_the_limit() -> None:
    long, short = (
        profile(segments=8, instances=1, ns=1e6, demand={1: 0.9}),
        profile("s", instances=1, ns=1e3, demand={1: 0.9}),
    )
    bench = Bench([long, short], policy="srpt", demand=1.0)
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


def test_a_demand_that_was_not_measured_is_estimated_from_the_fullest_resource() -> None:
    state = Bench([]).state
    half = int(state.gpu["capacity_warps"][0] / 2)
    assert estimate(state, [SegmentProfile(1e6, warps=half, registers=0)]) == pytest.approx(0.5)
    busy = SegmentProfile(1e6, registers=0, kernels=round(state.gpu["capacity_issue"][0] * 1e-3 / 4))
    assert estimate(state, [busy]) == pytest.approx(0.25, rel=0.01)
    assert estimate(state, [busy, SegmentProfile(1e6, warps=10 * half, registers=0)]) == 1.0


# --- tables ---------------------------------------------------------------------------------------------------------


def test_profiles_survive_a_file(tmp_path: object) -> None:
    path = tmp_path / "models.json"  # type: ignore[operator]
    models = [profile(batch=(1, 4), target_ms=2.5, priority=3), profile("b", share=0.5, demand={1: 0.3})]
    save_profiles(path, models)
    assert load_profiles(path) == models
    path.write_text('{"models": [{"name": "x"}]}')
    with pytest.raises(ProfileError) as caught:
        load_profiles(path)
    assert caught.value.given == str(path)


@pytest.mark.parametrize(
    ("field", "given", "make"),
    [
        ("time_ns", 0.0, lambda: SegmentProfile(0.0)),
        ("kernels", 0, lambda: SegmentProfile(1.0, kernels=0)),
        ("memory", 1.5, lambda: SegmentProfile(1.0, memory=1.5)),
        ("sizes", {}, lambda: ModelProfile("m", {})),
        ("sizes", {1: []}, lambda: ModelProfile("m", {1: []})),
        ("share", 0.0, lambda: profile(share=0.0)),
        ("target_ms", -1, lambda: profile(target_ms=-1)),
        ("needs", {1: [5]}, lambda: profile(needs={1: [5]})),
        ("batch", 2, lambda: profile().alone_ns(2)),
        ("segments", 9, lambda: install(st.new_state(LIMITS), profile(segments=9))),
        ("batch", 16, lambda: install(st.new_state(LIMITS), profile(batch=(1, 16)))),
        ("instances_per_model", 5, lambda: install(st.new_state(LIMITS), profile(instances=5))),
    ],
)
def test_a_wrong_profile_is_refused(field: str, given: object, make: Any) -> None:
    with pytest.raises(ProfileError) as caught:
        make()
    assert (caught.value.field, caught.value.given) == (field, given)


def test_the_integrity_check_sees_a_lost_request() -> None:
    bench = Bench([profile(instances=1)])
    bench.submit()
    bench.submit()
    bench.step()
    bench.state.model["first"][0] = bench.state.model["last"][0] = codes.NONE
    with pytest.raises(IntegrityError):
        check_integrity(bench.state)


# --- at random ------------------------------------------------------------------------------------------------------

profiles = st_.builds(
    lambda segments, batch, instances, ns, target, priority, limit, demand: profile(
        segments=segments,
        batch=batch,
        instances=instances,
        ns=ns,
        target_ms=target,
        priority=priority,
        queue_limit=limit,
        demand=demand,
    ),
    segments=st_.integers(1, 6),
    batch=st_.sampled_from([(1,), (1, 2), (2, 8), (1, 4, 8)]),
    instances=st_.integers(1, 4),
    ns=st_.sampled_from([1e3, 5e4, 1e6]),
    target=st_.sampled_from([None, 0.5, 10.0]),
    priority=st_.integers(0, 2),
    limit=st_.sampled_from([0, 3, 100]),
    demand=st_.sampled_from([{}, {1: 0.2, 2: 0.5, 4: 0.9, 8: 1.0}]),
)
actions = st_.lists(
    st_.one_of(
        st_.tuples(
            st_.just("submit"),
            st_.integers(0, 3),
            st_.sampled_from([codes.NEVER, 0, 500, 3000]),
            st_.integers(-1, 2),
            st_.integers(0, 3),
            st_.booleans(),
            st_.booleans(),
        ),
        st_.tuples(st_.just("cancel"), st_.integers(0, 40)),
        st_.tuples(st_.just("drain"), st_.integers(0, 15)),
        st_.tuples(st_.just("segment"), st_.integers(0, 15)),
        st_.tuples(st_.just("segment"), st_.integers(0, 15)),
        st_.tuples(st_.just("step"), st_.sampled_from([0, 1, 400, 2000])),
        st_.tuples(st_.just("step"), st_.sampled_from([0, 1, 400, 2000, 50_000_000])),
        st_.tuples(st_.just("write")),
        st_.tuples(st_.just("read")),
    ),
    max_size=80,
)


careful = replace(find_policy("srpt"), name="careful", max_in_flight=1)


def moody(job: Any, gpu: Any, own: Any) -> float:
    """Holds client 1 back for a time and client 2 beside others, and answers client 3 now so, now so."""
    if job.tenant == 1:
        return job.arrival_ns + 2500.0
    if job.tenant == 2:
        return 1.0 if gpu.active_jobs == 0 else 0.0
    own.asked += 1.0
    return 1.0 if own.asked % 3 > 0 else 0.0


@policy(admit=moody, state={"asked": 0.0})
def picky(job: Any) -> float:
    return job.client_start_ns


def play(bench: Bench, script: list[tuple[object, ...]]) -> int:
    """Runs the script; returns the number of submitted requests."""
    submitted = 0
    for action, *a in script:
        if action == "submit" and bench.free:
            submitted += 1
            model, offset, priority, client, direct, ready = a
            bench.submit(
                int(model),  # type: ignore[call-overload]
                deadline=codes.NEVER if offset == codes.NEVER else bench.now + offset,  # type: ignore[operator]
                priority=priority,  # type: ignore[arg-type]
                client=client,  # type: ignore[arg-type]
                direct=bool(direct),
                ready=bool(ready),
            )
        elif action == "cancel":
            bench.cancel(a[0])  # type: ignore[arg-type]
        elif action == "segment" and bench.running:
            bench.finish_segment(bench.running[a[0] % len(bench.running)])  # type: ignore[operator]
        elif action == "drain" and bench.running:
            bench.drain(bench.running[a[0] % len(bench.running)])  # type: ignore[operator]
        elif action == "step":
            bench.step(a[0])  # type: ignore[arg-type]
        elif action == "write":
            bench.write()
        elif action == "read":
            bench.read()
    return submitted


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    models=st_.lists(profiles, min_size=1, max_size=4),
    name=st_.sampled_from([*policy_names(), careful, picky]),
    later=st_.sampled_from([None, "srpt", picky]),
    hold=st_.booleans(),
    demand=st_.sampled_from([0.0, 0.4, 1.0, 2.0, np.inf]),
    reports=st_.booleans(),
    one_by_one=st_.booleans(),
    held=st_.sampled_from([0.0, 0.05, 0.5, 1.0]),
    script=actions,
    end=st_.sampled_from(["run dry", "drain", "close", "fail"]),
)
def test_whatever_happens_each_request_completes_exactly_once(
    models: list[ModelProfile],
    name: str | Policy,
    later: str | Policy | None,
    hold: bool,
    demand: float,
    reports: bool,
    one_by_one: bool,
    held: float,
    script: list[tuple[object, ...]],
    end: str,
) -> None:
    bench = Bench(models, policy=name, hold=hold, demand=demand, reports=reports, one_by_one=one_by_one)
    if held:
        set_tenant(bench.state, 1, "alice", Tenant(limit=held))
    submitted = play(bench, script[::2])
    if later is not None:  # the policy is changed while requests wait
        attach_policy(bench.state, kept := find_policy(later))
        assert kept.name
    submitted += play(bench, script[1::2])
    if held == 1.0:  # the limit goes while requests wait
        set_tenant(bench.state, 1, "alice", Tenant())
    if end == "drain":
        bench.tell(codes.DRAIN)
    elif end == "close":
        for m in range(len(models)):
            bench.tell(codes.CLOSE_MODEL, m)
    elif end == "fail":
        bench.tell(codes.FAIL, tag=1)
        bench.step()
        bench.launched.clear()
    bench.run_dry(ns=1_000_000 if held else 1000)
    assert len(bench.done) == submitted
    s = bench.state
    names = ("live", "ready", "active", "flight", "due", "held_queues", "held_back")
    assert all(s.core[each][0] == 0 for each in names)
    assert s.core["shares"][0] == 0.0
    if end == "close":
        assert sorted(bench.closed) == list(range(len(models)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=actions, name=st_.sampled_from(["srpt", "paella", "slack", "edf"]), end=st_.sampled_from(["", "drain"]))
def test_in_a_crowd_too_each_request_completes_exactly_once(
    script: list[tuple[object, ...]], name: str, end: str
) -> None:
    bench = crowd_of_long_jobs(name)
    two = [(entry[0], cast(int, entry[1]) % 2, *entry[2:]) if entry[0] == "submit" else entry for entry in script]
    submitted = 60 + play(bench, two)
    for instance in bench.running[::2]:
        bench.finish_segment(instance)
    bench.step(50_000_000)
    if end == "drain":
        bench.tell(codes.DRAIN)
    bench.run_dry()
    assert len(bench.done) == submitted


@settings(max_examples=60, deadline=None)
@given(
    models=st_.lists(profiles, min_size=1, max_size=4),
    name=st_.sampled_from(policy_names()),
    demand=st_.sampled_from([0.0, 0.4, 1.0, np.inf]),
    script=actions,
)
def test_the_gpu_is_never_idle_while_somebody_waits(
    models: list[ModelProfile], name: str, demand: float, script: list[tuple[object, ...]]
) -> None:
    bench = Bench(models, policy=name, demand=demand)
    for k in range(len(script)):
        play(bench, [(*entry[:6], True) if entry[0] == "submit" else entry for entry in script[k : k + 1]])
        bench.step()
        assert bench.running or not bench.rows, "requests wait for an idle GPU"
    bench.run_dry()


@settings(max_examples=20, deadline=None)
@given(long_segments=st_.integers(2, 8), shorts=st_.integers(1, 3))
def test_nothing_starves_under_paella(long_segments: int, shorts: int) -> None:
    """A flood of short jobs that never ends, on a GPU that takes one job at a time, and one long job."""
    long = profile("long", segments=long_segments, ns=2e6, instances=1)
    bench = Bench([profile("short", segments=1, ns=1e6, instances=2), long], policy="paella")
    bench.state.core["max_active"][0] = 1
    flood = [bench.submit(0, client=k) for k in range(shorts + 2)]
    bench.step()
    waiting = bench.submit(1)
    served = 0
    while waiting not in bench.done:
        assert served < 20 + 4 * long_segments, "the long job starves"
        for instance in bench.running:
            bench.finish_segment(instance)
        for serial in bench.step(1_000_000):
            if serial != waiting:
                served += 1
                flood.append(bench.submit(0, client=served % 3))
    bench.run_dry()


def test_requests_of_a_tenant_at_its_limit_stay_out_of_instances() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, batch=(1, 4))], policy="fifo")
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    first = [bench.submit(client=1, direct=True) for _ in range(12)]
    bench.step()
    assert [len(found) for found in slots_of(bench, 1)] == [4]  # a batch, in one instance
    for instance in bench.running:
        bench.finish_segment(instance)
    assert len(bench.step(1_000_000)) == 4
    assert not slots_of(bench, 1)
    other = bench.submit(client=2, direct=True)
    bench.step()
    for instance in bench.running:
        bench.finish_segment(instance)
    assert bench.step() == [other]
    bench.cancel(first[-1])
    bench.step()
    assert bench.status(first[-1]) == codes.CANCELLED
    assert bench.state.client["held_back"][1] == 7
    bench.run_dry(ns=1_000_000)
    assert len(bench.done) == 13


def test_a_model_closes_once_its_last_held_back_request_is_cancelled() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=1)], policy="fifo")
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.001))
    bench.submit(client=1)
    held = bench.submit(client=1)
    bench.step()
    bench.finish_segment(bench.running[0])
    bench.step(1_000_000)
    bench.tell(codes.CLOSE_MODEL, 0)
    bench.step()
    assert not bench.closed
    bench.cancel(held)
    bench.step()
    assert bench.status(held) == codes.CANCELLED
    assert bench.closed == [0]


def test_a_short_queue_counts_only_held_back_requests_without_a_free_slot() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, queue_limit=0)], policy="fifo")
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    first = [bench.submit(client=1) for _ in range(3)]
    bench.step()
    assert [bench.done[each]["status"] for each in first if each in bench.done] == [codes.QUEUE_FULL]
    bench.run_dry(ns=1_000_000)
    assert [bench.status(each) for each in first] == [codes.OK, codes.OK, codes.QUEUE_FULL]


def test_a_slot_taken_in_vain_is_charged_to_no_earlier_client() -> None:
    bench = Bench([profile(batch=(1, 4), instances=1)], policy="fifo")
    for _ in range(2):
        bench.submit(client=1, direct=True)
    bench.run_dry()
    before = float(bench.state.client["used_ns"][1])
    bench.submit(client=2, direct=True)
    late = bench.submit(client=3, direct=True, deadline=bench.now)
    bench.run_dry()
    assert bench.status(late) == codes.EXPIRED
    assert before > 0
    assert bench.state.client["used_ns"][1] == before
    assert bench.state.client["used_ns"].sum() == pytest.approx(bench.state.model["used_ns"].sum())


def test_requests_that_are_let_in_count_at_a_size_that_is_captured() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, batch=(1, 2, 4))], policy="fifo")
    later = bench.state.size[0, 1]
    later["segments"], later["total_ns"], later["capture"] = 0, 0.0, codes.LATER
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    bench.submit(client=1)
    bench.submit(client=1)
    bench.step()
    assert bench.state.client["released_ns"][1] == pytest.approx(bench.state.size["total_ns"][0, 2])
    bench.run_dry(ns=1_000_000)


def slots_of(bench: Bench, client: int) -> list[list[int]]:
    """The requests of a client in each instance that has any."""
    s = bench.state
    rows = [
        [row for row in s.slot[instance] if row >= 0 and s.request["client"][row] == client] for instance in range(2)
    ]
    return [each for each in rows if each]


def test_fair_shares_follow_the_weights_under_a_zero_threshold() -> None:
    from paellapy.scheduler.policies.builtin import paella_with

    models = [profile("a", segments=1, ns=1e6, instances=2, share=3.0), profile("b", segments=1, ns=1e6, instances=2)]
    bench = Bench(models, policy=paella_with(0.0))
    bench.state.core["max_active"][0] = 1
    for k in range(8):
        bench.submit(k % 2)
    for _ in range(200):
        for instance in bench.running:
            bench.finish_segment(instance)
        for serial in bench.step(1_000_000):
            bench.submit(int(bench.done[serial]["model"]))
    used = bench.state.model["used_ns"]
    assert used[0] / used[1] == pytest.approx(3.0, rel=0.15)
    bench.run_dry()


def test_every_policy_is_known_by_name() -> None:
    assert {find_policy(name).name for name in policy_names()} == set(policy_names())
