"""`RemoteMonitor`: the dashboard's look at an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.remote import RemoteEngine

_PATIENCE_S = 10.0


class RemoteMonitor:
    """As `scheduler.monitor.Monitor`, whose part in the engine's process looks only while it is asked for snapshots."""

    def __init__(self, engine: RemoteEngine, call: Callable[..., Awaitable[Any]]) -> None:
        self.engine, self._call, self._loop = engine, call, asyncio.get_running_loop()
        self._last: dict[str, Any] | None = None

    def start(self) -> None:
        """Nothing to do: the first snapshot does it."""

    def stop(self) -> None:
        """Nothing to do: see `calls.Calls.rest`."""

    def snapshot(self) -> dict[str, Any]:
        """From another thread than the loop's."""
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
