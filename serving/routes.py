"""All addresses of the server except inference: health, metadata, configuration, statistics, the repository."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from paellapy.instrument.env import versions
from paellapy.scheduler.core.residency import weights_state
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.engine.stats import sizes_state
from paellapy.scheduler.models.model import TensorSpec
from paellapy.serving.access import open_to_all, operates
from paellapy.serving.counters import ModelCounters
from paellapy.serving.errors import RequestError, json_response, short
from paellapy.serving.inference import infer, read
from paellapy.serving.limits import BESIDE_BYTES
from paellapy.serving.protocol import DEFAULT_LEVEL, PRIORITY_LEVELS
from paellapy.serving.registry import READY, VERSION, Catalogue, Entry
from paellapy.serving.service import SERVICE
from paellapy.serving.tensors import NOT_JSON, datatype

# What the server reports about itself and its models: metadata, configuration, statistics.

PLATFORM = "paellapy"
EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
]


def server_metadata() -> dict[str, Any]:
    return {"name": "paellapy", "version": versions()["paellapy"], "extensions": EXTENSIONS}


def model_metadata(model: Served) -> dict[str, Any]:
    """Metadata of a model. Its shapes have -1 for the batch, as clients expect."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        **{
            key: [
                {"name": name, "datatype": datatype(spec.dtype), "shape": [-1, *model.open_shape(key, name)]}
                for name, spec in specs.items()
            ]
            for key, specs in (("inputs", model.takes), ("outputs", model.gives))
        },
    }


def model_config(model: Served, engine: Engine | RemoteEngine) -> dict[str, Any]:
    """A model's configuration in the format that Triton's clients read."""
    tensors = {
        key: [
            {"name": name, "data_type": _data_type(spec), "dims": model.open_shape(f"{key}s", name)}
            for name, spec in specs.items()
        ]
        for key, specs in (("input", model.takes), ("output", model.gives))
    }
    instances = engine.stats()["models"].get(model.name, {}).get("instances", 0)
    own = {"priority": model.priority, "share": model.share, "target_ms": model.target_ms, "policy": engine.policy}
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": model.max_batch,
        **tensors,
        "instance_group": [{"name": model.name, "kind": "KIND_GPU", "count": instances}],
        "dynamic_batching": {
            "preferred_batch_size": list(model.batch),
            "max_queue_delay_microseconds": 0,
            "priority_levels": PRIORITY_LEVELS,
            "default_priority_level": DEFAULT_LEVEL,
        },
        "parameters": {key: {"string_value": str(value)} for key, value in own.items() if value is not None},
    }


def _data_type(spec: TensorSpec) -> str:
    return "TYPE_STRING" if spec.is_text else f"TYPE_{datatype(spec.dtype)}"


_TEXTS = {"input": ("text_input", "TYPE_STRING"), "output": ("text_output", "TYPE_STRING")}


def language_model_metadata(name: str) -> dict[str, Any]:
    """As `model_metadata`, for the addresses `generate` and `generate_stream`."""
    tensors = {
        f"{key}s": [{"name": text, "datatype": "BYTES", "shape": [1]}] for key, (text, _) in _TEXTS.items()
    }
    return {"name": name, "versions": [VERSION], "platform": PLATFORM, **tensors}


def language_model_config(name: str) -> dict[str, Any]:
    """As `model_config`. Decoupled: a request may have many answers."""
    tensors = {key: [{"name": text, "data_type": kind, "dims": [1]}] for key, (text, kind) in _TEXTS.items()}
    return {
        "name": name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": 0, **tensors,
        "version_policy": {"latest": {"num_versions": 1}}, "model_transaction_policy": {"decoupled": True},
    }  # fmt: skip


def model_statistics(name: str, counters: ModelCounters) -> dict[str, Any]:
    """A model's statistics in the format of Triton's extension. Times are sums in nanoseconds."""

    def total(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    n, nothing = counters.items, {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counters.last_ms,
        "inference_count": n,
        "execution_count": counters.batches,
        "inference_stats": {
            "success": total(counters.answered, counters.answered_ns),
            "fail": total(counters.failed, counters.failed_ns),
            "queue": total(n, counters.queue_ns),
            # Copies to and from the GPU are part of the model's program, and so count in compute_infer.
            "compute_input": total(n, 0),
            "compute_infer": total(n, counters.compute_ns),
            "compute_output": total(n, 0),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": total(count, 0),
                "compute_infer": total(count, ns),
                "compute_output": total(count, 0),
            }
            for size, (count, ns) in sorted(counters.by_batch.items())
        ],
    }


def repository_index(registry: Catalogue, ready_only: bool) -> list[dict[str, Any]]:
    """All configured models. For loaded ones it says where the weights are (resident, loading 43 %, leaving, host,
    disk), and, if not all batch sizes are captured, which are, which come later, and which failed.
    """
    state = registry.engine.state
    more: dict[str, dict[str, Any]] = {}
    for row, model in registry.by_row.items():
        more[model.name] = {"weights": weights_state(state, row)}
        sizes = sizes_state(state, row)
        if sizes["later"] or sizes["failed"]:
            more[model.name]["batch_sizes"] = sizes
    return [
        {"name": e.name, "version": VERSION, "state": e.state, "reason": e.reason} | more.get(e.name, {})
        for e in registry.entries.values()
        if e.state == "READY" or not ready_only
    ]


async def server(request: web.Request) -> web.Response:
    return json_response(server_metadata())


@open_to_all  # probes of orchestrators carry no key
async def live(request: web.Request) -> web.Response:
    return json_response({"live": True})


@open_to_all
async def ready(request: web.Request) -> web.Response:
    is_ready = request.app[SERVICE].ready
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def model(request: web.Request) -> web.Response:
    found = request.app[SERVICE].registry.loaded(*_which(request))
    return json_response(
        model_metadata(found.model) if found.model is not None else language_model_metadata(found.name)
    )


async def model_ready(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    entry = service.registry.find(*_which(request))
    is_ready = entry.state == READY and service.alive
    return json_response({"name": entry.name, "ready": is_ready}, 200 if is_ready else 503)


async def config(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    found = service.registry.loaded(*_which(request))
    return json_response(
        model_config(found.model, service.engine) if found.model is not None else language_model_config(found.name)
    )


async def stats(request: web.Request) -> web.Response:
    """Statistics of one model, or of all loaded ones."""
    service = request.app[SERVICE]
    if "model" in request.match_info:
        names = [service.registry.loaded(*_which(request)).name]
    else:
        names = [e.name for e in service.registry.entries.values() if e.state == READY]
    found = [model_statistics(name, service.counters.of(name)) for name in names]
    return json_response({"model_stats": found})


async def index(request: web.Request) -> web.Response:
    body = await read(request, request.app[SERVICE], BESIDE_BYTES)
    return json_response(repository_index(request.app[SERVICE].registry, asks_for_ready(body)))


def asks_for_ready(body: bytes | bytearray | memoryview) -> bool:
    """Whether a request for the index asks only for ready models."""
    ready_only = json_object(body).get("ready", False)
    if not isinstance(ready_only, bool):
        raise RequestError('"ready" must be true or false', field="ready", given=ready_only)
    return ready_only


@operates
async def load(request: web.Request) -> web.Response:
    entry = _entry(request)
    parameters = await _parameters(request)
    if parameters:
        given = short(", ".join(parameters))
        said = f"models are loaded as configured; the parameter {given} cannot be given here"
        raise RequestError(said, field="parameters", given=list(parameters))
    await request.app[SERVICE].registry.load_async(entry.name)
    return json_response({})


@operates
async def unload(request: web.Request) -> web.Response:
    entry = _entry(request)
    parameters = await _parameters(request)
    # Accepted for Triton's clients: no model depends on another
    if unknown := sorted(parameters.keys() - {"unload_dependents"}):
        said = f"unknown parameter {short(', '.join(unknown))}; only unload_dependents is allowed"
        raise RequestError(said, field="parameters", given=unknown)
    await request.app[SERVICE].registry.unload_async(entry.name)
    return json_response({})


def _which(request: web.Request) -> tuple[str, str | None]:
    return request.match_info["model"], request.match_info.get("version")


def _entry(request: web.Request) -> Entry:
    return request.app[SERVICE].registry.find(request.match_info["model"])


def json_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """A body as a JSON object; an empty one counts as {}."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if bytes(body).strip() else {}
    except NOT_JSON as e:
        raise RequestError(f"the body is not a JSON object: {e}", field="body") from None


async def _parameters(request: web.Request) -> dict[str, Any]:
    body = await read(request, request.app[SERVICE], BESIDE_BYTES)
    found = json_object(body).get("parameters") or {}
    if not isinstance(found, dict):
        raise RequestError('"parameters" must be a JSON object', field="parameters", given=found)
    return found


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The handler of each of the protocol's addresses."""

    server: Handler
    live: Handler
    ready: Handler
    infer: Handler
    model: Handler
    model_ready: Handler
    config: Handler
    stats: Handler
    index: Handler
    load: Handler
    unload: Handler

    def add_to(self, app: web.Application) -> None:
        router = app.router
        router.add_get("/v2", self.server)
        router.add_get("/v2/", self.server)
        router.add_get("/v2/health/live", self.live)
        router.add_get("/v2/health/ready", self.ready)
        router.add_get("/v2/models/stats", self.stats)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            router.add_post(f"{path}/infer", self.infer)
            router.add_get(path, self.model)
            router.add_get(f"{path}/ready", self.model_ready)
            router.add_get(f"{path}/config", self.config)
            router.add_get(f"{path}/stats", self.stats)
        router.add_post("/v2/repository/index", self.index)
        router.add_post("/v2/repository/models/{model}/load", self.load)
        router.add_post("/v2/repository/models/{model}/unload", self.unload)


def add_routes(app: web.Application) -> None:
    """Adds the protocol's addresses with this server's handlers."""
    Protocol(
        server=server, live=live, ready=ready, infer=infer, model=model, model_ready=model_ready, config=config,
        stats=stats, index=index, load=load, unload=unload,
    ).add_to(app)  # fmt: skip
