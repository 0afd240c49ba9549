"""Compiled loops over `range` visit the numbers that Python's visit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paellapy.instrument.jit import compiled


@compiled
def visited(start: int, stop: int, step: int, into: NDArray[np.int64]) -> int:
    """The number of values, which it writes; and in the last places, sums over ranges without a step."""
    n = 0
    for k in range(start, stop, step):
        into[n] = k
        n += 1
    for k in range(start, stop):
        if k == 7:
            break
        into[-1] += k
    for k in range(stop):
        for j in range(k):
            into[-2] += j
    return n


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-7, 7).filter(bool))
def test_ranges_are_pythons(start: int, stop: int, step: int):
    into = np.zeros(50, np.int64)
    n = visited(start, stop, step, into)
    assert into[:n].tolist() == list(range(start, stop, step))
    before_seven = [k for k in range(start, stop) if start > 7 or k < 7]
    assert into[-1] == sum(before_seven)
    assert into[-2] == sum(sum(range(k)) for k in range(stop))
