"""Sleeping and waking: an eventfd with a flag beside it, so that ringing at a loop that is awake is no system call."""

from __future__ import annotations

import os
import select

import numpy as np

from instrument.device.heaps import compiled
from scheduler.atomics import add_at, call_write, load_at, store_at


@compiled
def _armed(word: np.ndarray) -> bool:
    # Adding nothing is a full barrier: what was posted before is visible to a loop that armed the bell after.
    return bool(add_at(word.ctypes.data, 0) != 0)


@compiled
def _set(word: np.ndarray, value: int) -> None:
    store_at(word.ctypes.data, value)
    add_at(word.ctypes.data, 0)


@compiled
def ring_bell(word: np.ndarray, descriptor: int, write: int, scratch: np.ndarray) -> None:
    """`Bell.ring` for compiled front ends: `write` is the address of the C function, `scratch` one int64."""
    if add_at(word.ctypes.data, 0) != 0:
        scratch[0] = 1
        call_write(np.uint64(write), np.int32(descriptor), scratch.ctypes.data, np.uint64(8))


@compiled
def store_word(address: int, value: int) -> None:
    """Write a completion word."""
    store_at(np.uint64(address), np.uint64(value))


@compiled
def load_word(address: int) -> int:
    return int(load_at(np.uint64(address)))


class Bell:
    """Wakes one sleeping loop. The loop arms it, looks for work once more, and only then sleeps.

    Looking after arming is what makes it safe: whoever posts work either did so before, and it is seen, or rings.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.word = np.zeros(8, np.uint64)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self.armed = False

    def arm(self) -> None:
        _set(self.word, 1)
        self.armed = True

    def disarm(self) -> None:
        _set(self.word, 0)
        self.armed = False

    def ring(self) -> None:
        """From any thread, after the work is posted."""
        if self.fd >= 0 and _armed(self.word):
            os.eventfd_write(self.fd, 1)

    def sleep(self, timeout_s: float | None) -> None:
        """Until somebody rings, or the time is over."""
        # poll counts in milliseconds; a shorter wait is a look at the clock and another round.
        if timeout_s is None or timeout_s >= 1e-3:
            self._poll.poll(None if timeout_s is None else timeout_s * 1e3)
        elif timeout_s > 0:
            select.select([self.fd], [], [], timeout_s)
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)
