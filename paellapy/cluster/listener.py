"""A router on a socket. Inference takes the fast path; aiohttp handles everything else.

Through aiohttp's server a request takes 3.6 times the router's processor time.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from paellapy.cluster.aggregate import (
    ROUTER,
    ask_all,
    check_key,
    cluster_status,
    merged_index,
    merged_metrics,
    merged_statistics,
)
from paellapy.cluster.engine_state import members_of
from paellapy.cluster.headers import digest_of
from paellapy.cluster.processes import RouterTask, kept
from paellapy.cluster.router import Forward, Router, RouterOptions
from paellapy.instrument.errors import ArgumentError
from paellapy.serving import routes
from paellapy.serving.access import open_to_all
from paellapy.serving.errors import RequestError, error_response, json_response, short, sign
from paellapy.serving.fast_path.connection import FastConnection, Reading
from paellapy.serving.fast_path.headers import Head, Heads
from paellapy.serving.limits import BESIDE_BYTES, ConnectionLimits, read_body
from paellapy.serving.listening import Runner, Shares, Site, listen, stop_listening, url_of
from paellapy.serving.logs import log, request_id
from paellapy.serving.openai import error_body
from paellapy.serving.protocol import Pieces
from paellapy.serving.registry import VERSION
from paellapy.serving.routes import Protocol
from paellapy.serving.tensors import NOT_JSON, PIECE_BYTES

LOOK_S = 0.2

# Headers of one connection only, or set again by the next sender.
_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "trailer", "upgrade", "date")
)


class RouterHandler:
    def __init__(self, router: Router) -> None:
        o = router.options
        self._router = router
        self.heads = Heads(o.client_header, o.max_body_bytes)
        self.reading = Reading()

    def begin(self, connection: FastConnection, head: Head, raw: bytes) -> Forward | None:
        router = self._router
        if head.length > BESIDE_BYTES:
            unknown = router.options.key is not None and digest_of(raw) not in router.keys
            if unknown or head.length > router.most_bytes(head.model):
                return None
        return Forward(router, head.model, raw, client=connection, head=head)


async def forwarded(request: web.Request) -> web.StreamResponse:
    """Forwards a whole request that cannot take the fast path. If no address names the model, the body does.

    An engine stops writing a text when its client leaves; an inference goes on.
    """
    router, model = request.app[ROUTER], request.match_info.get("model", "")
    answer: asyncio.Future[Pieces] = asyncio.get_running_loop().create_future()
    work = Forward(router, model, answer=answer, cancels=not request.path.endswith("/infer"))
    try:
        if model:
            work.look()
        await check_key(request, again=True)
        most = router.most_bytes(model) if request.method == "POST" else BESIDE_BYTES
        body = await read_body(request, most, router.options.body_timeout_s, work.claim)
        if not model:
            work.model = _model_of(body)
        work.raw = _header(request, len(body))
        work.start(body)
        del body  # the request has a copy
        parts = await answer
        first, *headers = bytes(parts[0]).decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        passed = [(name, value.strip()) for name, _, value in (each.partition(":") for each in headers)]
        about: Any = {
            "status": int(first.split(" ", 2)[1]),
            "headers": CIMultiDict(each for each in passed if each[0].lower() not in _HOP),
        }
        if work.stream is None:
            return web.Response(**about, body=b"".join(parts[1:]))
        response = web.StreamResponse(**about)
        await response.prepare(request)
        while piece := await work.stream.read(PIECE_BYTES):
            await response.write(piece)
    except BaseException as e:
        work.leave()
        if work.stream is None or not isinstance(e, ConnectionError):
            raise
        if request.transport is not None:  # the engine has ended, and its client is not to take this for the end
            request.transport.abort()
    return response


async def texts(request: web.Request) -> web.StreamResponse:
    """The same at the addresses of OpenAI's API."""
    return await forwarded(request)


async def merged_models(request: web.Request) -> web.Response:
    pages = await ask_all(request.app[ROUTER], request, "/v1/models")
    found = {each["id"]: each for page in pages.values() for each in msgspec.json.decode(page)["data"]}
    return json_response({"object": "list", "data": list(found.values())})


texts.error_body = merged_models.error_body = error_body  # type: ignore[attr-defined]


def _header(request: web.Request, length: int) -> bytes:
    # An answer to HEAD has a length and no body: the engine is asked for both, and aiohttp sends the head alone.
    method = "GET" if request.method == "HEAD" else request.method
    lines = [f"{method} {request.raw_path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in _HOP]
    lines.append(f"Content-Length: {length}")
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("utf-8", "surrogateescape")


class _Named(msgspec.Struct):
    model: str


def _model_of(body: bytearray) -> str:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except NOT_JSON as e:
        raise RequestError(f"the body names no model: {e}", field="model") from None


@open_to_all
async def ready(request: web.Request) -> web.Response:
    router = request.app[ROUTER]
    if router.ready:
        return json_response({"ready": True})
    why = {"missing": router.missing(), "unheard": router.unheard()}
    # Where clients need keys, the names are for those who have one: /v2/cluster says the same.
    return json_response({"ready": False, **({} if router.options.key else why)}, 503)


async def model_ready(request: web.Request) -> web.Response:
    router, name = request.app[ROUTER], request.match_info["model"]
    await check_key(request)
    router.check_model(name)
    if (version := request.match_info.get("version", VERSION)) != VERSION:
        raise RequestError(f"model {name!r} has no version {short(version)}, only {VERSION}", status=404)
    is_ready = bool(router.with_model(name)) and not router.draining
    return json_response({"name": name, "ready": is_ready}, 200 if is_ready else 503)


async def placed(request: web.Request) -> web.Response:
    said = "the cluster's plan decides which engine has which model: change it with `paellapy cluster`"
    raise RequestError(said, status=403)


async def status(request: web.Request) -> web.Response:
    await check_key(request)
    return json_response(cluster_status(request.app[ROUTER]))


@web.middleware
async def errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answers every error as `{"error": "…"}`, like a server."""
    number = request_id(request.headers.get("X-Request-Id"))
    try:
        response: web.StreamResponse = await handler(request)
    except Exception as e:
        response = error_response(e, request, number)
    response.headers.setdefault("X-Request-Id", number)
    if request.app[ROUTER].draining:
        response.force_close()
    return response


def router_app(router: Router) -> web.Application:
    app = web.Application(middlewares=[errors], client_max_size=router.options.max_body_bytes)
    app[ROUTER] = router
    app.on_response_prepare.append(sign)
    Protocol(
        server=routes.server, live=routes.live, ready=ready, infer=forwarded, model=forwarded, model_ready=model_ready,
        config=forwarded, stats=merged_statistics, index=merged_index, load=placed, unload=placed,
    ).add_to(app)  # fmt: skip
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        app.router.add_post(f"{path}/generate", forwarded)
        app.router.add_post(f"{path}/generate_stream", forwarded)
    for root in ("/v1", "/openai/v1"):
        app.router.add_get(f"{root}/models", merged_models)
        app.router.add_get(f"{root}/models/{{model}}", texts)
        for name in ("completions", "chat/completions", "embeddings", "rerank"):
            app.router.add_post(f"{root}/{name}", texts)
    app.router.add_get("/health", ready)
    app.router.add_get("/v2/cluster", status)
    app.router.add_get("/metrics", merged_metrics)
    return app


class FrontDoor:
    """A router that listens. `listening` is a socket that listens already, on a port shared with other routers."""

    def __init__(self, router: Router, listening: socket.socket | None = None) -> None:
        self.router, self._listening = router, listening
        self._runner: Runner | None = None
        self.url = ""

    async def start(self) -> None:
        o = self.router.options
        self._runner = Runner(
            router_app(self.router),
            partial(FastConnection, handler=RouterHandler(self.router)),
            ConnectionLimits(
                max_body_bytes=o.max_body_bytes, body_timeout_s=o.body_timeout_s, max_held_bytes=o.max_held_bytes
            ),
            drain_s=o.drain_s,
            held=self.router.held,
        )
        await self._runner.setup()
        try:
            sockets = listen(o.host, o.port) if self._listening is None else [self._listening]
        except BaseException:
            await self._runner.cleanup()
            raise
        for each in sockets:
            await Site(self._runner, each, None).start()
        self.url = url_of(self._runner.addresses[0], tls=False)

    async def stop(self) -> None:
        """Stops listening, then finishes the requests in flight."""
        self.router.draining = True
        if self._runner is not None:
            await stop_listening(self._runner)
            await self._runner.cleanup()
            self._runner = None
        await self.router.close()


class Routers:
    """`number` routers on one port, in front of the same engines; they do not know of each other."""

    def __init__(self, engines: Mapping[str, str], options: RouterOptions, number: int = 1) -> None:
        if not engines:
            said = "a router needs engines: give the address of each, as in http://127.0.0.1:8001"
            raise ArgumentError(said, field="engines")
        if number < 1:
            raise ArgumentError(f"there cannot be {number} routers: give 1 or more", field="number", given=number)
        members_of(engines)
        self._drain_s = options.drain_s
        self._shares = Shares(options.host, options.port, number)
        self.url = url_of(self._shares.address, tls=False)
        descriptors = [self._shares[k].fileno() for k in range(number)]
        self._task = RouterTask(engines=dict(engines), options=asdict(options), descriptors=descriptors)
        self.kept = kept(self._task, descriptors)

    def look(self) -> None:
        """Starts a keeper that has ended again. The sockets stay open, so that connections wait there meanwhile."""
        if self.kept.ended:
            log.error("the routers ended and are started again")
            self.kept.end()
            self.kept = kept(self._task, self._task.descriptors)

    def close(self) -> None:
        self._shares.close()
        self.kept.end(self._drain_s + 4.0)

    def __enter__(self) -> Routers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_routers(
    engines: Mapping[str, str], options: RouterOptions, number: int, announce: Callable[[str], object]
) -> None:
    """Runs until SIGTERM or SIGINT."""
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    with Routers(engines, options, number) as routers:
        announce(routers.url)
        while not stop.wait(LOOK_S):
            routers.look()
