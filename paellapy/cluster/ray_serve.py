"""paellapy inside Ray Serve: replicas that hold an engine each, and a request router by predicted finish.

    app = engine_deployment("package.module:models", device="auto", num_replicas=2)
    handle = serve.run(app)
    outputs = await handle.infer.remote("mlp", {"x": image})

The handle's router sends no queries: replicas report to Serve when a new request would be done
(`record_routing_stats`), and the router adds the work it has sent since. Serve passes these reports on every 0.1 s
here; the front door of `paellapy cluster` gets them every 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.admission import Predictor
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model
from paellapy.serving.registry import find_factory

REPORT_S = 0.1

Source = str | Callable[[], Model | Iterable[Model]]


class EngineReplica:
    """One engine with its models, as a Serve replica."""

    def __init__(self, models: Source, device: str = "auto", policy: str = "paella") -> None:
        """`models`: a function that returns a Model or several, or its name "package.module:function"."""
        self._engine = Engine(device, policy)
        for model in _made(models):
            self._engine.load(model)
        self._predictor = Predictor(self._engine.state)

    async def infer(self, model: str, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Runs one request; `options` are those of `Engine.infer`."""
        return dict(await self._engine.infer(model, inputs, **options))

    async def record_routing_stats(self) -> dict[str, float]:
        """For each model, the milliseconds that a new request would take, and the time it adds to the queue."""
        state, now_ns = self._engine.state, time.monotonic_ns()
        found: dict[str, float] = {}
        for row, loaded in self._engine.loaded_rows().items():
            found[f"predicted_ms:{loaded.model.name}"] = (self._predictor.finish(state, row, now_ns) - now_ns) * 1e-6
            found[f"step_ms:{loaded.model.name}"] = float(state.size["total_ns"][row, 0]) * 1e-6
        return found

    def check_health(self) -> None:
        if self._engine.failure is not None:
            raise self._engine.failure

    def __del__(self) -> None:
        self._engine.close()


def _made(source: Source) -> Iterable[Model]:
    found: Any = find_factory(source, Path.cwd()) if isinstance(source, str) else source
    made = found() if callable(found) else found
    models = [made] if isinstance(made, Model) else list(made)
    if not models or not all(isinstance(each, Model) for each in models):
        raise ArgumentError(f"{source} returned no models: give a function that returns a Model or a list of them")
    return models


class PredictedFinishRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by predicted finish: their latest report, plus the work sent since."""

    def initialize_state(self, **_: Any) -> None:
        self._sent: dict[Any, tuple[Any, float]] = {}  # by replica: its last report, and the work sent since, ms

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        model = _model_of(pending_request)
        ranked = sorted(candidate_replicas, key=lambda each: self._estimate_ms(each, model))
        return [[each] for each in ranked]

    def _estimate_ms(self, replica: RunningReplica, model: str) -> float:
        stats = replica.routing_stats
        report, added_ms = self._sent.get(replica.replica_id, (None, 0.0))
        if report is not stats:
            added_ms = 0.0
            self._sent[replica.replica_id] = stats, 0.0
        return float(stats.get(f"predicted_ms:{model}", 0.0)) + added_ms

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        model = _model_of(pending_request)
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._estimate_ms(replica, model)
            report, added_ms = self._sent[replica_id]
            step_ms = float(replica.routing_stats.get(f"step_ms:{model}", 1.0))
            self._sent[replica_id] = report, added_ms + step_ms


def _model_of(pending_request: PendingRequest | None) -> str:
    """The first argument of the call, if it is a name."""
    arguments = () if pending_request is None else pending_request.args
    return arguments[0] if arguments and isinstance(arguments[0], str) else ""


def engine_deployment(models: Source, device: str = "auto", policy: str = "paella", **options: Any) -> Any:
    """A bound Serve application; `options` are those of `serve.deployment`, as in num_replicas=2."""
    router = RequestRouterConfig(
        request_router_class=PredictedFinishRouter, request_routing_stats_period_s=REPORT_S,
        request_routing_stats_timeout_s=5.0,
    )  # fmt: skip
    made = serve.deployment(EngineReplica, name="paellapy", request_router_config=router, **options)
    return made.bind(models, device, policy)
