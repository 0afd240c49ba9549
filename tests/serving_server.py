"""A real server on loopback for the tests: in a thread of this process, or as the command line starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import triton
import triton.language as tl
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.client import Slot
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving.config import ServerConfig
from paellapy.serving.registry import Entry, Registry, entry_of
from paellapy.serving.server import Server
from paellapy.serving.tensors import DTYPES

DEVICE = "virtual:h200"


class InLoop:
    """What serves in another thread of this process: its address, and a way to run code in its loop."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.loop = url, loop
        self.address = url.partition("://")[2]
        self.port = int(self.address.rpartition(":")[2] or 0)  # 0: at a file

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    @staticmethod
    def wait_until(condition: Any) -> None:
        wait_until(condition, 250.0)


@contextlib.contextmanager
def looping(new_loop: Any = asyncio.new_event_loop) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread."""
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Running(InLoop):
    """A server that listens."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server.url, loop)
        self.server, self.service, self.engine = server, server.service, server.registry.engine

    def connections(self) -> int:
        """Number of open connections."""
        return len(self.server._runner.server.connections)

    def hold(self, model: str) -> Slot:
        """Reserves a slot of the model, so that its instance waits. Right after an answer the instance may not be free
        yet.
        """
        while True:
            slot = self.engine.reserve(model)
            if slot._place is not None:
                return slot
            slot.cancel()


@contextlib.contextmanager
def running(
    models: Iterable[Model | Entry],
    *,
    keys: dict[str, str] | None = None,
    tls: Any = None,
    limits: Limits | None = None,
    policy: str = "paella",
    load: bool = True,
    engine: dict[str, Any] | None = None,
    new_loop: Any = asyncio.new_event_loop,
    **options: Any,
) -> Iterator[Running]:
    """A server on a free port of 127.0.0.1, with all models loaded, stopped at the end. `engine`: further settings."""
    with Engine(DEVICE, policy, limits=limits, **(engine or {})) as made:
        registry = Registry(made, [m if isinstance(m, Entry) else entry_of(m) for m in models])
        settings = ServerConfig(**{"port": 0, "grace_s": 0.0, "drain_s": 10.0, **options})
        with looping(new_loop) as loop:
            server = Server(registry, settings, keys, tls)
            asyncio.run_coroutine_threadsafe(server.start(), loop).result()
            found = Running(server, loop)
            if load:
                found.call(server.load())
            yield found
            found.call(server.stop())


@pp.kernel
@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def echo_model(name: str, dtypes: Iterable[str], shape: tuple[int, ...] = (4,), **options: Any) -> Model:
    """Returns its inputs: one tensor of each datatype."""
    specs = {each.lower(): TensorSpec(shape, DTYPES[each]) for each in dtypes}

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        for key in specs:
            n = int(np.prod(inputs[key].shape))
            copy[(triton.cdiv(n, 128),)](inputs[key], outputs[key], n, B=128)

    return Model(name, fn, inputs=specs, outputs=specs, **options)


def mixed_model() -> Model:
    """For a server's configuration: a model with one input of each kind of datatype."""
    return echo_model("mixed", ["FP32", "FP16", "BF16", "INT8", "UINT64", "BOOL"], batch=(1, 4))


INFER = "/v2/models/scale/infer"


def infer_body(name: str, array: np.ndarray, datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    tensor = {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.reshape(-1).tolist()}
    return {"inputs": [tensor], **more}


BODY = json.dumps(infer_body("x", np.ones((1, 64), np.float32))).encode()  # for `scale_model`, whose answer is 2.0


# -- as a process


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `paellapy serve …` in a separate process, which finds the tests' models; killed if the test has not stopped
    it. Without a standby, which would load and log the same again in a test that takes long.
    """
    alone = "--set", "server.standby=off"
    command = [sys.executable, "-c", "from paellapy.cli import main; main()", "serve", *arguments, *alone]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(stream: Any, text: str) -> str:
    lines = []
    while not lines or text not in lines[-1]:
        line = stream.readline()
        assert line, "".join(lines)
        lines.append(line)
    return "".join(lines)


def url_once(process: subprocess.Popen[str], said: str = '"message":"loaded"') -> str:
    """The URL of a process with a JSON log, once the log says this."""
    lines = read_until(process.stderr, said).splitlines()
    return next(json.loads(line)["url"] for line in lines if '"listening"' in line)


class At:
    """A server at a URL, for `ask`."""

    def __init__(self, url: str) -> None:
        self.url, self.port = url, int(url.rpartition(":")[2])


async def stop_under_load(process: subprocess.Popen[str], url: str, bodies: list[bytes]) -> list[tuple[bytes, Any]]:
    """Tells a server to stop while each of some clients sends one body again and again, until its last answer.

    Returns the bodies with their answers: none may be missing.
    """
    answers: list[tuple[bytes, Any]] = []
    closed = 0
    stopping = asyncio.Event()

    async def client(body: bytes) -> None:
        nonlocal closed
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            while True:
                try:
                    async with session.post(url, data=body) as answer:
                        assert answer.status == 200
                        answers.append((body, await answer.json()))
                        if answer.headers.get("Connection") == "close":
                            closed += 1
                            return
                except aiohttp.ClientConnectorError:
                    assert stopping.is_set()
                    return

    tasks = [asyncio.create_task(client(body)) for body in bodies]
    while len(answers) < 100:
        await asyncio.sleep(0.005)
    stopping.set()
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    assert closed == len(bodies)
    return answers


def ask(server, method, path, body=None, headers=None):
    """Status, headers and content of one request on a new connection."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        content = answer.read()
    kind = answer.headers.get("Content-Type", "")
    decoded = json.loads(content) if kind.startswith("application/json") and content else content
    return answer.status, answer.headers, decoded


def scrape(server):
    """All samples of /metrics."""
    text = ask(server, "GET", "/metrics")[2].decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
