"""The load generator on an engine in this process: the same workload without HTTP, on a real or a virtual GPU."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.client import BenchError
from paellapy.serving.bench.http import BODIES, Inputs, made_up
from paellapy.serving.describe import model_metadata
from paellapy.serving.errors import status_of
from paellapy.serving.protocol import engine_priority


class EngineTarget:
    """An engine with loaded models. Each request is one item."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.url, self.load = f"engine on {engine.device.name}, {engine.policy}", load
        self._engine = engine
        self._inputs: dict[str, list[Inputs]] = {}

    async def prepare(self, rng: np.random.Generator) -> list[str]:
        models = self._engine.models
        names = list(self.load.models) or sorted({each.model for each in self.load.trace}) or list(models)
        if unknown := [name for name in names if name not in models]:
            raise BenchError(f"the engine has no model {', '.join(unknown)}; it has {', '.join(models) or 'none'}")
        if self.load.items != 1:
            raise BenchError("an engine takes one item per request: leave items at 1")
        for name in names:
            inputs = model_metadata(models[name])["inputs"]
            made = [made_up(name, inputs, 1, rng) for _ in range(BODIES)]
            self._inputs[name] = [{key: array[0] for key, array in each.items()} for each in made]
            await self._engine.infer(name, self._inputs[name][0])  # compiles before the measurement
        return names

    async def ask(self, name: str, k: int, timeout_us: int | None, level: int | None) -> tuple[int, str, float]:
        deadline_ms = None if timeout_us is None else timeout_us * 1e-3
        priority = engine_priority(self._engine.models[name], level)
        try:
            await self._engine.infer(name, self._inputs[name][k % BODIES], deadline_ms, priority)
        except PaellaError as e:
            return status_of(e)[0], str(e)[:240], 0.0
        return 200, "", 0.0

    def close(self) -> None:
        """Does nothing: the caller owns the engine."""
