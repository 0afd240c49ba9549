"""Simulation: workloads, results, and what policies do to a short model beside long ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st_

from paellapy.instrument.errors import ArgumentError, PaellaError
from paellapy.instrument.numba_ext.cache import fingerprint
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import TOGETHER, ModelProfile, SegmentProfile, busy_alone, usual_demand
from paellapy.scheduler.core.step import step
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.sim.recorded_profiles import ALONE_US, MIX, mix_profiles
from paellapy.scheduler.sim.segment_model import run_segments
from paellapy.scheduler.sim.simulate import Fidelity, simulate
from paellapy.scheduler.sim.workload import (
    Background,
    ClosedLoop,
    Lognormal,
    Poisson,
    TraceWorkload,
    Workload,
    WorkloadError,
)
from paellapy.viz.palette import OKABE_ITO

TUNING = Tuning.for_part("h200")


def net(name: str = "net", us: float = 50.0, segments: int = 4, blocks: int = 66, **more: object) -> ModelProfile:
    segment = SegmentProfile(us * 1e3, blocks, blocks * 8, blocks * 8192, 0, 5)
    return ModelProfile(name, {1: [segment] * segments}, **more)  # type: ignore[arg-type]


# --- workloads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Poisson, Lognormal])
def test_open_loops_have_their_rate_their_mix_and_their_seed(kind: type[Poisson]) -> None:
    load = kind(20_000, {"a": 3, "b": 1}, duration=2.0, clients=4, deadline_ms=5)
    first, again, other = (load.arrivals(["b", "a"], seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first["time_ns"][:10], other["time_ns"][:10])
    assert len(first) == pytest.approx(40_000, rel=0.1)
    assert (np.diff(first["time_ns"]) >= 0).all()
    assert first["time_ns"].max() < 2e9
    assert (first["model"] == 1).mean() == pytest.approx(0.75, abs=0.02)
    assert set(first["client"]) == {0, 1, 2, 3}
    assert (first["deadline_ns"] - first["time_ns"] == 5_000_000).all()


def test_lognormal_gaps_are_burstier_than_poisson() -> None:
    gaps = [np.diff(load(1000, "m", duration=20).arrivals(["m"], 0)["time_ns"]) for load in (Poisson, Lognormal)]
    assert gaps[1].std() / gaps[1].mean() > 1.5 * gaps[0].std() / gaps[0].mean()


def test_a_list_of_models_is_asked_for_in_equal_shares() -> None:
    names = ["a", "b"]
    found, same = (Poisson(1000, mix).arrivals(names, 0) for mix in (names, dict.fromkeys(names, 1.0)))
    np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize(("make", "field"), [
    (lambda: Poisson(0, "m"), "rate"),
    (lambda: Poisson(10, 3).arrivals(["m"], 0), "mix"),
    (lambda: Poisson(10, [("m", 1)]).arrivals(["m"], 0), "mix"),
    (lambda: Poisson(10, {"m": "much"}).arrivals(["m"], 0), "mix"),
    (lambda: Poisson(10, {}).arrivals(["m"], 0), "mix"),
    (lambda: Poisson(10, {"m": -1}).arrivals(["m"], 0), "mix"),
    (lambda: Poisson(10, "n").arrivals(["m"], 0), "model"),
    (lambda: Poisson(10, "m", duration=-1), "duration"),
    (lambda: Poisson(10, "m", deadline_ms=0), "deadline_ms"),
    (lambda: Poisson(10, "m", deadline_ms=math.inf), "deadline_ms"),
    (lambda: Poisson(10, "m", priority=1 << 40), "priority"),
    (lambda: Poisson(10, "m", clients=1.5), "clients"),
    (lambda: Lognormal(10, "m", sigma=-1), "sigma"),
    (lambda: Lognormal(0, "m"), "rate"),
    (lambda: ClosedLoop("m", clients=0), "clients"),
    (lambda: ClosedLoop("m", clients=1.5), "clients"),
    (lambda: ClosedLoop("m", clients="alice"), "clients"),
    (lambda: ClosedLoop("m", duration=math.inf), "duration"),
    (lambda: ClosedLoop("m", think_ms=math.inf), "think_ms"),
    (lambda: ClosedLoop("m", priority="high"), "priority"),
    (lambda: Background("m", gap_us=math.nan), "gap_us"),
    (lambda: Background("m", gap_us=-1), "gap_us"),
])  # fmt: skip
def test_a_wrong_workload_is_refused(make: Any, field: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        make()
    assert caught.value.field == field


def test_every_part_of_a_workload_has_arrivals_of_its_own() -> None:
    a, b, c = (Poisson(1000, name) for name in "abc")
    for together in (a + b + c, a + (b + c), (a + b) + (c + a)):
        found = together.arrivals(["a", "b", "c"], 0)
        times = [set(found["time_ns"][found["model"] == m].tolist()) for m in range(3)]
        assert not times[0] & times[1] | times[1] & times[2] | times[0] & times[2]


def test_a_workload_is_combined_with_workloads_only() -> None:
    with pytest.raises(TypeError):
        Poisson(1000, "a") + 3  # type: ignore[operator]


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
def test_a_model_alone_takes_its_time_alone(fidelity: Fidelity) -> None:
    result = simulate([net()], ClosedLoop("net", think_ms=1, duration=0.05), "paella", fidelity=fidelity)
    latency = result.latency_ms
    assert len(latency) > 30
    np.testing.assert_allclose(latency, 0.2, rtol=0.02 if fidelity == "segments" else 0.15)


@pytest.mark.parametrize("moved", [1e3, 1e7, 1e8])
@pytest.mark.parametrize("blocks", [20, 500])
def test_memory_traffic_is_part_of_the_time_alone(moved: float, blocks: int) -> None:
    model = ModelProfile("net", {1: [SegmentProfile(100e3, blocks, 4 * blocks, kernels=4, bytes=moved)] * 2})
    result = simulate([model], TraceWorkload(((1e-3, "net", None, None, 0),)), "fifo", fidelity="blocks")
    np.testing.assert_allclose(result.latency_ms, 0.2, rtol=0.05)


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
@pytest.mark.parametrize("policy", ["paella", "streams"])
def test_the_same_seed_gives_the_same_run(policy: str, fidelity: Fidelity) -> None:
    load = Poisson(3000, {"a": 1, "b": 1}, duration=0.02)
    runs = [simulate([net("a"), net("b", us=20)], load, policy, seed=5, fidelity=fidelity) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].jobs, runs[1].jobs)
    np.testing.assert_array_equal(runs[0].occupancy, runs[1].occupancy)


def test_a_saturated_gpu_does_what_its_slots_allow() -> None:
    """Each job fills a quarter of the GPU for 0.2 ms: four at a time, 20,000 a second, whoever waits."""
    model = net(blocks=264, instances=16)
    result = simulate([model], ClosedLoop("net", clients=32, duration=0.2), "streams", host_launch_ns=0)
    assert result.all.throughput == pytest.approx(20_000, rel=0.03)
    assert result.occupancy[5:-5, 0].mean() == pytest.approx(1.0, abs=0.02)


@given(
    rows=st_.lists(st_.tuples(st_.floats(0.0, 0.02), st_.sampled_from(sorted(MIX))), max_size=12),
    policy=st_.sampled_from(["slack", "paella", "streams"]),
)
def test_few_requests_for_many_models_are_all_answered(rows: list[tuple[float, str]], policy: str) -> None:
    load = TraceWorkload(tuple((t, name, None, None, 0) for t, name in sorted(rows)))
    result = simulate(mix_profiles(), load, policy)
    assert (result.jobs["status"] == codes.OK).sum() == len(rows)


@pytest.mark.parametrize("requests", [0, 1, 2, 3, 5])
def test_few_requests_are_all_answered_where_every_block_is_placed(requests: int) -> None:
    load = TraceWorkload(tuple((0.0, f"net{k % 6}", None, None, 0) for k in range(requests)))
    result = simulate([net(f"net{k}") for k in range(6)], load, "fifo", fidelity="blocks")
    assert result.all.completed == requests


def test_batches_raise_throughput() -> None:
    one, many = (mix_profiles(batch, names=["resnet18"]) for batch in ((1,), (1, 2, 4, 8)))
    load = ClosedLoop("resnet18", clients=64, duration=0.3)
    slow, fast = (simulate(models, load, "srpt").all for models in (one, many))
    assert fast.throughput > 1.8 * slow.throughput
    assert fast.mean_batch > 4


def test_deadlines_expire_and_queues_overflow() -> None:
    models = [net(instances=1, queue_limit=10, target_ms=1)]
    result = simulate(models, Poisson(20_000, "net", duration=0.05, deadline_ms=2), "edf")
    statuses = result.statuses()
    assert set(statuses) == {"ok", "expired", "queue full"} or set(statuses) == {"ok", "queue full"}
    assert sum(statuses.values()) == len(result.jobs) == result.all.submitted
    assert result.all.within_target < 0.5
    late = simulate([net(instances=1, target_ms=1)], Poisson(20_000, "net", duration=0.05, deadline_ms=2), "edf")
    assert late.statuses()["expired"] > 0


def test_a_deadline_is_what_a_request_is_held_to_and_else_its_model_s_target() -> None:
    def within(target_ms: float | None, deadline_ms: float | None) -> float:
        load = TraceWorkload(tuple((k * 1e-3, "net", deadline_ms, None, 0) for k in range(10)))
        return simulate([net(target_ms=target_ms)], load, "fifo").all.within_target

    assert within(target_ms=100.0, deadline_ms=0.1) == 0.0  # 0.2 ms alone
    assert within(target_ms=None, deadline_ms=0.1) == 0.0
    assert within(target_ms=0.1, deadline_ms=100.0) == 1.0
    assert within(target_ms=0.1, deadline_ms=None) == 0.0
    assert within(target_ms=100.0, deadline_ms=None) == 1.0
    assert np.isnan(within(target_ms=None, deadline_ms=None))
    some = TraceWorkload(((0.0, "net", 100.0, None, 0), (0.1, "net", None, None, 0)))
    assert simulate([net()], some, "fifo").all.within_target == 1.0  # of the one that has a deadline


def test_figures_of_a_model_that_is_not_there_name_those_that_are() -> None:
    result = simulate([net("a"), net("b")], Poisson(1000, "a", duration=0.01), "fifo")
    with pytest.raises(ArgumentError) as caught:
        result.model("c")
    assert (caught.value.field, caught.value.given) == ("model", "c")


def test_results_print_and_plot(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = simulate([net("a", target_ms=1), net("b")], Poisson(2000, {"a": 1, "b": 1}, duration=0.02), "fifo")
    assert "fifo on virtual:h200" in str(result)
    assert "all" in str(result)
    assert [each.name for each in result.per_model] == ["a", "b"]
    figure = result.plot()
    figure.savefig(tmp_path / "plot.png")
    left, right = figure.axes
    assert [line.get_color() for line in left.get_lines()] == list(OKABE_ITO[:2])
    assert [line.get_color() for line in right.get_lines()] == list(OKABE_ITO[:3])
    of_all = right.transData.transform((0, 1))[1]
    assert right.get_legend().get_window_extent().y0 > of_all, "the legend is above all that curves can reach"
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
def test_occupancy_covers_the_whole_run_however_long_it_goes_on(fidelity: Fidelity) -> None:
    load = TraceWorkload(tuple((1e-6, "net", None, None, 0) for _ in range(300)))
    result = simulate([net(blocks=2000)], load, "streams", fidelity=fidelity)
    assert result.seconds > 100 * load.seconds
    assert result.bin_ms * len(result.occupancy) == pytest.approx(result.seconds * 1e3, abs=result.bin_ms)
    assert result.occupancy[:, :3].min() >= 0.0
    assert result.occupancy[:, :3].max() < 1.0 + 1e-9
    jobs = result.jobs
    in_flight_ms = (jobs["finish_ns"] - jobs["started_ns"]).sum() / 1e6
    assert result.occupancy[:, 3].sum() * result.bin_ms == pytest.approx(in_flight_ms, rel=0.05)


def test_parts_of_the_gpu_stay_parts_where_demand_was_measured() -> None:
    segments = [SegmentProfile(100e3, blocks=1, warps=64), SegmentProfile(100e3, blocks=2000, warps=4000)]
    measured = ModelProfile("net", {1: segments}, instances=8, demand={1: 1.0})
    result = simulate([measured], ClosedLoop("net", clients=8, duration=0.05), "srpt")
    assert result.occupancy[:, :3].max() < 1.0 + 1e-9


def test_an_empty_run_has_figures_that_say_so() -> None:
    result = simulate([net()], TraceWorkload(()), "fifo")
    assert result.all.completed == 0
    assert np.isnan(result.all.p99_ms)
    assert str(result)


@pytest.mark.parametrize(("options", "field"), [
    ({"fidelity": "atoms"}, "fidelity"), ({"seed": -1}, "seed"), ({"seed": 0.5}, "seed"),
    ({"demand": -1}, "demand"), ({"demand": float("nan")}, "demand"), ({"queues": 0}, "queues"),
    ({"queues": 2.5}, "queues"), ({"host_launch_ns": -1}, "host_launch_ns"), ({"fidelty": "blocks"}, "fidelty"),
    ({"memory_bytes": "1 GB"}, "memory_bytes"), ({"tenants": ["alice"]}, "tenants"), ({"device": None}, "device"),
])  # fmt: skip
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(PaellaError) as caught:
        simulate([net()], Poisson(1, "net"), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("make", [
    lambda: simulate([], Poisson(1, "m")),
    lambda: simulate([net(), net()], Poisson(1, "net")),
    lambda: simulate([net()], Poisson(1, "net"), active=0),
    lambda: simulate([net()], Poisson(1, "net"), active=-1),
    lambda: simulate([net()], Poisson(1, "net"), active=1.5),
    lambda: simulate([net()], Poisson(1, "net"), max_in_flight=0),
    lambda: simulate([net()], Poisson(1, "net"), "streams", queues=33, fidelity="blocks"),
    lambda: simulate([net()], Poisson(1, "net"), None),
    lambda: simulate([net()], 4000),
    lambda: simulate([net()], [Poisson(1, "net")]),
    lambda: simulate([replace(net(), demand={1: -1.0})], Poisson(1, "net")),
])  # fmt: skip
def test_a_run_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(PaellaError):
        make()


def test_the_mix_is_as_measured() -> None:
    models = {each.name: each for each in mix_profiles((1, 8))}
    assert set(models) == set(MIX)
    for name, us in ALONE_US.items():
        assert models[name].alone_ns() / 1e3 == pytest.approx(us, rel=0.05)
        assert 1.2 < models[name].alone_ns(8) / models[name].alone_ns(1) < 1.5
    kernels = sum(MIX[name] * sum(s.kernels for s in each.sizes[1]) for name, each in models.items())
    assert kernels == pytest.approx(228, rel=0.1)  # measured per request of the mix


# --- the claim ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
def test_a_short_model_stays_short_beside_a_flood_of_long_ones(fidelity: Fidelity, seed: int) -> None:
    if fidelity == "blocks" and seed:
        pytest.skip("one seed suffices where every block is simulated")
    segments, seconds = (80, 0.5) if fidelity == "segments" else (20, 0.05)
    models = [
        net("short", us=25, target_ms=1, instances=8),
        net("long", segments=segments, blocks=264, target_ms=200, instances=32),
    ]
    load: Workload = Poisson(500, "short", duration=seconds) + ClosedLoop("long", clients=64, duration=seconds)
    p99, rate = {}, {}
    for policy in ("paella", "edf", "streams", "fifo"):
        result = simulate(models, load, policy, seed=seed, fidelity=fidelity)
        assert result.statuses() == {"ok": len(result.jobs)}
        p99[policy], rate[policy] = result.model("short").p99_ms, result.all.throughput
    for policy in ("paella", "edf"):
        for baseline in ("streams", "fifo"):
            assert p99[policy] <= 0.3 * p99[baseline], (policy, baseline, p99)
            assert rate[policy] >= 0.97 * rate[baseline], (policy, baseline, rate)


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
    load = TraceWorkload(tuple((1e-6, "net", None, None, 0) for _ in range(6)))
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
    nets = [
        ModelProfile(
            f"net{n}", {1: [SegmentProfile(100.0 * n, blocks=1, warps=1, registers=32, kernels=n)]}, instances=4
        )
        for n in (150, 300, 700)
    ]
    load = TraceWorkload(tuple((since + k * 1e-5, f"net{(150, 300, 700)[k % 3]}", None, None, 0) for k in range(3000)))
    assert (simulate(nets, load, policy, queues=8).jobs["status"] == codes.OK).all()


@given(st_.integers(1, 700), st_.integers(1, 12), st_.integers(1, 12))
def test_more_hardware_queues_never_take_longer(kernels: int, queues: int, more: int) -> None:
    assert last_ns(kernels, queues * more) <= last_ns(kernels, queues) * 1.001


def test_streams_share_hardware_queues_where_every_block_is_placed_too() -> None:
    net = ModelProfile("net", {1: [SegmentProfile(100e3, blocks=1, warps=1, registers=32, kernels=4)]}, instances=6)
    load = TraceWorkload(tuple((1e-6, "net", None, None, 0) for _ in range(6)))

    def seconds(queues: int | None, policy: str = "streams") -> float:
        return simulate([net], load, policy, queues=queues, fidelity="blocks").seconds

    assert seconds(1) > 1.5 * seconds(2) > 1.5 * seconds(6)
    assert seconds(6) == seconds(None)
    assert seconds(1, "srpt") == seconds(None, "srpt")  # the engine gives every job a queue


def test_who_waits_in_a_hardware_queue_takes_nothing_from_those_who_run() -> None:
    """Kernel issue is full with four: more queues never do less."""
    net = ModelProfile("net", {1: [SegmentProfile(100e3, blocks=1, warps=1, registers=32, kernels=50)]}, instances=32)
    load = TraceWorkload(tuple((1e-6, "net", None, None, 0) for _ in range(32)))
    last = [simulate([net], load, "streams", queues=n, host_launch_ns=0.0).seconds for n in (1, 2, 4, 8, None)]
    assert all(later <= sooner * 1.001 for sooner, later in pairwise(last)), last


def test_kernel_issue_that_some_leave_is_used_by_the_others() -> None:
    """One that issues little beside three that would each issue all the time: what it leaves is theirs."""
    little = ModelProfile("little", {1: [SegmentProfile(100e6, kernels=1)]}, instances=1)
    much = ModelProfile("much", {1: [SegmentProfile(1e6, kernels=100_000)]}, instances=3)
    load = TraceWorkload(tuple((1e-6, name, None, None, 0) for name in ("little", "much", "much", "much")))
    jobs = simulate([little, much], load, "streams", host_launch_ns=0.0).jobs
    assert jobs["finish_ns"][jobs["model"] == 1].max() == pytest.approx(3e6, rel=0.01)
    assert jobs["finish_ns"][jobs["model"] == 0].max() == pytest.approx(100e6, rel=0.01)


def test_inputs_that_waited_for_a_instance_are_copied_once_it_is_free() -> None:
    def finished(input_bytes: int, second: float) -> tuple[int, ...]:
        net = ModelProfile("net", {1: [SegmentProfile(200e3)], 4: [SegmentProfile(300e3)]}, instances=1)
        load = TraceWorkload(tuple((t, "net", None, None, 0) for t in (1e-6, second, second)))
        jobs = simulate(replace(net, input_bytes=input_bytes), load, "streams").jobs
        return tuple(jobs["finish_ns"])

    nothing, inputs = finished(0, 50e-6), finished(80_000, 50e-6)
    copies = TUNING.hand_over_ns + 2 * 80_000 / TUNING.copy_gbps
    assert inputs[0] == nothing[0]
    assert inputs[1] == inputs[2] == pytest.approx(nothing[1] + copies, abs=10)
    assert finished(0, 1e-3) == finished(80_000, 1e-3)  # a free instance: they were copied when they came


def test_inputs_are_copied_while_a_instance_waits_for_its_turn() -> None:
    """One job at a time, and an instance that is open meanwhile: copies cost nothing, as long as they take less."""

    def finished(input_bytes: int) -> list[int]:
        net = ModelProfile("net", {1: [SegmentProfile(200e3)]}, instances=2, input_bytes=input_bytes)
        load = TraceWorkload(tuple((1e-6, "net", None, None, 0) for _ in range(5)))
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
    load = TraceWorkload(((1e-6, "net", None, None, 0),))
    one, two = (simulate([net, first], load, max_in_flight=ahead, fidelity=fidelity).seconds for ahead in (1, 2))
    assert one == pytest.approx(two, rel=0.002)


def test_partitions_of_sms_let_a_crowd_do_more_and_change_little_for_few() -> None:
    net = ModelProfile("net", {1: [SegmentProfile(50e3)] * 10}, instances=32, demand={1: 0.23}, together={1: 8})

    def served(clients: int, partitions: int) -> int:
        load = ClosedLoop("net", clients, duration=0.1)
        return simulate(net, load, "fifo", active=32, sm_partitions=partitions).all.completed

    few, many = ([served(clients, partitions) for partitions in (0, 8)] for clients in (4, 24))
    assert few[0] <= few[1] <= 1.02 * few[0]  # few go in one piece, which saves the gaps
    assert 1.15 < many[1] / many[0] < 1.25  # what the rule was made for


def test_partitions_of_sms_are_not_for_streams_where_the_hardware_decides() -> None:
    net = ModelProfile("net", {1: [SegmentProfile(50e3)] * 10}, instances=32, demand={1: 0.23}, together={1: 8})
    load = ClosedLoop("net", 24, duration=0.1)
    without, asked = (simulate(net, load, "streams", sm_partitions=partitions) for partitions in (0, 8))
    assert np.array_equal(without.jobs, asked.jobs)


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        (run_segments, "sim.segment_model.WHOLE"),
        (run_segments, "sim.segment_model.MOST_BUSY"),
        (run_segments, "sim.tables.NEVER"),
        (step, "core.codes.NEVER"),
        (step, "core.codes.CHOICES"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_simulations_are_compiled_anew_after_an_edit_of_any_part(
    monkeypatch: pytest.MonkeyPatch, entry: Any, part: str
) -> None:
    before = fingerprint(entry.py_func)
    monkeypatch.setattr(f"paellapy.scheduler.{part}", 12345)
    assert fingerprint(entry.py_func) != before


@pytest.mark.parametrize(("fidelity", "demand"), [("blocks", {1: 0.3}), ("segments", {})])
def test_partitions_are_simulated_where_demand_was_measured_and_for_segments(
    fidelity: Fidelity, demand: dict[int, float]
) -> None:
    net = ModelProfile("net", {1: [SegmentProfile(50e3)]}, demand=demand)
    with pytest.raises(ArgumentError) as caught:
        simulate(net, Poisson(10, "net"), sm_partitions=8, fidelity=fidelity)
    assert caught.value.field == "sm_partitions"


@pytest.mark.parametrize("wrong", [True, 2, -1, 65])
def test_partitions_are_a_number_of_them_as_for_an_engine(wrong: int) -> None:
    net = ModelProfile("net", {1: [SegmentProfile(50e3)]}, demand={1: 0.3})
    with pytest.raises(ArgumentError) as caught:
        simulate(net, Poisson(10, "net"), sm_partitions=wrong)
    assert (caught.value.field, caught.value.given) == ("sm_partitions", wrong)


def test_a_background_job_takes_what_requests_leave_and_no_more() -> None:
    models = [
        ModelProfile("net", {1: [SegmentProfile(100e3, blocks=200)] * 9}),
        ModelProfile("train", {1: [SegmentProfile(100e3, blocks=2000, warps=8000)] * 30}, instances=1),
    ]
    ask = Poisson(250, "net", duration=0.5, priority=1)
    alone = simulate(models, ask, "priority").model("net")
    beside = simulate(models, ask + Background("train"), "priority")
    free = simulate(models, Background("train", duration=0.5), "priority").model("train")
    assert free.completed == pytest.approx(0.5 / (30 * 100e-6 + 60e-6), rel=0.05)
    assert beside.model("net").completed == alone.completed
    assert 0.5 * free.completed < beside.model("train").completed < free.completed
    assert beside.model("net").p99_ms < 1.6 * alone.p99_ms
