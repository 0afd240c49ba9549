"""Checked requests over mixed models, sizes, encodings, priorities and deadlines, while faults are injected in turn.

    python benchmarks/trust.py [--device cuda] [--seconds 120] [--clients 16] [--faults engine-killed,bad-value]
    python benchmarks/trust.py --attacks all [--seconds 5]      latency and memory under each attack
    python benchmarks/trust.py --minutes 60 [--seed 0]          faults and attacks of all kinds at random, at once

Every answer is compared with NumPy's result. Faults are injected one after the other while the clients go on; the
recovery is the time from a fault to the end of the last moment in which a prober, which asks every model in turn, got
no right answer. Where a fault comes more than once, its longest recovery counts.

Attacks that any server understands also go against LitServe's and Triton's servers, where `--others` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from harness import arguments, commit, environment, save, show, stored
from serving_processes import Processes, children, processes

from paellapy import demo
from paellapy.demo.reference import forward

CLOSE = 2e-3  # of scores between 0 and 1, in single precision
TARGETS_MS = {"mlp": 50.0, "cnn": 100.0, "transformer": 200.0}
TABLE = 64  # rows of `lookup`, which does not check its index
FAR = 1 << 40  # a real GPU has memory behind a table's end, and faults only where there is none
QUIET_S, LONGEST_S = 0.6, 30.0  # of right answers before and after a fault; that a recovery is waited for
CALM_S = 10.0  # before memory is compared
NOTICED_S = 5.0  # after this time, clients know that a worker was killed
BROKEN = (aiohttp.ClientError, OSError, EOFError)
CONFIG = """
device = "{device}"
[server]
host = "127.0.0.1"
port = 0
workers = {workers}
model_control = true
engine_timeout_s = {silent_s}
log_format = "json"
{more}
[[models]]
name = "lookup"
factory = "lookup_model:model"
"""
MODEL = """
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "{name}" }}
target_ms = {target_ms}
"""
LOOKUP = f"""
import numpy as np
import paellapy as pp
import triton
import triton.language as tl

@pp.kernel
@triton.jit
def look_up(index, table, out, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    tl.store(out + row * B + i, tl.load(table + tl.load(index + row) * B + i))

def model():
    def fn(weights, inputs, outputs):
        look_up[(inputs["i"].shape[0],)](inputs["i"], weights["table"], outputs["y"], B=32)

    table = np.repeat(np.arange({TABLE}, dtype=np.float32)[:, None], 32, axis=1)
    return pp.Model("lookup", fn, inputs={{"i": pp.TensorSpec((1,), np.int64)}},
                    outputs={{"y": pp.TensorSpec((32,))}}, weights={{"table": table}}, batch=(1, 4))
"""


@dataclass(slots=True)
class Served:
    """`paellapy serve` with workers, in a folder of its own."""

    processes: Processes
    folder: Path
    harmed_at: float = 0.0

    @property
    def url(self) -> str:
        return self.processes.url

    def children(self, name: str) -> list[int]:
        """The server's processes of that name (engine, spare, work1, …) that have not ended."""
        return [pid for pid in self.processes.pids(name) if Path(f"/proc/{pid}/cmdline").read_bytes()]

    def has_standby(self) -> bool:
        ready = [each["pid"] for each in self.processes.lines() if each["message"] == "a standby is ready"]
        return bool(ready) and ready[-1:] == self.children("spare")


@contextlib.contextmanager
def served(device: str, workers: int = 2, more: str = "", texts: bool = False) -> Iterator[Served]:
    """Up and loaded; `more`: settings under [server]; `texts`: with a language model."""
    with tempfile.TemporaryDirectory(prefix="trust-") as name:
        folder, file = Path(name), Path(name) / "trust.toml"
        models = "".join(MODEL.format(name=each, target_ms=TARGETS_MS[each]) for each in demo.names())
        models += AUSTEN.format(path=demo.AUSTEN) if texts else ""
        silent_s = 20.0 if texts else 2.0  # under attack, the engine shares the machine's cores with the attackers
        file.write_text(CONFIG.format(device=device, workers=workers, more=more, silent_s=silent_s) + models)
        (folder / "lookup_model.py").write_text(LOOKUP)
        os.environ.update(environment(XDG_RUNTIME_DIR=name))
        with processes(str(file), workers) as server:
            said = lambda: [each["message"] for each in server.lines()]  # noqa: E731
            server.wait_until(lambda: said().count("loaded") > len(demo.names()) + texts)
            yield Served(server, folder)


AUSTEN = """
[[models]]
name = "austen"
language_model = "{path}"
"""


def connections() -> aiohttp.ClientSession:
    """Any number of connections, which are kept while the server does."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60.0))


@dataclass(frozen=True, slots=True)
class Checked:
    """A request, and the answer it must get."""

    model: str
    kind: str
    headers: dict[str, str]
    body: bytes
    expected: Any  # [items, …]
    timed: bool  # it has a deadline of its own

    async def ask(self, session: aiohttp.ClientSession, url: str) -> str:
        """right, wrong, dropped (the connection ended), lost (no answer), a status; for 503 with Retry-After refused
        (for want of room) or unavailable.
        """
        try:
            path = f"{url}/v2/models/{self.model}/infer"
            async with session.post(path, data=self.body, headers=self.headers) as answer:
                found = await answer.read()
        except TimeoutError:
            return "lost"
        except BROKEN:
            return "dropped"
        if answer.status != 200:
            if answer.status != 503 or "Retry-After" not in answer.headers:
                return str(answer.status)
            return "refused" if b"in flight" in found or b"would take" in found else "unavailable"
        length = answer.headers.get("Inference-Header-Content-Length")
        if length is None:
            values = np.array(json.loads(found)["outputs"][0]["data"], np.float32)
        else:
            values = np.frombuffer(found[int(length) :], np.float32)
        same = values.size == self.expected.size
        return "right" if same and np.abs(values - self.expected.ravel()).max() < CLOSE else "wrong"


def requests(rng: np.random.Generator, count: int) -> list[Checked]:
    """Of all models, sizes, encodings, priorities and deadlines."""
    images, _ = demo.held_out()
    scores = {name: forward(name, demo.load_weights(name), images) for name in demo.names()}
    more = {"gzip": {"Content-Encoding": "gzip"}, "closing": {"Connection": "close"}}
    made = []
    for _ in range(count):
        model = str(rng.choice(["lookup", *demo.names()], p=[0.25, 0.45, 0.2, 0.1]))
        items = int(rng.choice([1, 2, 4], p=[0.7, 0.2, 0.1]))
        kind = str(rng.choice(["json", "binary", "gzip", "closing"], p=[0.43, 0.45, 0.08, 0.04]))
        given: dict[str, Any] = {"priority": int(rng.integers(0, 20))} if rng.random() < 0.2 else {}
        given |= {"timeout": int(rng.choice([500, 50_000, 5_000_000]))} if rng.random() < 0.2 else {}
        if model == "lookup":
            values = rng.integers(0, TABLE, (items, 1))
            tensor: dict[str, Any] = {"name": "i", "datatype": "INT64"}
            expected = np.repeat(values.astype(np.float32), 32, axis=1)
        else:
            which = rng.integers(0, len(images), items)
            values, tensor, expected = images[which], {"name": "image", "datatype": "FP32"}, scores[model][which]
        tensor["shape"], headers, end = list(values.shape), more.get(kind, {}), b""
        if kind == "binary":
            tensor["parameters"], given["binary_data_output"] = {"binary_data_size": values.nbytes}, True
            end = values.tobytes()
        else:
            tensor["data"] = values.ravel().tolist()
        body = json.dumps({"inputs": [tensor], "parameters": given}).encode()
        headers = headers | ({"Inference-Header-Content-Length": str(len(body))} if end else {})
        body = gzip.compress(body, 1) if kind == "gzip" else body + end
        made.append(Checked(model, kind, headers, body, expected, "timeout" in given))
    return made


async def run_clients(
    url: str, work: list[Checked], note: Callable[[str], object], clients: int, end: asyncio.Event
) -> None:
    """Clients that ask one request after the other, and pause where they are refused."""
    numbers = itertools.count()

    async def client(session: aiohttp.ClientSession) -> None:
        while not end.is_set():
            outcome = await work[next(numbers) * 7919 % len(work)].ask(session, url)
            note(outcome)
            await asyncio.sleep(0.01 if outcome in ("refused", "unavailable", "dropped") else 0)  # the load is to stay

    async with connections() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))


# -- faults: each harms a server in one way

Fault = Callable[[Served], Awaitable[Any]]


async def post(server: Served, path: str, body: bytes = b"{}", **headers: str) -> None:
    """One request on a connection of its own, whatever comes of it."""
    with contextlib.suppress(TimeoutError, *BROKEN):
        async with connections() as session, asyncio.timeout(20.0):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(server.url + path, data=body, headers=named) as answer:
                await answer.read()


def lookups(*values: int, at_once: bool = False) -> Fault:
    tensor = {"name": "i", "shape": [1, 1], "datatype": "INT64"}
    bodies = [json.dumps({"inputs": [{**tensor, "data": [value]}]}).encode() for value in values]

    async def ask(server: Served) -> None:
        asked = [partial(post, server, "/v2/models/lookup/infer", body) for body in bodies]
        if at_once:
            await asyncio.gather(*(each() for each in asked))
        else:
            for each in asked:
                await each()

    return ask


def kill(name: str, number: signal.Signals = signal.SIGKILL) -> Fault:
    async def send(server: Served) -> None:
        for pid in server.children(name):
            os.kill(pid, number)

    return send


async def killed_twice(server: Served) -> None:
    before = set(server.children("engine"))
    await kill("engine")(server)
    await asyncio.sleep(0.5)
    while before & set(engines := server.children("engine")) or not engines:
        await asyncio.sleep(0.01)
    await kill("engine")(server)


async def killed_without_standby(server: Served) -> None:
    await kill("spare")(server)
    while server.processes.pids("spare"):
        await asyncio.sleep(0.01)
    server.harmed_at = time.monotonic()  # the standby's end harms nobody
    await kill("engine")(server)


@functools.cache
def gzip_bomb() -> bytes:
    return gzip.compress(bytes(1 << 28), 9) * 4


async def gzip_bombs(server: Served) -> None:
    bomb = await asyncio.to_thread(gzip_bomb)  # clients would miss their answers meanwhile
    await asyncio.gather(*(post(server, "/v2/models/mlp/infer", bomb, Content_Encoding="gzip") for _ in range(4)))


async def unread(server: Served) -> None:
    port = server.processes.port
    opened = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(100)]
    for _, writer in opened:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
    await asyncio.sleep(2.0)
    for _, writer in opened:
        writer.transport.abort()


async def code_that_fails(server: Served) -> None:
    path = server.folder / "lookup_model.py"
    before = path.read_text()
    for text in ("raise RuntimeError('edited')\n", before):
        path.write_text(text)
        await post(server, "/v2/repository/models/lookup/load")


async def reload_signal(server: Served) -> None:
    config = server.folder / "trust.toml"
    before = config.read_text()
    for text in ("[[[", before):
        config.write_text(text)
        os.kill(server.processes.process.pid, signal.SIGHUP)
        await asyncio.sleep(0.5)


async def policies(server: Served) -> None:
    headers = {"Content_Type": "application/json", "X_Paellapy": "1"}
    for name in ("edf", "srpt", "fifo", "hrrn", "slack", "paella"):
        await post(server, "/dashboard/policy", json.dumps({"policy": name}).encode(), **headers)


FAULTS: dict[str, tuple[str, Fault]] = {
    "worker-killed": ("kill -9 of an HTTP worker", kill("work1")),
    "engine-killed": ("kill -9 of the engine's process", kill("engine")),
    "engine-killed-twice": (
        "kill -9 of the engine's process, and half a second later of its successor", killed_twice),
    "engine-killed-without-standby": (
        "kill -9 of the standby, and of the engine's process once the standby has gone", killed_without_standby),
    "engine-stops": ("The engine's process stands still (SIGSTOP)", kill("engine", signal.SIGSTOP)),
    "bad-value": ("An index far beyond its table, three times", lookups(FAR, FAR, FAR)),
    "bad-values-at-once": (
        "Fifty indices far beyond their table at once", lookups(*range(FAR, FAR + 50), at_once=True)),
    "gzip-bombs": ("Four bodies of 1 MB that unpack to 1 GB", gzip_bombs),
    "long-json": ("20 MB of JSON lists for an input of 64 numbers", lambda server: post(
        server, "/v2/models/mlp/infer", b'{"inputs":[' + b"[1]," * 5_000_000 + b"[1]]}")),
    "clients-that-never-read": ("100 clients that ask and do not read their answers", unread),
    "code-that-fails": (
        "A model's file is edited into one that cannot be imported, and loaded; then put back", code_that_fails),
    "reload-signal": ("SIGHUP with a configuration that is no TOML, then with the right one", reload_signal),
    "policies-in-turn": ("The policy is switched six times", policies),
    "connection-flood": (
        "1,000 connections at once, each with a request", lookups(*[*range(TABLE)] * 16, at_once=True)),
}  # fmt: skip


# -- attacks: each goes on for a while, and is to delay nobody. They know HTTP only, so that other servers can be asked

HELLO = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HOURS = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(10, 50)]}  # to compile
PROMPT = {"model": "austen", "prompt": "It is", "stream": True, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Target:
    """A server under attack: addresses, and a request with its right answer."""

    kind: str
    url: str
    pid: int
    infer: str
    live: str
    body: bytes
    expected: bytes  # a part of the answer

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def pids(self) -> list[int]:
        """Its processes."""
        found = [self.pid]
        for pid in found:
            found += children(pid)
        return found

    def held(self) -> dict[str, tuple[float, int]]:
        """MB of memory of their own, and open descriptors, of all its processes by name."""
        found: dict[str, tuple[float, int]] = {}
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError):  # it has ended, perhaps without having been waited for
                words = Path(f"/proc/{pid}/status").read_text().split()
                mb, descriptors = int(words[words.index("RssAnon:") + 1]) * 1.024e-3, len(os.listdir(f"/proc/{pid}/fd"))
                before = found.get(words[1], (0.0, 0))
                found[words[1]] = (before[0] + mb, before[1] + descriptors)
        return found

    def mb(self) -> float:
        return sum(mb for mb, _ in self.held().values())


Attack = Callable[[Target, float], Awaitable[Any]]  # until this time


def sockets(count: int, *pieces: bytes, path: str = "", length: int = 0) -> Attack:
    """So many connections that send this, of a body of some length, and are kept; one that is closed comes again."""

    async def one(target: Target, until: float) -> None:
        head = f"{HELLO.format(path or target.infer)}Content-Length: {length}\r\n\r\n" if length else ""
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError, *BROKEN):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    _, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1)
                    try:
                        for piece in (head.encode(), *pieces):
                            writer.write(piece)
                            await writer.drain()
                        while not writer.transport.is_closing():
                            await asyncio.sleep(0.1)
                    finally:
                        writer.transport.abort()
            await asyncio.sleep(0.01)

    async def attack(target: Target, until: float) -> None:
        await asyncio.gather(*(one(target, until) for _ in range(count)))

    return attack


def bodies(count: int, path: str, body: bytes, leave: bool = False, **headers: str) -> Attack:
    """So many clients that post this again and again; `leave`: they go with the first bytes of the answer."""

    async def one(target: Target, until: float, session: aiohttp.ClientSession) -> None:
        named = {"Content-Type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError, *BROKEN):
                async with asyncio.timeout(max(0.1, until - time.monotonic())):
                    async with session.post(target.url + (path or target.infer), data=body, headers=named) as answer:
                        await (answer.content.readany() if leave else answer.read())
                        if leave:
                            answer.close()
            await asyncio.sleep(0.01)

    async def attack(target: Target, until: float) -> None:
        async with connections() as session:
            await asyncio.gather(*(one(target, until, session) for _ in range(count)))

    return attack


def texts(count: int, leave: bool = False, path: str = "/v1/completions", **fields: Any) -> Attack:
    return bodies(count, path, json.dumps({**PROMPT, **fields}).encode(), leave)


def chats(count: int, **fields: Any) -> Attack:
    given = {"messages": [{"role": "user", "content": "It"}], "prompt": None, "stream": False, **fields}
    body = {name: each for name, each in {**PROMPT, **given}.items() if each is not None}
    return bodies(count, "/v1/chat/completions", json.dumps(body).encode())


def deaf_readers(target: Target, until: float) -> Awaitable[Any]:
    body = json.dumps({**PROMPT, "max_tokens": 400, "n": 8}).encode()
    return sockets(50, body, path="/v1/completions", length=len(body))(target, until)


LISTS = b'{"inputs":[' + b'{"name":"y"},' * 4_000_000 + b'{"name":"y"}]}'
ATTACKS: dict[str, tuple[str, Attack]] = {
    "json-lists": ("Two clients with 4 M elements of JSON as 150 KB of gzip", bodies(
        2, "", gzip.compress(LISTS, 9), Content_Encoding="gzip")),
    "json-plain": ("Two clients with 28 MB of JSON lists", bodies(2, "", LISTS[:28_000_000] + b"]}")),
    "headers": ("1,000 connections with unfinished headers of 30 KB", sockets(
        1000, b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (k, b"a" * 7000) for k in range(4)))),
    "half-bodies": ("200 connections with one of two MB of a body", sockets(200, bytes(1 << 20), length=2 << 20)),
    "no-bodies": ("1,000 connections that announce a body and send none", sockets(1000, length=1000)),
    "deep-json": ("JSON 100,000 levels deep", bodies(2, "", b"[" * 100_000)),
}  # fmt: skip
TEXT_ATTACKS: dict[str, tuple[str, Attack]] = {
    "texts-left": ("64 clients that begin texts and leave", texts(64, leave=True, max_tokens=400)),
    "texts-unread": ("50 clients that do not read eight texts of 400 tokens", deaf_readers),
    "long-prompts": ("Four prompts of 10 MB", texts(4, prompt="It is a truth " * 700_000)),
    "stops": ("16 stop strings of 1,000 characters, and 1,000 of them", texts(
        4, stop=["e" * (984 + k) for k in range(16)], max_tokens=400)),
    "many-stops": ("1,000 stop strings", texts(4, stop=["e"] * 1000)),
    "many-texts": ("128 texts in one request, and 2^70", texts(4, n=128, max_tokens=400)),
    "deep-fields": ("Fields 10,000 levels deep", bodies(2, "/v1/completions", b'{"model":' + b"[" * 10_000)),
    "logit-bias": ("A bias for a million tokens", texts(2, logit_bias={str(k): 1.0 for k in range(1_000_000)})),
    "schemas": ("Schemas that take hours to compile", chats(4, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": HOURS}})),
    "logprobs": ("Answers with 20 log probabilities for each token", chats(
        8, logprobs=True, top_logprobs=20, max_tokens=400)),
    "many-messages": ("Chats of 10,000 messages", chats(2, messages=[{"role": "user", "content": ""}] * 10_000)),
}  # fmt: skip
MOST_S = 6.0  # of an attack


def probe(target: Target, connection: Any) -> None:
    """Asks on new connections, in a process of its own, until told to end; tells times in ms and outcomes."""
    times, outcomes = [], Counter[str]()
    connection.send("ready")
    while not (times and connection.poll(0.02)):
        for method, path, body in (("GET", target.live, b""), ("POST", target.infer, target.body)):
            began = time.monotonic()
            asked = HTTPConnection("127.0.0.1", target.port, timeout=30.0)
            try:
                asked.request(method, path, body, {"Content-Type": "application/json"} if body else {})
                answer = asked.getresponse()
                found = answer.read()
                right = answer.status == 200 and (not body or target.expected in found)
                outcomes["right" if right else "wrong" if answer.status == 200 else str(answer.status)] += 1
            except (OSError, HTTPException):
                outcomes["lost"] += 1
            finally:
                asked.close()
            if not body:
                times.append((time.monotonic() - began) * 1e3)
    connection.send((times, dict(outcomes)))


async def under_attack(target: Target, attack: Attack, seconds: float) -> dict[str, Any]:
    """Times of a probe, and memory, while the attack lasts."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    prober = spawn.Process(target=probe, args=(target, theirs))
    prober.start()
    await asyncio.to_thread(mine.recv)
    before, most = target.mb(), 0.0
    attacking = asyncio.create_task(attack(target, time.monotonic() + seconds))
    while not attacking.done():
        await asyncio.wait({attacking}, timeout=0.1)
        most = max(most, target.mb())
    mine.send(None)
    times, outcomes = await asyncio.to_thread(mine.recv)
    prober.join()
    p50, p99, longest = np.percentile(times, [50, 99, 100]).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "longest_ms": longest, "added_mb": most - before, "outcomes": outcomes}


async def attack_all(target: Target, names: list[str], seconds: float) -> list[dict[str, Any]]:
    found = []
    for name in names:
        what, attack = KNOWN[name]
        found.append({"attack": name, "what": what, **await under_attack(target, attack, seconds)})
        cells = {key: each if isinstance(each, dict) else round(each, 1) for key, each in found[-1].items()
                 if key.endswith(("ms", "mb")) or key == "outcomes"}  # fmt: skip
        print(target.kind, name, cells, flush=True)
        await asyncio.sleep(1.0)
    return found


async def idle(target: Target, until: float) -> None:
    await asyncio.sleep(until - time.monotonic())


KNOWN: dict[str, tuple[str, Attack]] = {"none": ("No attack", idle), **ATTACKS, **TEXT_ATTACKS}


BODY = b'{"inputs": [{"name": "i", "shape": [1, 1], "datatype": "INT64", "data": [7]}]}'
PATHS = "/v2/models/lookup/infer", "/v2/health/live"
OTHERS = {"lit": ("LitServe", "/predict", "/health", b'{"input": 7}'), "triton": ("Triton", *PATHS, BODY)}


def target_of(server: Served) -> Target:
    return Target("paellapy", server.url, server.processes.process.pid, *PATHS, BODY, b"7.0,7.0,7.0")


@contextlib.contextmanager
def other(kind: str, python: Path) -> Iterator[Target]:
    """Another server with the same model, in NumPy."""
    command = [python, Path(__file__).with_name("other_servers.py"), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port, end = int(url.rpartition(":")[2]), time.monotonic() + 60.0
        while not is_ready(port, OTHERS[kind][2]) and time.monotonic() < end:
            time.sleep(0.1)
        name, infer, live, body = OTHERS[kind]
        yield Target(name, url, process.pid, infer, live, body, b"7.0,7.0,7.0")
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()


def is_ready(port: int, path: str) -> bool:
    asked = HTTPConnection("127.0.0.1", port, timeout=5.0)
    with contextlib.suppress(OSError, HTTPException):
        asked.request("GET", path)
        return asked.getresponse().status == 200
    return False


async def everything(server: Served, o: Any, until: float) -> tuple[Counter[str], dict[str, Any]]:
    """Faults and attacks of all kinds at random, some at once, beside clients; memory and descriptors meanwhile."""
    target, work = target_of(server), requests(np.random.default_rng(0), 2000)
    kinds = [*FAULTS, *ATTACKS, *TEXT_ATTACKS]
    outcomes, end, counts, held = Counter[str](), asyncio.Event(), Counter[str](), list[dict[str, tuple[float, int]]]()
    killed_at = 0.0

    def note(outcome: str) -> None:
        killed = outcome == "dropped" and time.monotonic() - killed_at < NOTICED_S
        outcomes["of a killed worker" if killed else outcome] += 1

    async def harm(rng: np.random.Generator) -> None:
        nonlocal killed_at
        while time.monotonic() < until - 2 * MOST_S:
            name, pause_s = kinds[rng.integers(len(kinds))], rng.uniform(0.1, 3.0)
            ends_engine = name.startswith("engine") or (name.startswith("bad-value") and o.device == "cuda")
            if ends_engine and not server.has_standby():
                await asyncio.sleep(0.1)  # else no engine would live long enough to answer
                continue
            counts[name] += 1
            print(f"{time.strftime('%X')} {name}", flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S):
                    if name in FAULTS:
                        killed_at = time.monotonic() if name == "worker-killed" else killed_at
                        await FAULTS[name][1](server)
                    else:
                        seconds = rng.uniform(1.0, MOST_S)
                        await (ATTACKS | TEXT_ATTACKS)[name][1](target, time.monotonic() + seconds)
            await asyncio.sleep(pause_s)

    load = asyncio.create_task(run_clients(server.url, work, note, o.clients, end))
    await asyncio.sleep(CALM_S)
    calm = {"before": target.held()}
    harming = asyncio.gather(*(harm(np.random.default_rng([o.seed, k])) for k in range(2)))
    while not harming.done():
        held.append(target.held())
        if len(held) % 12 == 0:
            print(f"{len(held) // 12} min", dict(outcomes), flush=True)
        await asyncio.wait({harming}, timeout=5.0)
    await harming
    end.set()
    await load
    async with connections() as session:
        server.processes.wait_until(server.has_standby)
        after = Counter([await each.ask(session, server.url) for each in work[:200]])
    await asyncio.sleep(CALM_S)
    calm["after"] = target.held()
    names = sorted({name for each in held for name in each})
    tenths = [held[len(held) * k // 10 : len(held) * (k + 1) // 10] or held[-1:] for k in range(10)]
    medians = {name: {
        what: [float(np.median([each.get(name, (0.0, 0))[k] for each in part])) for part in tenths]
        for k, what in enumerate(("mb", "descriptors"))} for name in names}  # fmt: skip
    about = {"seed": o.seed, "kinds": dict(counts), "after": dict(after), "calm": calm}
    return outcomes, {**about, "medians of tenths": medians}


class Prober:
    """Asks every model in turn, on new connections, and notes when it was not answered right."""

    def __init__(self, server: Served, work: list[Checked]) -> None:
        plain = [each for each in work if not each.timed and each.kind == "json"]
        self._url, self._work = server.url, list({each.model: each for each in plain}.values())
        self.failed_until, self.good_since, self.last_good, self.good = 0.0, time.monotonic(), time.monotonic(), 0

    async def run(self) -> None:
        for each in itertools.cycle(self._work):
            outcome = "lost"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0), connections() as session:
                    outcome = await each.ask(session, self._url)
            if outcome in ("right", "refused"):  # the load is there on purpose
                self.good, self.last_good = self.good + 1, time.monotonic()
            else:
                self.failed_until = time.monotonic()
                self.begin_again()
            await asyncio.sleep(0.02)

    def begin_again(self) -> None:
        self.good_since, self.good = time.monotonic(), 0

    async def quiet(self) -> bool:
        """Waits until all was right for a while, every model was asked meanwhile, and no answer is overdue."""
        end = time.monotonic() + LONGEST_S
        while (now := time.monotonic()) < end:
            is_calm = now - self.last_good < QUIET_S / 2 and now - self.good_since >= QUIET_S
            if is_calm and self.good >= 2 * len(self._work):
                return True
            await asyncio.sleep(0.02)
        return False


async def inject(names: list[str], server: Served, prober: Prober, found: dict[str, Any], until: float) -> None:
    """The faults again and again, until shortly before that time."""
    for name in itertools.cycle(names):
        if time.monotonic() > until - 25.0:
            return
        end = time.monotonic() + LONGEST_S  # faults come one after the other: the server has done with the last one
        while not server.has_standby() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        await prober.quiet()
        prober.failed_until, server.harmed_at = 0.0, time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(FAULTS[name][1](server), LONGEST_S)
        prober.begin_again()  # what it did may not show at once
        took = max(0.0, prober.failed_until - server.harmed_at) if await prober.quiet() else math.inf
        took = max(took, found.get(name, {"recovery_s": 0.0})["recovery_s"])
        found[name] = {"fault": name, "what": FAULTS[name][0], "recovery_s": took}
        print(f"{name}: {took:.2f} s", flush=True)


async def campaign(server: Served, o: Any, until: float) -> tuple[Counter[str], list[Any]]:
    work = requests(np.random.default_rng(0), 2000)
    outcomes, end, faults, prober = Counter[str](), asyncio.Event(), dict[str, Any](), Prober(server, work)
    probing = asyncio.create_task(prober.run())
    note = lambda outcome: outcomes.update([outcome])  # noqa: E731
    load = asyncio.create_task(run_clients(server.url, work, note, o.clients, end))
    names = [*FAULTS] if o.faults == "all" else o.faults.split(",")
    if o.faults != "none":
        await inject(names, server, prober, faults, until)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    end.set()
    await load
    probing.cancel()
    return outcomes, list(faults.values())


def quoted(by_gpu: dict[str, Any]) -> dict[str, Any]:
    load = [["GPU", "servers", "checked requests", "right", "refused, or past a deadline", "connection ended", "wrong",
             "without an answer", "answered with 500"]]  # fmt: skip
    for gpu, found in by_gpu.items():
        outcomes = Counter(found["load"]["outcomes"])
        refused = outcomes["refused"] + outcomes["unavailable"]
        counts = [outcomes["right"], refused, *(outcomes[each] for each in ("dropped", "wrong", "lost", "500"))]
        load.append([gpu, str(len(found["servers"])), *(f"{n:,}" for n in (found["load"]["requests"], *counts))])
    recovery = [["fault", *(f"{gpu}, s" for gpu in by_gpu)]]
    known = [{each["fault"]: each for each in found["faults"]} for found in by_gpu.values()]
    for name, each in known[0].items():
        every = (found[name]["recovery_s"] if name in found else "–" for found in known)
        cells = ("not within 30" if s in (None, math.inf) else s if s == "–" else f"{s:.1f}" for s in every)
        recovery.append([each["what"].split(":")[0].rstrip("."), *cells])
    return {"trust-load": load, "trust-recovery": recovery}


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=120.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--faults", default="all", help=f"all, none, or some of {', '.join(FAULTS)}")
    parser.add_argument("--attacks", help=f"all, or some of {', '.join([*ATTACKS, *TEXT_ATTACKS])}")
    parser.add_argument("--minutes", type=float, help="of all faults and attacks at random")
    parser.add_argument("--seed", type=int, default=0)
    others = "Python of an environment with litserve or nvidia-pytriton, whose servers are attacked too"
    parser.add_argument("--others", type=Path, default=Path(sys.executable), help=others)
    o = parser.parse_args()
    if o.attacks:
        attacks(o)
    elif o.minutes:
        at_random(o)
    else:
        recoveries(o)


def at_random(o: Any) -> None:
    """Adds a run to those that are stored."""
    with served(o.device, o.workers, texts=True) as server:
        outcomes, found = asyncio.run(everything(server, o, time.monotonic() + 60 * o.minutes))
    found |= {"minutes": o.minutes, "outcomes": dict(outcomes), "commit": commit(), "cores": os.cpu_count()}
    files = {"virtual H200": "trust_hour", "H200": "trust_hour_h200"}
    gpu = "virtual H200" if o.device.startswith("virtual") else "H200"
    by_gpu = {name: stored(file, o.out).get("runs", []) for name, file in files.items()}
    by_gpu[gpu] = [each for each in by_gpu[gpu] if each["seed"] != o.seed] + [found]
    rows = quoted_hours(by_gpu)
    show("everything at once", rows[0], rows[1:])
    print(save(files[gpu], {"runs": by_gpu[gpu]}, None, o.out, tables={"trust-hour": rows}))


def quoted_hours(by_gpu: dict[str, list[Any]]) -> list[list[str]]:
    rows = [["GPU", "minutes", "faults and attacks", "checked requests", "right", "refused, or past a deadline",
             "of killed workers", "connection ended", "wrong", "without an answer", "answered with 500",
             "MB, first and last tenth", "descriptors"]]  # fmt: skip
    counted = ("of a killed worker", "dropped", "wrong", "lost", "500")
    for gpu, run in ((gpu, run) for gpu, runs in by_gpu.items() for run in runs):
        outcomes, tenths = Counter(run["outcomes"]), run["medians of tenths"].values()
        refused = outcomes["refused"] + outcomes["unavailable"]
        counts = [sum(outcomes.values()), outcomes["right"], refused, *(outcomes[each] for each in counted)]
        held = [" → ".join(f"{sum(each[what][k] for each in tenths):,.0f}" for k in (0, -1))
                for what in ("mb", "descriptors")]  # fmt: skip
        injected = f"{sum(run['kinds'].values()):,} of {len(run['kinds'])} kinds"
        rows.append([gpu, f"{run['minutes']:g}", injected, *(f"{n:,}" for n in counts), *held])
    return rows


def attacks(o: Any) -> None:
    names, found = [*KNOWN] if o.attacks == "all" else ["none", *o.attacks.split(",")], dict[str, Any]()
    seconds = min(o.seconds, MOST_S)
    with served(o.device, o.workers, texts=True) as server:
        found["paellapy"] = asyncio.run(attack_all(target_of(server), names, seconds))
    script = Path(__file__).with_name("other_servers.py")
    for kind in subprocess.check_output([o.others, script, "which"], text=True).split():
        rows = found[OTHERS[kind][0]] = []
        for name in names:
            if name not in TEXT_ATTACKS:
                with other(kind, o.others) as target:  # a new one: some do not recover
                    rows += asyncio.run(attack_all(target, [name], seconds))
    table = quoted_attacks(found)
    show("attacks", table[0], table[1:])
    print(save("trust_attacks", found, None, o.out, tables={"trust-attacks": table}))


def quoted_attacks(found: dict[str, Any]) -> list[list[str]]:
    known = {kind: {each["attack"]: each for each in rows} for kind, rows in found.items()}
    head = ["attack", *(f"{kind}, p99 ms / MB added" for kind in ("paellapy", "LitServe", "Triton"))]
    rows = [head]
    for each in found["paellapy"]:
        cells = [known.get(kind, {}).get(each["attack"]) for kind in ("paellapy", "LitServe", "Triton")]
        rows.append([each["what"], *("–" if c is None else attack_cell(c) for c in cells)])
    return rows


def attack_cell(found: dict[str, Any]) -> str:
    outcomes = Counter(found["outcomes"])
    failed = sum(outcomes.values()) - outcomes["right"]
    said = f"; {failed} of {sum(outcomes.values())} probes failed" if failed else ""
    return f"{found['p99_ms']:,.0f} / {found['added_mb']:.0f}{said}"


def recoveries(o: Any) -> None:
    with served(o.device, o.workers) as server:
        outcomes, faults = asyncio.run(campaign(server, o, time.monotonic() + o.seconds))
    about = {"commit": commit(), "clients": o.clients, "cores": os.cpu_count(), "seconds": o.seconds}
    load = {"requests": sum(outcomes.values()), "outcomes": dict(outcomes)}
    files = {"virtual H200": "trust_campaign", "H200": "trust_campaign_h200"}
    gpu = "virtual H200" if o.device.startswith("virtual") else "H200"
    by_gpu = {name: stored(file, o.out) for name, file in files.items()}
    by_gpu[gpu] = {"servers": [about], "load": load, "faults": faults}
    tables = quoted({name: each for name, each in by_gpu.items() if each})
    show("outcomes", tables["trust-load"][0], tables["trust-load"][1:])
    print(save(files[gpu], by_gpu[gpu], None, o.out, tables=tables))


if __name__ == "__main__":
    main()
