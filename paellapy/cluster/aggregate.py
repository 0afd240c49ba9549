"""Answers for the whole cluster: the index, the statistics and the metrics of all engines combined."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from paellapy.cluster.engine_state import EngineView
from paellapy.cluster.headers import digest_of
from paellapy.cluster.router import Router
from paellapy.serving.errors import RefusedError, RequestError, json_response
from paellapy.serving.limits import BESIDE_BYTES, read_body
from paellapy.serving.registry import READY, VERSION
from paellapy.serving.routes import asks_for_ready

PATIENCE_S = 2.0  # for an engine's part; without it, the answer has the rest
ROUTER = web.AppKey("router", Router)

_PASSED = ("Authorization", "X-API-Key")


async def ask_all(router: Router, request: web.Request, path: str) -> dict[str, bytes]:
    """Asks every engine that is up, with the client's own key. If an engine refuses the key, its error is raised."""
    headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
    found: dict[str, bytes] = {}

    async def ask(session: ClientSession, name: str, url: str) -> None:
        try:
            async with session.get(url + path, headers=headers) as answer:
                body = await answer.read()
        except (ClientError, OSError, TimeoutError):
            return
        if answer.status in (401, 403):
            raise RequestError(msgspec.json.decode(body)["error"], status=answer.status)
        if answer.status == 200:
            found[name] = body

    async with router.asking, ClientSession(timeout=ClientTimeout(PATIENCE_S)) as session:
        up = [(view.name, view.member.url.rstrip("/")) for view in router.views.values() if view.up]
        await asyncio.gather(*(ask(session, name, url) for name, url in up))
    return {view.name: found[view.name] for view in router.views.values() if view.name in found}


async def check_key(request: web.Request, again: bool = False) -> None:
    """Raises RequestError if engines need a key that the client lacks. Engines know the keys; a router knows only its
    own. `again`: the engine checks it again, so only a key that is new to this router is asked for.
    """
    router, digest = request.app[ROUTER], _digest(request)
    if router.options.key is None or (again and digest in router.keys):
        return
    if not _is_own(request) and not await ask_all(router, request, "/v2"):
        raise _unchecked()
    router.keys.add(digest)


def _unchecked() -> RefusedError:
    return RefusedError("no engine answered to check the API key; try again", "engine_away", 2.0)


def _is_own(request: web.Request) -> bool:
    given, own = request.headers.get("X-API-Key", ""), request.app[ROUTER].options.key or ""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), own.encode())


def _digest(request: web.Request) -> bytes:
    return digest_of(b"".join(b"\r\n%b: %b\r\n" % each for each in request.raw_headers))


# -- statistics and the index


def _add(one: Any, other: Any, key: str = "") -> Any:
    if isinstance(one, dict):
        return {**other, **{k: _add(value, other[k], k) if k in other else value for k, value in one.items()}}
    if key == "batch_stats":
        sizes: dict[int, Any] = {}
        for each in [*one, *other]:
            size = each["batch_size"]
            sizes[size] = _add(sizes[size], each) if size in sizes else each
        return [sizes[size] for size in sorted(sizes)]
    if key == "last_inference":
        return max(one, other)
    return one if key in ("name", "version", "batch_size") else one + other


def add_statistics(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Statistics of models, added up by name.

    >>> one = {"name": "m", "last_inference": 3, "inference_count": 2, "batch_stats": []}
    >>> add_statistics([one, {**one, "last_inference": 5}])
    [{'name': 'm', 'last_inference': 5, 'inference_count': 4, 'batch_stats': []}]
    """
    found: dict[str, dict[str, Any]] = {}
    for each in parts:
        name = each["name"]
        found[name] = _add(found[name], each) if name in found else each
    return list(found.values())


async def merged_statistics(request: web.Request) -> web.Response:
    router, model = request.app[ROUTER], request.match_info.get("model")
    if model is not None:
        router.check_model(model)
    parts = await ask_all(router, request, "/v2/models/stats")
    every = [each for part in parts.values() for each in msgspec.json.decode(part)["model_stats"]]
    return json_response({"model_stats": add_statistics(each for each in every if model in (None, each["name"]))})


async def merged_index(request: web.Request) -> web.Response:
    router = request.app[ROUTER]
    await check_key(request)
    ready_only = asks_for_ready(await read_body(request, BESIDE_BYTES, router.options.body_timeout_s))
    found = []
    for name in sorted(router.models):
        there = router.with_model(name)
        state, reason = (READY, "on " + ", ".join(there)) if there else ("UNAVAILABLE", "no engine that answers has it")
        if there or not ready_only:
            found.append({"name": name, "version": VERSION, "state": state, "reason": reason})
    return json_response(found)


# -- metrics


class _Page(CollectorRegistry):
    """The metrics of a router, and those of its engines with the engine as a label."""

    def __init__(self, own: Iterable[Metric], pages: Mapping[str, bytes]) -> None:
        super().__init__()
        self._own, self._pages = own, pages

    def collect(self) -> Iterator[Metric]:
        yield from self._own
        families: dict[str, Metric] = {}
        for engine, page in self._pages.items():
            for found in text_string_to_metric_families(page.decode()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [each._replace(labels={"engine": engine, **each.labels}) for each in found.samples]
        yield from families.values()


def router_metrics(router: Router) -> Iterator[Metric]:
    counts = router.counts
    for name, text, count in (
        ("requests", "Requests taken", counts.requests),
        ("refused", "Answers 503, 429 and 404 of engines, after which other engines were asked", counts.refused),
        ("lost", "Engines that ended, or fell silent, before an answer", counts.lost),
        ("again", "Requests sent again after an engine was lost", counts.again),
        ("held", "Requests that waited for an engine", counts.held),
        ("full", "Requests refused: too many bytes held", router.held.full),
    ):
        yield CounterMetricFamily(f"paellapy_router_{name}", text, count)
    yield GaugeMetricFamily("paellapy_router_held_bytes", "Bytes of unanswered requests", router.held.nbytes)
    yield GaugeMetricFamily("paellapy_router_in_flight", "Requests being handled", router.in_flight)
    up = GaugeMetricFamily("paellapy_engine_up", "1: the engine takes requests", labels=("engine",))
    text = "Predicted time of a request that arrives now"
    predicted = GaugeMetricFamily("paellapy_predicted_seconds", text, labels=("engine", "model"))
    for view in router.views.values():
        # An engine that never started, or was drained, is not missing: routers may be told of engines that start later.
        if view.outlook is not None and not view.outlook.draining:
            up.add_metric((view.name,), view.up)
        for model in sorted(view.offers()):
            predicted.add_metric((view.name, model), (view.estimate_ms(model) or 0.0) * 1e-3)
    yield from (up, predicted)


async def merged_metrics(request: web.Request) -> web.Response:
    router = request.app[ROUTER]
    pages = await ask_all(router, request, "/metrics")
    if pages:
        router.keys.add(_digest(request))
    elif router.options.key is not None and not _is_own(request) and not router.keys.was_accepted(_digest(request)):
        raise _unchecked()
    body = await asyncio.to_thread(generate_latest, _Page(list(router_metrics(router)), pages))  # long with many models
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


# -- a router's view of its cluster


def cluster_status(router: Router) -> dict[str, Any]:
    return {
        "ready": router.ready,
        "missing": router.missing(),
        "models": sorted(router.models),
        "router": {**asdict(router.counts), "in_flight": router.in_flight},
        "engines": [_engine(view) for view in router.views.values()],
    }


def _engine(view: EngineView) -> dict[str, Any]:
    found = view.outlook
    said = {key: getattr(view, key) for key in ("name", "up", "outstanding", "sent")} | {"url": view.member.url}
    if not view.up:
        said["why"] = "draining" if found is not None and found.draining else view.why
    if found is not None:
        said |= {key: getattr(found, key) for key in ("draining", "live", "held_bytes", "budget_bytes")}
    said["models"] = {
        name: {
            "state": each.state, "live": each.live, "predicted_ms": round(each.predicted_ms, 4),
            "estimate_ms": round(view.estimate_ms(name) or 0.0, 4),
        }
        for name, each in view.models.items()
    }  # fmt: skip
    return said
