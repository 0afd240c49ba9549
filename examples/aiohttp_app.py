"""Serve models inside your own aiohttp application, under the prefix /inference."""

from aiohttp import web

import paellapy as pp
from paellapy import demo
from paellapy.serving.app import create_app


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="my own page\n")


def make_app() -> web.Application:
    engine = pp.Engine()
    engine.load(demo.load("mlp"))

    async def close_engine(_: web.Application) -> None:
        engine.close()

    app = web.Application()
    app.router.add_get("/", hello)
    app.add_subapp("/inference", create_app(engine))  # /inference/v2/models/mlp/infer, dashboard at /inference/
    app.on_cleanup.append(close_engine)
    return app


if __name__ == "__main__":
    # handler_cancellation cancels the work of a client that disconnects.
    web.run_app(make_app(), host="127.0.0.1", port=8080, handler_cancellation=True)
