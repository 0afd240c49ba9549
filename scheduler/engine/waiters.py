"""Waiters: objects on which threads sleep until their own request or event is done."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref


class Waiter:
    """An object that a thread sleeps on until its own request or event is done."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.done = False
        self._thread = threading.get_ident()
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        self.done = True
        if threading.get_ident() != self._thread:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        self.done = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


_local = threading.local()


def thread_waiter() -> Waiter:
    """This thread's waiter. It is created once, because its eventfd takes a file descriptor."""
    waiter: Waiter | None = getattr(_local, "waiter", None)
    if waiter is None:
        waiter = _local.waiter = Waiter()
    waiter.clear()
    return waiter
