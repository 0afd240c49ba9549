"""Connections that begin a request and do not go on: closed after a while, so that they cannot use up what there is.

aiohttp has a limit on idle connections (`keepalive_s`), and we have one on bodies (`body_timeout_s`). Between the two
are headers that come drop by drop: with the first limit alone each would hold its connection as long as an idle one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

_BODY = b'{"error":"the header did not arrive in time"}'
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Connection(web.RequestHandler):
    """aiohttp's own, with `header_timeout_s`: from when it is open, then from a request's first byte, to its header."""

    __slots__ = ("_began", "_header_timeout_s", "_timer")

    def __init__(self, manager: web.Server, *, header_timeout_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._header_timeout_s, self._began = header_timeout_s, False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = self._loop.call_later(self._header_timeout_s, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:  # a whole header
            if self._timer is not None:
                self._disarm()
        elif self._waiter is not None and not self._waiter.done():  # none, and no body is being read
            self._began = True
            if self._timer is None:
                self._timer = self._loop.call_later(self._header_timeout_s, self._too_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._began = None, False

    def _too_late(self) -> None:
        self._timer = None
        if self._began and self.transport is not None:
            self.transport.write(_LATE)
        self.force_close()


class Connections(web.Server):
    """Makes them."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """An `AppRunner` that takes `header_timeout_s` too."""

    async def _make_server(self) -> Connections:
        made = await super()._make_server()
        return Connections(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
