"""`create_app`: the aiohttp application over an engine, to run by itself or as a sub-application of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.access import Access, Key
from paellapy.serving.admission import Mode
from paellapy.serving.dashboard_routes import add_dashboard
from paellapy.serving.load_report import add_outlook
from paellapy.serving.metrics import add_metrics
from paellapy.serving.middleware import SERVICE, outermost, sign
from paellapy.serving.openapi import add_docs
from paellapy.serving.registry import Catalogue, registry_of
from paellapy.serving.routes import add_routes
from paellapy.serving.service import Service

ACCESS = web.AppKey("access", Access)
MAX_BODY_BYTES = 64 << 20
BODY_TIMEOUT_S = 30.0
CLIENT_HEADER = "X-Client-Id"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Options of `create_app`; `hosts` and `model_control` are described under `[server]`."""

    admission: Mode = "targets"
    keys: Mapping[str, str | Key] = field(default_factory=dict)
    client_header: str = CLIENT_HEADER
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float | None = BODY_TIMEOUT_S
    access_log: bool = False
    hosts: Sequence[str] = ()
    model_control: bool = True


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
    access = Access(o.keys, o.hosts, o.model_control)
    app = web.Application(
        middlewares=[outermost(access, o.client_header, o.access_log)], client_max_size=o.max_body_bytes
    )
    if service is None:
        registry = engine if isinstance(engine, Catalogue) else registry_of(engine)
        service = Service(registry, o.admission, o.max_body_bytes, o.body_timeout_s)
    app[SERVICE] = service
    app[ACCESS] = access
    app.on_response_prepare.append(sign)
    add_routes(app)
    add_metrics(app)
    add_docs(app)
    add_outlook(app)
    add_dashboard(app)

    async def close(_: web.Application) -> None:
        service.close()

    app.on_cleanup.append(close)
    return app
