"""The dashboard at `/`: its page, its data as server-sent events, and the switch of the policy.

`snapshot` has everything that the page shows; `switch_policy` is the only thing that it can change.
"""

from __future__ import annotations

import asyncio
import contextlib
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from paellapy.scheduler.engine.monitor import Monitor
from paellapy.scheduler.policies.policy import PolicyError
from paellapy.serving.access import open_to_all, operates
from paellapy.serving.dashboard_events import Hub
from paellapy.serving.errors import RequestError
from paellapy.serving.infer import read
from paellapy.serving.middleware import SERVICE, json_response
from paellapy.serving.numbers import NOT_JSON
from paellapy.serving.protocol import BESIDE_BYTES
from paellapy.serving.registry import READY, UNAVAILABLE, Entry
from paellapy.serving.remote_monitor import RemoteMonitor
from paellapy.serving.service import Service

HUB = web.AppKey("dashboard_hub", Hub)
MONITOR = web.AppKey[Monitor | RemoteMonitor]("dashboard_monitor")

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS = {
    # Nothing from other hosts, nothing inline, and no other page may show this one in a frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
SWITCH_HEADER = "X-Paellapy"  # a page of another site cannot send it: no answer of ours permits that


async def snapshot(monitor: Monitor | RemoteMonitor, service: Service) -> dict[str, Any]:
    """All data of the page: the engine's, and the front end's counts of refusals."""
    found = await asyncio.to_thread(monitor.snapshot)
    counters = service.counters.models
    for each in found["models"]:
        known = counters.get(each["name"])
        each["refused"] = 0 if known is None else sum(known.refused.values())
    found["state"] = "draining" if service.draining and found["state"] == "running" else found["state"]
    found["ready"] = service.ready
    missing = [e for e in service.registry.entries.values() if e.wanted and e.state != READY]
    found["failed"] = [{"name": e.name, "reason": e.reason} for e in missing if _has_failed(e)]
    found["loading"] = [e.name for e in missing if not _has_failed(e)]
    return found


def _has_failed(entry: Entry) -> bool:
    """Whether the model could not be loaded; other models that are not loaded yet soon will be."""
    return entry.state == UNAVAILABLE and entry.reason not in ("not loaded yet", "being loaded anew")


async def switch_policy(monitor: Monitor | RemoteMonitor, name: str) -> str:
    """Returns the policy's name once it is in effect."""
    await asyncio.to_thread(monitor.set_policy, name)
    return monitor.engine.policy


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    policy: str


async def events(request: web.Request) -> web.StreamResponse:
    if request.method == "HEAD":  # its answer has no body, and must not wait for events
        return web.Response(headers=_STREAM)
    hub = request.app[HUB]
    with hub.seat() as free:
        if not free:
            said = f"the limit of {hub.max_viewers} open dashboards, of all workers together, is reached; close one"
            raise RequestError(said, status=503)
        response = web.StreamResponse(headers=_STREAM)
        await response.prepare(request)
        # The viewer is too slow or gone; either way its connection ends here, without loss for the others.
        with contextlib.suppress(TimeoutError, ConnectionError):
            await hub.show(response.write)
    response.force_close()
    return response


@operates
async def policy(request: web.Request) -> web.Response:
    if request.content_type != "application/json" or SWITCH_HEADER not in request.headers:
        raise RequestError(f"send Content-Type: application/json and the header {SWITCH_HEADER}: 1", status=403)
    try:
        asked = msgspec.json.decode(await read(request, request.app[SERVICE], BESIDE_BYTES), type=_Switch)
    except NOT_JSON as e:
        raise RequestError(f'the body must be {{"policy": "NAME"}}: {e}') from None
    try:
        return json_response({"policy": await switch_policy(request.app[MONITOR], asked.policy)})
    except PolicyError as e:
        raise RequestError(str(e)) from e


def add_dashboard(app: web.Application) -> None:
    service = app[SERVICE]
    monitor = app[MONITOR] = service.monitor()
    hub = app[HUB] = Hub(lambda: snapshot(monitor, service), monitor.start, monitor.stop, service.counters.add_viewers)
    folder = files("paellapy.serving") / "dashboard"
    pages = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}

    def answer(name: str) -> web.Response:
        return web.Response(
            body=pages[name], content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8", headers=_HEADERS
        )

    @open_to_all  # it holds no secrets; the data needs a key
    async def page(request: web.Request) -> web.Response:
        return answer("index.html")

    @open_to_all
    async def part(request: web.Request) -> web.Response:
        if request.match_info["file"] not in pages:
            raise web.HTTPNotFound
        return answer(request.match_info["file"])

    async def shutdown(_: web.Application) -> None:
        hub.close()

    @open_to_all
    async def moved(request: web.Request) -> web.Response:
        # A relative address: behind a proxy or in another application, only the browser knows the full one.
        raise web.HTTPFound("../" if request.path.endswith("/") else "./")

    app.router.add_get("/", page)
    app.router.add_get("/dashboard", moved)
    app.router.add_get("/dashboard/", moved)
    app.router.add_get("/dashboard/events", events)
    app.router.add_post("/dashboard/policy", policy)
    app.router.add_get("/dashboard/{file}", part)
    app.on_shutdown.append(shutdown)
