"""The interfaces between a connection of the fast path and its requests: a server answers them, a router
forwards them.
"""

from __future__ import annotations

from typing import Any, Protocol

from paellapy.serving.fast_path.head import Head, Heads
from paellapy.serving.inference import Pieces


class Work(Protocol):
    """One request, from its header to its answer."""

    head: Head

    def look(self) -> Any:
        """Called before the body arrives; PaellaError if the request is refused."""

    def claim(self, nbytes: int) -> None:
        """Called before the body takes that many bytes of memory; PaellaError if there is no room."""

    def start(self, body: memoryview, json_length: str | None) -> None:
        """Called with the complete body. The connection may reuse the body's memory when this returns."""

    def fail(self, error: Exception) -> None: ...

    def leave(self) -> None:
        """Called when the client has left."""

    def settle(self) -> None:
        """Called when the request is answered or cancelled: the connection may go on to the next."""


class Client(Protocol):
    """The connection that gets the answer."""

    @property
    def closing(self) -> bool:
        """Whether its next answer is its last."""

    def send(self, work: Any, answer: Pieces, close: bool) -> None:
        """Sends an answer; called in the loop's thread. The caller may reuse the pieces' memory when this returns."""


class Way(Protocol):
    """State that all connections of a server share."""

    heads: Heads
    buffer: memoryview
    body_timeout_s: float | None

    def is_doubtful(self, head: Head, raw: bytes) -> bool:
        """Whether a long body exceeds the limit, or may not be read yet. aiohttp then handles the request: it can ask
        others first, and refuse the body without losing the answer.
        """

    def begin(self, client: Client, head: Head, raw: bytes) -> Work:
        """Makes a request from its header; `raw` are the header's bytes."""
