"""Bytes of requests that a router holds: a sum with a limit, so that slow clients cannot use up its memory."""

from __future__ import annotations

from paellapy.serving.errors import RefusedError

HELD_BYTES = 256_000_000  # of one router
RETRY_S = 1.0


class Held:
    """The sum over all requests. Bytes count from their arrival until no engine needs them any more.

    >>> held = Held(100)
    >>> held.change(0, 60), held.nbytes
    (None, 60)
    >>> held.change(0, 60)
    Traceback (most recent call last):
    paellapy.serving.errors.RefusedError: this router holds 60 of at most 100 bytes of requests: try again
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
            said = f"this router holds {self.nbytes:,} of at most {self.most_bytes:,} bytes of requests: try again"
            raise RefusedError(said, "overloaded", RETRY_S)
        self.nbytes += more
