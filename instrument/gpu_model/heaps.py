"""Priority queues over NumPy arrays, for compiled code: a binary heap, and a tournament tree with changeable keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@part
def heap_push(keys: Floats, ids: Ints, base: int, count: int, key: float, identity: int) -> None:
    """Adds to the heap of `count` entries that starts at `base`; the caller keeps the count. Ties go to the lower id.
    """
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


@part
def heap_pop(keys: Floats, ids: Ints, base: int, count: int) -> None:
    """Removes the least of `count` entries, which the caller has read at `base`."""
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


@part
def tree_set(keys: Floats, leaf: int, key: float) -> None:
    """Changes one leaf's key; `keys[1]` is then the least of all."""
    node = leaf + keys.shape[0] // 2
    keys[node] = key
    while node > 1:
        node >>= 1
        a = keys[2 * node]
        b = keys[2 * node + 1]
        least = a if a <= b else b
        if keys[node] == least:
            break
        keys[node] = least


@part
def tree_first(keys: Floats) -> int:
    """The leaf with the least key, the lowest leaf on a tie."""
    width: int = keys.shape[0] // 2
    node = 1
    while node < width:
        node *= 2
        if keys[node] > keys[node + 1]:
            node += 1
    return node - width


@part
def tree_rebuild(keys: Floats) -> None:
    """Recomputes the tree after its leaves, the upper half of `keys`, were written directly."""
    for node in range(keys.shape[0] // 2 - 1, 0, -1):
        a = keys[2 * node]
        b = keys[2 * node + 1]
        keys[node] = a if a <= b else b


def new_tree(leaves: int) -> Floats:
    """A tree with room for this many leaves, all at infinity.

    >>> len(new_tree(3))
    8
    """
    return np.full(2 << max(1, leaves - 1).bit_length(), np.inf)
