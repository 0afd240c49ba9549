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


class Calls:
    """Functions that workers may call on an engine and its registry. Each call runs in a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._engine = registry, registry.engine
        self._monitor = Monitor(self._engine)
        self._to_stop: asyncio.TimerHandle | None = None  # stops the monitor, which costs time
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
        if name == "snapshot":
            self._stop_later()
        return await asyncio.to_thread(self.functions[name], data)

    def _load(self, data: Any) -> float:
        return self._registry.load_by_hand(str(data))

    def _unload(self, data: Any) -> None:
        self._registry.unload_by_hand(str(data))

    def set_policy(self, data: Any) -> str:
        """Switches the policy, and logs it, so that the log says which policy decided when."""
        before = self._engine.policy
        self._monitor.set_policy(str(data))
        log.info("policy switched", extra={"fields": {"policy": self._engine.policy, "before": before}})
        self._registry.tell()
        return self._engine.policy

    def _snapshot(self, _: Any) -> dict[str, Any]:
        self._monitor.start()  # starting it twice does no harm
        return self._monitor.snapshot()

    def _stop_later(self) -> None:
        if self._to_stop is not None:
            self._to_stop.cancel()
        self._to_stop = asyncio.get_running_loop().call_later(UNWATCHED_S, self._monitor.stop)

    def close(self) -> None:
        """Stops the monitor, which must not outlive the engine."""
        if self._to_stop is not None:
            self._to_stop.cancel()
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
        self._calls: Calls | None = None
        if call is None:
            assert isinstance(registry, Registry)
            self._calls = Calls(registry)
            call = self._calls.call
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

    def close(self) -> None:
        self.counters.close()
        if self._calls is not None:
            self._calls.close()


SERVICE = web.AppKey("service", Service)
