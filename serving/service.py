"""`Service`: one engine behind HTTP, and everything a handler needs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from paellapy.scheduler.engine.door import Door
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.serving.admission import Admission, Mode
from paellapy.serving.calls import Calls, LoggedMonitor
from paellapy.serving.counters import Counters
from paellapy.serving.held import Held
from paellapy.serving.registry import READY, Catalogue, Registry
from paellapy.serving.remote_monitor import RemoteMonitor
from paellapy.serving.suspects import Suspects

HELD_BYTES = 1_000_000_000  # where held_mb is not set
Call = Callable[..., Awaitable[Any]]


class Live(Protocol):
    """A request that the engine is working on."""

    name: str

    def is_past_deadline(self) -> bool: ...

    def abandon(self, error: Exception) -> None:
        """Answers it without the engine."""


class Service:
    """`registry` says which models may be served; `draining` is set when the server is about to stop."""

    def __init__(
        self,
        registry: Catalogue,
        admission: Mode,
        max_body_bytes: int,
        body_timeout_s: float | None,
        counters: Counters | None = None,
        call: Call | None = None,
        since: float | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        """`call` reaches the engine if it is in another process; `since` is the server's start, if not now."""
        self.suspects = Suspects() if suspects is None else suspects  # `or` would replace an empty one, which is false
        self.registry = registry
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s
        self.counters = counters or Counters(registry)
        self.admission = Admission(self.engine, admission)
        self.door = Door(self.engine)
        self.held = Held(HELD_BYTES)
        self.draining = False
        self.live: set[Live] = set()  # requests that the engine is working on
        self.silent = self.hung = False  # the engine does not respond, and has been given up: heartbeat.py
        self.since = time.time() if since is None else since
        if call is None:
            assert isinstance(registry, Registry)
            call = Calls(registry).call
        self.call = call

    @property
    def engine(self) -> Engine | RemoteEngine:
        return self.registry.engine

    @property
    def in_flight(self) -> int:
        """Inference requests being handled, of all workers together."""
        return self.counters.in_flight

    @property
    def ready(self) -> bool:
        """Whether every wanted model is loaded and the server is not about to stop."""
        engine = self.engine
        return (
            not self.draining
            and not self.silent
            and engine.failure is None
            and (isinstance(engine, Engine) or engine.link is not None)
            and all(e.state == READY for e in self.registry.entries.values() if e.wanted)
        )

    def monitor(self) -> Monitor | RemoteMonitor:
        """A monitor of the engine, for the dashboard."""
        engine = self.engine
        return LoggedMonitor(engine) if isinstance(engine, Engine) else RemoteMonitor(engine, self.call)

    def close(self) -> None:
        self.counters.close()
