"""`Service`: one engine behind HTTP, and everything a handler needs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.callbacks import Door
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.serving.admission import Admission, Mode
from paellapy.serving.byte_limits import HELD_BYTES, RequestBudget
from paellapy.serving.counters import Counters
from paellapy.serving.logs import log
from paellapy.serving.metrics import DeviceCollector
from paellapy.serving.quarantine import Quarantine
from paellapy.serving.registry import READY, Catalogue, Registry

# Functions of the engine's process, called by name: `await service.call("stats")` works in every process.
#
# Arguments and results consist of JSON values and bytes. A function added here can be called from every worker.


LONGEST_TRACE_S = 60.0
UNWATCHED_S = 10.0  # a monitor stops this long after its last snapshot


class LoggedMonitor(Monitor):
    """A monitor that logs each change of the policy, so that the log says which policy decided when."""

    def set_policy(self, name: str) -> None:
        before = self.engine.policy
        super().set_policy(name)
        log.info("policy switched", extra={"fields": {"policy": self.engine.policy, "before": before}})


class Calls:
    """Functions that workers may call on an engine and its registry. Each call runs in a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._engine = registry, registry.engine
        self._monitor = LoggedMonitor(self._engine)
        self._looked_at = 0.0
        self._device_metrics = CollectorRegistry(auto_describe=False)
        self._device_metrics.register(DeviceCollector(self._engine))
        ProcessCollector("paellapy_engine", registry=self._device_metrics)
        self.functions: dict[str, Callable[[Any], Any]] = {
            "load": self._load,
            "unload": self._unload,
            "stats": lambda _: self._engine.stats(),
            "occupancy": lambda _: asdict(self._engine.occupancy()),
            "policy": lambda _: self._engine.policy,
            "set_policy": self.set_policy,
            "snapshot": self._snapshot,
            "trace": self._trace,
            "device_metrics": lambda _: generate_latest(self._device_metrics).decode(),
        }

    async def call(self, name: str, data: Any = None) -> Any:
        """Calls the function; KeyError if there is no function of that name."""
        return await asyncio.to_thread(self.functions[name], data)

    def _load(self, data: Any) -> float:
        return self._registry.load_by_hand(str(data))

    def _unload(self, data: Any) -> None:
        self._registry.unload_by_hand(str(data))

    def set_policy(self, data: Any) -> str:
        self._monitor.set_policy(str(data))
        self._registry.tell()
        return self._engine.policy

    def _snapshot(self, _: Any) -> dict[str, Any]:
        self._monitor.start()  # starting it twice does no harm
        self._looked_at = time.monotonic()
        return self._monitor.snapshot()

    def rest(self) -> None:
        """Called now and then: stops the monitor once nobody has asked for snapshots, since monitoring costs time."""
        if self._looked_at and time.monotonic() - self._looked_at > UNWATCHED_S:
            self._looked_at = 0.0
            self._monitor.stop()

    def _trace(self, data: Any) -> bytes:
        """Records the next seconds and returns the trace as a file that `Trace.load` reads."""
        seconds = min(float((data or {}).get("seconds", 1.0)), LONGEST_TRACE_S)
        with self._engine.trace() as trace:
            time.sleep(seconds)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.pptrace"
            trace.save(path)
            return path.read_bytes()


# `RemoteMonitor`: the dashboard's monitor of an engine in another process.


_PATIENCE_S = 10.0


class RemoteMonitor:
    """Like `scheduler.monitor.Monitor`; its part in the engine's process runs only while snapshots are asked for."""

    def __init__(self, engine: RemoteEngine, call: Callable[..., Awaitable[Any]]) -> None:
        self.engine, self._call, self._loop = engine, call, asyncio.get_running_loop()
        self._last: dict[str, Any] | None = None

    def start(self) -> None:
        """Does nothing: the first snapshot starts monitoring."""

    def stop(self) -> None:
        """Does nothing: `calls.Calls.rest` stops monitoring."""

    def snapshot(self) -> dict[str, Any]:
        """A snapshot; to be called in a thread other than the event loop's."""
        try:
            self._last = self._ask("snapshot", None)
        except EngineAwayError:
            if self._last is None:
                raise
            self._last = {**self._last, "state": "restarting"}
        return self._last

    def set_policy(self, name: str) -> None:
        self._ask("set_policy", name)

    def _ask(self, name: str, data: Any) -> Any:
        async def ask() -> Any:
            return await self._call(name, data)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_PATIENCE_S)


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
        quarantine: Quarantine | None = None,
    ) -> None:
        """`call` reaches the engine if it is in another process; `since` is the server's start, if not now."""
        self.quarantine = Quarantine() if quarantine is None else quarantine  # `or` would replace an empty one
        self.registry = registry
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s
        self.counters = counters or Counters(registry)
        self.admission = Admission(self.engine, admission)
        self.door = Door(self.engine)
        self.held = RequestBudget(HELD_BYTES)
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


SERVICE = web.AppKey("service", Service)
