"""Bytes of requests that a process holds: a sum with a limit, so that slow clients cannot use up its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paellapy.serving.errors import RefusedError

RETRY_S = 1.0


class Held:
    """The sum over all requests.

    >>> held = Held(100)
    >>> held.change(0, 60), held.nbytes
    (None, 60)
    >>> held.change(0, 60)
    Traceback (most recent call last):
    paellapy.serving.errors.RefusedError: 60 of at most 100 bytes of requests are held: try again
    """

    __slots__ = ("full", "most_bytes", "nbytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self.full = 0  # requests refused for lack of room

    def change(self, before: int, after: int) -> None:
        """A request holds `after` bytes in place of `before`. RefusedError: there is no room for more."""
        more = after - before
        if more > 0 and self.nbytes + more > self.most_bytes:
            self.full += 1
            said = f"{self.nbytes:,} of at most {self.most_bytes:,} bytes of requests are held: try again"
            raise RefusedError(said, "overloaded", RETRY_S)
        self.nbytes += more

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """For one request: yields a function that sets the number of bytes that it holds."""
        held = 0

        def claim(nbytes: int) -> None:
            nonlocal held
            self.change(held, nbytes)
            held = nbytes

        try:
            yield claim
        finally:
            claim(0)
