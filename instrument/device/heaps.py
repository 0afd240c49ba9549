"""Priority queues over NumPy arrays, for compiled code: a binary heap, and a tournament tree with changeable keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# Reference counts on the arrays of a state cost ten times the work done on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Compile an entry point: no Python objects, free of the GIL, kept on disk between runs."""
    result: Function = numba.njit(cache=True, **_OPTIONS)(function)
    return result


def inlined(function: Function) -> Function:
    """A part of entry points, folded into them: passing a state of thirty arrays costs more than most bodies.

    It has no wrapper of its own, so Python reaches it as `.py_func` only. It is on disk with the entry points, and not
    by itself.
    """
    result: Function = numba.njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function)
    return result


@inlined
def heap_push(keys: Floats, ids: Ints, base: int, count: int, key: float, identity: int) -> None:
    """Add to the heap of `count` entries that starts at `base`; the caller keeps the count. Ties go to the lower id."""
    i = count
    while i > 0:
        up = (i - 1) >> 1
        k = keys[base + up]
        if k < key or (k == key and ids[base + up] <= identity):
            break
        keys[base + i] = k
        ids[base + i] = ids[base + up]
        i = up
    keys[base + i] = key
    ids[base + i] = identity


@inlined
def heap_pop(keys: Floats, ids: Ints, base: int, count: int) -> None:
    """Remove the least of `count` entries, which the caller has read at `base`."""
    last = count - 1
    key = keys[base + last]
    identity = ids[base + last]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= last:
            break
        right = down + 1
        if right < last:
            a = keys[base + down]
            b = keys[base + right]
            if b < a or (b == a and ids[base + right] < ids[base + down]):
                down = right
        k = keys[base + down]
        if key < k or (key == k and identity <= ids[base + down]):
            break
        keys[base + i] = k
        ids[base + i] = ids[base + down]
        i = down
    keys[base + i] = key
    ids[base + i] = identity


@inlined
def tree_set(keys: Floats, winners: Ints, leaf: int, key: float) -> None:
    """Change one key; `winners[1]` is then the leaf with the least key, the lowest leaf on a tie."""
    keys[leaf] = key
    node = (leaf + keys.shape[0]) >> 1
    while node >= 1:
        a = winners[2 * node]
        b = winners[2 * node + 1]
        winner = a if keys[a] <= keys[b] else b
        if winners[node] == winner and winner != leaf:
            break
        winners[node] = winner
        node >>= 1


@inlined
def tree_rebuild(keys: Floats, winners: Ints) -> None:
    for node in range(keys.shape[0] - 1, 0, -1):
        a = winners[2 * node]
        b = winners[2 * node + 1]
        winners[node] = a if keys[a] <= keys[b] else b


def new_tree(leaves: int) -> tuple[Floats, Ints]:
    """Keys (all infinite) and winners of a tree with room for `leaves`.

    >>> keys, winners = new_tree(3)
    >>> len(keys), int(winners[1])
    (4, 0)
    """
    width = 1 << max(1, leaves - 1).bit_length()
    winners = np.zeros(2 * width, np.int64)
    first = np.arange(width)
    while len(first) > 0:  # all keys tie, so each node's winner is the first leaf below it
        winners[len(first) : 2 * len(first)] = first
        first = first[::2] if len(first) > 1 else first[:0]
    return np.full(width, np.inf), winners
