"""Answers for the whole cluster: the index, the statistics and the metrics of all engines combined."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from paellapy.cluster.engine_state import EngineView
from paellapy.cluster.headers import digest_of
from paellapy.cluster.router import Router
from paellapy.serving.errors import RefusedError, RequestError, json_response
from paellapy.serving.limits import BESIDE_BYTES, read_body
from paellapy.serving.registry import READY, VERSION
from paellapy.serving.routes import asks_for_ready

UNCHECKED = "no engine answered to check the API key; try again"
PATIENCE_S = 2.0  # for an engine's part; without it, the answer has the rest
ROUTER = web.AppKey("router", Router)

_PASSED = ("Authorization", "X-API-Key")
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)$")


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


async def check_key(request: web.Request) -> None:
    """Raises RequestError if engines need a key that the client lacks. Engines know the keys; a router knows only its
    own.
    """
    router = request.app[ROUTER]
    own = router.options.key
    if own is None or _is_own(request, own):
        return
    if not await ask_all(router, request, "/v2"):
        raise RefusedError(UNCHECKED, "engine_away", 2.0)


def _is_own(request: web.Request, own: str) -> bool:
    return hmac.compare_digest(request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape"), own.encode())


def check_known(request: web.Request, accepted: bool) -> None:
    """For answers that a router gives while no engine answers: the key must be one that an engine accepted before.
    `accepted`: an engine has done so just now.
    """
    router = request.app[ROUTER]
    own, digest = router.options.key, _digest(request)
    if accepted:
        router.keys.add(digest)
    elif own is not None and not _is_own(request, own) and not router.keys.was_accepted(digest):
        raise RefusedError(UNCHECKED, "engine_away", 2.0)


def _digest(request: web.Request) -> bytes:
    return digest_of(b"".join(b"\r\n%b: %b" % each for each in request.raw_headers))


async def check_key_once(request: web.Request) -> None:
    """The same, where the engine checks the key again: it is asked for a key that is new to this router."""
    router = request.app[ROUTER]
    if router.options.key is None:
        return
    if (digest := _digest(request)) not in router.keys:
        await check_key(request)
        router.keys.add(digest)


def _add(total: Any, more: Any) -> Any:
    """Adds numbers wherever they occur in both."""
    if isinstance(total, dict) and isinstance(more, dict):
        return {key: _add(total[key], more[key]) if key in total and key in more else total.get(key, more.get(key))
                for key in {**total, **more}}  # fmt: skip
    if isinstance(total, int | float) and isinstance(more, int | float):
        return total + more
    return total


def add_statistics(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Statistics of models, added up by name.

    >>> one = {"name": "m", "last_inference": 3, "inference_count": 2, "batch_stats": []}
    >>> add_statistics([one, {**one, "last_inference": 5}])
    [{'name': 'm', 'last_inference': 5, 'inference_count': 4, 'batch_stats': []}]
    """
    found: dict[str, dict[str, Any]] = {}
    for each in parts:
        if (before := found.get(each["name"])) is None:
            found[each["name"]] = each
            continue
        sizes: dict[int, dict[str, Any]] = {}
        for batch in [*before["batch_stats"], *each["batch_stats"]]:
            size = batch["batch_size"]
            sizes[size] = {**_add(sizes[size], batch), "batch_size": size} if size in sizes else batch
        last = max(before["last_inference"], each["last_inference"])
        together = {"last_inference": last, "batch_stats": [sizes[size] for size in sorted(sizes)]}
        found[each["name"]] = {**_add(before, each), **together}
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
        there = [view.name for view in router.views.values() if view.up and name in view.offers()]
        state, reason = (READY, "on " + ", ".join(there)) if there else ("UNAVAILABLE", "no engine that answers has it")
        if there or not ready_only:
            found.append({"name": name, "version": VERSION, "state": state, "reason": reason})
    return json_response(found)


def labelled(page: str, engine: str, said: set[str]) -> Iterable[str]:
    """The lines of a metrics page, each sample labelled with its engine; repeated HELP and TYPE lines are left out.

    >>> list(labelled('# TYPE a gauge\\na 1\\nb{c="d"} 2', "e0", set()))
    ['# TYPE a gauge', 'a{engine="e0"} 1', 'b{engine="e0",c="d"} 2']
    """
    for line in page.splitlines():
        if line.startswith("#"):
            if line not in said:
                said.add(line)
                yield line
        elif sample := _SAMPLE.match(line):
            more = f",{sample[2]}" if sample[2] else ""
            yield f'{sample[1]}{{engine="{engine}"{more}}} {sample[3]}'


def _families(pages: dict[str, str]) -> list[str]:
    """Groups the lines by metric, as Prometheus requires."""
    blocks: dict[str, list[str]] = {}
    said: set[str] = set()
    for engine, page in pages.items():
        current = ""
        for line in labelled(page, engine, said):
            if line.startswith("# "):
                current = line.split(" ", 3)[2]
                blocks.setdefault(current, []).append(line)
            else:
                name = line.partition("{")[0]
                known = (each for each in (current, name, name.rpartition("_")[0]) if each in blocks)
                family = next((each for each in known if name.startswith(each)), name)
                blocks.setdefault(family, []).append(line)
    return [line for block in blocks.values() for line in block]


def router_metrics(router: Router) -> list[str]:
    # An engine that never started, or was drained, is not missing: routers may be told of engines that start later.
    views = router.views.values()
    known = [view for view in views if view.outlook is not None and not view.outlook.draining]
    up = [(f'{{engine="{view.name}"}}', int(view.up)) for view in known]
    predicted = [
        (f'{{engine="{view.name}",model="{model}"}}', f"{(view.estimate_ms(model) or 0.0) * 1e-3:.6g}")
        for view in views
        for model in sorted(view.offers())
    ]
    counts = asdict(router.counts)
    metrics: list[tuple[str, str, str, list[tuple[str, object]]]] = [
        (f"paellapy_router_{name}_total", "counter", text, [("", counts[name])])
        for name, text in (
            ("requests", "Requests taken"),
            ("refused", "Answers 503, 429 and 404 of engines, after which other engines were asked"),
            ("lost", "Engines that ended, or fell silent, before an answer"),
            ("again", "Requests sent again after an engine was lost"),
            ("held", "Requests that waited for an engine"),
        )
    ]
    held = router.held
    metrics += [
        ("paellapy_engine_up", "gauge", "1: the engine takes requests", [*up]),
        ("paellapy_predicted_seconds", "gauge", "Predicted time of a request that arrives now", [*predicted]),
        ("paellapy_router_held_bytes", "gauge", "Bytes of requests that are not answered yet", [("", held.nbytes)]),
        ("paellapy_router_full_total", "counter", "Requests refused: too many bytes held", [("", held.full)]),
        ("paellapy_router_in_flight", "gauge", "Requests being handled", [("", router.in_flight)]),
    ]
    found = []
    for name, kind, text, samples in metrics:
        found += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        found += [f"{name}{labels} {value}" for labels, value in samples]
    return found


async def merged_metrics(request: web.Request) -> web.Response:
    router = request.app[ROUTER]
    pages = await ask_all(router, request, "/metrics")
    check_known(request, bool(pages))
    lines = [*router_metrics(router), *_families({name: page.decode() for name, page in pages.items()}), ""]
    return web.Response(body="\n".join(lines).encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})


# A router's view of its cluster, as JSON and as a table.


def cluster_status(router: Router) -> dict[str, Any]:
    """The answer of `GET /v2/cluster`."""
    return {
        "ready": router.ready,
        "missing": router.missing(),
        "models": sorted(router.models),
        "router": {**asdict(router.counts), "in_flight": router.in_flight},
        "engines": [_engine(router, view) for view in router.views.values()],
    }


def _engine(router: Router, view: EngineView) -> dict[str, Any]:
    found = view.outlook
    said: dict[str, Any] = {
        "name": view.name, "url": view.member.url, "up": view.up, "outstanding": view.outstanding, "sent": view.sent,
    }  # fmt: skip
    if found is None:
        return {**said, "why": view.why, "models": {}}
    models = {
        name: {
            "state": each.state,
            "live": each.live,
            "predicted_ms": round(each.predicted_ms, 4),
            "estimate_ms": round(view.estimate_ms(name) or 0.0, 4),
        }
        for name, each in found.models.items()
    }
    if not view.up:
        said["why"] = "draining" if found.draining else view.why
    return {
        **said, "draining": found.draining, "live": found.live, "held_bytes": found.held_bytes,
        "budget_bytes": found.budget_bytes, "models": models,
    }  # fmt: skip


def status_table(status: dict[str, Any], title: str) -> Any:
    """A rich table with a row for every engine."""
    from rich.table import Table

    table = Table(title=title)
    for column in ("engine", "state", "models", "live", "slowest\nms", "memory", "sent"):
        table.add_column(column)
    for each in status["engines"]:
        ready = [name for name, model in each["models"].items() if model["state"] == "READY"]
        late = max((each["models"][name]["estimate_ms"] for name in ready), default=0.0)
        memory = f"{each.get('held_bytes', 0) / 1e9:.2f}/{each.get('budget_bytes', 0) / 1e9:.0f} GB"
        state = "up" if each["up"] else each.get("why", "away")
        live, sent = str(each.get("live", 0)), str(each["sent"])
        table.add_row(each["name"], state, ", ".join(ready), live, f"{late:.2f}", memory, sent)
    return table
