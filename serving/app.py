"""`create_app`: the aiohttp application over an engine, and the middleware around all its handlers.

The middleware gives every request an id and a trace, checks its key, and turns errors into answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import Any

from aiohttp import web

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.access import CLIENT, CLIENT_HEADER, Access, Key, clients_of
from paellapy.serving.admission import Mode
from paellapy.serving.counters import Counters
from paellapy.serving.dashboard_routes import add_dashboard
from paellapy.serving.embeddings import add_embeddings
from paellapy.serving.errors import NUMBER, SERVER, error_response, sign
from paellapy.serving.generation import add_generation
from paellapy.serving.inference import FACTS
from paellapy.serving.limits import DEFAULTS, ConnectionLimits
from paellapy.serving.load_report import add_outlook
from paellapy.serving.logs import child_span, log_request, request_id
from paellapy.serving.metrics import add_metrics
from paellapy.serving.openapi import add_docs
from paellapy.serving.registry import Catalogue, Registry, registry_of
from paellapy.serving.routes import add_routes
from paellapy.serving.rpc import Calls
from paellapy.serving.service import SERVICE, Service

ACCESS = web.AppKey("access", Access)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Options of `create_app`; `hosts` and `model_control` are described under `[server]`."""

    admission: Mode = "targets"
    keys: Mapping[str, str | Key] = field(default_factory=dict)
    client_header: str = CLIENT_HEADER
    max_body_bytes: int = DEFAULTS.max_body_bytes
    body_timeout_s: float | None = DEFAULTS.body_timeout_s
    max_held_bytes: int = DEFAULTS.max_held_bytes
    access_log: bool = False
    hosts: Sequence[str] = ()
    model_control: bool = True
    local: bool = False  # only this machine reaches the server: see Access


def create_app(
    engine: Engine | Catalogue, options: AppOptions | None = None, *, service: Service | None = None, **settings: Any
) -> web.Application:
    """Makes an application that serves the models of an engine or of a registry.

        app = web.Application()
        app.add_subapp("/inference", create_app(engine))
        web.run_app(app, handler_cancellation=True)  # frees the work of a client that disconnects

    The caller keeps the engine: it closes it, and may load more models through the registry. `settings` are the fields
    of `AppOptions`. `service` is given where it exists already, as in a worker.
    """
    o = replace(options or AppOptions(), **settings)
    access = Access(o.keys, o.hosts, o.model_control, o.local)
    app = web.Application(
        middlewares=[middleware_of(access, o.client_header, o.access_log)], client_max_size=o.max_body_bytes
    )
    calls: Calls | None = None  # of an engine in this process
    if service is None:
        registry = registry_of(engine) if isinstance(engine, Engine) else engine
        assert isinstance(registry, Registry)
        calls = Calls(registry)
        limits = ConnectionLimits(
            max_body_bytes=o.max_body_bytes, body_timeout_s=o.body_timeout_s, max_held_bytes=o.max_held_bytes
        )
        counters = Counters(registry, clients={*clients_of(o.keys), *registry.engine.tenants})
        service = Service(registry, o.admission, limits, calls.call, counters, vouched=bool(o.keys))
    app[SERVICE] = service
    app[ACCESS] = access
    app.on_response_prepare.append(sign)
    add_routes(app)
    add_generation(app)
    add_embeddings(app)
    add_metrics(app)
    add_docs(app)
    add_outlook(app)
    add_dashboard(app)

    async def close(_: web.Application) -> None:
        service.close()
        if calls is not None:
            calls.close()

    app.on_cleanup.append(close)
    return app


def middleware_of(access: Access, client_header: str, access_log: bool) -> Any:
    """Makes the middleware of an application."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_ns = time.monotonic_ns()
        headers, service = request.headers, request.app[SERVICE]
        number = request[NUMBER] = request_id(headers.get("X-Request-Id"))
        try:
            request[CLIENT] = access.client(request, client_header)
            response = await handler(request)
        except asyncio.CancelledError:
            service.counters.note_status(499)
            if access_log:
                _log(request, number, 499, started_ns, 0)
            raise
        except Exception as e:
            response = error_response(e, request, number)
            service.note_refusal(response.status, e, request.get(CLIENT, ""), request.remote)
            clear_frames(e.__traceback__)  # they hold the body, and the error itself
        if not response.prepared:  # a stream that has begun has sent its headers
            response.headers["X-Request-Id"] = number
            response.headers["Server"] = SERVER
        if (given := headers.get("traceparent")) and (span := child_span(given)):
            response.headers["traceparent"] = span
            if state := headers.get("tracestate"):
                response.headers["tracestate"] = state
        service.counters.note_status(response.status)
        if service.draining:
            response.force_close()
        if access_log:
            _log(request, number, response.status, started_ns, getattr(response, "content_length", None) or 0)
        return response

    return middleware


def _log(request: web.Request, number: str, status: int, started_ns: int, size: int) -> None:
    facts: dict[str, Any] | None = request.get(FACTS)
    more = {} if facts is None else {**facts, "out": size}
    if trace := request.headers.get("traceparent"):
        more["traceparent"] = trace
    client = request.get(CLIENT, "")
    log_request(number, request.method, request.path, status, started_ns, client, request.remote, more)
