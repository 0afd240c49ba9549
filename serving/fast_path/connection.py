"""Connections with a fast path: from their bytes into a slot, and from the slot to the connection.

A usual `POST /v2/models/…/infer`, with a Content-Length and without codings, needs no router, middleware, task or
request object. It is read here and answered where completions are read. All other input goes to aiohttp unchanged:
other addresses, other framings, anything unusual, and so all invalid HTTP. Meaning, checks, errors and counters of a
request are the same on both paths.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.serving.byte_limits import AHEAD_BYTES, BESIDE_BYTES, FAST_HEADER_BYTES, FAST_HEADERS, FIRST_BYTES
from paellapy.serving.errors import STOPPING, LateBodyError
from paellapy.serving.inference import HEADER_LENGTH, Pieces
from paellapy.serving.listening import Connection

# Buffers of the fast path: from the socket to the decoder, and from slots to the socket.
#
# Every copy of a large tensor costs time. So the socket's bytes are read into a buffer that all connections share, or
# directly into the request's body, and an answer is sent directly from its slot.


READ_BYTES = 1 << 20  # per read; the kernel usually holds less for one connection
COPIED_BYTES = 1 << 14  # shorter pieces are copied, which is faster than sending them separately


def read_buffer() -> memoryview:
    return np.empty(READ_BYTES, np.uint8).data


class Body:
    """The body of one request while it arrives."""

    __slots__ = ("_memory", "at", "length")

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0
        self._memory = np.empty(min(length, FIRST_BYTES), np.uint8)

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return len(self._memory)

    @property
    def next_size(self) -> int:
        """Bytes of memory once this much is full."""
        return min(self.length, 2 * len(self._memory))

    def room(self) -> memoryview:
        """Memory for the next bytes; the caller advances `at` by the number of bytes received."""
        if self.at == len(self._memory):
            larger = np.empty(self.next_size, np.uint8)
            larger[: self.at] = self._memory
            self._memory = larger
        return self._memory.data[self.at :]

    def add(self, data: bytes | memoryview) -> None:
        at = 0
        while at < len(data):
            room = self.room()
            n = min(len(room), len(data) - at)
            room[:n] = memoryview(data)[at : at + n]
            at += n
            self.at += n

    def all(self) -> memoryview:
        return self._memory.data


class Reading(Protocol):
    """The part of a connection that its reader uses."""

    @property
    def body(self) -> Body | None: ...
    @property
    def idle(self) -> bool: ...
    def data_received(self, data: Any) -> None: ...
    def body_received(self, body: Body, nbytes: int) -> None: ...
    def eof_received(self) -> Any: ...
    def connection_lost(self, exc: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Reader(asyncio.BufferedProtocol):
    """Reads for a connection into `shared` memory; with other protocols the event loop makes a bytes object
    per read.
    """

    def __init__(self, connection: Reading, shared: memoryview) -> None:
        self._connection, self._shared = connection, shared
        self._body: Body | None = None  # the body being read
        self.pause_writing, self.resume_writing = connection.pause_writing, connection.resume_writing  # type: ignore[method-assign]
        self.connection_lost, self.eof_received = connection.connection_lost, connection.eof_received  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> Any:
        body = self._body = self._connection.body
        if body is not None:
            return body.room()
        return self._shared if self._connection.idle else self._shared[:AHEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._connection.body_received(self._body, nbytes)
            return
        data = self._shared[:nbytes]
        self._connection.data_received(bytes(data) if nbytes < COPIED_BYTES else data)


def descriptor(transport: asyncio.Transport) -> int:
    """File descriptor of the socket, if bytes can be written to it directly; -1: unknown, or TLS."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


def write(transport: asyncio.Transport, pieces: list[bytes | memoryview]) -> None:
    """Writes an answer to its connection. The caller may reuse the pieces' memory when this returns."""
    size = sum(map(len, pieces))
    sent = 0
    if size >= COPIED_BYTES and not transport.is_closing() and not transport.get_write_buffer_size():
        fd = descriptor(transport)
        if fd >= 0:
            try:
                sent = os.writev(fd, pieces)
            except OSError:  # no room; or the client has left, which the transport will notice
                sent = 0
    if sent < size:
        transport.write(b"".join(_after(pieces, sent) if sent else pieces))


def _after(pieces: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    left: list[bytes | memoryview] = []
    for piece in pieces:
        if sent < len(piece):
            left.append(memoryview(piece)[sent:] if sent else piece)
        sent = max(0, sent - len(piece))
    return left


# The header of an inference on the fast path: parsed once, since clients repeat it.


_LINE = re.compile(rb"POST /v2/models/([A-Za-z0-9_.\-]+)(?:/versions/([A-Za-z0-9_.\-]+))?/infer HTTP/1\.1\r\n")
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[ \t]*[\t\x20-\x7e\x80-\xff]*\r\n)+")
REMEMBERED_HEADS = 512

# Headers that the fast path does not support.
_UNUSUAL = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"te", b"trailer", b"traceparent", b"tracestate")
)
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()
_SINGLE = frozenset((b"content-length", _HEADER_LENGTH, b"x-request-id", b"host", b"connection", b"accept-encoding"))


@dataclass(frozen=True, slots=True)
class Head:
    """The parsed header of a request."""

    model: str
    version: str | None
    length: int
    json_length: str | None
    client: str
    id: str | None
    accepts: str | None


class Heads:
    """Known headers and their parsed form."""

    def __init__(self, client_header: str, max_body_bytes: int) -> None:
        self._client_header, self._max_body_bytes = client_header.lower().encode(), max_body_bytes
        self._known: dict[bytes, Head | None] = {}

    def find(self, data: bytes) -> Head | None:
        """Parses the bytes up to the empty line; None: aiohttp reads them. Clients repeat headers, so results are
        cached.
        """
        try:
            return self._known[data]
        except KeyError:
            pass
        if len(self._known) >= REMEMBERED_HEADS:
            self._known.clear()
        found = self._known[data] = self._parse(data)
        return found

    def _parse(self, data: bytes) -> Head | None:
        line = _LINE.match(data)
        if line is None or len(data) > FAST_HEADER_BYTES or not _HEADERS.fullmatch(data, line.end(), len(data) - 2):
            return None
        length = json_length = client = number = accepts = None
        lines = data[line.end() : -4].split(b"\r\n")
        if len(lines) > FAST_HEADERS:
            return None
        seen: set[bytes] = set()
        for each in lines:
            name, _, value = each.partition(b":")
            name, value = name.lower(), value.strip(b" \t")
            if name in _UNUSUAL or (name in seen and name in _SINGLE):
                return None
            if name == b"connection" and value.lower() != b"keep-alive":
                return None
            seen.add(name)
            if name == b"content-length":
                length = value
            elif name == _HEADER_LENGTH:
                json_length = value.decode("latin-1")
            elif name == b"x-request-id":
                number = value.decode("utf-8", "surrogateescape")
            elif name == b"accept-encoding":
                accepts = value.decode("latin-1")
            if name == self._client_header:
                client = value.decode("utf-8", "surrogateescape")
        if b"host" not in seen:  # aiohttp reports the error
            return None
        if length is None or not length.isdigit() or len(length) > 15 or int(length) > self._max_body_bytes:
            return None
        version = None if line[2] is None else line[2].decode()
        return Head(line[1].decode(), version, int(length), json_length, client or "", number, accepts)


# The interfaces between a connection of the fast path and its requests: a server answers them, a router
# forwards them.


class Work(Protocol):
    """One request, from its header to its answer."""

    head: Head

    def look(self) -> Any:
        """Called before the body arrives; PaellaError if the request is refused."""

    def claim(self, nbytes: int) -> None:
        """Called before the body takes that many bytes of memory; PaellaError if there is no room."""

    def start(self, body: memoryview, json_length: str | None) -> None:
        """Called with the complete body. The connection may reuse the body's memory when this returns."""

    def fail(self, error: Exception) -> None: ...

    def leave(self) -> None:
        """Called when the client has left."""

    def settle(self) -> None:
        """Called when the request is answered or cancelled: the connection may go on to the next."""


class Client(Protocol):
    """The connection that gets the answer."""

    @property
    def closing(self) -> bool:
        """Whether its next answer is its last."""

    def send(self, work: Any, answer: Pieces, close: bool) -> None:
        """Sends an answer; called in the loop's thread. The caller may reuse the pieces' memory when this returns."""


class Way(Protocol):
    """State that all connections of a server share."""

    heads: Heads
    buffer: memoryview
    body_timeout_s: float | None

    def is_doubtful(self, head: Head, raw: bytes) -> bool:
        """Whether a long body exceeds the limit, or may not be read yet. aiohttp then handles the request: it can ask
        others first, and refuse the body without losing the answer.
        """

    def begin(self, client: Client, head: Head, raw: bytes) -> Work:
        """Makes a request from its header; `raw` are the header's bytes."""


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
        start = data if isinstance(data, bytes) else bytes(data[:FAST_HEADER_BYTES])
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
