"""Gates: launches of this process wait while another process wants the GPU for itself.

The two processes share a block of words. The other process writes the time until which the gate is closed. A time in
the past means an open gate, so a process that dies leaves no gate closed for long. On the virtual GPU launches call
`hold` themselves; on a real one the driver's entry points do (`driver_cells`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Words of the block. The engine writes the first line, the guest the second.
CLOSED_UNTIL_NS, ALIVE_UNTIL_NS, SHARE = 0, 1, 2  # on CLOCK_MONOTONIC; the share in 2⁻²⁰
LAUNCHES, WAITS, WAITED_NS, CELLS = 8, 9, 10, 11  # CELLS: number of pointers to the driver that lead through the gate
IN_FLIGHT = 12  # kernels that a guest launches before it waits for its stream; 0: it never waits
WORDS = 16
SHARE_UNIT = 1 << 20
LEAST_SHARE = 0.01  # with less, the gate would be open for a shorter time than a waiting guest sleeps
PERIOD_NS = 10_000_000  # for a share below one: the gate is open for that fraction of each period
_SLEEP_S = 100e-6

hold: Callable[[], None] | None = None  # called by launches of the virtual GPU, if there is a gate


class Gate:
    """A gate for Python code."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words

    def closed(self, now_ns: int) -> bool:
        return closed_at(self.words, now_ns)

    def wait(self) -> None:
        """Waits until the gate is open."""
        words = self.words
        words[LAUNCHES] += np.uint64(1)
        now = began = time.monotonic_ns()
        while self.closed(now):
            time.sleep(_SLEEP_S)
            now = time.monotonic_ns()
        if now != began:
            words[WAITS] += np.uint64(1)
            words[WAITED_NS] += np.uint64(now - began)


def closed_at(words: NDArray[np.uint64], now_ns: int) -> bool:
    """Whether the gate is closed at this time.

    >>> words = np.zeros(WORDS, np.uint64)
    >>> words[CLOSED_UNTIL_NS] = 100
    >>> closed_at(words, 99), closed_at(words, 100)
    (True, False)
    """
    if now_ns < int(words[CLOSED_UNTIL_NS]):
        return True
    share = int(words[SHARE])
    if share >= SHARE_UNIT or now_ns >= int(words[ALIVE_UNTIL_NS]):
        return False
    return now_ns % PERIOD_NS * SHARE_UNIT >= share * PERIOD_NS


def keep_forever(it: Any) -> None:
    """Never frees an object that libraries use until the process ends, which is after the interpreter has ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(it))
