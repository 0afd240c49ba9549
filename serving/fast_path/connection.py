"""Connections with a fast path: from their bytes into a slot, and from the slot to the connection.

A usual `POST /v2/models/…/infer`, with a Content-Length and without codings, needs no router, middleware, task or
request object. It is read here and answered where completions are read. All other input goes to aiohttp unchanged:
other addresses, other framings, unknown API keys, anything unusual, and so all invalid HTTP. Meaning, checks, errors,
counters and log lines of a request are the same on both paths. A request takes 0.3 times the CPU time of one that
goes through aiohttp (`benchmarks/serving_floor.py`).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import Any, Protocol

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.serving.errors import STOPPING, LateBodyError, RefusedError
from paellapy.serving.fast_path.headers import Head, Heads, header_length, header_values
from paellapy.serving.limits import AHEAD_BYTES, FAST_HEADER_BYTES, MAPPED_BYTES, RETRY_S
from paellapy.serving.listening import Connection
from paellapy.serving.protocol import Pieces

# Every copy of a large tensor costs time. So the socket's bytes are read into a buffer that all connections share, or
# directly into the request's body, and an answer is sent directly from its slot.

READ_BYTES = 1 << 20  # per read; the kernel usually holds less for one connection
TURN_BYTES, LEAST_BYTES = 1 << 20, 1 << 12  # of all bodies in one turn of the loop; of each that may be read
COPIED_BYTES = 1 << 14  # shorter pieces are copied, which is faster than sending them separately

_START = b"POST /v2/models/"
_NO_HEAD = b"\r\n\r\n"  # no request begins with these bytes


class Body:
    """The body of one request while it arrives."""

    __slots__ = ("_memory", "at", "length")

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0
        if length <= MAPPED_BYTES:
            self._memory = np.empty(length, np.uint8).data
        else:
            try:
                self._memory = memoryview(mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except OSError as e:
                said = f"the system gives no {length:,} bytes for a body: try again"
                raise RefusedError(said, "overloaded", RETRY_S, given=length) from e

    def room(self) -> memoryview:
        """Memory for the next bytes; the caller advances `at` by the number of bytes received."""
        return self._memory[self.at :]

    def add(self, data: bytes | memoryview) -> None:
        self._memory[self.at : self.at + len(data)] = data
        self.at += len(data)

    def all(self) -> memoryview:
        return self._memory


class Reading:
    """What the connections of a loop share: memory that they read into, and how much of bodies one turn of the loop may
    read. A connection that has used it up waits until others had their turn.
    """

    __slots__ = ("_left", "_waiting", "buffer")

    def __init__(self) -> None:
        self.buffer = np.empty(READ_BYTES, np.uint8).data
        self._left = TURN_BYTES
        self._waiting: list[asyncio.Transport] = []

    def room(self, body: Body) -> memoryview:
        """Memory for the next bytes of a body."""
        return body.room()[: max(self._left, LEAST_BYTES)]

    def note(self, nbytes: int, transport: asyncio.Transport) -> None:
        """Counts bytes of a body that were read from this connection, and is not complete."""
        if self._left == TURN_BYTES:
            asyncio.get_running_loop().call_soon(self._begin)
        self._left -= nbytes
        if self._left <= 0 and not transport.is_closing():
            transport.pause_reading()
            self._waiting.append(transport)

    def _begin(self) -> None:
        self._left = TURN_BYTES
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.is_closing():
                each.resume_reading()


def descriptor(transport: asyncio.Transport) -> int:
    """File descriptor of the socket, if bytes can be written to it directly; -1: unknown, or TLS."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


def write(transport: asyncio.Transport, pieces: Pieces) -> None:
    """Writes an answer to its connection. The caller may reuse the memory of memoryviews when this returns."""
    size = sum(map(len, pieces))
    if size < COPIED_BYTES:
        transport.write(b"".join(pieces))
        return
    sent = 0
    if not transport.is_closing() and not transport.get_write_buffer_size():
        fd = descriptor(transport)
        if fd >= 0:
            try:
                sent = os.writev(fd, pieces)
            except OSError:  # no room; or the client has left, which the transport will notice
                sent = 0
    for piece in pieces:
        if sent < len(piece):
            rest = memoryview(piece)[sent:]
            transport.write(bytes(rest) if isinstance(piece, memoryview) else rest)
        sent = max(0, sent - len(piece))


class Work(Protocol):
    """One request, from its header to its answer: a server answers it, a router forwards it."""

    head: Head

    def look(self) -> Any:
        """Called before the body arrives; PaellaError if the request is refused."""

    def claim(self, nbytes: int) -> None:
        """Called as the body takes that many bytes of memory; PaellaError if there is no room."""

    def start(self, body: memoryview, json_length: str | None) -> None:
        """Called with the complete body. The connection may reuse the body's memory when this returns."""

    def fail(self, error: Exception) -> None: ...

    def leave(self) -> None:
        """Called when the client has left."""

    def release(self) -> None:
        """Called when the request is answered or cancelled: the connection may go on to the next."""


class Handler(Protocol):
    """State that all connections of a server share. It makes the requests."""

    heads: Heads
    reading: Reading

    def begin(self, connection: FastConnection, head: Head, raw: bytes) -> Work | None:
        """Makes a request from its header, whose bytes are `raw`. None: aiohttp must handle it, since its key is not
        known or its body is too long: aiohttp can ask others first, and refuse the body without losing the answer.
        """


class FastConnection(Connection):
    """A connection whose inferences take the fast path; aiohttp handles its other requests."""

    __slots__ = ("_ahead", "_aiohttp_only", "_body_timer", "_drained", "_handler", "_latest", "_reading_paused",
                 "_to_drop", "_work", "body", "closing")  # fmt: skip

    def __init__(self, manager: Any, *, handler: Handler, **options: Any) -> None:
        super().__init__(manager, **options)
        self._handler = handler
        self._ahead = b""  # received bytes that belong to no request yet
        self._latest: tuple[bytes, Head | None] = _NO_HEAD, None  # the latest header: clients repeat it
        self._work: Work | None = None  # the current request, from its header to its answer
        self.body: Body | None = None  # its body while it arrives; None: it is complete
        self._body_timer: asyncio.TimerHandle | None = None
        self._to_drop = 0  # bytes left of a body whose request is already answered
        self._aiohttp_only = False  # aiohttp's parser may hold part of a request, so it gets all further bytes
        self._reading_paused = self.closing = False
        self._drained: asyncio.Future[None] | None = None

    # -- input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is None:
            transport.set_protocol(Reader(self, self._handler.reading))

    @property
    def idle(self) -> bool:
        """Whether the next bytes can be handled at once."""
        return self._work is None and not self._paused

    def data_received(self, data: bytes | memoryview) -> None:
        """Handles bytes. The memory behind a memoryview is reused after this call."""
        self.fresh = False
        if self._work is None and data and not (self._ahead or self._to_drop or self._aiohttp_only or self._paused):
            self._take(data)
        elif self._aiohttp_only or not data:  # empty: aiohttp calls itself
            super().data_received(bytes(data))
        elif self.body is not None:
            self._read_body(data)
        elif self._to_drop:
            n = min(len(data), self._to_drop)
            self._to_drop -= n
            if n < len(data):
                self.data_received(data[n:])
        elif not self.idle:  # the next request waits until this one's answer is sent
            self._ahead += bytes(data)
            if len(self._ahead) > AHEAD_BYTES and not self._reading_paused and self.transport is not None:
                self._reading_paused = True
                self.transport.pause_reading()
        else:
            self._take(self._ahead + bytes(data) if self._ahead else data)

    def _take(self, data: bytes | memoryview) -> None:
        """Handles bytes at the beginning of a request."""
        self._ahead = b""
        if self.closing or self._force_close or self._close:
            return
        # After a request of its own, aiohttp waits for the next one; its answer is written by then.
        idle = self._request_count == 0 or (self._waiter is not None and not self._waiter.done())
        start = data if isinstance(data, bytes) else bytes(data[:FAST_HEADER_BYTES])
        raw, head = self._latest
        if not start.startswith(raw) or not idle or self._messages or not self._keepalive:
            raw, head = self._find_head(start, idle)
        work = None if head is None else self._handler.begin(self, head, raw)
        if head is None or work is None:
            self._give(bytes(data))
            return
        if self._timer is not None:
            self._disarm()
        self._work, end = work, len(raw)
        body_end = end + head.length
        if len(data) >= body_end:
            self._ahead = bytes(data[body_end:])
            work.start(memoryview(data)[end:body_end], head.json_length)
            return
        try:
            work.look()
            body = Body(head.length)
        except PaellaError as e:
            self._to_drop = body_end - len(data)
            work.fail(e)
            return
        self.body = body
        if (body_timeout_s := self._limits.body_timeout_s) is not None:
            self._body_timer = self._loop.call_later(body_timeout_s, self._body_is_late)
        self._read_body(memoryview(data)[end:])

    def _find_head(self, start: bytes, idle: bool) -> tuple[bytes, Head | None]:
        """The header at the beginning of these bytes; None: aiohttp handles the request."""
        if not start.startswith(_START) or not idle or self._messages or not self._keepalive:
            return b"", None
        end = start.find(b"\r\n\r\n") + 4
        raw = start[:end] if end >= 4 else b""
        head = self._handler.heads.find(raw) if raw else None
        if head is not None:
            self._latest = raw, head
        return raw, head

    def _give(self, data: bytes) -> None:
        """Gives bytes to aiohttp. After a complete request its parser is empty, and the next request may be
        ours again.
        """
        end = data.find(b"\r\n\r\n")
        head = data[: max(0, end) + 2]
        self._aiohttp_only = (
            end < 0
            or len(header_values(head, b"content-length")) > 1
            or end + 4 + (header_length(head) or 0) != len(data)
            or bool(header_values(head, b"transfer-encoding") or header_values(head, b"upgrade"))
        )
        super().data_received(data)

    def _read_body(self, data: bytes | memoryview) -> None:
        body = self.body
        assert body is not None
        n = min(len(data), body.length - body.at)
        body.add(data[:n])
        self._ahead = bytes(data[n:])
        self.body_received(body, 0)

    def body_received(self, body: Body, nbytes: int) -> None:
        """Notes that `nbytes` were written into the body's memory."""
        body.at += nbytes
        work = self._work
        if work is None or body is not self.body:
            return
        if body.at < body.length:
            if nbytes and self.transport is not None:
                self._handler.reading.note(nbytes, self.transport)
            try:
                work.claim(body.at)
            except PaellaError as e:
                self._forget_body()
                self._to_drop = body.length - body.at
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
        work.release()
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
        if self._ahead or self._reading_paused:
            # Not called directly: a series of requests that fail at once would recurse.
            self._loop.call_soon(self._go_on)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        if self._work is not None or self._paused or self.transport is None:
            return
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        if self._ahead and not self._aiohttp_only:
            self._take(self._ahead)

    # -- closing

    def connection_lost(self, exc: BaseException | None) -> None:
        work, self._work = self._work, None
        self._forget_body()
        if work is not None:
            work.leave()
            work.release()
        self._ahead = b""
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


class Reader(asyncio.BufferedProtocol):
    """Reads for a connection into shared memory; with other protocols the event loop makes a bytes object per read."""

    def __init__(self, connection: FastConnection, reading: Reading) -> None:
        self._connection, self._reading, self._shared = connection, reading, reading.buffer
        self._body: Body | None = None  # the body being read
        self.pause_writing, self.resume_writing = connection.pause_writing, connection.resume_writing  # type: ignore[method-assign]
        self.connection_lost, self.eof_received = connection.connection_lost, connection.eof_received  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> Any:
        body = self._body = self._connection.body
        if body is not None:
            return self._reading.room(body)
        return self._shared if self._connection.idle else self._shared[:AHEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        body, self._body = self._body, None  # else an idle connection would keep its memory
        if body is not None:
            self._connection.body_received(body, nbytes)
            return
        data = self._shared[:nbytes]
        self._connection.data_received(bytes(data) if nbytes < COPIED_BYTES else data)
