"""Answers that clients have not taken yet. Beyond a limit, the client that takes longest is disconnected."""

from __future__ import annotations

from typing import Protocol


class Slow(Protocol):
    """A connection whose client does not take its answer at once."""

    def abort(self) -> None: ...


class Unsent:
    """Unsent bytes of each connection, the longest waiting one first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._waiting: dict[Slow, int] = {}

    def begin(self, connection: Slow, nbytes: int) -> None:
        """The connection waits with that many bytes. A single one may have more than the limit."""
        self.nbytes += nbytes - self._waiting.get(connection, 0)
        self._waiting[connection] = nbytes
        while self.nbytes > self.most_bytes and len(self._waiting) > 1:
            slowest = next(iter(self._waiting))
            self.end(slowest)
            slowest.abort()

    def end(self, connection: Slow) -> None:
        """The connection has sent everything, or is lost."""
        self.nbytes -= self._waiting.pop(connection, 0)
