"""Requests as a connection of the short way knows them: a server answers them, a router hands them on."""

from __future__ import annotations

from typing import Any, Protocol

from paellapy.serving.fast_path.head import Head, Heads
from paellapy.serving.inference import Pieces


class Work(Protocol):
    """One request, from its header to its answer."""

    head: Head

    def look(self) -> Any:
        """Before its body is here: PaellaError where nobody wants that."""

    def start(self, body: memoryview, json_length: str | None) -> None:
        """All of it is here. The body's memory is the connection's own again when this returns."""

    def fail(self, error: Exception) -> None: ...

    def leave(self) -> None:
        """Its client has left."""

    def settle(self) -> None:
        """It is answered, or nobody waits for it: the connection goes on to the next."""


class Client(Protocol):
    """Who is answered: a connection."""

    @property
    def closing(self) -> bool:
        """Its next answer is its last."""

    def send(self, work: Any, answer: Pieces, close: bool) -> None:
        """In the loop's thread. The pieces' memory is the caller's again when this returns."""


class Way(Protocol):
    """What all connections of a server have in common."""

    heads: Heads
    buffer: memoryview
    body_timeout_s: float | None

    def is_too_large(self, head: Head) -> bool:
        """aiohttp says so then, and ends the connection without losing the answer."""

    def begin(self, client: Client, head: Head, raw: bytes) -> Work:
        """A request whose header, `raw`, has come."""
