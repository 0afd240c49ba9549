"""Tables behind one address: in compiled code they are what they are in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.instrument.numba_ext.tables import TableSet, table, table_set

pytestmark = [pytest.mark.quick, pytest.mark.versions]

ROW = np.dtype([("count", "i8"), ("weight", "f8")], align=True)


@table_set
class Shelf(TableSet):
    row: NDArray[Any] = table(ROW, "rows")
    grid: NDArray[np.int64] = table(np.int64, "rows", "columns")
    cube: NDArray[np.float64] = table(np.float64, "rows", "columns", 2)


def shelf(rows: int = 4, columns: int = 3) -> Shelf:
    cells = rows * columns
    return Shelf(
        row=np.zeros(rows, ROW),
        grid=np.arange(cells).reshape(rows, columns),
        cube=np.arange(2.0 * cells).reshape(rows, columns, 2),
    )


@part
def add(column: Any, i: int, weight: float) -> None:
    column[i] += weight


@compiled
def change(s: Shelf, i: int, j: int) -> float:
    r = s.row[i]
    r.count += s.grid[i, j]
    s.row[0].count += 100
    add(s.row["weight"], i, 0.5)
    s.grid[i, j] = -s.grid[i, j]
    s.cube[i, j, 1] = 7.0
    s.grid[i][0] += 1000
    s.cube[0:1, :, 0] = 2.5
    return float(s.cube[i, j, 0] + s.grid.shape[1] + (s.row.ctypes.data == s.row[0:].ctypes.data))


def changed(s: Shelf, i: int, j: int) -> float:
    """The same in Python."""
    s.row["count"][i] += s.grid[i, j]
    s.row["count"][0] += 100
    s.row["weight"][i] += 0.5
    s.grid[i, j] *= -1
    s.cube[i, j, 1] = 7.0
    s.grid[i, 0] += 1000
    s.cube[0:1, :, 0] = 2.5
    return float(s.cube[i, j, 0] + s.grid.shape[1] + 1)


@given(some.data())
def test_compiled_code_reads_and_writes_what_python_does(data: some.DataObject) -> None:
    rows, columns = data.draw(some.integers(1, 6)), data.draw(some.integers(1, 6))
    i, j = data.draw(some.integers(0, rows - 1)), data.draw(some.integers(0, columns - 1))
    ours, expected = shelf(rows, columns), shelf(rows, columns)
    assert change(ours, i, j) == changed(expected, i, j)
    for name in ("row", "grid", "cube"):
        assert np.array_equal(getattr(ours, name), getattr(expected, name))


def test_a_replaced_table_is_seen_and_the_others_are_shared() -> None:
    first = shelf()
    second = first._replace(row=np.ones(9, ROW))
    change(second, 8 % 4, 0)
    assert first.row["count"].tolist() == [0, 0, 0, 0]
    assert second.row["count"][0] > 100
    assert second.grid is first.grid


def test_what_compiled_code_would_read_wrongly_is_refused() -> None:
    with pytest.raises(TypeError, match="grid"):
        shelf()._replace(grid=np.zeros((4, 3), np.int32))
    with pytest.raises(TypeError, match="contiguous"):
        shelf()._replace(grid=np.zeros((3, 4), np.int64).T)
    with pytest.raises(TypeError, match="dimensions"):
        shelf()._replace(grid=np.zeros(12, np.int64))


def test_a_set_cannot_lose_a_table_that_compiled_code_uses() -> None:
    with pytest.raises(AttributeError):
        shelf().grid = np.zeros((4, 3), np.int64)  # type: ignore[misc]
