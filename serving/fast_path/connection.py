"""Connections with a fast path: from their bytes into a slot, and from the slot to the connection.

A usual `POST /v2/models/…/infer`, with a Content-Length and without codings, needs no router, middleware, task or
request object. It is read here and answered where completions are read. All other input goes to aiohttp unchanged:
other addresses, other framings, anything unusual, and so all invalid HTTP. Meaning, checks, errors and counters of a
request are the same on both paths.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from paellapy.instrument.errors import PaellaError
from paellapy.serving.connections import Connection
from paellapy.serving.errors import STOPPING, LateBodyError
from paellapy.serving.fast_path.buffers import AHEAD_BYTES, Body, Reader, write
from paellapy.serving.fast_path.head import LONGEST_HEAD, Head
from paellapy.serving.fast_path.way import Way, Work
from paellapy.serving.inference import Pieces
from paellapy.serving.protocol import BESIDE_BYTES

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*(?=\r\n)")
_START = b"POST /v2/models/"
_NO_HEAD = b"\r\n\r\n"  # no request begins with these bytes


class FastConnection(Connection):
    """A connection whose inferences take the fast path; aiohttp handles its other requests."""

    __slots__ = ("_body_timer", "_drained", "_held", "_latest", "_reading_held", "_strange", "_unwanted", "_way",
                 "_work", "body", "closing")  # fmt: skip

    def __init__(self, manager: Any, *, way: Way, **options: Any) -> None:
        super().__init__(manager, **options)
        self._way = way
        self._held = b""  # received bytes that belong to no request yet
        self._latest: tuple[bytes, Head | None] = _NO_HEAD, None  # the latest header: clients repeat it
        self._work: Work | None = None  # the current request, from its header to its answer
        self.body: Body | None = None  # its body while it arrives; None: it is complete
        self._body_timer: asyncio.TimerHandle | None = None
        self._unwanted = 0  # bytes left of a body whose request is already answered
        self._strange = False  # aiohttp's parser may hold part of a request, so it gets all further bytes
        self._reading_held = self.closing = False
        self._drained: asyncio.Future[None] | None = None

    # -- input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is None:
            transport.set_protocol(Reader(self, self._way.buffer))

    @property
    def idle(self) -> bool:
        """Whether the next bytes can be handled at once."""
        return self._work is None and not self._paused

    def data_received(self, data: bytes | memoryview) -> None:
        """Handles bytes. The memory behind a memoryview is reused after this call."""
        self.fresh = False
        if self._work is None and data and not (self._held or self._unwanted or self._strange or self._paused):
            self._take(data)
        elif self._strange or not data:  # empty: aiohttp calls itself
            super().data_received(bytes(data))
        elif self.body is not None:
            self._read_body(data)
        elif self._unwanted:
            n = min(len(data), self._unwanted)
            self._unwanted -= n
            if n < len(data):
                self.data_received(data[n:])
        elif not self.idle:  # the next request waits until this one's answer is sent
            self._held += bytes(data)
            if len(self._held) > AHEAD_BYTES and not self._reading_held and self.transport is not None:
                self._reading_held = True
                self.transport.pause_reading()
        else:
            self._take(self._held + bytes(data) if self._held else data)

    def _take(self, data: bytes | memoryview) -> None:
        """Handles bytes at the beginning of a request."""
        self._held = b""
        if self.closing or self._force_close or self._close:
            return
        # After a request of its own, aiohttp waits for the next one; its answer is written by then.
        idle = self._request_count == 0 or (self._waiter is not None and not self._waiter.done())
        start = data if isinstance(data, bytes) else bytes(data[:LONGEST_HEAD])
        raw, head = self._latest
        if not start.startswith(raw) or not idle or self._messages or not self._keepalive:
            raw, head = self._find_head(start, idle)
        end = len(raw)
        if head is None or (head.length > BESIDE_BYTES and self._way.is_doubtful(head, raw)):
            self._give(bytes(data))
            return
        if self._timer is not None:
            self._disarm()
        work = self._work = self._way.begin(self, head, raw)
        body_end = end + head.length
        if len(data) >= body_end:
            self._held = bytes(data[body_end:])
            work.start(memoryview(data)[end:body_end], head.json_length)
            return
        body = Body(head.length)
        try:
            work.look()
            work.claim(body.size)
        except PaellaError as e:
            self._unwanted = body_end - len(data)
            work.fail(e)
            return
        self.body = body
        if self._way.body_timeout_s is not None:
            self._body_timer = self._loop.call_later(self._way.body_timeout_s, self._body_is_late)
        self._read_body(memoryview(data)[end:])

    def _find_head(self, start: bytes, idle: bool) -> tuple[bytes, Head | None]:
        """The header at the beginning of these bytes; None: aiohttp handles the request."""
        if not start.startswith(_START) or not idle or self._messages or not self._keepalive:
            return b"", None
        end = start.find(b"\r\n\r\n") + 4
        raw = start[:end] if end >= 4 else b""
        head = self._way.heads.find(raw) if raw else None
        if head is not None:
            self._latest = raw, head
        return raw, head

    def _give(self, data: bytes) -> None:
        """Gives bytes to aiohttp. After a complete request its parser is empty, and the next request may be
        ours again.
        """
        end = data.find(b"\r\n\r\n")
        head = data[: max(0, end) + 2].lower()
        lengths = _LENGTH.findall(head)
        self._strange = (
            end < 0
            or len(lengths) > 1
            or end + 4 + (int(lengths[0]) if lengths else 0) != len(data)
            or b"\r\ntransfer-encoding" in head
            or b"\r\nupgrade" in head
        )
        super().data_received(data)

    def _read_body(self, data: bytes | memoryview) -> None:
        body = self.body
        assert body is not None
        n = min(len(data), body.length - body.at)
        body.add(data[:n])
        self._held = bytes(data[n:])
        self.body_received(body, 0)

    def body_received(self, body: Body, nbytes: int) -> None:
        """Notes that `nbytes` were written into the body's memory."""
        body.at += nbytes
        work = self._work
        if work is None or body is not self.body:
            return
        if body.at < body.length:
            try:  # under TLS its memory has grown already if a piece did not fit
                work.claim(body.next_size if body.at == body.size else body.size)
            except PaellaError as e:
                self._forget_body()
                self._unwanted = body.length - body.at
                work.fail(e)
            return
        self._forget_body()
        work.start(body.all(), work.head.json_length)

    def _forget_body(self) -> None:
        self.body = None
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_is_late(self, error: LateBodyError | None = None) -> None:
        self._forget_body()
        if self._work is not None:
            self.closing = True
            self._work.fail(error or LateBodyError())

    # -- output

    def send(self, work: Work, answer: Pieces, close: bool) -> None:
        if self._work is not work:  # the client has left
            return
        self._work = None
        work.settle()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.transport is None:
            return
        write(self.transport, answer)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if close:
            self.closing = True
            self.transport.close()
            return
        if self._held or self._reading_held:
            # Not called directly: a series of requests that fail at once would recurse.
            self._loop.call_soon(self._go_on)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        if self._work is not None or self._paused or self.transport is None:
            return
        if self._reading_held:
            self._reading_held = False
            self.transport.resume_reading()
        if self._held and not self._strange:
            self._take(self._held)

    # -- closing

    def connection_lost(self, exc: BaseException | None) -> None:
        work, self._work = self._work, None
        self._forget_body()
        if work is not None:
            work.leave()
            work.settle()
        self._held = b""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes after the current answer."""
        if self._work is not None:
            self.closing = True
        else:
            super().close()

    @property
    def arriving(self) -> bool:
        return self.body is not None or super().arriving

    def end_arrival(self) -> None:
        if self.body is not None:
            self._body_is_late(LateBodyError(STOPPING))
        else:
            super().end_arrival()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        self.closing = self.closing or self._work is not None
        timeout = await self.arrive(timeout)
        if self._work is not None:
            self.closing = True
            self._drained = self._loop.create_future()
            await asyncio.wait((self._drained,), timeout=timeout)
        await super().shutdown(timeout)

    def _process_keepalive(self) -> None:
        if self._work is not None:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()
