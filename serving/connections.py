"""Connections that begin a request and do not go on: closed after a while, so that they cannot use up what there is.

aiohttp has a limit on idle connections (`keepalive_s`), and we have one on bodies (`body_timeout_s`). Between the two
are headers that come drop by drop: with the first limit alone each would hold its connection as long as an idle one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from multidict import CIMultiDict

from paellapy.serving.logs import log
from paellapy.serving.middleware import SERVICE, json_response

_BODY = b'{"error":"the header did not arrive in time"}'
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


# What aiohttp's parser says, which may go on with the bytes that were sent, and what we do.
_MISTAKES = {
    "Too many headers": "the request has more headers than this server takes: send fewer",
    "Missing 'Host'": "the Host header is missing: HTTP/1.1 has it in every request",
    "Duplicate 'Host'": "there are two Host headers: send one",
    "Duplicate Content-Length": "there are two Content-Length headers: send one",
    "Transfer-Encoding can't be present with": "there are Content-Length and Transfer-Encoding: send one of them",
    "Content-Length can't be present with": "there are Content-Length and Transfer-Encoding: send one of them",
    "Invalid character in Content-Length": "Content-Length is no number: send the body's length in bytes",
}


class Connection(web.RequestHandler):
    """aiohttp's own, with two limits more.

    `header_timeout_s`: from when it is open, then from a request's first byte, to its header. `send_timeout_s`: for its
    client to take some of what was written. `log_rejected`: what is no HTTP has a line too.
    """

    __slots__ = (
        "__weakref__",
        "_began",
        "_content",
        "_header_timeout_s",
        "_log_rejected",
        "_send_timeout_s",
        "_send_timer",
        "_timer",
        "_to_client",
        "_unsent",
        "fresh",
    )  # fmt: skip

    def __init__(
        self, manager: web.Server, *, header_timeout_s: float, send_timeout_s: float, log_rejected: bool, **options: Any
    ) -> None:
        super().__init__(manager, **options)
        self._log_rejected = log_rejected
        self._header_timeout_s, self._began = header_timeout_s, False
        self._send_timeout_s, self._unsent = send_timeout_s, 0
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._to_client: asyncio.Transport | None = None  # until it is closed: aiohttp forgets it before
        self.fresh = True  # nothing has come yet
        self._content: StreamReader | None = None  # the body of the last request whose header came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._to_client = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self._to_client.set_write_buffer_limits(high=0)  # told of every answer that is not taken at once
        self._timer = self._loop.call_later(self._header_timeout_s, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = self._to_client = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Something is left that the client has not taken."""
        super().pause_writing()
        if self._send_timer is None and self._to_client is not None:
            self._unsent = self._to_client.get_write_buffer_size()
            self._send_timer = self._loop.call_later(self._send_timeout_s, self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._send_timer = None
        transport = self._to_client
        if transport is None or not (left := transport.get_write_buffer_size()):
            return
        if left < self._unsent:  # slow, but it reads
            self._unsent = left
            self._send_timer = self._loop.call_later(self._send_timeout_s, self._look_at_sending)
            return
        transport.abort()

    def data_received(self, data: bytes) -> None:
        self.fresh = False
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:  # a whole header
            if self._timer is not None:
                self._disarm()
            self._read_on(self._request_count - before)
        elif self._waiter is not None and not self._waiter.done():  # none, and no body is being read
            self._began = True
            if self._timer is None:
                self._timer = self._loop.call_later(self._header_timeout_s, self._too_late)

    def _read_on(self, n: int) -> None:
        """`n` messages have come. Where the body being read turns out to be none, its reader is told.

        aiohttp puts the error behind it, as if another request had been wrong, and the reader would wait for the rest.
        Whether that reader has begun is a matter of luck: head and body may come one right after the other.
        """
        for message, content in list(self._messages)[-n:]:
            if hasattr(message, "method"):
                self._content = content
            elif self._content is not None and not self._content.is_eof():
                self._messages.pop()  # nothing follows an error
                self._content.set_exception(web.RequestPayloadError("the body is not what its headers say"))

    def log_exception(self, *what: Any, **more: Any) -> None:
        """Of aiohttp itself: a body that cannot be read on after the answer is the client's mistake."""
        if not isinstance(more.get("exc_info"), web.RequestPayloadError | HttpProcessingError | ConnectionError):
            log.error(what[0] % what[1:], exc_info=more.get("exc_info"))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is no HTTP at all: an answer like every other error's, without the bytes that were sent."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        said = "this is not HTTP/1.1 as this server takes it"
        for start, meant in _MISTAKES.items():
            if (message or "").startswith(start):
                said = meant
        if isinstance(exc, LineTooLong):
            said = f"the first line, or a header, is longer than the {self.max_field_size:,} bytes this server takes"
        if self._log_rejected:
            peer = self._to_client.get_extra_info("peername") if self._to_client is not None else None
            fields = {"status": status, "error": said, **({"peer": peer[0]} if peer else {})}
            log.info("rejected", extra={"fields": fields})
        response = json_response({"error": said}, status)
        response.force_close()
        return response

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

    def __init__(self, connection: Callable[..., Connection], *handler: Any, **options: Any) -> None:
        super().__init__(*handler, **options)
        self._connection = connection
        self.accepted: weakref.WeakSet[Connection] = weakref.WeakSet()  # and not open yet, as in a TLS handshake

    def __call__(self) -> Connection:
        made = self._connection(self, loop=self._loop, **self._kwargs)
        self.accepted.add(made)
        return made

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.accepted.discard(handler)


class Runner(web.AppRunner):
    """An `AppRunner` that takes `header_timeout_s` too, and makes connections of another kind where asked to."""

    __slots__ = ("_connection",)

    def __init__(self, app: web.Application, connection: Callable[..., Connection] = Connection, **more: Any) -> None:
        super().__init__(app, **more)
        self._connection = connection

    async def _make_server(self) -> Connections:
        made = await super()._make_server()
        most_bytes = self.app[SERVICE].max_body_bytes

        async def handle(request: Any) -> web.StreamResponse:
            """Before anything else: aiohttp tells a client that waits for it to go on before its handler is asked."""
            if (request.content_length or 0) > most_bytes and "Expect" in request.headers:
                kept = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() != "expect")
                request.protocol._lingering_time = 0.0  # it has sent nothing, and will not
                request = request.clone(headers=kept)
            return await made.request_handler(request)

        return Connections(
            self._connection,
            handle,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
