"""Sleeping and waking: an eventfd with a flag beside it, so that ringing at a loop that is awake is no system call."""

from __future__ import annotations

import os
import select
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from instrument.device.heaps import compiled, inlined
from scheduler.atomics import add_at, exchange_at, load_at, store_at
from scheduler.state import Words

# What the word beside a bell says: the loop is awake; it sleeps, and everything is to wake it; or everything but
# outputs that have been read, because nobody waits for their lanes.
AWAKE, ANYTHING, REQUESTS = np.uint64(0), np.uint64(1), np.uint64(2)


@inlined
def wakes(word: int, for_request: bool) -> bool:
    """Whether the caller has to write to the bell's descriptor.

    A full barrier: what was posted before is visible to a loop that armed the bell after. Only the first of those who
    ring has to write; the loop looks at everything when it wakes.
    """
    return bool(exchange_at(word, ANYTHING, AWAKE)) or (for_request and bool(exchange_at(word, REQUESTS, AWAKE)))


@inlined
def arm(word: int, for_anything: bool) -> None:
    store_at(word, ANYTHING if for_anything else REQUESTS)
    add_at(word, 0)  # a full barrier


@compiled
def _disarms(word: np.ndarray) -> bool:
    return wakes(word.ctypes.data, True)


@compiled
def _set(word: np.ndarray, value: int) -> None:
    store_at(word.ctypes.data, value)
    add_at(word.ctypes.data, 0)


@compiled
def store_word(address: int, value: int) -> None:
    """Write a completion word."""
    store_at(np.uint64(address), np.uint64(value))


@compiled
def load_word(address: int) -> int:
    return int(load_at(np.uint64(address)))


def notice_edits(*entries: Any, also: tuple[ModuleType, ...] = ()) -> None:
    """The disk cache looks at the file of an entry point only: let it see the core that is folded into it too."""
    folder = Path(__file__).parent
    for entry in entries:
        own = Path(entry.py_func.__code__.co_filename)
        files = [own, *sorted(folder.glob("core*.py")), folder / "state.py", folder / "atomics.py"]
        files += [Path(module.__file__ or "") for module in also]
        stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
        cache: Any = getattr(entry, "_cache", None)
        if hasattr(cache, "_cache_file"):
            cache._cache_file._source_stamp = stamp


notice_edits(_disarms, _set, store_word, load_word)


class Bell:
    """Wakes one sleeping loop. The loop arms it, looks for work once more, and only then sleeps.

    Looking after arming is what makes it safe: whoever posts work either did so before, and it is seen, or rings.
    """

    def __init__(self, blocking: bool = False, word: Words | None = None, fd: int = -1) -> None:
        """`blocking`: for a loop that sleeps in compiled code, by reading the descriptor.

        `word` and `fd` are those of a loop in another process.
        """
        self.fd = fd if fd >= 0 else os.eventfd(0, os.EFD_CLOEXEC | (0 if blocking else os.EFD_NONBLOCK))
        self.word = np.zeros(8, np.uint64) if word is None else word
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    @property
    def armed(self) -> bool:
        return bool(self.word[0])

    def arm(self) -> None:
        _set(self.word, 1)

    def disarm(self) -> None:
        _set(self.word, 0)

    def ring(self) -> None:
        """From any thread, after the work is posted."""
        if self.fd >= 0 and _disarms(self.word):
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
