"""`RemoteMonitor`: the dashboard's monitor of an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.remote import RemoteEngine

_PATIENCE_S = 10.0


class RemoteMonitor:
    """Like `scheduler.monitor.Monitor`; its part in the engine's process runs only while snapshots are asked for."""

    def __init__(self, engine: RemoteEngine, call: Callable[..., Awaitable[Any]]) -> None:
        self.engine, self._call, self._loop = engine, call, asyncio.get_running_loop()
        self._last: dict[str, Any] | None = None

    def start(self) -> None:
        """Does nothing: the first snapshot starts monitoring."""

    def stop(self) -> None:
        """Does nothing: `calls.Calls.rest` stops monitoring."""

    def snapshot(self) -> dict[str, Any]:
        """A snapshot; to be called in a thread other than the event loop's."""
        try:
            self._last = self._ask("snapshot", None)
        except EngineAwayError:
            if self._last is None:
                raise
            self._last = {**self._last, "state": "restarting"}
        return self._last

    def set_policy(self, name: str) -> None:
        self._ask("set_policy", name)

    def _ask(self, name: str, data: Any) -> Any:
        async def ask() -> Any:
            return await self._call(name, data)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_PATIENCE_S)
