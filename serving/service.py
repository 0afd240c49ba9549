"""`Service`: one engine behind HTTP. Everything a handler needs, and the way of an inference through it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import DeadlineError, UnknownModelError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.models.model import Model
from paellapy.serving.admission import Admission, Mode
from paellapy.serving.calls import Calls, LoggedMonitor
from paellapy.serving.counters import Counters
from paellapy.serving.errors import RefusedError, status_of
from paellapy.serving.protocol import Request
from paellapy.serving.registry import READY, Catalogue, Registry
from paellapy.serving.remote_monitor import RemoteMonitor

Call = Callable[..., Awaitable[Any]]


def met_unload(name: str) -> RefusedError:
    """The engine has no such model any more: it was there when the request was looked at."""
    said = f"model {name!r} was unloaded before the request could run: ask again, it may be being loaded anew"
    return RefusedError(said, "loading", retry_after_s=2.0)


class Service:
    """`registry` says what may be served; `draining` is set once the server is about to stop."""

    def __init__(
        self,
        registry: Catalogue,
        admission: Mode,
        max_body_bytes: int,
        body_timeout_s: float | None,
        counters: Counters | None = None,
        call: Call | None = None,
        since: float | None = None,
    ) -> None:
        """`call` asks the engine's process, where that is another one; `since`: when the server began, if not now."""
        self.registry = registry
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s
        self.counters = counters or Counters(registry)
        self.admission = Admission(self.engine, admission)
        self.draining = False
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
        """Inference requests, of all workers together."""
        return self.counters.in_flight

    @property
    def ready(self) -> bool:
        """Every model that is wanted is loaded, and the server is not about to stop."""
        engine = self.engine
        return (
            not self.draining
            and engine.failure is None
            and (isinstance(engine, Engine) or engine.link is not None)
            and all(e.state == READY for e in self.registry.entries.values() if e.wanted)
        )

    def monitor(self) -> Monitor | RemoteMonitor:
        """A look at the engine, for the dashboard."""
        engine = self.engine
        return LoggedMonitor(engine) if isinstance(engine, Engine) else RemoteMonitor(engine, self.call)

    async def infer(self, model: Model, request: Request, client: str) -> dict[str, NDArray[Any]]:
        """Runs a checked request: every item goes into a slot of the engine's own. Outputs are [items, …]."""
        deadline_ms = None if request.timeout_us is None else request.timeout_us * 1e-3
        row = self.registry.entries[model.name].row
        ticket = self.admission.enter(model, row, request.priority, deadline_ms)
        try:
            results = await self.engine.run(
                model.name, request.inputs, request.items, deadline_ms, request.priority, client or None
            )
        except BaseException as e:
            if ticket is not None:
                ticket.leave(answered=isinstance(e, DeadlineError))
            if isinstance(e, UnknownModelError):
                raise met_unload(model.name) from e
            raise
        if ticket is not None:
            ticket.leave(answered=True)
        return results

    def note_failure(self, name: str, error: BaseException, elapsed_ns: int) -> None:
        if name not in self.registry.entries:
            return  # names of clients' invention are not counted one by one
        reason = status_of(error)[1] if isinstance(error, PaellaError) else None
        self.counters.of(name).note_failure(elapsed_ns, reason)

    def note_left(self, name: str) -> None:
        """The client went away before its answer."""
        if name in self.registry.entries:
            self.counters.of(name).note_left()

    def close(self) -> None:
        self.counters.close()
