"""Snapshots for the dashboard's viewers: each tick makes one for all of them, and none while nobody watches.

A viewer that cannot keep up gets the latest snapshot when it is ready for one; nothing is queued for it. A viewer that
reads nothing for a while is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from paellapy.serving.logs import log

Take = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[bytes], Awaitable[None]]

TICK_S = 0.2
MAX_VIEWERS = 32  # of all processes of a server together
PATIENCE_S = 5.0

_encode = msgspec.json.Encoder().encode


class _Round:
    """The time from the first viewer to the last: it holds the latest snapshot and wakes those who wait for
    the next.
    """

    def __init__(self) -> None:
        self.latest = b""
        self.number = 0
        self.over = False
        self._news = asyncio.Event()
        self.ticker: asyncio.Task[None] | None = None

    def publish(self, message: bytes) -> None:
        self.latest = message
        self.number += 1
        self._wake()

    def end(self) -> None:
        self.over = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def after(self, seen: int) -> None:
        """Waits until there is a newer snapshot, or the round is over."""
        while self.number == seen and not self.over:
            await self._news.wait()


class Hub:
    """Sends snapshots to viewers. `take` makes one; `begin` and `end` run before the first viewer and after
    the last. `count` adds to the number of viewers in all processes, and returns it.
    """

    def __init__(
        self,
        take: Take,
        begin: Callable[[], None],
        end: Callable[[], None],
        count: Callable[[int], int],
        *,
        tick_s: float = TICK_S,
        max_viewers: int = MAX_VIEWERS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._take, self._begin, self._end, self._count = take, begin, end, count
        self._tick_s, self.max_viewers, self._patience_s = tick_s, max_viewers, patience_s
        self._round: _Round | None = None
        self._closed = False
        self.viewers = 0

    @contextlib.contextmanager
    def seat(self) -> Iterator[bool]:
        """Counts one more viewer. False: there are too many, in this process and others together."""
        try:  # counted first and looked at second: processes that do so at the same time never let in too many
            yield self._count(1) <= self.max_viewers
        finally:
            self._count(-1)

    async def show(self, send: Send) -> None:
        """Sends snapshots to one viewer until the round is over. TimeoutError: the viewer is too slow."""
        if self._closed:
            return
        self.viewers += 1
        try:
            current = self._round or self._open()
            seen = 0
            while True:
                await current.after(seen)
                if current.over:
                    return
                seen = current.number
                await asyncio.wait_for(send(current.latest), self._patience_s)
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._rest()

    def _open(self) -> _Round:
        self._begin()
        self._round = opened = _Round()
        opened.ticker = asyncio.create_task(self._run(opened))
        return opened

    async def _run(self, current: _Round) -> None:
        try:
            while True:
                current.publish(b"data: " + _encode(await self._take()) + b"\n\n")
                await asyncio.sleep(self._tick_s)
        except Exception as e:  # viewers reconnect, and try again
            log.error("making a snapshot for the dashboard failed", exc_info=e)
            current.end()
            if self._round is current:
                self._round = None

    def _rest(self) -> None:
        current, self._round = self._round, None
        if current is not None and current.ticker is not None:
            current.ticker.cancel()
        self._end()

    def close(self) -> None:
        """Ends all viewers' streams; no viewer is accepted afterwards."""
        self._closed = True
        if self._round is not None:
            self._round.end()
