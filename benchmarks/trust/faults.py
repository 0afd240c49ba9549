"""Faults that are injected under load: each harms a server in one way, and returns its observations."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable

from load import exchange
from served import TABLE, Served

Fault = Callable[[Served], Awaitable[str]]
FAR = 1 << 40  # a real GPU has memory behind a table's end, and faults only where there is none
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", "-")] = function  # type: ignore[attr-defined]
    return function


async def ask(server: Served, request: bytes, patience_s: float = 20.0) -> str:
    """The status of one request on a connection of its own."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                status, _, _ = await exchange(reader, writer, request)
            finally:
                writer.close()
    except (OSError, EOFError) as e:
        return type(e).__name__
    return str(status)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def lookup(value: int, *headers: str) -> bytes:
    tensor = {"name": "i", "shape": [1, 1], "datatype": "INT64", "data": [value]}
    return post("/v2/models/lookup/infer", json.dumps({"inputs": [tensor]}).encode(), *headers)


def kill(server: Served, name: str, number: signal.Signals = signal.SIGKILL) -> str:
    for pid in server.children().get(name, []):
        os.kill(pid, number)
        return f"process {pid}, {name}, got {number.name}"
    return f"there is no {name}"


@fault
async def worker_killed(server: Served) -> str:
    """kill -9 of an HTTP worker."""
    return kill(server, "work1")


@fault
async def other_worker_killed(server: Served) -> str:
    """kill -9 of the other HTTP worker."""
    return kill(server, "work2")


@fault
async def engine_killed(server: Served) -> str:
    """kill -9 of the engine's process."""
    return kill(server, "engine")


@fault
async def engine_killed_twice(server: Served) -> str:
    """kill -9 of the engine's process, and half a second later of its successor."""
    before = set(server.children().get("engine", []))
    first = kill(server, "engine")
    await asyncio.sleep(0.5)
    while before & set(engines := server.children().get("engine", [])) or not engines:
        await asyncio.sleep(0.01)
    return f"{first}; {kill(server, 'engine')}"


@fault
async def engine_killed_without_standby(server: Served) -> str:
    """kill -9 of the standby, and of the engine's process once the standby has gone."""
    first = kill(server, "spare")
    while server.children(ended=True).get("spare"):
        await asyncio.sleep(0.01)
    server.harmed_at = time.monotonic()  # the standby's end harms nobody
    return f"{first}; {kill(server, 'engine')}"


@fault
async def engine_stops(server: Served) -> str:
    """The engine's process stands still (SIGSTOP): it is given up after engine_timeout_s = 2."""
    return kill(server, "engine", signal.SIGSTOP)


@fault
async def worker_pauses(server: Served) -> str:
    """A worker stands still for half a second."""
    pids = server.children().get("work1", [])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return f"{len(pids)} paused"


@fault
async def bad_value(server: Served) -> str:
    """An index far beyond its table, three times."""
    return ", ".join([await ask(server, lookup(FAR)) for _ in range(3)])


@fault
async def bad_values_at_once(server: Served) -> str:
    """Fifty indices far beyond their table at once."""
    found = await asyncio.gather(*(ask(server, lookup(FAR + k)) for k in range(50)))
    return ", ".join(f"{found.count(status)} of 50 answered with {status}" for status in sorted(set(found)))


@fault
async def gzip_bombs(server: Served) -> str:
    """Four bodies of 1 MB that unpack to 1 GB."""
    bomb = await asyncio.to_thread(lambda: gzip.compress(bytes(1 << 28), 9) * 4)
    request = post("/v2/models/mlp/infer", bomb, "Content-Encoding: gzip")
    return ", ".join(await asyncio.gather(*(ask(server, request) for _ in range(4))))


@fault
async def long_json(server: Served) -> str:
    """20 MB of JSON lists for an input of 64 numbers."""
    return await ask(server, post("/v2/models/mlp/infer", b'{"inputs":[' + b"[1]," * 5_000_000 + b"[1]]}"))


@fault
async def slow_headers(server: Served) -> str:
    """300 connections that send a header drop by drop."""
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(300)]
    for k in range(10):
        for _, writer in opened:
            with contextlib.suppress(OSError):
                writer.write(b"POST /v2"[k : k + 1])
        await asyncio.sleep(0.1)
    for _, writer in opened:
        writer.close()
    return "300 opened and left"


@fault
async def clients_that_never_read(server: Served) -> str:
    """100 clients that ask and do not read their answers."""
    opened = [await asyncio.open_connection("127.0.0.1", server.port, limit=1) for _ in range(100)]
    for _, writer in opened:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
    await asyncio.sleep(2.0)
    for _, writer in opened:
        writer.transport.abort()
    return "100 opened and left"


@fault
async def clients_that_leave(server: Served) -> str:
    """200 clients that leave within their bodies or before their answers."""
    for k in range(200):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        request = lookup(1)
        writer.write(request if k % 2 else request[:-10])
        writer.transport.abort()
    return "200 left"


@fault
async def unread_dashboards(server: Served) -> str:
    """40 event streams of the dashboard that nobody reads."""
    opened = [await asyncio.open_connection("127.0.0.1", server.port, limit=1) for _ in range(40)]
    for _, writer in opened:
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await asyncio.sleep(2.0)
    for _, writer in opened:
        writer.transport.abort()
    return "40 opened and left"


@fault
async def metrics_flood(server: Served) -> str:
    """200 scrapes of the metrics, eight at a time."""

    async def scrape() -> None:
        for _ in range(25):
            await ask(server, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

    await asyncio.gather(*(scrape() for _ in range(8)))
    return "200 answered"


@fault
async def model_reloaded(server: Served) -> str:
    """A model is loaded anew, five times."""
    return ", ".join([await ask(server, post("/v2/repository/models/lookup/load", b"{}")) for _ in range(5)])


@fault
async def code_that_fails(server: Served) -> str:
    """A model's file is edited into one that cannot be imported, and loaded; then put back."""
    path = server.folder / "lookup_model.py"
    before = path.read_text()
    path.write_text("raise RuntimeError('edited')\n")
    found = await ask(server, post("/v2/repository/models/lookup/load", b"{}"))
    path.write_text(before)
    return f"{found}, then {await ask(server, post('/v2/repository/models/lookup/load', b'{}'))}"


@fault
async def reload_signal(server: Served) -> str:
    """SIGHUP with a configuration that is no TOML, then with the right one."""
    before = server.config.read_text()
    server.config.write_text("[[[")
    os.kill(server.process.pid, signal.SIGHUP)
    await asyncio.sleep(0.5)
    server.config.write_text(before)
    os.kill(server.process.pid, signal.SIGHUP)
    await asyncio.sleep(0.5)
    return "sent twice"


@fault
async def policies_in_turn(server: Served) -> str:
    """The policy is switched six times."""
    found = []
    for name in ("edf", "srpt", "fifo", "hrrn", "slack", "paella"):
        body = json.dumps({"policy": name}).encode()
        headers = ("Content-Type: application/json", "X-Paellapy: 1")
        found.append(await ask(server, post("/dashboard/policy", body, *headers)))
    return ", ".join(found)


@fault
async def connection_flood(server: Served) -> str:
    """1,000 connections at once, each with a request."""
    found = await asyncio.gather(*(ask(server, lookup(k % TABLE)) for k in range(1000)))
    answered, refused = found.count("200"), found.count("503")
    return f"{answered} answered, {refused} refused, {1000 - answered - refused} others"
