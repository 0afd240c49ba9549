"""The order in which jobs launch, and how: by rank, in segments or in one piece, on streams of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_bench import Bench, profile
from core_scripts import actions, careful, play, profiles
from hypothesis import given, settings
from hypothesis import strategies as st_

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.policies.policy import policy_names

pytestmark = pytest.mark.quick
TUNING = Tuning.for_part("h200")


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
    assert bench.running == [bench.instance_of(1)]
    while quick not in bench.done:
        bench.finish_segment(bench.instance_of(1))
        bench.step()
    assert bench.running == [instance]
    bench.run_dry()


def test_a_request_behind_an_instance_that_waits_lends_it_its_deadline() -> None:
    one, other = profile("one", segments=2, instances=4), profile("other", segments=2, instances=2)
    bench = Bench([one, other], policy="edf")
    bench.state.core["max_active"][0] = 1
    bench.submit(1, deadline=bench.now + 10**6)
    bench.step()
    late = bench.submit(0, deadline=bench.now + 10**9)
    bench.step()
    soon = bench.submit(0, deadline=bench.now + 10**7)
    between = bench.submit(1, deadline=bench.now + 10**8)
    bench.run_dry()
    ended = [each for each in bench.done if each in (late, soon, between)]
    assert ended == [soon, between, late]


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


def test_one_at_a_time_the_next_segment_goes_when_the_last_block_has_started() -> None:
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


def test_without_reports_the_next_segment_goes_just_before_the_predicted_end() -> None:
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
    assert bench.history[bench.instance_of(1)] == [0]
    bench.run_dry()


def test_programs_below_the_highest_priority_are_never_launched_whole() -> None:
    bench = Bench([profile("high", priority=1, instances=2), profile("low", instances=2)], policy="priority")
    bench.submit(1)
    bench.step()
    assert bench.history[bench.instance_of(1)] == [0]
    bench.run_dry()
    bench.submit(0, priority=1)
    bench.step()
    assert bench.history[bench.instance_of(0)] == [codes.WHOLE]
    bench.run_dry()
    bench.tell(codes.CLOSE_MODEL, 0)
    bench.step()
    bench.submit(1)
    bench.step()
    assert bench.history[bench.instance_of(1)] == [codes.WHOLE]  # nobody is above it any more


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


@settings(max_examples=60, deadline=None)
@given(
    models=st_.lists(profiles, min_size=1, max_size=4),
    name=st_.sampled_from(policy_names()),
    demand=st_.sampled_from([0.0, 0.4, 1.0, np.inf]),
    script=actions,
)
def test_the_gpu_is_never_idle_while_a_request_waits(
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
        for serial in bench.finish(1_000_000):
            if serial != waiting:
                served += 1
                flood.append(bench.submit(0, client=served % 3))
    bench.run_dry()


def test_fair_shares_follow_the_weights_under_a_zero_threshold() -> None:
    from paellapy.scheduler.policies.builtin import paella_with

    models = [profile("a", segments=1, ns=1e6, instances=2, share=3.0), profile("b", segments=1, ns=1e6, instances=2)]
    bench = Bench(models, policy=paella_with(0.0))
    bench.state.core["max_active"][0] = 1
    for k in range(8):
        bench.submit(k % 2)
    for _ in range(200):
        for serial in bench.finish(1_000_000):
            bench.submit(int(bench.done[serial]["model"]))
    used = bench.state.model["used_ns"]
    assert used[0] / used[1] == pytest.approx(3.0, rel=0.15)
    bench.run_dry()
