"""Functions of the engine's process, called by name: `await service.call("snapshot")` works in every process.

Arguments and results consist of JSON values and bytes. A function added here can be called from every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.serving.logs import log
from paellapy.serving.metrics import DeviceCollector
from paellapy.serving.registry import Registry
from paellapy.serving.tensors import packed, unpacked

STEP = "step"  # runs a function before or after a model, in the model's own threads or processes
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
            "load": registry.load_by_hand,
            "unload": registry.unload_by_hand,
            "set_policy": self.set_policy,
            "snapshot": self._snapshot,
            "device_metrics": lambda _: generate_latest(self._device_metrics).decode(),
        }

    async def call(self, name: str, data: Any = None) -> Any:
        """Calls the function; PaellaError if there is no function of that name."""
        if name == STEP:
            return await self._run_step(*data)
        if name not in self.functions:
            raise PaellaError(f"the engine has no function {name!r}")
        if name == "snapshot":
            self._stop_later()
        return await asyncio.to_thread(self.functions[name], data)

    async def _run_step(self, model: str, step: str, values: Any, deadline_ns: int) -> Any:
        runner = self._engine.steps.of(self._engine.client.find(model).model)
        with runner.request():
            return packed(await runner.run(step, unpacked(values), deadline_ns))

    def set_policy(self, name: str) -> str:
        """Switches the policy, and logs it, so that the log says which policy decided when."""
        before = self._engine.policy
        self._monitor.set_policy(name)
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
        """Stops the monitor, which must not outlive the engine, and processes of the models."""
        self._registry.close()
        if self._to_stop is not None:
            self._to_stop.cancel()
        self._monitor.stop()
