"""Persistent connections to one engine: each carries one request at a time, and holds its answer until it is
complete.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from typing import Protocol

from paellapy.cluster.view import EngineView

IDLE_S = 20.0  # shorter than a server's `keepalive_s`, so that nothing is sent into a closing connection
CONNECT_S = 2.0
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)


class Sent(Protocol):
    """A request that was sent to an engine."""

    def bytes_of(self) -> list[bytes]:
        """Its header and its body."""

    def answered(self, view: EngineView, head: bytes, body: list[bytes]) -> None: ...

    def lost(self, view: EngineView, was_sent: bool) -> None:
        """The engine will not answer; `was_sent`: the request may have run nevertheless."""


class Link(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = ("_head", "_held", "_left", "_pool", "_work", "transport", "used_at")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._work: Sent | None = None
        self._head, self._held, self._left = b"", [b""], -1
        self.used_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return self._work is not None

    def send(self, work: Sent) -> None:
        assert self.transport is not None
        self._work = work
        parts = work.bytes_of()
        self.transport.write(parts[0] + parts[1] if len(parts[1]) < 1 << 16 else parts[0])
        if len(parts[1]) >= 1 << 16:
            self.transport.write(parts[1])

    def data_received(self, data: bytes) -> None:
        if self._work is None:  # an engine sends nothing unasked, so it is about to close
            self.abort()
            return
        if self._left < 0:
            data = self._held[0] + data if self._held[0] else data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._held[0] = data
                return
            length = _LENGTH.search(data, 0, end)
            if length is None or not data.startswith(b"HTTP/1.1 "):
                self.abort()
                return
            self._head, data = data[:end], data[end:]
            self._left, self._held = int(length[1]), []
        self._held.append(data)
        self._left -= len(data)
        if self._left == 0:
            self._answer()
        elif self._left < 0:
            self.abort()

    def _answer(self) -> None:
        work, head, body = self._work, self._head, self._held
        self._work, self._head, self._held, self._left = None, b"", [b""], -1
        assert work is not None
        self._pool.give_back(self, head)
        work.answered(self._pool.view, head, body)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.forget(self)
        work, self._work = self._work, None
        if work is not None:
            self._pool.view.up = False  # until it is heard again
            work.lost(self._pool.view, was_sent=True)


class Pool:
    """Connections to one engine, one for each of this router's requests in flight."""

    def __init__(self, view: EngineView, context: ssl.SSLContext | None = None) -> None:
        self.view, self._context = view, context
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, work: Sent) -> None:
        idle, now = self._idle, time.monotonic()
        while idle:
            link = idle.pop()
            if link.transport is not None and not link.transport.is_closing() and now - link.used_at < IDLE_S:
                link.send(work)
                return
            link.abort()
        task = asyncio.get_running_loop().create_task(self._open(work))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, work: Sent) -> None:
        host, port, tls = self.view.member.address
        loop = asyncio.get_running_loop()
        make: Callable[[], Link] = lambda: Link(self)  # noqa: E731
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(make, host, port, ssl=self._context if tls else None)
        except (OSError, TimeoutError):
            self.view.up = False
            work.lost(self.view, was_sent=False)
            return
        except asyncio.CancelledError:
            work.lost(self.view, was_sent=False)
            raise
        self._links.add(link)
        link.send(work)

    def give_back(self, link: Link, head: bytes) -> None:
        if b"\r\nConnection: close\r\n" in head:
            if link.transport is not None:
                link.transport.close()
            return
        link.used_at = time.monotonic()
        self._idle.append(link)

    def forget(self, link: Link) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def cut(self) -> None:
        """Drops all connections to an engine that has fallen silent; their requests are lost."""
        for link in list(self._links):
            link.abort()

    async def close(self) -> None:
        for task in list(self._opening):
            task.cancel()
        for link in list(self._links):
            link.abort()
        await asyncio.sleep(0)
