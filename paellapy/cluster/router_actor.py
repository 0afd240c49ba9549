"""The Ray actor of a router, with an event loop of its own. A request's bytes never pass through Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import asdict
from typing import Any

from paellapy.cluster.front_door import FrontDoor
from paellapy.cluster.process import be_as_important_as_others
from paellapy.cluster.router import Router, RouterOptions
from paellapy.cluster.view import Member
from paellapy.serving.listening import Shares
from paellapy.serving.logs import configure
from paellapy.serving.process_settings import keep_memory, loop_factory


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
