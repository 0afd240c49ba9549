"""The Ray actor of an engine: it owns the engine's GPU and keeps a server alive on it.

A standby replaces a server that has ended, or that was alive and then has not answered for `hung_s`. The class is plain
(`ray.remote` is applied where it is started) and imports little, so that an actor restarts quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from paellapy.cluster.engine_state import Member
from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.processes import EngineTask, be_as_important_as_others, end, start
from paellapy.cluster.router import Router, RouterOptions
from paellapy.serving.listening import Shares
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory

LOOK_S = 0.1
ASK_S = 0.5  # between two checks that the server answers
STANDBY_AFTER_S = 8.0  # of a server's life, so that its loading comes first
STOP_S = 40.0  # a server's own drain takes up to 30


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineActor:
    """Keeps one server alive on the GPU that Ray assigned, and a standby that takes over when it ends."""

    def __init__(self, name: str, task: dict[str, Any], node_host: str | None, hung_s: float, standby: bool) -> None:
        configure("text", "info")
        be_as_important_as_others()  # its server inherits the priority
        host = node_host or _node_address()
        self._task = EngineTask(**{**task, "host": host, "port": free_port(host)})
        self.name, self._host, self._hung_s = name, host, hung_s
        self._process: subprocess.Popen[bytes] | None = None
        self._standby: subprocess.Popen[bytes] | None = None
        self._wants_standby = standby
        self._stopping, self._starts = False, 0
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        """Servers end with the thread that started them, so this thread also stops them."""
        alive_at = heard_at = 0.0  # 0: not yet
        asked_at, unheard = 0.0, 0
        while not self._stopping:
            now = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                self._process = self._next()
                alive_at = heard_at = 0.0
            elif now - asked_at >= ASK_S:
                asked_at = now
                if self._is_alive():
                    heard_at, unheard = time.monotonic(), 0
                    alive_at = alive_at or heard_at
                else:
                    unheard += 1
                # One answer may be late because the whole machine was suspended; the next one is not.
                if heard_at and unheard > 1 and time.monotonic() - heard_at > self._hung_s:
                    log.error("a server does not answer and is restarted", extra={"fields": {"engine": self.name}})
                    self._process.kill()  # a stopped process would react to nothing else
                    self._process.wait()
            if self._wants_standby and self._standby is None and alive_at and now - alive_at > STANDBY_AFTER_S:
                self._standby = self._start(waits=True)
            time.sleep(LOOK_S)
        end([each for each in (self._standby, self._process) if each is not None], STOP_S)

    def _start(self, waits: bool) -> subprocess.Popen[bytes]:
        task = msgspec.structs.replace(self._task, waits=waits)
        return start(task, stdin=subprocess.PIPE if waits else subprocess.DEVNULL)

    def _next(self) -> subprocess.Popen[bytes]:
        """The standby if there is one, else a new process."""
        self._starts += 1
        standby, self._standby = self._standby, None
        if standby is not None and standby.stdin is not None:
            with contextlib.suppress(OSError), standby.stdin as told:
                told.write(msgspec.json.encode(self._task.loaded) + b"\n")
            if standby.poll() is None:
                return standby
        return self._start(waits=False)

    def _is_alive(self) -> bool:
        """Whether it answers within half of `hung_s`: a busy machine's server is slow, not silent."""
        connection = http.client.HTTPConnection(self._host, self._task.port, timeout=max(ASK_S, self._hung_s / 2))
        try:
            connection.request("GET", "/v2/health/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def info(self, models: Sequence[str]) -> dict[str, Any]:
        """The actor's address and state. A server started from now on loads these models."""
        self._task.loaded = list(models)
        process = self._process
        return {
            "name": self.name, "url": f"http://{self._host}:{self._task.port}", "starts": self._starts,
            "pid": None if process is None else process.pid, "actor_pid": os.getpid(), "node": _node(),
        }  # fmt: skip

    def stop(self) -> None:
        """Finishes requests in flight, then ends the server for good."""
        self._stopping = True
        self._keeper.join()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _node() -> str | None:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None


# The Ray actor of a router, with an event loop of its own. A request's bytes never pass through Ray.


class RouterActor:
    """A router in an event loop of its own. Routers of one machine share the port, and the kernel spreads connections
    over them; so a restarted router listens only once it knows its engines and has heard them.
    """

    def __init__(self, name: str, options: dict[str, Any], models: list[str]) -> None:
        configure("text", "warning")
        be_as_important_as_others()
        keep_memory()
        self.name = name
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._router = Router(RouterOptions(**options), models)
        self._door: FrontDoor | None = None

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self) -> str | None:
        """Opens the socket. Returns the reason if that fails, else None."""
        o = self._router.options
        while not (self._router.ready or self._router.knows_all):
            await asyncio.sleep(0.01)
        if self._door is None:
            try:
                listening = _Shared(o.host, o.port).socket
            except OSError as e:
                return f"cannot listen on {o.host}:{o.port}: {e}"
            self._door = FrontDoor(self._router, listening)
            await self._door.start()
        return None

    def set_members(self, members: list[tuple[str, str]]) -> dict[str, Any]:
        """Replaces the list of engines. Returns the router's counters, and why it does not listen, if so."""

        async def change() -> dict[str, Any]:
            self._router.set_members(Member(name, url) for name, url in members)
            why = None if self._door is not None else await self._open()
            return {**asdict(self._router.counts), "ready": self._router.ready, "pid": os.getpid(), "why": why}

        found: dict[str, Any] = self._call(change())
        return found

    def stop(self) -> None:
        self._call(self._router.close() if self._door is None else self._door.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Shared(Shares):
    """A socket that joins those already listening on a port, or is the first."""

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._family, self._address, self._sockets = found[0], found[4], []
        self.socket = self._make()
