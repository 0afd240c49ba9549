"""Entry points and their parts: the types, results and errors that Numba has without our linking."""

from __future__ import annotations

import gc
from typing import Any

import numba
import numpy as np
import pytest

from paellapy.instrument.numba_ext.link import compiled, loop, part

pytestmark = pytest.mark.versions


@part
def widen(n: int) -> float:
    """The type of `total` is known only once the loop's end is seen."""
    total = 0
    for k in range(n):
        total = total + 0.5 * k
    return total


@part
def branch(x: float, whole: bool) -> float:
    found = 1
    if whole:
        found = x
    while found > 10:
        found = found / 2
    return found


def both(n: int, x: float, whole: bool) -> float:
    return widen(n) + branch(x, whole)


def index(table: Any, k: int) -> Any:
    row = table[k]
    row.count += 1
    table[0].count = table[k].count + row.count
    return row.count + table[0].size ** 2


def test_a_variable_gets_the_type_of_all_its_values() -> None:
    entry = compiled(both)
    for given in ((0, 3.0, True), (4, 100.0, True), (5, 2.5, False)):
        expected = widen.py_func(given[0]) + branch.py_func(*given[1:])  # type: ignore[attr-defined]
        assert entry(*given) == expected
    assert [made.signature.return_type for made in entry.overloads.values()] == [numba.float64]  # type: ignore[attr-defined]


def test_records_are_read_and_written_as_in_python() -> None:
    kind = np.dtype([("count", "i8"), ("size", "f8")])
    ours, theirs = (np.zeros(3, kind) for _ in range(2))
    ours["size"] = theirs["size"] = 1.5
    assert compiled(index)(ours, 2) == numba.njit(index)(theirs, 2)
    assert (ours == theirs).all()


def test_the_garbage_collector_is_left_as_it_was() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            compiled(lambda x: x + 1)(1)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def scaled(x: Any, factor: float, out: Any) -> None:
    for i in range(out.size):
        out[i] = x[i] * factor


def test_loops_compute_as_in_python() -> None:
    x, out, expected = np.arange(37.0), np.zeros(37), np.zeros(37)
    loop(scaled)(x, 2.5, out)
    scaled(x, 2.5, expected)
    assert (out == expected).all()


def missing(x: int) -> Any:
    return x.missing_attribute  # type: ignore[attr-defined]


def test_an_error_of_types_names_the_cause_and_the_place() -> None:
    with pytest.raises(numba.core.errors.TypingError) as raised:
        compiled(missing)(1)
    assert raised.value.loc.filename == __file__
    assert raised.value.loc.line == missing.__code__.co_firstlineno + 1


def test_a_compiled_function_keeps_no_types_of_its_variables() -> None:
    entry: Any = compiled(both)
    entry(1, 2.0, True)
    for function in (entry, widen, branch):
        for made in function.overloads.values():  # type: ignore[attr-defined]
            assert made.fndesc.typemap is None
            assert made.fndesc.calltypes is None
