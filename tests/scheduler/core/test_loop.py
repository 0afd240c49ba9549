"""Bells between threads: a sleeper sees the work or is rung for, on machines that reorder stores and loads too."""

from __future__ import annotations

import threading

import numba
import numpy as np

from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.rings import ANYTHING, AWAKE, announce_sleep, must_ring

ROUNDS = 3000
APART = 16  # words between two that are shared: a cache line and more, so that they may be reordered


@numba.njit(nogil=True)
def posts(bell, post, begun, ended, rang):
    for k in range(1, len(rang)):
        while load_at(begun) != np.uint64(k):
            pass
        store_at(post, np.uint64(k))
        rang[k] = must_ring(bell, False)
        store_at(ended, np.uint64(k))


@numba.njit(nogil=True)
def sleeps(bell, post, begun, ended, seen):
    for k in range(1, len(seen)):
        store_at(bell, AWAKE)
        store_at(begun, np.uint64(k))
        announce_sleep(bell, ANYTHING)
        seen[k] = load_at(post) == np.uint64(k)
        while load_at(ended) != np.uint64(k):
            pass


def test_nobody_sleeps_over_work_that_was_posted():
    words = np.zeros(4 * APART, np.uint64)
    shared = [np.uint64(words.ctypes.data + 8 * APART * k) for k in range(4)]
    rang, seen = (np.ones(ROUNDS + 1, np.bool_) for _ in range(2))
    poster = threading.Thread(target=posts, args=(*shared, rang), daemon=True)
    sleeps(*shared, seen[:1])  # compiled before the race
    posts(*shared, rang[:1])
    poster.start()
    sleeps(*shared, seen)
    poster.join()
    assert (rang | seen).all()
