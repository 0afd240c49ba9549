"""What Ray runs: an actor for every engine, which has its GPU and keeps a server alive, and one for every router.

Ray says where they are and notices when they are gone; a request's bytes never pass through it. The classes are plain:
`ray.remote` is applied where they are started, so that this module can be read without Ray.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from typing import Any

import msgspec

from paellapy.cluster.engine_process import EngineTask
from paellapy.cluster.front_door import FrontDoor
from paellapy.cluster.process import end, start
from paellapy.cluster.router import Router, RouterOptions
from paellapy.cluster.view import Member
from paellapy.serving.listening import Shares
from paellapy.serving.logs import configure
from paellapy.serving.server import keep_memory, loop_factory

LOOK_S = 0.1
STOP_S = 40.0  # a server's own drain is 30
ENGINE_MODULE = "paellapy.cluster.engine_process"


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineActor:
    """Keeps one server alive on the GPU that Ray gave it."""

    def __init__(self, name: str, task: dict[str, Any], node_host: str | None = None) -> None:
        host = node_host or _node_address()
        self._task = EngineTask(**{**task, "host": host, "port": free_port(host)})
        self.name, self._host = name, host
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping, self._starts = False, 0
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        """The server ends with the thread that has started it, so that one also stops it."""
        while not self._stopping:
            if self._process is None or self._process.poll() is not None:
                text = msgspec.json.encode(self._task).decode()
                self._process = start(ENGINE_MODULE, [text], environment={"PYTHONUNBUFFERED": "1"})
                self._starts += 1
            time.sleep(LOOK_S)
        if self._process is not None:
            end(self._process, STOP_S)

    def info(self) -> dict[str, Any]:
        process = self._process
        return {
            "name": self.name, "url": f"http://{self._host}:{self._task.port}", "starts": self._starts,
            "pid": None if process is None else process.pid, "actor_pid": os.getpid(), "stopping": self._stopping,
        }  # fmt: skip

    def stop(self) -> None:
        """Finishes what is in flight, then ends the server for good."""
        self._stopping = True
        self._keeper.join()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


class RouterActor:
    """A router in a loop of its own. Routers of one machine share the port: the kernel deals connections out."""

    def __init__(self, name: str, options: dict[str, Any], models: list[str]) -> None:
        configure("text", "warning")
        keep_memory()
        self.name = name
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._door: FrontDoor = self._call(self._open(RouterOptions(**options), models))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, options: RouterOptions, models: list[str]) -> FrontDoor:
        shares = _Shared(options.host, options.port)
        door = FrontDoor(Router(options, models), shares.socket)
        await door.start()
        return door

    def set_members(self, members: list[tuple[str, str]]) -> dict[str, Any]:
        """From now on these; what the router has seen so far."""

        async def change() -> dict[str, Any]:
            self._door.router.set_members(Member(name, url) for name, url in members)
            return {**asdict(self._door.router.counts), "ready": self._door.router.ready, "pid": os.getpid()}

        found: dict[str, Any] = self._call(change())
        return found

    def stop(self) -> None:
        self._call(self._door.stop())


class _Shared(Shares):
    """A place among those that listen on a port already, or the first of them."""

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._family, self._address, self._sockets = found[0], found[4], []
        self.socket = self._make()
