"""Recorded arrivals: from CSV files and rows, with errors that name the file or the row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import TraceWorkload, WorkloadError

pytestmark = pytest.mark.quick


def net(name: str = "net") -> ModelProfile:
    return ModelProfile(name, {1: [SegmentProfile(50e3, 66, 66 * 8, 66 * 8192, 0, 5)] * 4})


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


@pytest.mark.parametrize(
    "text",
    [
        "time,model\n1,a\n",
        "t,model\nsoon,a\n",
        "t,model\nnan,a\n",
        "t,model\ninf,a\n",
        "t,model\n-1,a\n",
        "model,t\na\n",
        "t,model,priority\n1,a,high\n",
        "t,model,deadline\n1,a,inf\n",
        "t,model,priority\n1,a,3000000000\n",
        "t,model\n1e12,a\n",
        "\xff\xfe",
    ],
)
def test_a_wrong_trace_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(WorkloadError) as caught:
        TraceWorkload.from_csv(path)
    assert caught.value.where.startswith(str(path))


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkloadError) as caught:
        TraceWorkload.from_csv("missing.csv")
    assert caught.value.where == "missing.csv"


def test_the_rows_of_a_trace_may_come_in_any_order() -> None:
    rows = ((3e-3, "net", None, None, 2), (1e-3, "net", 5.0, None, 1), (2e-3, "net", None, 1, 0))
    runs = [simulate([net()], TraceWorkload(each), "fifo").jobs for each in (rows, tuple(sorted(rows)))]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0]["arrival_ns"].tolist() == [1_000_000, 2_000_000, 3_000_000]


@pytest.mark.parametrize(
    "row",
    [
        (-1.0, "m", None, None, 0),
        (float("nan"), "m", None, None, 0),
        ("soon", "m", None, None, 0),
        (0.0, "m", float("nan"), None, 0),
        (0.0, "m", -1.0, None, 0),
        (0.0, 3, None, None, 0),
        (0.0, "m", None, "high", 0),
        (0.0, "m", None, 1 << 40, 0),
        (1e12, "m", None, None, 0),
        (0.0, "m", 1e20, None, 0),
        (0.0, "m"),
        0.0,
    ],
)
def test_a_wrong_row_of_a_trace_is_named(row: object) -> None:
    with pytest.raises(WorkloadError) as caught:
        TraceWorkload(((0.0, "m", None, None, 0), row))  # type: ignore[arg-type]
    assert caught.value.where == "row 1 of the trace"


def test_a_trace_from_a_spreadsheet_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,model\n0.001,a\n", encoding="utf-8-sig")
    assert len(TraceWorkload.from_csv(path).rows) == 1


def test_clients_may_have_large_numbers() -> None:
    rows = [(1e-3 * k, "net", None, None, client) for k, client in enumerate((5, 10**12, "alice", 10**12 + 1))]
    found = simulate([net()], TraceWorkload(tuple(rows)), "fifo")
    assert sorted(found.clients) == ["1000000000000", "1000000000001", "5", "alice"]
    assert all(each.completed == 1 for each in found.per_tenant)
