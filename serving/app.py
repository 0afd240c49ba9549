"""`create_app`: the aiohttp application over an engine. It stands alone, or as a sub-application of another."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.admission import Mode
from paellapy.serving.dashboard_routes import add_dashboard
from paellapy.serving.metrics import add_metrics
from paellapy.serving.middleware import SERVICE, outermost
from paellapy.serving.openapi import add_docs
from paellapy.serving.registry import Catalogue, registry_of
from paellapy.serving.routes import add_routes
from paellapy.serving.service import Service

MAX_BODY_BYTES = 64 << 20
BODY_TIMEOUT_S = 30.0
CLIENT_HEADER = "X-Client-Id"


def create_app(
    engine: Engine | Catalogue,
    *,
    admission: Mode = "targets",
    keys: Mapping[str, str] | None = None,
    client_header: str = CLIENT_HEADER,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout_s: float | None = BODY_TIMEOUT_S,
    access_log: bool = False,
    service: Service | None = None,
) -> web.Application:
    """An application that serves the models an engine has loaded, or those of a registry.

        app = web.Application()
        app.add_subapp("/inference", create_app(engine))
        web.run_app(app, handler_cancellation=True)  # so that a client that leaves frees its work

    The engine stays the caller's: to close it, and to load more models through the registry. `service`: where it was
    made already, in a worker.
    """
    app = web.Application(
        middlewares=[outermost(keys or {}, client_header, access_log)], client_max_size=max_body_bytes
    )
    if service is None:
        registry = engine if isinstance(engine, Catalogue) else registry_of(engine)
        service = Service(registry, admission, max_body_bytes, body_timeout_s)
    app[SERVICE] = service
    add_routes(app)
    add_metrics(app)
    add_docs(app)
    add_dashboard(app)

    async def close(_: web.Application) -> None:
        service.close()

    app.on_cleanup.append(close)
    return app
