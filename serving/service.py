"""`Service`: one engine behind HTTP, and everything a handler needs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.engine.callbacks import CallbackClient
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.policies.policy import Policy
from paellapy.serving.admission import Admission, Mode
from paellapy.serving.counters import CAUSES, Counters
from paellapy.serving.errors import short, status_of
from paellapy.serving.limits import AddressPlaces, ConnectionLimits, RequestBudget, ResponseBudget
from paellapy.serving.logs import Seldom, log
from paellapy.serving.quarantine import Quarantine
from paellapy.serving.registry import READY, Catalogue

SELDOM_S = 10.0  # between log lines on the same subject
_REFUSALS = (*CAUSES, 503)
Call = Callable[..., Awaitable[Any]]


class Live(Protocol):
    """A request that the engine is working on."""

    name: str

    def abandon(self, error: Exception) -> None:
        """Answers it without the engine."""


class Service:
    """`registry` says which models may be served; `draining` is set when the server is about to stop."""

    def __init__(
        self,
        registry: Catalogue,
        admission: Mode,
        limits: ConnectionLimits,
        call: Call,
        counters: Counters | None = None,
        since: float | None = None,
        quarantine: Quarantine | None = None,
        *,
        vouched: bool = False,
    ) -> None:
        """`call` reaches the engine (rpc.py); `since` is the server's start, if not now; `vouched`: clients are named
        by their keys, not by themselves.
        """
        self.quarantine = Quarantine() if quarantine is None else quarantine  # `or` would replace an empty one
        self.registry = registry
        self.limits = limits
        self.counters = counters or Counters(registry)
        self.admission = Admission(self.engine, admission)
        self.callbacks = CallbackClient(self.engine.client)
        self.held = RequestBudget(limits.max_held_bytes)
        self.unsent = ResponseBudget(limits.max_held_bytes)
        self.places = None if vouched else AddressPlaces()
        self.texts = None if vouched else AddressPlaces()  # of language models
        self.draining = False
        self.live: set[Live] = set()  # requests that the engine is working on
        self.silent = self.hung = False  # the engine does not respond, and has been given up: see server.Heartbeat
        self.since = time.time() if since is None else since
        self.call = call
        self._refusals = Seldom(SELDOM_S)
        self._policy: Policy | None = None
        self._reads_priority = True

    @property
    def engine(self) -> Engine | RemoteEngine:
        return self.registry.engine

    @property
    def in_flight(self) -> int:
        """Inference requests being handled, of all workers together."""
        return self.counters.in_flight

    @property
    def alive(self) -> bool:
        """Whether the engine responds and the server is not about to stop."""
        engine = self.engine
        attached = isinstance(engine, Engine) or engine.link is not None
        return not self.draining and not self.silent and engine.failure is None and attached

    @property
    def ready(self) -> bool:
        """Whether the server is alive and every wanted model is loaded."""
        return self.alive and all(e.state == READY for e in self.registry.entries.values() if e.wanted)

    def reads_priority(self) -> bool:
        """Whether the present policy reads requests' priorities."""
        policy = self.engine.current_policy
        if policy is not self._policy:
            self._policy, self._reads_priority = policy, policy is None or policy.reads_priority
        return self._reads_priority

    def note_refusal(self, status: int, error: Exception, client: str, peer: str | None) -> None:
        """Counts a refused request, and logs it if none like it was logged lately."""
        if status not in _REFUSALS:
            return
        reason = CAUSES.get(status) or (status_of(error)[1] if isinstance(error, PaellaError) else None) or "other"
        self.counters.note_refusal(reason, client)
        if count := self._refusals.due((reason, self.counters.label_of(client))):
            fields = {"reason": reason, "status": status, "count": count, "client": client, "peer": peer or "",
                      "error": short(str(error))}  # fmt: skip
            log.warning("requests are refused", extra={"fields": fields})

    def close(self) -> None:
        self.counters.close()


SERVICE = web.AppKey("service", Service)
