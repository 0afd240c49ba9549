"""What an engine tells routers every few milliseconds: its queue, when a new request would be done, its models.

`GET /v2/outlook` answers once; with `?every_ms=5` it streams one JSON object per line. While nothing changes, a line is
sent every `BEAT_S`, so a longer silence means that the server is not responding.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import msgspec
from aiohttp import web

from paellapy.scheduler.core.admission import Predictor
from paellapy.serving.errors import RequestError, short
from paellapy.serving.limits import largest_request
from paellapy.serving.registry import READY, Entry
from paellapy.serving.service import SERVICE, Service

BEAT_S = 0.05
LEAST_MS, MOST_MS = 1.0, 1000.0  # allowed interval between two lines
MEMORY_S = 0.5  # seconds to reuse the models' memory use, which changes rarely and is slow to add up
MAX_LISTENERS = 64


class ModelOutlook(msgspec.Struct, kw_only=True):
    """One model of an engine. All times are zero while it is not loaded."""

    state: str
    wanted: bool = False  # it should be loaded
    largest_bytes: int = 0  # largest body of a request to it
    predicted_ms: float = 0.0  # latency of a request that arrives now, including its wait
    step_ms: float = 0.0  # time that each further request in the queue adds
    alone_ms: float = 0.0
    live: int = 0  # its requests, waiting or running


class Outlook(msgspec.Struct, kw_only=True):
    """One line of an engine's stream."""

    ready: bool
    draining: bool
    live: int  # items waiting or running
    in_flight: int  # requests being handled
    held_bytes: int
    budget_bytes: int
    since: float  # start of the server, Unix time
    models: dict[str, ModelOutlook]


_encode = msgspec.json.Encoder().encode


class Outlooks:
    """Makes the lines of a service; all listeners share them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._predictor = Predictor(service.engine.state)
        self._memory, self._memory_at = {"held_bytes": 0, "budget_bytes": 0}, -math.inf
        self._line, self._made_at = b"", -math.inf
        self.listeners = 0

    def line(self) -> bytes:
        now = time.monotonic()
        if now - self._made_at >= LEAST_MS * 1e-3 / 2:
            self._line, self._made_at = _encode(self.look()) + b"\n", now
        return self._line

    def look(self) -> Outlook:
        service = self._service
        engine, now = service.engine, time.monotonic()
        if now - self._memory_at > MEMORY_S:
            self._memory, self._memory_at = engine.stats()["memory"], now
        entries = list(service.registry.entries.items())
        return Outlook(
            ready=service.ready,
            draining=service.draining,
            live=int(engine.state.core["live"][0]),
            in_flight=service.in_flight,
            held_bytes=self._memory["held_bytes"],
            budget_bytes=self._memory["budget_bytes"],
            since=service.since,
            models={name: self._model(entry) for name, entry in entries},
        )

    def _model(self, entry: Entry) -> ModelOutlook:
        state, row = self._service.engine.state, entry.row
        if entry.state != READY or entry.model is None or row < 0 or self._service.silent:
            return ModelOutlook(state=entry.state, wanted=entry.wanted)
        now_ns = time.monotonic_ns()
        sizes, last = state.size[row], int(state.model["n_sizes"][row]) - 1
        gain = max(1.0, float(state.core["gain"][0]))
        return ModelOutlook(
            state=READY,
            wanted=entry.wanted,
            largest_bytes=min(largest_request(entry.model), self._service.limits.max_body_bytes),
            predicted_ms=(self._predictor.finish(state, row, now_ns) - now_ns) * 1e-6,
            step_ms=float(sizes["total_ns"][last]) / int(sizes["batch"][last]) / gain * 1e-6,
            alone_ms=float(sizes["total_ns"][0]) * 1e-6,
            live=int(state.model["live"][row]),
        )


_OUTLOOKS = web.AppKey("outlooks", Outlooks)


def _every_s(text: str) -> float:
    try:
        every_ms = float(text)
    except ValueError:
        every_ms = math.nan
    if not LEAST_MS <= every_ms <= MOST_MS:
        said = f"every_ms is {short(text)}: give a number of milliseconds from {LEAST_MS:g} to {MOST_MS:g}"
        raise RequestError(said, field="every_ms", limit=(LEAST_MS, MOST_MS), given=text)
    return every_ms * 1e-3


async def outlook(request: web.Request) -> web.StreamResponse:
    looks = request.app[_OUTLOOKS]
    if "every_ms" not in request.query:
        return web.Response(body=looks.line(), content_type="application/json")
    every_s = _every_s(request.query["every_ms"])
    if looks.listeners >= MAX_LISTENERS:
        raise RequestError(f"this engine's limit of {MAX_LISTENERS} listening routers is reached", status=503)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    looks.listeners += 1
    try:
        with contextlib.suppress(ConnectionError):
            await _stream(request.app[SERVICE], looks, response, every_s)
    finally:
        looks.listeners -= 1
    response.force_close()
    return response


async def _stream(service: Service, looks: Outlooks, response: web.StreamResponse, every_s: float) -> None:
    """Sends lines until the server drains; the last line says so."""
    last, told_at = b"", -math.inf
    while True:
        line, now = looks.line(), time.monotonic()
        if line != last or now - told_at >= BEAT_S:
            await response.write(line)
            last, told_at = line, now
        if service.draining:
            return
        await asyncio.sleep(every_s)


def add_outlook(app: web.Application) -> None:
    app[_OUTLOOKS] = Outlooks(app[SERVICE])
    app.router.add_get("/v2/outlook", outlook)
