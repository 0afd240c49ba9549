"""A router in a thread of the tests' process, in front of servers in this or another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from serving_server import InLoop, ask, infer_body, looping

from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.router import Router, RouterOptions


class RunningRouter(InLoop):
    def __init__(self, door: FrontDoor, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(door.url, loop)
        self.door, self.router = door, door.router

    def do(self, function: Any, *arguments: Any) -> Any:
        async def run() -> Any:
            return function(*arguments)

        return self.call(run())

    def set_engines(self, urls: dict[str, str]) -> None:
        self.do(self.router.set_engines, urls)


@contextlib.contextmanager
def routing(urls: dict[str, str], models: tuple[str, ...] = (), **options: Any) -> Iterator[RunningRouter]:
    async def start() -> FrontDoor:
        door = FrontDoor(Router(RouterOptions(**{"port": 0, "drain_s": 5.0, **options}), models))
        await door.start()
        return door

    with looping() as loop:
        door = asyncio.run_coroutine_threadsafe(start(), loop).result()
        found = RunningRouter(door, loop)
        found.set_engines(urls)
        yield found
        found.call(door.stop())


X = np.arange(64, dtype=np.float32).reshape(1, 64)
INFER = "/v2/models/scale/infer"


def body(x=X, **more):
    return json.dumps(infer_body("x", x, **more)).encode()


def check(answer, x=X, factor=2.0):
    assert answer[0] == 200, answer[2]
    np.testing.assert_array_equal(answer[2]["outputs"][0]["data"], (factor * x).reshape(-1))


@contextlib.contextmanager
def asking(router, clients=4, headers=None):
    """Clients that ask all the time and check every answer; yields (status, engine) of each."""
    answers, stop = [], threading.Event()

    def client(k):
        x = X + k
        while not stop.is_set():
            status, found, said = ask(router, "POST", INFER, body(x), headers)
            if status == 200:
                np.testing.assert_array_equal(said["outputs"][0]["data"], (2 * x).reshape(-1))
            answers.append((status, found.get("X-Engine")))

    threads = [threading.Thread(target=client, args=(k,)) for k in range(clients)]
    for each in threads:
        each.start()
    try:
        yield answers
    finally:
        stop.set()
        for each in threads:
            each.join()
