"""The dispatcher core, driven by hand: one request, batches, ends, the loop in real time, and everything at random."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_bench import LIMITS, Bench, ask_to_be_woken, claim, mark_ready, profile, take_done
from core_check import check_integrity
from core_scripts import actions, careful, play, profiles
from hypothesis import given, settings
from hypothesis import strategies as st_

from paellapy.scheduler.core import codes, rings, step, tables
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import ModelProfile, install, remove
from paellapy.scheduler.core.tenants import Tenant, set_tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.stats import occupancy
from paellapy.scheduler.policies.policy import Policy, attach_policy, find_policy, policy, policy_names

pytestmark = pytest.mark.quick
TUNING = Tuning.for_part("h200")


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


def test_an_instance_waits_for_inputs_that_are_still_being_written() -> None:
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


def test_no_job_starts_before_its_last_request_has_arrived() -> None:
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


def test_batches_form_while_the_gpu_is_busy_and_run_at_the_smallest_size() -> None:
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


def test_cancelled_while_queued_in_an_instance_and_between_segments() -> None:
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


def test_drain_finishes_accepted_requests_and_refuses_new_ones() -> None:
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


def test_a_failure_ends_every_request_and_refuses_new_ones() -> None:
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


def test_requests_that_ended_before_the_failure_was_seen_are_not_suspected() -> None:
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
                kind=codes.SUBMIT, request=row, serial=serial, model=model, instance=instance, slot=slot, client=k,
                arrival_ns=i,
            )  # fmt: skip
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


def test_occupancy_follows_the_launches() -> None:
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


@pytest.mark.parametrize("hold", [False, True])
def test_one_request_at_a_time_stays_on_one_instance(hold: bool) -> None:
    bench = Bench([profile(segments=2, instances=3)], hold=hold)
    instances = set()
    for _ in range(5):
        bench.submit(direct=True)
        bench.step()
        instances.add(bench.instance_of(0))
        bench.run_dry()
        bench.step()
    assert len(instances) == 1


def test_a_slot_reserved_just_before_its_instance_gives_way_is_served() -> None:
    bench = Bench([profile(segments=2, instances=3)])
    bench.submit(direct=True)
    bench.step()
    first = bench.instance_of(0)
    serial = bench.submit(direct=True, ready=False)  # has a slot of the other instance, and has not written it
    bench.finish_segment(first)
    bench.step()
    third = bench.submit(direct=True)
    bench.step()
    bench.run_dry()
    assert set(bench.done) == {1, serial, third}


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


def waits(job: Any) -> float:
    return job.arrival_ns + 2500.0 if job.tenant == 1 else 1.0


patient = policy(admit=waits, may_idle=True)(lambda job: job.arrival_ns)


@settings(max_examples=150, deadline=None)
@given(
    models=st_.lists(profiles, min_size=1, max_size=4),
    name=st_.sampled_from([*policy_names(), careful, picky]),
    later=st_.sampled_from([None, "srpt", picky, patient]),
    hold=st_.booleans(),
    demand=st_.sampled_from([0.0, 0.4, 1.0, 2.0, np.inf]),
    reports=st_.booleans(),
    one_by_one=st_.booleans(),
    held=st_.sampled_from([0.0, 0.05, 0.5, 1.0]),
    script=actions,
    end=st_.sampled_from(["run dry", "drain", "close", "fail"]),
)
def test_each_request_completes_exactly_once_in_any_script(
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


def test_an_expired_request_in_a_slot_is_charged_to_no_earlier_client() -> None:
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
