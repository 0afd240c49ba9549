"""Workloads: arrivals by rate, mix and seed, or recorded in CSV files and rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import failing
from sim_models import net

from paellapy.scheduler.core import codes
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import Background, ClosedLoop, Lognormal, Poisson, TraceWorkload, WorkloadError

pytestmark = pytest.mark.quick


def test_traces_come_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,model,deadline,priority,client\n0.002,b,,,\n0.001,a,5,2,3\n")
    found = TraceWorkload.from_csv(path).arrivals(["a", "b"], 0)
    assert found["time_ns"].tolist() == [1_000_000, 2_000_000]
    assert found["model"].tolist() == [0, 1]
    assert found["deadline_ns"].tolist() == [6_000_000, codes.NEVER]
    assert found["client"].tolist() == [3, 0]
    result = simulate([net("a"), net("b")], TraceWorkload.from_csv(path), "fifo")
    assert result.all.completed == 2


@pytest.mark.parametrize("text", [
    "time,model\n1,a\n", "t,model\nsoon,a\n", "t,model\nnan,a\n", "t,model\ninf,a\n", "t,model\n-1,a\n",
    "model,t\na\n", "t,model,priority\n1,a,high\n", "t,model,deadline\n1,a,inf\n",
    "t,model,priority\n1,a,5000000000000000000\n", "t,model\n1e12,a\n", "\xff\xfe",
])  # fmt: skip
def test_a_wrong_trace_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(WorkloadError) as caught:
        TraceWorkload.from_csv(path)
    assert caught.value.where.startswith(str(path))


def test_a_trace_that_is_not_there_is_named() -> None:
    with failing(WorkloadError, where="missing.csv"):
        TraceWorkload.from_csv("missing.csv")


def test_the_rows_of_a_trace_may_come_in_any_order() -> None:
    rows = ((3e-3, "net", None, None, 2), (1e-3, "net", 5.0, None, 1), (2e-3, "net", None, 1, 0))
    runs = [simulate([net()], TraceWorkload(each), "fifo").jobs for each in (rows, tuple(sorted(rows)))]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0]["arrival_ns"].tolist() == [1_000_000, 2_000_000, 3_000_000]


@pytest.mark.parametrize("row", [
    (-1.0, "m", None, None, 0), (float("nan"), "m", None, None, 0), ("soon", "m", None, None, 0),
    (0.0, "m", float("nan"), None, 0), (0.0, "m", -1.0, None, 0), (0.0, 3, None, None, 0),
    (0.0, "m", None, "high", 0), (0.0, "m", None, 1 << 62, 0), (1e12, "m", None, None, 0), (0.0, "m", 1e20, None, 0),
    (0.0, "m"), 0.0,
])  # fmt: skip
def test_a_wrong_row_of_a_trace_is_named(row: object) -> None:
    with failing(WorkloadError, where="row 1 of the trace"):
        TraceWorkload(((0.0, "m", None, None, 0), row))  # type: ignore[arg-type]


def test_a_trace_from_a_spreadsheet_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,model\n0.001,a\n", encoding="utf-8-sig")
    assert len(TraceWorkload.from_csv(path).rows) == 1


def test_clients_may_have_large_numbers() -> None:
    rows = [(1e-3 * k, "net", None, None, client) for k, client in enumerate((5, 10**12, "alice", 10**12 + 1))]
    found = simulate([net()], TraceWorkload(tuple(rows)), "fifo")
    assert sorted(found.clients) == ["1000000000000", "1000000000001", "5", "alice"]
    assert all(each.completed == 1 for each in found.per_tenant)


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
    (lambda: Poisson(10, "m", priority=1 << 62), "priority"),
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
    with failing(WorkloadError, field=field):
        make()


def test_every_part_of_a_workload_has_arrivals_of_its_own() -> None:
    a, b, c = (Poisson(1000, name) for name in "abc")
    for together in (a + b + c, a + (b + c), (a + b) + (c + a)):
        found = together.arrivals(["a", "b", "c"], 0)
        times = [set(found["time_ns"][found["model"] == m].tolist()) for m in range(3)]
        assert not times[0] & times[1] | times[1] & times[2] | times[0] & times[2]


def test_a_workload_is_combined_with_workloads_only() -> None:
    with pytest.raises(TypeError):
        Poisson(1000, "a") + 3  # type: ignore[operator]
