"""Functions of the engine's process, called by name: `await service.call("stats")` works in every process.

Arguments and results consist of JSON values and bytes. A function added here can be called from every worker.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from paellapy.scheduler.engine.monitor import Monitor
from paellapy.serving.logs import log
from paellapy.serving.metrics_device import CpuMetrics, job_metrics, sm_metrics, triton_metrics, weight_metrics
from paellapy.serving.registry import Registry

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
        self._device_metrics.register(_DeviceCollector(self._engine))
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


class _DeviceCollector(Collector):
    def __init__(self, engine: Any) -> None:
        self._engine, self._cpu = engine, CpuMetrics()

    def collect(self) -> Any:
        yield from sm_metrics(self._engine)
        yield from triton_metrics(self._engine)
        yield from weight_metrics(self._engine)
        yield from job_metrics(self._engine.job_stats())
        yield from self._cpu.collect()
