"""A picture of the dashboard under load: made at once, or recorded on one machine and drawn on another.

python benchmarks/dashboard_shot.py shot PNG [--url URL | --device cuda] [--dark] [--size 1366x900]
python benchmarks/dashboard_shot.py record JSON [--url URL | --device cuda] [--seconds 20]     (no browser needed)
python benchmarks/dashboard_shot.py draw JSON PNG [--dark] [--size 1366x900] [--first N]       (no GPU needed)

Without --url it starts a server on a free port and clients that keep it busy: --clients in each of --processes, with
pauses of --rest-ms on average. The server has the demo models, which leave a GPU nearly empty, or, with --models
rivals, `short` and `long`, whose layers have up to two blocks for every SM. A recording holds the data that the server
sent, so the server's own page can draw it later.

docs/images/dashboard.png: record --device cuda --processes 4 --clients 16 --rest-ms 1, then draw --first 30
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from browser import Browser
from common import commit

from paellapy import demo
from paellapy.cli.serve import digit_request
from paellapy.demo.models import WIDTH, rivals
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model
from paellapy.serving.config import ServerConfig
from paellapy.serving.preflight import keep_memory, loop_factory, share_interpreter
from paellapy.serving.registry import Registry, entry_of
from paellapy.serving.server import Server

TARGETS_MS = {
    "cuda": {"mlp": 2.0, "cnn": 4.0, "transformer": 8.0, "short": 2.0, "long": 12.0},
    "virtual": {"mlp": 40.0, "cnn": 60.0, "transformer": 90.0, "short": 400.0, "long": 4000.0},
}
ASKED = {"demo": {"mlp": 5, "cnn": 3, "transformer": 2}, "rivals": {"short": 5, "long": 2}}  # how often, relative
MEANWHILE_S = 20.0  # of load before the picture: the curves reach back so far


# -- a server under load


@contextlib.asynccontextmanager
async def server_of(which: str, device: str, policy: str) -> AsyncIterator[str]:
    """Models with targets, on a free port, in a process that is set up as `paellapy serve` does; its URL."""
    keep_memory()
    share_interpreter()
    with Engine(device, policy) as engine:
        targets = TARGETS_MS["virtual" if engine.device.name.startswith("virtual") else "cuda"]
        models: list[Model] = rivals() if which == "rivals" else [demo.load(name) for name in demo.names()]
        for model in models:
            model.target_ms = targets[model.name]
        server = Server(Registry(engine, map(entry_of, models)), ServerConfig(port=0, grace_s=0.0, admission="off"))
        await server.start()
        await server.load()
        try:
            yield server.url
        finally:
            await server.stop()


def vector_request() -> str:
    data = [0.5] * WIDTH
    return json.dumps({"inputs": [{"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": data}]})


async def load(options: argparse.Namespace) -> None:
    """Clients that ask, wait for the answer, rest a moment, and come in bursts, until they are ended."""
    body = vector_request() if options.models == "rivals" else digit_request(demo.held_out()[0][0])
    asked, rng = ASKED[options.models], random.Random(options.seed)

    async def client(session: aiohttp.ClientSession) -> None:
        while True:
            name = rng.choices(list(asked), list(asked.values()))[0]
            for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
                async with session.post(f"{options.url}/v2/models/{name}/infer", data=body) as answer:
                    await answer.read()
            await asyncio.sleep(rng.expovariate(1e3 / options.rest_ms))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(options.clients)))


@contextlib.asynccontextmanager
async def busy(options: argparse.Namespace) -> AsyncIterator[str]:
    """The server to look at: the given one as it is, or one of our own under load.

    The load comes from other processes: a server that asks itself stands still while it looks at its GPU.
    """
    if options.url:
        yield options.url.rstrip("/")
        return
    async with server_of(options.models, options.device, options.policy) as url:
        command = [sys.executable, __file__, "load", "--url", url, "--models", options.models]
        command += ["--clients", str(options.clients), "--rest-ms", str(options.rest_ms), "--seed"]
        asking = [await asyncio.create_subprocess_exec(*command, str(seed)) for seed in range(options.processes)]
        try:
            yield url
        finally:
            for each in asking:
                each.terminate()
            await asyncio.gather(*(each.wait() for each in asking))


# -- record, draw, shot


async def record(options: argparse.Namespace) -> None:
    headers = {"X-API-Key": options.key} if options.key else {}
    found: list[Any] = []
    async with (
        busy(options) as url,
        aiohttp.ClientSession(headers=headers, read_bufsize=1 << 20) as session,
        session.get(f"{url}/dashboard/events", timeout=aiohttp.ClientTimeout(None)) as answer,
    ):
        answer.raise_for_status()
        ends = time.monotonic() + options.seconds
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
            if time.monotonic() > ends:
                break
    options.recording.write_text(json.dumps({"commit": commit(), "snapshots": found}, separators=(",", ":")) + "\n")
    print(f"{options.recording}: {len(found)} snapshots of {found[-1]['device']}")


@contextlib.asynccontextmanager
async def replayed(snapshots: list[Any]) -> AsyncIterator[str]:
    """The page as the server serves it, over events that were recorded; its URL."""
    over = asyncio.Event()

    @web.middleware
    async def from_recording(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/dashboard/events":
            return await handler(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in snapshots:
            await response.write(b"data: " + json.dumps(each).encode() + b"\n\n")
            await asyncio.sleep(0.03)  # a page draws what came last: let it see all
        while not over.is_set():  # the last again and again: a page that hears nothing says so
            await response.write(b"data: " + json.dumps(snapshots[-1]).encode() + b"\n\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.2)
        return response

    with Engine("virtual:h200") as engine:  # serves the page; what is on it was recorded
        server = Server(Registry(engine, ()), ServerConfig(port=0, grace_s=0.0))
        server.app.middlewares.insert(0, from_recording)
        await server.start()
        try:
            yield server.url
        finally:
            over.set()
            await server.stop()


async def picture(url: str, options: argparse.Namespace, ready: str, wait_s: float) -> None:
    width, height = options.size
    async with Browser() as browser:
        page = await browser.page(width, height, dark=options.dark, scale=options.scale)
        await page.goto(f"{url}/")
        await page.wait_for(ready)
        await asyncio.sleep(wait_s)
        await page.screenshot(options.picture)
        for each in [*await page.unreadable(), *page.errors]:
            print("WARNING:", each)
    print(options.picture)


async def draw(options: argparse.Namespace) -> None:
    snapshots = json.loads(options.recording.read_text())["snapshots"][: options.first]
    last = snapshots[-1]
    async with replayed(snapshots) as url:
        uptime = f"up {int(last['uptime_s']) % 60} s" if last["uptime_s"] < 60 else f"{int(last['uptime_s']) % 60} s"
        ready = f"document.querySelector('.pp-foot')?.textContent.includes({json.dumps(uptime)})"
        await picture(url, options, ready, 0.5)


async def shot(options: argparse.Namespace) -> None:
    async with busy(options) as url:
        await picture(url, options, "document.querySelectorAll('.pp-cell').length > 0", MEANWHILE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def size(text: str) -> tuple[int, int]:
        width, _, height = text.partition("x")
        return int(width), int(height)

    for function in (shot, record, draw, load):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        if function in (record, draw):
            command.add_argument("recording", type=Path)
        if function in (shot, draw):
            command.add_argument("picture", type=Path)
            command.add_argument("--dark", action="store_true")
            command.add_argument("--size", type=size, default=(1366, 900))
            command.add_argument("--scale", type=float, default=1.0, help="device pixels per CSS pixel")
        if function is draw:
            command.add_argument("--first", type=int, help="number of snapshots to draw (default: all)")
        if function is not draw:
            command.add_argument("--url", help="URL of a running server that has its own load")
            command.add_argument("--clients", type=int, default=10)
            command.add_argument("--models", choices=list(ASKED), default="demo")
            command.add_argument("--rest-ms", type=float, default=25.0)
        if function in (shot, record):
            command.add_argument("--device", default="virtual:h200")
            command.add_argument("--policy", default="paella")
            command.add_argument("--processes", type=int, default=1)
        if function is load:
            command.add_argument("--seed", type=int, default=0)
        if function is record:
            command.add_argument("--seconds", type=float, default=MEANWHILE_S)
            command.add_argument("--key", help="API key, if the server needs one")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(options.function(options))


if __name__ == "__main__":
    main()
