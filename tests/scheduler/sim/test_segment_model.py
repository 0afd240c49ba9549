"""The segment model: how concurrent segments share the simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st_
from sim_models import burst, net, requests, together

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import TOGETHER, ModelProfile, SegmentProfile, busy_alone, usual_demand
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.sim.simulate import Fidelity, simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson


def bound(name: str, **parts: float) -> ModelProfile:
    segment = SegmentProfile(100e3, blocks=200, warps=1500, **parts)
    return ModelProfile(name, {1: [segment] * 4}, instances=2)


def rate(*models: ModelProfile, **tuning: float) -> float:
    """Rate of the first program while all run again and again."""
    load = together(*(ClosedLoop(each.name, duration=0.05) for each in models))
    return simulate(list(models), load, "streams", tuning=tuning or None).model(models[0].name).throughput


@pytest.mark.parametrize("measured", [True, False])
def test_like_jobs_slow_each_other_in_simulations(measured: bool) -> None:
    seen = {"demand": {1: 0.2}, "together": {1: 8}} if measured else {}
    segments = {"m": {"memory": 0.9, "compute": 0.05}, "c": {"memory": 0.05, "compute": 0.9}}
    models = {
        name: ModelProfile(name, bound(name, **parts).sizes, instances=2, **seen) for name, parts in segments.items()
    }
    other = ModelProfile("other", models["m"].sizes, instances=2, **seen)
    unlike, like = rate(models["m"], models["c"]), rate(models["m"], other)
    assert unlike > 1.4 * like


def test_higher_stream_priority_is_slowed_less() -> None:
    wide = SegmentProfile(100e3, blocks=2000, warps=7000)
    usual = ModelProfile("usual", {1: [wide] * 4}, instances=2)
    low = ModelProfile("low", {1: [wide] * 4}, instances=2)
    high = ModelProfile("high", {1: [wide] * 4}, instances=2, priority=1)
    rates = [rate(high, low, priority_share=share) / rate(usual, low, priority_share=share) for share in (0.0, 0.25)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[1] > 1.1
    assert 1.0 < rate(high, low) / rate(usual, low) < rates[1]  # on an H200 priorities have little influence


TUNING = Tuning.for_part("h200")


@given(st_.floats(0.15, 0.99), st_.integers(2, 16))
def test_demands_are_the_same_however_many_ran_to_measure_them(busy: float, together: int) -> None:
    def seen(n: int) -> float:
        return float(busy / (1 - (1 - busy) ** n))

    if seen(together) / 2 < busy:  # else hardly anybody had to wait, and it says little
        assert usual_demand(seen(together), together) == pytest.approx(seen(TOGETHER), rel=1e-3)


@given(st_.floats(0.01, 1.0), st_.integers(0, 8))
def test_what_eight_demand_is_never_more_than_what_fewer_do(demand: float, together: int) -> None:
    assert 0.0 < usual_demand(demand, together) <= demand


@pytest.mark.parametrize("demand", [0.2, 0.5, 1.0])
def test_a_measured_demand_comes_out_where_as_many_run_at_once(demand: float) -> None:
    net = ModelProfile("net", {1: [SegmentProfile(100e3, warps=64, kernels=10)] * 5}, instances=8, demand={1: demand})
    result = simulate([net], ClosedLoop("net", clients=8, duration=0.2), "streams")
    assert result.all.throughput == pytest.approx(1 / (demand * 500e-6), rel=0.1)


@given(demand=st_.floats(0.15, 0.9), together=st_.integers(8, 16))
def test_what_a_program_keeps_busy_follows_from_its_demand(demand: float, together: int) -> None:
    busy = busy_alone(demand, together)
    assert 0.0 < busy < demand + 1e-9
    assert busy / (1 - (1 - busy) ** together) == pytest.approx(demand) or busy == pytest.approx(demand / 2)


@pytest.mark.parametrize("demand", [0.9, 0.98, 0.999])
def test_a_program_that_always_wants_the_gpu_leaves_others_their_turns(demand: float) -> None:
    greedy = net("greedy", demand={1: demand}, together={1: 2}, priority=1)
    modest = net("modest", demand={1: 0.7}, together={1: 2})  # for six tenths of its time
    load = ClosedLoop("greedy", duration=0.2) + ClosedLoop("modest", duration=0.2)
    both = simulate([greedy, modest], load, "streams")
    alone = simulate([modest], ClosedLoop("modest", duration=0.2), "streams").model("modest").throughput
    assert 1.5 < alone / both.model("modest").throughput < 3.0


def test_programs_that_want_the_gpu_independently_fill_it_little_by_little() -> None:
    """As Paella's CNNs do on an H200: see `paellapy.scheduler.sim.segment_model`."""
    rates = {}
    for clients in (1, 2, 6, 24):
        demand = 0.18 / (1 - 0.82**8)
        net = ModelProfile("net", {1: [SegmentProfile(100e3)] * 5}, instances=24, demand={1: demand}, together={1: 8})
        result = simulate([net], ClosedLoop("net", clients=clients, duration=0.5), "streams", host_launch_ns=0.0)
        rates[clients] = result.all.throughput * 500e-6
    assert rates == pytest.approx({n: (1 - 0.82**n) / 0.18 for n in rates}, rel=0.03)


def last_ns(kernels: int, queues: int | None, policy: str = "streams", segments: int = 1) -> float:
    """End time of the last of six jobs of 100 ms that arrive together."""
    cut = [SegmentProfile(100e6 / segments, blocks=1, warps=1, registers=32, kernels=kernels // segments)] * segments
    load = burst(6)
    jobs = simulate([ModelProfile("net", {1: cut}, instances=6)], load, policy, queues=queues, host_launch_ns=0.0).jobs
    return float(np.max(jobs["finish_ns"]))


def test_long_graphs_that_share_a_hardware_queue_wait_for_each_other() -> None:
    at_once = last_ns(10_000, None)
    assert last_ns(10_000, 6) == at_once
    assert last_ns(10_000, 1) == pytest.approx(6 * at_once, rel=0.06)
    assert last_ns(10_000, 3) == pytest.approx(2 * at_once, rel=0.02)


def test_nobody_waits_for_the_last_kernels_of_a_graph() -> None:
    assert last_ns(90, 1) == last_ns(90, None)
    assert last_ns(196, 1) == pytest.approx((1 + 5 / 2) * last_ns(196, None), rel=0.01)  # each for half of one before


def test_segments_of_few_kernels_do_not_hold_up_a_hardware_queue() -> None:
    assert last_ns(10_000, 1, "srpt", segments=200) == last_ns(10_000, None, "srpt", segments=200)


@pytest.mark.parametrize("policy", ["streams", "hrrn"])
@pytest.mark.parametrize("since", [5_000, 300_000])
def test_queues_of_short_kernels_end_late_in_simulated_time_too(policy: str, since: int) -> None:
    """There the last digit that a clock in nanoseconds has is worth something."""
    cuts = {n: [SegmentProfile(100.0 * n, blocks=1, warps=1, registers=32, kernels=n)] for n in (150, 300, 700)}
    nets = [ModelProfile(f"net{n}", {1: cut}, instances=4) for n, cut in cuts.items()]
    load = requests(*((since + k * 1e-5, nets[k % 3].name) for k in range(3000)))
    assert (simulate(nets, load, policy, queues=8).jobs["status"] == codes.OK).all()


@given(st_.integers(1, 700), st_.integers(1, 12), st_.integers(1, 12))
def test_more_hardware_queues_never_take_longer(kernels: int, queues: int, more: int) -> None:
    assert last_ns(kernels, queues * more) <= last_ns(kernels, queues) * 1.001


def test_streams_share_hardware_queues_where_every_block_is_placed_too() -> None:
    net = ModelProfile("net", {1: [SegmentProfile(100e3, blocks=1, warps=1, registers=32, kernels=4)]}, instances=6)
    load = burst(6)

    def seconds(queues: int | None, policy: str = "streams") -> float:
        return simulate([net], load, policy, queues=queues, fidelity="blocks").seconds

    assert seconds(1) > 1.5 * seconds(2) > 1.5 * seconds(6)
    assert seconds(6) == seconds(None)
    assert seconds(1, "srpt") == seconds(None, "srpt")  # the engine gives every job a queue


def test_who_waits_in_a_hardware_queue_takes_nothing_from_those_who_run() -> None:
    """Kernel issue is full with four: more queues never do less."""
    net = ModelProfile("net", {1: [SegmentProfile(100e3, blocks=1, warps=1, registers=32, kernels=50)]}, instances=32)
    load = burst(32)
    last = [simulate([net], load, "streams", queues=n, host_launch_ns=0.0).seconds for n in (1, 2, 4, 8, None)]
    assert all(later <= sooner * 1.001 for sooner, later in pairwise(last)), last


def test_kernel_issue_that_some_leave_is_used_by_the_others() -> None:
    """One that issues little beside three that would each issue all the time: what it leaves is theirs."""
    little = ModelProfile("little", {1: [SegmentProfile(100e6, kernels=1)]}, instances=1)
    much = ModelProfile("much", {1: [SegmentProfile(1e6, kernels=100_000)]}, instances=3)
    load = requests((1e-6, "little"), *[(1e-6, "much")] * 3)
    jobs = simulate([little, much], load, "streams", host_launch_ns=0.0).jobs
    assert jobs["finish_ns"][jobs["model"] == 1].max() == pytest.approx(3e6, rel=0.01)
    assert jobs["finish_ns"][jobs["model"] == 0].max() == pytest.approx(100e6, rel=0.01)


def test_inputs_that_waited_for_an_instance_are_copied_once_it_is_free() -> None:
    def finished(input_bytes: int, second: float) -> tuple[int, ...]:
        net = ModelProfile("net", {1: [SegmentProfile(200e3)], 4: [SegmentProfile(300e3)]}, instances=1)
        load = requests((1e-6, "net"), (second, "net"), (second, "net"))
        jobs = simulate(replace(net, input_bytes=input_bytes), load, "streams").jobs
        return tuple(jobs["finish_ns"])

    nothing, inputs = finished(0, 50e-6), finished(80_000, 50e-6)
    copies = TUNING.hand_over_ns + 2 * 80_000 / TUNING.copy_gbps
    assert inputs[0] == nothing[0]
    assert inputs[1] == inputs[2] == pytest.approx(nothing[1] + copies, abs=10)
    assert finished(0, 1e-3) == finished(80_000, 1e-3)  # a free instance: they were copied when they came


def test_inputs_are_copied_while_an_instance_waits_for_its_turn() -> None:
    """One job at a time, and an instance that is open meanwhile: copies cost nothing, as long as they take less."""

    def finished(input_bytes: int) -> list[int]:
        net = ModelProfile("net", {1: [SegmentProfile(200e3)]}, instances=2, input_bytes=input_bytes)
        load = burst(5)
        return sorted(simulate(net, load, "serial").jobs["finish_ns"].tolist())

    assert TUNING.hand_over_ns + 400_000 / TUNING.copy_gbps < 200e3
    assert finished(400_000) == finished(0)
    long = TUNING.hand_over_ns + 4_000_000 / TUNING.copy_gbps  # then only every second one is copied while another runs
    assert finished(4_000_000)[-1] == pytest.approx(2 * long + 3 * 200e3, abs=2e3)


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
def test_one_segment_at_a_time_loses_next_to_nothing(fidelity: Fidelity) -> None:
    """The next is sent before the GPU runs dry, although nothing else happens at that time."""
    net = ModelProfile("net", {1: [SegmentProfile(100e3, blocks=132, warps=1056)] * 10}, instances=2)
    first = replace(net, name="first", priority=1)  # whom a job in one piece could not make way for
    load = burst(1)
    one, two = (simulate([net, first], load, max_in_flight=ahead, fidelity=fidelity).seconds for ahead in (1, 2))
    assert one == pytest.approx(two, rel=0.002)


CROWD = ModelProfile("net", {1: [SegmentProfile(50e3)] * 10}, instances=32, demand={1: 0.23}, together={1: 8})


def test_partitions_of_sms_let_a_crowd_do_more_and_change_little_for_few() -> None:
    def served(clients: int, partitions: int) -> int:
        load = ClosedLoop("net", clients, duration=0.1)
        return simulate(CROWD, load, "fifo", active=32, sm_partitions=partitions).all.completed

    few, many = ([served(clients, partitions) for partitions in (0, 8)] for clients in (4, 24))
    assert few[0] <= few[1] <= 1.02 * few[0]  # few go in one piece, which saves the gaps
    assert 1.15 < many[1] / many[0] < 1.25  # what the rule was made for


def test_partitions_of_sms_are_not_for_streams_where_the_hardware_decides() -> None:
    load = ClosedLoop("net", 24, duration=0.1)
    without, asked = (simulate(CROWD, load, "streams", sm_partitions=partitions) for partitions in (0, 8))
    assert np.array_equal(without.jobs, asked.jobs)


@pytest.mark.parametrize(("partitions", "fidelity", "demand"), [
    (8, "blocks", {1: 0.3}), (8, "segments", {}),  # they need segments, and a demand that was measured
    *((wrong, "segments", {1: 0.3}) for wrong in (True, 2, -1, 65)),
])  # fmt: skip
def test_partitions_that_cannot_be_simulated_are_refused(
    partitions: int, fidelity: Fidelity, demand: dict[int, float]
) -> None:
    model = ModelProfile("net", {1: [SegmentProfile(50e3)]}, demand=demand)
    with failing(ArgumentError, field="sm_partitions", given=partitions):
        simulate(model, Poisson(10, "net"), sm_partitions=partitions, fidelity=fidelity)
