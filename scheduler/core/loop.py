"""Sleeping and waking: an eventfd with a flag beside it, so that ringing a loop that is awake needs no system call."""

from __future__ import annotations

import os

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import exchange_at, fence, load_at, store_at
from paellapy.scheduler.core.tables import Words

# Values of the word beside a bell: the loop is awake; it sleeps, and everything wakes it; it sleeps, and everything
# wakes it except outputs that were read, because no request waits for their lanes.
AWAKE, ANYTHING, REQUESTS = np.uint64(0), np.uint64(1), np.uint64(2)


@part
def wakes(word: int, for_request: bool) -> bool:
    """Whether the caller has to write to the bell's descriptor.

    Work that was posted before is visible to a loop that armed the bell after. Only the first caller that rings has to
    write; the loop looks at everything when it wakes.
    """
    fence()
    seen = load_at(word)
    if seen == AWAKE or (seen == REQUESTS and not for_request):
        return False
    return bool(exchange_at(word, seen, AWAKE))


@part
def ask(word: int, value: np.uint64) -> None:
    """Announces that the caller is about to sleep. The caller looks for work once more after this."""
    store_at(word, value)
    fence()


@part
def arm(word: int, for_anything: bool) -> None:
    ask(word, ANYTHING if for_anything else REQUESTS)


class Bell:
    """Wakes one sleeping loop. The loop arms the bell, looks for work once more, and only then sleeps.

    No work is lost: work that was posted before the bell was armed is seen by the second look, and later work rings it.
    """

    def __init__(self, word: Words, blocking: bool = False, fd: int = -1) -> None:
        """`blocking`: for a loop that sleeps by reading the descriptor. `fd`: that of a loop in another process."""
        self.fd = fd if fd >= 0 else os.eventfd(0, os.EFD_CLOEXEC | (0 if blocking else os.EFD_NONBLOCK))
        self.word = word

    @property
    def armed(self) -> bool:
        return bool(self.word[0])

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)
