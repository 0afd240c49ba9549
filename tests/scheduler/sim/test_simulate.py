"""Simulation: runs and their results, and what policies do to a short model beside long ones."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st_
from sim_models import burst, net, requests

from paellapy.instrument.errors import ArgumentError, PaellaError
from paellapy.instrument.numba_ext.cache import fingerprint
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.step import step
from paellapy.scheduler.sim.recorded_profiles import ALONE_US, MIX, mix_profiles
from paellapy.scheduler.sim.results import COLUMNS
from paellapy.scheduler.sim.segment_model import run_segments
from paellapy.scheduler.sim.simulate import (
    Fidelity,
    SimulationError,
    check_conserved,
    check_gpu_time,
    check_in_turn,
    check_ordered,
    simulate,
)
from paellapy.scheduler.sim.workload import Background, ClosedLoop, Poisson, TraceWorkload, Workload
from paellapy.viz.palette import OKABE_ITO


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
    result = simulate([model], burst(1), "fifo", fidelity="blocks")
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
@settings(max_examples=40)
def test_few_requests_for_many_models_are_all_answered(rows: list[tuple[float, str]], policy: str) -> None:
    load = requests(*sorted(rows))
    result = simulate(mix_profiles(), load, policy)
    assert (result.jobs["status"] == codes.OK).sum() == len(rows)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
def test_few_requests_are_all_answered_where_every_block_is_placed(n: int) -> None:
    load = requests(*((0.0, f"net{k % 6}") for k in range(n)))
    result = simulate([net(f"net{k}") for k in range(6)], load, "fifo", fidelity="blocks")
    assert result.all.completed == n


def test_batches_raise_throughput() -> None:
    one, many = (mix_profiles(batch, names=["resnet18"]) for batch in ((1,), (1, 2, 4, 8)))
    load = ClosedLoop("resnet18", clients=64, duration=0.3)
    slow, fast = (simulate(models, load, "srpt").all for models in (one, many))
    assert fast.throughput > 1.8 * slow.throughput
    assert fast.mean_batch > 4


LENGTHS = [replace(net(f"net[{us}]", us=us), length_of="net") for us in (10, 20, 80)]


@given(
    rows=st_.lists(st_.tuples(st_.integers(0, 2000), st_.sampled_from(LENGTHS)), max_size=20, unique_by=lambda x: x[0]),
    policy=st_.sampled_from(["srpt", "hrrn", "paella", "slack"]),
)
@settings(max_examples=40)
def test_requests_of_one_model_go_in_order_whatever_their_length(
    rows: list[tuple[int, ModelProfile]], policy: str
) -> None:
    load = requests(*sorted((us * 1e-6, each.name) for us, each in rows))
    jobs = simulate(LENGTHS, load, policy, active=1).jobs
    assert (np.diff(np.sort(jobs, order="arrival_ns")["started_ns"]) > 0).all()


def test_rare_lengths_do_not_starve_and_shorter_models_still_go_first() -> None:
    one = SegmentProfile(50e3, 66, 528, 66 * 8192, 0, 5)
    sizes = {b: [one] * 4 for b in (1, 16)}
    often, seldom = (ModelProfile(name, sizes, instances=2, length_of="net") for name in ("often", "seldom"))
    short = ModelProfile("short", {1: [SegmentProfile(5e3)]})
    load = Poisson(60_000, {"often": 60, "seldom": 1, "short": 1}, duration=0.1)
    run = simulate([often, seldom, short], load, "srpt", active=1)
    assert run.model("seldom").p99_ms < 2 * run.model("often").p99_ms
    assert run.model("short").p99_ms < run.model("often").p50_ms
    starved = simulate([replace(often, length_of=""), replace(seldom, length_of=""), short], load, "srpt", active=1)
    assert starved.model("seldom").p99_ms > 2 * run.model("seldom").p99_ms


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
    with failing(ArgumentError, field="model", given="c"):
        result.model("c")


def test_results_print_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = simulate([net("a", target_ms=1), net("b")], Poisson(2000, {"a": 1, "b": 1}, duration=0.02), "fifo")
    assert "fifo on virtual:h200" in str(result)
    assert "all" in str(result)
    assert [each.name for each in result.per_model] == ["a", "b"]
    left, right = result.plot().figure.axes
    curves = {line.get_label(): line for line in left.get_lines() if line.get_label() in ("a", "b")}
    assert [line.get_color() for line in curves.values()] == list(OKABE_ITO[:2])
    (target,) = (line for line in left.get_lines() if set(line.get_xdata()) == {1.0})
    assert target.get_color() == curves["a"].get_color()
    assert left.get_yscale() == "log"
    assert {"a", "b"} < {text.get_text() for text in left.get_legend().get_texts()}
    assert [line.get_label() for line in right.get_lines()] == ["block slots", "kernel issue"], "a resource in use"


def test_policies_are_compared_in_one_picture() -> None:
    pytest.importorskip("matplotlib")
    load = Poisson(4000, {"a": 1, "b": 1}, duration=0.05)
    runs = [simulate([net("a", target_ms=1), net("b"), net("none")], load, each) for each in ("fifo", "srpt", "edf")]
    figure = runs[0].compare(*runs[1:]).plot().figure
    assert [ax.get_title("left") for ax in figure.axes] == ["all requests", "a", "b"], "no panel without a request"
    for ax, targets in zip(figure.axes, (0, 1, 0), strict=True):
        curves = [line for line in ax.get_lines() if len(line.get_xdata()) > 2]
        assert [line.get_color() for line in curves] == list(OKABE_ITO[:3])
        assert len(ax.get_lines()) == 3 + targets
    all_of_fifo = figure.axes[0].get_lines()[0]
    assert all_of_fifo.get_xdata()[-1] == runs[0].latency_ms.max()
    assert all_of_fifo.get_ydata()[-1] == 1 / len(runs[0].jobs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:3] == ["fifo", "srpt", "edf"]


def test_tables_of_results_are_written_and_read_again(tmp_path: Path) -> None:
    load = Poisson(40000, {"a": 2, "b": 1}, duration=0.02)
    run = simulate([net("a", target_ms=1), net("b")], load, "fifo", admission=True)
    assert 0 < run.all.refused < run.all.submitted
    for what, columns in COLUMNS.items():
        by_name = run.compare().columns(what)
        assert list(by_name) == list(columns)
        rows = json.loads(run.to_json(tmp_path / "run.json", what).read_text())
        with run.to_csv(tmp_path / "run.csv", what).open(newline="") as file:
            written = list(csv.DictReader(file))
        assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows] == written
        assert len(rows) == len(by_name["policy"])
    requests, figures = run.compare().columns("requests"), run.compare().columns()
    assert figures["name"] == ["a", "b", "all"]
    assert figures["p99_ms"][2] == pytest.approx(np.nanpercentile(requests["latency_ms"], 99))
    answered_in_time = np.nan_to_num(requests["latency_ms"], nan=np.inf) <= requests["limit_ms"]
    with_limit = ~np.isnan(requests["limit_ms"].astype(float))
    assert figures["within_target"][2] == pytest.approx(answered_in_time[with_limit].mean())
    assert set(requests["status"]) == set(run.statuses())
    with failing(ArgumentError, field="what", given="jobs"):
        run.to_csv(tmp_path / "x.csv", "jobs")  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_has_the_columns(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    if library == "polars":
        monkeypatch.setitem(sys.modules, "pandas", None)
    run = simulate([net()], Poisson(2000, "net", duration=0.02), "fifo")
    frame = run.to_dataframe("requests")
    assert type(frame).__module__.startswith(library)
    assert list(frame.columns) == list(COLUMNS["requests"])
    assert len(frame) == len(run.jobs)


def test_without_a_library_for_data_frames_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, library, None)
    run = simulate([net()], Poisson(2000, "net", duration=0.01), "fifo")
    with failing(ArgumentError, field="pandas"):
        run.to_dataframe()


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
def test_occupancy_covers_the_whole_run_however_long_it_goes_on(fidelity: Fidelity) -> None:
    load = burst(300 if fidelity == "segments" else 60)
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
    result = simulate([net()], requests(), "fifo")
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
    with failing(PaellaError, field=field):
        simulate([net()], Poisson(1, "net"), **options)


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


@pytest.mark.parametrize(("fidelity", "seed"), [("segments", 0), ("segments", 1), ("blocks", 0)])
def test_a_short_model_stays_short_beside_a_flood_of_long_ones(fidelity: Fidelity, seed: int) -> None:
    segments, seconds = (80, 0.5) if fidelity == "segments" else (20, 0.01)
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


def test_results_that_contradict_themselves_are_not_returned() -> None:
    run = simulate([net()], ClosedLoop("net", clients=2, duration=0.005) + Poisson(1000, "net", duration=0.005), "fifo")
    check_in_turn(run.jobs)
    check_gpu_time(run.gpu_ms)
    sent = run.jobs["arrival_ns"][run.jobs["source"] < 0]
    check_conserved(sent, sent[::-1])
    with failing(SimulationError, field="requests"):
        check_conserved(sent, sent[1:])
    with failing(SimulationError, field="times"):
        check_ordered(sent, sent - 1)
    early = run.jobs.copy()
    early["finish_ns"] += 10**6
    with failing(SimulationError, field="times"):
        check_in_turn(early)
    with failing(SimulationError, field="models"):
        check_gpu_time({**run.gpu_ms, "models": {"net": 0.99 * run.gpu_ms["busy"][""]}})
