"""The loops NumPy has no call for, compiled by Numba (cached on disk, without the GIL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

    def jit(fn: Callable[..., Any]) -> Callable[..., Any]: ...
else:
    jit = njit(cache=True, nogil=True)

KINDS = {"add": 0, "fadd": 0, "max": 1, "umax": 1, "min": 2, "umin": 2, "and": 3, "or": 4, "xor": 5, "exch": 6}


@jit
def copy_runs(source: Any, target: Any, source_start: Any, target_start: Any, length: Any) -> None:
    """target[t : t + n] = source[s : s + n] for every run (s, t, n), in order."""
    for i in range(length.size):
        s, t = source_start[i], target_start[i]
        for k in range(length[i]):
            target[t + k] = source[s + k]


@jit
def atomic(memory: Any, index: Any, value: Any, kind: int, old: Any) -> None:
    """memory[index[i]] = op(memory[index[i]], value[i]) in order, with the old values kept in `old`."""
    for i in range(index.size):
        at = index[i]
        was = memory[at]
        old[i] = was
        v = value[i]
        if kind == 0:
            memory[at] = was + v
        elif kind == 1:
            memory[at] = max(was, v)
        elif kind == 2:
            memory[at] = min(was, v)
        elif kind == 6:
            memory[at] = v


@jit
def atomic_bits(memory: Any, index: Any, value: Any, kind: int, old: Any) -> None:
    """The bitwise kinds, which floats do not have."""
    for i in range(index.size):
        at = index[i]
        was = memory[at]
        old[i] = was
        if kind == 3:
            memory[at] = was & value[i]
        elif kind == 4:
            memory[at] = was | value[i]
        elif kind == 5:
            memory[at] = was ^ value[i]


@jit
def compare_and_swap(memory: Any, index: Any, expected: Any, value: Any, old: Any) -> None:
    for i in range(index.size):
        at = index[i]
        old[i] = memory[at]
        if memory[at] == expected[i]:
            memory[at] = value[i]
