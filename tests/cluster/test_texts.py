"""Texts through a router: the addresses of language models, streams piece by piece, clients and engines that leave."""

from __future__ import annotations

import asyncio
import contextlib
import types

import msgspec
import pytest
from aiohttp import web
from raw_client import Client
from router_server import routing
from serving_server import looping

from paellapy.serving.load_report import ModelOutlook, Outlook

BODY = b'{"model": "tiny"}'


@contextlib.contextmanager
def writing():
    """An engine whose texts consist of the pieces that `say` is given; None: it ends the connection."""
    line = Outlook(
        ready=True, draining=False, live=0, in_flight=0, held_bytes=0, budget_bytes=0, since=1.0,
        models={"tiny": ModelOutlook(state="READY")},
    )  # fmt: skip

    async def outlooks(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(msgspec.json.encode(line) + b"\n")
            await asyncio.sleep(0.02)

    async def completions(request):
        found.asked += 1
        response = web.StreamResponse()
        try:
            while (piece := await pieces.get()) is not None:
                if not piece:
                    await response.write_eof()
                    return response
                if not response.prepared:
                    await response.prepare(request)
                await response.write(piece)
            request.transport.abort()
        except asyncio.CancelledError:
            found.left += 1
            raise
        return response

    async def start():
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, asyncio.Queue()

    app = web.Application()
    app.router.add_get("/v2/outlook", outlooks)
    app.router.add_post("/v1/completions", completions)
    with looping() as loop:
        runner, pieces = asyncio.run_coroutine_threadsafe(start(), loop).result()
        found = types.SimpleNamespace(asked=0, left=0, url=f"http://127.0.0.1:{runner.addresses[0][1]}")
        found.say = lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece)
        yield found
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()


@pytest.fixture
def one():
    with writing() as engine, routing({"e": engine.url}) as router:
        router.wait_until(lambda: router.router.ready)
        yield engine, router


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def test_pieces_pass_as_they_come_and_the_next_request_finds_the_connection_free(one):
    engine, router = one
    with Client(router) as client:
        for _ in range(2):
            client.send(REQUEST)
            for piece in (b"first", b"second" * 1000, b"third"):
                engine.say(piece)
                client.until(piece)  # before the engine goes on
            engine.say(b"")
            client.until(b"0\r\n\r\n")
        router.wait_until(lambda: router.router.in_flight == 0)
    assert engine.asked == 2
    view = router.router.views["e"]
    assert (view.outstanding, router.router.held.nbytes) == (0, 0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_its_text(one, begun):
    engine, router = one
    with Client(router) as client:
        client.send(REQUEST)
        if begun:
            engine.say(b"first")
            client.until(b"first")
        router.wait_until(lambda: engine.asked == 1)
    router.wait_until(lambda: engine.left == 1)
    router.wait_until(lambda: router.router.in_flight == router.router.views["e"].outstanding == 0)
    assert router.router.held.nbytes == 0


def test_an_engine_that_ends_before_the_first_byte_is_replaced_and_later_the_client_is_cut_off(one):
    engine, router = one
    with Client(router) as client:
        client.send(REQUEST)
        engine.say(None)
        engine.say(b"again")
        client.until(b"again")
        assert engine.asked == 2
        engine.say(None)
        with pytest.raises((AssertionError, ConnectionResetError)):  # the connection is closed
            client.until(b"0\r\n\r\n")
    router.wait_until(lambda: router.router.in_flight == 0)
    assert (engine.asked, router.router.counts.lost, router.router.counts.again) == (2, 2, 1)
