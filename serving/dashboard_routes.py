"""The dashboard at `/`: its page, its data as server-sent events, and the switch of the policy.

`Snapshots` make everything that the page shows; the policy is the only thing that it can change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.policies.policy import PolicyError
from paellapy.serving.access import for_operators, open_to_all, operates
from paellapy.serving.errors import EVENTS, RequestError, json_response
from paellapy.serving.inference import read
from paellapy.serving.limits import BESIDE_BYTES
from paellapy.serving.logs import log
from paellapy.serving.registry import READY, UNAVAILABLE, Entry
from paellapy.serving.service import SERVICE, Service
from paellapy.serving.tensors import NOT_JSON

# Snapshots for the dashboard's viewers: each tick makes one for all of them, and none while nobody watches.
#
# A viewer that cannot keep up gets the latest snapshot when it is ready for one; nothing is queued for it. A viewer
# that reads nothing for a while is dropped.

Take = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[bytes], Awaitable[None]]

TICK_S = 0.2
MAX_VIEWERS = 32  # of all processes of a server together
PATIENCE_S = 5.0  # for a viewer that reads nothing
ENGINE_PATIENCE_S = 10.0  # for a snapshot of the engine

_encode = msgspec.json.Encoder().encode


class _Round:
    """The time from the first viewer to the last: it holds the latest snapshot and wakes those who wait for
    the next.
    """

    def __init__(self) -> None:
        self.latest = b""
        self.number = 0
        self.over = False
        self._news = asyncio.Event()
        self.ticker: asyncio.Task[None] | None = None

    def publish(self, message: bytes) -> None:
        self.latest = message
        self.number += 1
        self._wake()

    def end(self) -> None:
        self.over = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def after(self, seen: int) -> None:
        """Waits until there is a newer snapshot, or the round is over."""
        while self.number == seen and not self.over:
            await self._news.wait()


class Hub:
    """Sends snapshots to viewers. `take` makes one, and is called only while somebody watches. `count` adds to the
    number of viewers in all processes, and returns it.
    """

    def __init__(
        self,
        take: Take,
        count: Callable[[int], int],
        *,
        tick_s: float = TICK_S,
        max_viewers: int = MAX_VIEWERS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._take, self._count = take, count
        self._tick_s, self.max_viewers, self._patience_s = tick_s, max_viewers, patience_s
        self._round: _Round | None = None
        self._closed = False
        self.viewers = 0

    @contextlib.contextmanager
    def seat(self) -> Iterator[bool]:
        """Counts one more viewer. False: there are too many, in this process and others together."""
        try:  # counted first and looked at second: processes that do so at the same time never let in too many
            yield self._count(1) <= self.max_viewers
        finally:
            self._count(-1)

    async def show(self, send: Send) -> None:
        """Sends snapshots to one viewer until the round is over. TimeoutError: the viewer is too slow."""
        if self._closed:
            return
        self.viewers += 1
        try:
            current = self._round or self._open()
            seen = 0
            while True:
                await current.after(seen)
                if current.over:
                    return
                seen = current.number
                await asyncio.wait_for(send(current.latest), self._patience_s)
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._rest()

    def _open(self) -> _Round:
        self._round = opened = _Round()
        opened.ticker = asyncio.create_task(self._run(opened))
        return opened

    async def _run(self, current: _Round) -> None:
        try:
            while True:
                current.publish(b"data: " + _encode(await self._take()) + b"\n\n")
                await asyncio.sleep(self._tick_s)
        except Exception as e:  # viewers reconnect, and try again
            log.error("making a snapshot for the dashboard failed", exc_info=e)
            current.end()
            if self._round is current:
                self._round = None

    def _rest(self) -> None:
        current, self._round = self._round, None
        if current is not None and current.ticker is not None:
            current.ticker.cancel()

    def close(self) -> None:
        """Ends all viewers' streams; no viewer is accepted afterwards."""
        self._closed = True
        if self._round is not None:
            self._round.end()


HUB = web.AppKey("dashboard_hub", Hub)

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
SWITCH_HEADER = "X-Paellapy"  # a page of another site cannot send it: no answer of ours permits that


class Snapshots:
    """All data of the page: the engine's, and the front end's counts of refusals."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last: dict[str, Any] | None = None

    async def take(self) -> dict[str, Any]:
        service = self._service
        found = await self._of_engine()
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

    async def _of_engine(self) -> dict[str, Any]:
        """The engine's data; while it is restarted, those before."""
        try:
            async with asyncio.timeout(ENGINE_PATIENCE_S):
                self._last = await self._service.call("snapshot")
        except EngineAwayError:
            if self._last is None:
                raise
            self._last = {**self._last, "state": "restarting"}
        assert self._last is not None
        return self._last


def _has_failed(entry: Entry) -> bool:
    """Whether the model could not be loaded; other models that are not loaded yet soon will be."""
    return entry.state == UNAVAILABLE and entry.reason not in ("not loaded yet", "being loaded anew")


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    policy: str


@for_operators
async def events(request: web.Request) -> web.StreamResponse:
    if request.method == "HEAD":  # its answer has no body, and must not wait for events
        return web.Response(headers=EVENTS)
    hub = request.app[HUB]
    with hub.seat() as free:
        if not free:
            said = f"the limit of {hub.max_viewers} open dashboards, of all workers together, is reached; close one"
            raise RequestError(said, status=503)
        response = web.StreamResponse(headers=EVENTS)
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
        return json_response({"policy": await request.app[SERVICE].call("set_policy", asked.policy)})
    except PolicyError as e:
        raise RequestError(str(e)) from e


def add_dashboard(app: web.Application) -> None:
    service = app[SERVICE]
    hub = app[HUB] = Hub(Snapshots(service).take, service.counters.add_viewers)
    folder = files("paellapy.serving") / "dashboard"
    pages = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}

    def answer(name: str) -> web.Response:
        return web.Response(
            body=pages[name], content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8", headers=_HEADERS
        )

    @open_to_all  # it holds no secrets; the data needs a key
    @for_operators
    async def page(request: web.Request) -> web.Response:
        return answer("index.html")

    @open_to_all
    @for_operators
    async def part(request: web.Request) -> web.Response:
        if request.match_info["file"] not in pages:
            raise web.HTTPNotFound
        return answer(request.match_info["file"])

    async def shutdown(_: web.Application) -> None:
        hub.close()

    @open_to_all
    @for_operators
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
