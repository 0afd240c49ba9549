"""Checked requests over mixed models, sizes, encodings, priorities and deadlines, while faults are injected in turn.

    python benchmarks/trust.py [--device cuda] [--seconds 120] [--clients 16] [--faults engine-killed,bad-value]

Every answer is compared with NumPy's result. Faults are injected one after the other while the clients go on; the
recovery is the time from a fault to the end of the last moment in which a prober, which asks every model in turn, got
no right answer. Where a fault comes more than once, its longest recovery counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness import arguments, commit, environment, save, show, stored

from paellapy import demo
from paellapy.demo.reference import forward

CLOSE = 2e-3  # of scores between 0 and 1, in single precision
TARGETS_MS = {"mlp": 50.0, "cnn": 100.0, "transformer": 200.0}
TABLE = 64  # rows of `lookup`, which does not check its index
FAR = 1 << 40  # a real GPU has memory behind a table's end, and faults only where there is none
QUIET_S, LONGEST_S = 0.6, 30.0  # of right answers before and after a fault; that a recovery is waited for
PATIENCE_S = 60.0  # of a client for an answer
CONFIG = """
device = "{device}"
[server]
host = "127.0.0.1"
port = 0
workers = {workers}
model_control = true
engine_timeout_s = 2.0
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


class Served:
    """`paellapy serve` with workers, in a folder of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self.log = process, folder, folder / "log"
        self.harmed_at = 0.0  # when a fault began: recoveries are measured from here
        self.port = 0

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def wait(self) -> None:
        """Until all models are loaded."""
        while not self.port or sum(each["message"] == "loaded" for each in self.said()) < len(demo.names()) + 1:
            assert self.process.poll() is None, self.log.read_text()
            urls = [each["url"] for each in self.said() if each["message"] == "listening"]
            self.port = int(urls[0].rpartition(":")[2]) if urls else 0
            time.sleep(0.1)

    def children(self, name: str, ended: bool = False) -> list[int]:
        """The numbers of the server's processes of that name: engine, spare, work1, … `ended`: also of those that the
        system still cleans up after, which takes seconds with a real GPU; they have no command line any more.
        """
        found = []
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1]) if each.name.isdigit() else 0
                alive = parent == self.process.pid and (ended or (each / "cmdline").read_bytes())
                if alive and (each / "comm").read_text().strip().removeprefix("paellapy-") == name:
                    found.append(int(each.name))
        return found

    def has_standby(self) -> bool:
        ready = [each["pid"] for each in self.said() if each["message"] == "a standby is ready"]
        return bool(ready) and ready[-1:] == self.children("spare")


@contextlib.contextmanager
def served(device: str, workers: int = 2, more: str = "") -> Iterator[Served]:
    """Up and loaded; `more`: settings under [server]."""
    with tempfile.TemporaryDirectory(prefix="trust-") as name:
        folder = Path(name)
        models = "".join(MODEL.format(name=each, target_ms=TARGETS_MS[each]) for each in demo.names())
        (folder / "trust.toml").write_text(CONFIG.format(device=device, workers=workers, more=more) + models)
        (folder / "lookup_model.py").write_text(LOOKUP)
        command = [sys.executable, "-m", "paellapy", "serve", str(folder / "trust.toml")]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
        with (folder / "log").open("w") as log:
            env = environment(XDG_RUNTIME_DIR=name)
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=env)
        try:
            server = Served(process, folder)
            server.wait()
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


# -- requests and clients


@dataclass(frozen=True, slots=True)
class Checked:
    """A request as bytes, and the answer it must get."""

    model: str
    kind: str
    request: bytes
    output: str
    expected: Any  # [items, …]

    def is_right(self, header: bytes, body: bytes) -> bool:
        """Of an answer with status 200."""
        length = re.search(rb"\r\ninference-header-content-length: (\d+)", header)
        if b"\r\ncontent-encoding: gzip" in header:
            body = gzip.decompress(body)
        output = msgspec.json.decode(body if length is None else body[: int(length[1])])["outputs"][0]
        values = output["data"] if length is None else np.frombuffer(body[int(length[1]) :], np.float32)
        found = np.array(values, np.float32)
        same = output["name"] == self.output and found.size == self.expected.size
        return same and bool(np.abs(found.reshape(self.expected.shape) - self.expected).max() < CLOSE)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def requests(rng: np.random.Generator, count: int) -> list[Checked]:
    """Of all models, sizes, encodings, priorities and deadlines."""
    images, _ = demo.held_out()
    scores = {name: forward(name, demo.load_weights(name), images) for name in demo.names()}
    made = []
    for _ in range(count):
        model = str(rng.choice(["lookup", *demo.names()], p=[0.25, 0.45, 0.2, 0.1]))
        items = int(rng.choice([1, 2, 4], p=[0.7, 0.2, 0.1]))
        kind = str(rng.choice(["json", "binary", "gzip", "closing", "answer-gzip"], p=[0.35, 0.45, 0.08, 0.04, 0.08]))
        given: dict[str, Any] = {"priority": int(rng.integers(0, 20))} if rng.random() < 0.2 else {}
        given |= {"timeout": int(rng.choice([500, 50_000, 5_000_000]))} if rng.random() < 0.2 else {}
        if model == "lookup":
            values = rng.integers(0, TABLE, (items, 1))
            tensor: dict[str, Any] = {"name": "i", "datatype": "INT64"}
            output, expected = "y", np.repeat(values.astype(np.float32), 32, axis=1)
        else:
            which = rng.integers(0, len(images), items)
            values, tensor = images[which], {"name": "image", "datatype": "FP32"}
            output, expected = "scores", scores[model][which]
        request = encoded(model, kind, {**tensor, "shape": list(values.shape)}, values, given)
        made.append(Checked(model, kind, request, output, expected))
    return made


def encoded(model: str, kind: str, tensor: dict[str, Any], values: Any, given: dict[str, Any]) -> bytes:
    headers = {"closing": ["Connection: close"], "answer-gzip": ["Accept-Encoding: gzip"]}.get(kind, [])
    if kind == "binary":
        tensor = {**tensor, "parameters": {"binary_data_size": values.nbytes}}
        head = json.dumps({"inputs": [tensor], "parameters": {**given, "binary_data_output": True}}).encode()
        headers, body = [f"Inference-Header-Content-Length: {len(head)}"], head + values.tobytes()
    else:
        tensor = {**tensor, "data": values.reshape(-1).tolist()}
        body = json.dumps({"inputs": [tensor], "parameters": given}).encode()
    if kind == "gzip":
        headers, body = ["Content-Encoding: gzip"], gzip.compress(body, 1)
    return post(f"/v2/models/{model}/infer", body, *headers)


async def exchange(reader: Any, writer: Any, request: bytes) -> tuple[int, bytes, bytes]:
    """Status, header in small letters, and body."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    return int(head[9:12]), head, await reader.readexactly(int(length[1])) if length else b""


async def client(port: int, work: list[Checked], outcomes: Counter[str], end: asyncio.Event, left: list[int]) -> None:
    """Asks one after the other, on a connection that it keeps while the server does; pauses where it is refused.

    Outcomes: right, wrong, refused (503 with Retry-After), dropped (the connection ended), lost (no answer), a status.
    """
    connection: Any = None
    while not end.is_set() and left[0] > 0:
        left[0] -= 1
        each, head = work[(left[0] * 7919) % len(work)], b""
        try:
            connection = connection or await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(PATIENCE_S):
                status, head, body = await exchange(*connection, each.request)
            outcome = str(status)
            if status == 200:
                outcome = "right" if each.is_right(head, body) else "wrong"
            elif status == 503 and b"\r\nretry-after: " in head:
                outcome = "refused"
        except TimeoutError:
            outcome = "lost"
        except (OSError, EOFError):
            outcome = "dropped"
        if connection is not None and (outcome in ("lost", "dropped") or b"\r\nconnection: close" in head):
            connection[1].close()
            connection = None
        outcomes[outcome] += 1
        if outcome in ("refused", "dropped"):
            await asyncio.sleep(0.01)  # sooner than asked: the load is to stay
    if connection is not None:
        connection[1].close()


async def run_clients(
    port: int, work: list[Checked], outcomes: Counter[str], clients: int, end: asyncio.Event, most: int = 1 << 60
) -> None:
    left = [most]
    await asyncio.gather(*(client(port, work, outcomes, end, left) for _ in range(clients)))


# -- faults: each harms a server in one way


async def ask(server: Served, request: bytes) -> str:
    """The status of one request on a connection of its own."""
    try:
        async with asyncio.timeout(20.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                return str((await exchange(reader, writer, request))[0])
            finally:
                writer.close()
    except (OSError, EOFError) as e:
        return type(e).__name__


def lookup(value: int) -> bytes:
    tensor = {"name": "i", "shape": [1, 1], "datatype": "INT64", "data": [value]}
    return post("/v2/models/lookup/infer", json.dumps({"inputs": [tensor]}).encode())


def kill(name: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Served], Awaitable[None]]:
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
    while server.children("spare", ended=True):
        await asyncio.sleep(0.01)
    server.harmed_at = time.monotonic()  # the standby's end harms nobody
    await kill("engine")(server)


async def worker_pauses(server: Served) -> None:
    await kill("work1", signal.SIGSTOP)(server)
    await asyncio.sleep(0.5)
    await kill("work1", signal.SIGCONT)(server)


async def unread(server: Served, count: int, request: bytes) -> None:
    """Connections that ask and do not read."""
    opened = [await asyncio.open_connection("127.0.0.1", server.port, limit=1) for _ in range(count)]
    for _, writer in opened:
        writer.write(request)
    await asyncio.sleep(2.0)
    for _, writer in opened:
        writer.transport.abort()


async def at_once(server: Served, *requests: bytes) -> None:
    await asyncio.gather(*(ask(server, request) for request in requests))


async def in_turn(server: Served, *requests: bytes) -> None:
    for request in requests:
        await ask(server, request)


async def code_that_fails(server: Served) -> None:
    path, load = server.folder / "lookup_model.py", post("/v2/repository/models/lookup/load", b"{}")
    before = path.read_text()
    path.write_text("raise RuntimeError('edited')\n")
    await ask(server, load)
    path.write_text(before)
    await ask(server, load)


async def reload_signal(server: Served) -> None:
    config = server.folder / "trust.toml"
    before = config.read_text()
    for text in ("[[[", before):
        config.write_text(text)
        os.kill(server.process.pid, signal.SIGHUP)
        await asyncio.sleep(0.5)


def policy(name: str) -> bytes:
    headers = ("Content-Type: application/json", "X-Paellapy: 1")
    return post("/dashboard/policy", json.dumps({"policy": name}).encode(), *headers)


GET = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LOAD = post("/v2/repository/models/lookup/load", b"{}")
LONG_JSON = post("/v2/models/mlp/infer", b'{"inputs":[' + b"[1]," * 5_000_000 + b"[1]]}")
FAULTS: dict[str, tuple[str, Callable[[Served], Awaitable[None]]]] = {
    "worker-killed": ("kill -9 of an HTTP worker", kill("work1")),
    "engine-killed": ("kill -9 of the engine's process", kill("engine")),
    "engine-killed-twice": (
        "kill -9 of the engine's process, and half a second later of its successor", killed_twice),
    "engine-killed-without-standby": (
        "kill -9 of the standby, and of the engine's process once the standby has gone", killed_without_standby),
    "engine-stops": ("The engine's process stands still (SIGSTOP)", kill("engine", signal.SIGSTOP)),
    "worker-pauses": ("A worker stands still for half a second", worker_pauses),
    "bad-value": ("An index far beyond its table, three times", lambda s: in_turn(s, *[lookup(FAR)] * 3)),
    "bad-values-at-once": (
        "Fifty indices far beyond their table at once", lambda s: at_once(s, *(lookup(FAR + k) for k in range(50)))),
    "gzip-bombs": ("Four bodies of 1 MB that unpack to 1 GB", lambda s: at_once(
        s, *[post("/v2/models/mlp/infer", gzip.compress(bytes(1 << 28), 9) * 4, "Content-Encoding: gzip")] * 4)),
    "long-json": ("20 MB of JSON lists for an input of 64 numbers", lambda s: in_turn(s, LONG_JSON)),
    "clients-that-never-read": (
        "100 clients that ask and do not read their answers",
        lambda s: unread(s, 100, GET.format("/metrics").encode() * 20)),
    "unread-dashboards": (
        "40 event streams of the dashboard that nobody reads",
        lambda s: unread(s, 40, GET.format("/dashboard/events").encode())),
    "model-reloaded": ("A model is loaded anew, five times", lambda s: in_turn(s, *[LOAD] * 5)),
    "code-that-fails": (
        "A model's file is edited into one that cannot be imported, and loaded; then put back", code_that_fails),
    "reload-signal": ("SIGHUP with a configuration that is no TOML, then with the right one", reload_signal),
    "policies-in-turn": ("The policy is switched six times", lambda s: in_turn(
        s, *map(policy, ("edf", "srpt", "fifo", "hrrn", "slack", "paella")))),
    "connection-flood": (
        "1,000 connections at once, each with a request",
        lambda s: at_once(s, *(lookup(k % TABLE) for k in range(1000)))),
}  # fmt: skip


class Prober:
    """Asks every model in turn, on new connections, and notes when it was not answered right."""

    def __init__(self, server: Served, work: list[Checked]) -> None:
        plain = [each for each in work if b"timeout" not in each.request and each.kind == "json"]
        self._port, self._work = server.port, list({each.model: each for each in plain}.values())
        self.failed_until, self.good_since, self.last_good, self.good = 0.0, time.monotonic(), time.monotonic(), 0

    async def run(self) -> None:
        for each in itertools.cycle(self._work):
            right = False
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(1.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    try:
                        status, head, body = await exchange(reader, writer, each.request)
                    finally:
                        writer.close()
                # A refusal for want of room is an answer: the load is there on purpose.
                no_room = status == 503 and (b"in flight" in body or b"would take" in body)
                right = no_room or (status == 200 and each.is_right(head, body))
            if right:
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
            if (
                self.good >= 2 * len(self._work)
                and now - self.last_good < QUIET_S / 2 < QUIET_S <= now - self.good_since
            ):
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
        recovered = await prober.quiet()
        took = max(0.0, prober.failed_until - server.harmed_at) if recovered else None
        known = found.get(name, {"recovery_s": 0.0})["recovery_s"]
        longest = None if took is None or known is None else max(took, known)
        found[name] = {"fault": name, "what": FAULTS[name][0], "recovery_s": longest}
        print(f"{name}: {'not within 30' if took is None else f'{took:.2f}'} s", flush=True)


async def campaign(server: Served, o: Any, until: float) -> tuple[Counter[str], list[Any]]:
    work = requests(np.random.default_rng(0), 2000)
    outcomes, end, faults, prober = Counter[str](), asyncio.Event(), dict[str, Any](), Prober(server, work)
    tasks = [asyncio.create_task(prober.run())]
    tasks += [asyncio.create_task(run_clients(server.port, work, outcomes, o.clients, end))]
    names = [] if o.faults == "none" else [*FAULTS] if o.faults == "all" else o.faults.split(",")
    if names:
        await inject(names, server, prober, faults, until)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    end.set()
    await tasks[1]
    tasks[0].cancel()
    return outcomes, list(faults.values())


def quoted(by_gpu: dict[str, Any]) -> dict[str, Any]:
    load = [["GPU", "servers", "checked requests", "right", "refused, or past a deadline", "connection ended", "wrong",
             "without an answer", "answered with 500"]]  # fmt: skip
    for gpu, found in by_gpu.items():
        outcomes = found["load"]["outcomes"]
        counts = (outcomes.get(each, 0) for each in ("right", "refused", "dropped", "wrong", "lost", "500"))
        load.append([gpu, str(len(found["servers"])), *(f"{n:,}" for n in (found["load"]["requests"], *counts))])
    recovery = [["fault", *(f"{gpu}, s" for gpu in by_gpu)]]
    known = [{each["fault"]: each for each in found["faults"]} for found in by_gpu.values()]
    for name, each in known[0].items():
        every = [found.get(name, {"recovery_s": math.nan})["recovery_s"] for found in known]
        cells = ("not within 30" if s is None else "–" if math.isnan(s) else f"{s:.1f}" for s in every)
        recovery.append([each["what"].split(":")[0].rstrip("."), *cells])
    return {"trust-load": load, "trust-recovery": recovery}


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=120.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--faults", default="all", help=f"all, none, or some of {', '.join(FAULTS)}")
    o = parser.parse_args()
    with served(o.device, o.workers) as server:
        outcomes, faults = asyncio.run(campaign(server, o, time.monotonic() + o.seconds))
    about = {"commit": commit(), "clients": o.clients, "cores": os.cpu_count(), "seconds": o.seconds}
    load = {"requests": sum(outcomes.values()), "outcomes": dict(outcomes)}
    found = {"servers": [about], "load": load, "faults": faults}
    name = "trust_campaign" if o.device.startswith("virtual") else "trust_campaign_h200"
    by_gpu = {"virtual H200": stored("trust_campaign", o.out), "H200": stored("trust_campaign_h200", o.out)}
    by_gpu["virtual H200" if o.device.startswith("virtual") else "H200"] = found
    tables = quoted({gpu: each for gpu, each in by_gpu.items() if each})
    show("outcomes", tables["trust-load"][0], tables["trust-load"][1:])
    print(save(name, found, None, o.out, tables=tables))


if __name__ == "__main__":
    main()
