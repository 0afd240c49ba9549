"""A small, fast HTTP/1.1 client: connections to one server, for routers and the load generator.

aiohttp's client takes 95 µs of CPU time for a request, this one 17 µs, and the server's fast path 60 µs (32 clients,
256 bytes of tensors). With aiohttp's, the router or the load generator, and not the server, would limit the throughput.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from typing import Any, Protocol, cast

from paellapy.instrument.errors import PaellaError

READ_BYTES = 1 << 20  # per read
LONGEST_HEAD = 1 << 16
LONGEST_CHUNK = 1 << 20
IDLE_S = 20.0  # shorter than a server's `keepalive_s`, so that nothing is sent into a closing connection
JOINED_BYTES = 1 << 16  # shorter bodies are sent together with their header
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.I)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.I)


class AnswerError(PaellaError):
    """An answer that is not HTTP/1.1, or has no known length."""


class Exchange(Protocol):
    """A request, and what happens to it. `most` bytes of its answer's body are kept."""

    raw: bytes
    body: bytes
    most: int
    over: bool  # nobody waits for the answer any more
    link: Link | None

    def answered(self, head: bytes, body: list[bytes]) -> None: ...

    def begun(self, head: bytes, stream: asyncio.StreamReader) -> None:
        """The answer comes in chunks. `answered`, without a body, or `lost` follows. May raise AnswerError."""

    def lost(self, was_sent: bool, why: Exception) -> None:
        """There will be no answer; `was_sent`: the request may have run nevertheless."""


def whole_chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """The content of the whole chunks at the beginning, the bytes behind them, and whether the last chunk is there.

    >>> whole_chunks(b"3\\r\\nabc\\r\\n2\\r\\nd"), whole_chunks(b"0\\r\\n\\r\\n")
    ((b'abc', b'2\\r\\nd', False), (b'', b'', True))
    """
    found: list[bytes] = []
    while (end := data.find(b"\r\n") + 2) > 1:
        try:
            size = int(data[: end - 2].partition(b";")[0], 16)
        except ValueError:
            raise AnswerError("an answer's chunks have no sizes") from None
        if len(data) < end + size + 2:
            break
        found.append(data[end : end + size])
        data = data[end + size + 2 :]
        if not size:
            return b"".join(found), data, True
    if len(data) > LONGEST_CHUNK:
        raise AnswerError(f"a chunk of an answer is longer than {LONGEST_CHUNK:,} bytes")
    return b"".join(found), data, False


class Link(asyncio.BufferedProtocol):
    """One connection. It carries one request at a time, and holds its answer until it is complete, unless that comes in
    chunks; then the connection ends with it.
    """

    __slots__ = ("_head", "_held", "_left", "_pool", "_room", "_stream", "_why", "_work", "transport", "used_at")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._work: Exchange | None = None
        self._stream: asyncio.StreamReader | None = None
        self._why: Exception | None = None
        self.used_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._head, self._held = b"", list[bytes]()
        self._left, self._room = -1, 0  # bytes of the body to come, and to keep; -1: its header is not complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class only has the methods of one

    def send(self, work: Exchange) -> None:
        assert self.transport is not None
        self._work, work.link = work, self
        if len(work.body) < JOINED_BYTES:
            self.transport.write(work.raw + work.body)
        else:
            self.transport.write(work.raw)
            self.transport.write(work.body)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.shared

    def buffer_updated(self, nbytes: int) -> None:
        work, data = self._work, self._pool.shared[:nbytes]
        if work is None:  # a server sends nothing unasked, so it is about to close
            self.abort()
            return
        try:
            if self._stream is not None:
                self._pass(work, self._stream, bytes(data))
            elif self._left >= 0:
                self._take(work, data)
            else:
                self._read_head(work, self._head + data)
        except AnswerError as e:
            self._why = e
            self.abort()

    def _read_head(self, work: Exchange, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._head = data
            if len(data) >= LONGEST_HEAD:
                raise AnswerError("the headers of an answer do not end")
            return
        self._head, data = data[:end], data[end:]
        length = _LENGTH.search(self._head)
        is_http = self._head.startswith(b"HTTP/1.") and self._head[9:12].isdigit()
        if not is_http or (length is None and not _CHUNKED.search(self._head)):
            raise AnswerError("an answer is not HTTP/1.1, or has no Content-Length that is a number")
        if length is not None:
            self._left, self._room = int(length[1]), work.most
            self._take(work, data)
            return
        stream = asyncio.StreamReader()
        work.begun(self._head, stream)
        self._stream = stream
        if self.transport is not None:
            stream.set_transport(self.transport)  # whoever reads slowly holds the server back
        self._pass(work, stream, data)

    def _take(self, work: Exchange, data: bytes | memoryview) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise AnswerError("an answer is longer than its Content-Length says")
        if self._room > 0 and data:
            self._held.append(bytes(data[: self._room]))
            self._room -= len(data)
        if self._left == 0:
            head, body, self._work = self._head, self._held, None
            self._begin()
            self._pool.give_back(self, closes=_CLOSES.search(head) is not None)
            work.answered(head, body)

    def _pass(self, work: Exchange, stream: asyncio.StreamReader, data: bytes) -> None:
        self._held = self._held or [b""]
        content, self._held[0], ended = whole_chunks(self._held[0] + data)
        if content:
            stream.feed_data(content)
        if ended:
            stream.feed_eof()
            self.drop()
            work.answered(self._head, [])

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def drop(self) -> None:
        """Ends the connection and forgets its request."""
        self._work = None
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.forget(self)
        work, self._work = self._work, None
        if work is not None:
            why = self._why or exc or ConnectionResetError("the server closed the connection")
            if self._stream is not None:
                self._stream.set_exception(ConnectionResetError(str(why)))
            work.lost(True, why)


class Pool:
    """Connections to one server, opened on demand: one for each request in flight."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, connect_s: float | None = None) -> None:
        self._where: dict[str, Any] = {"host": host, "port": port, "ssl": tls}
        self._connect_s = connect_s
        self.shared = memoryview(bytearray(READ_BYTES))  # memory that all its connections read into
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, work: Exchange) -> None:
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

    async def _open(self, work: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, link = await loop.create_connection(lambda: Link(self), **self._where)
        except OSError as e:  # a TimeoutError too
            work.lost(False, e)
            return
        except asyncio.CancelledError:
            work.lost(False, ConnectionAbortedError("the connection is closed"))
            raise
        self._links.add(link)
        if work.over:
            self.give_back(link, closes=False)
            work.answered(b"", [])
        else:
            link.send(work)

    def give_back(self, link: Link, closes: bool) -> None:
        if closes and link.transport is not None:
            link.transport.close()
            return
        link.used_at = time.monotonic()
        self._idle.append(link)

    def forget(self, link: Link) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def cut(self) -> None:
        """Ends all connections; their requests are lost."""
        for link in list(self._links):
            link.abort()

    def close(self) -> None:
        for task in list(self._opening):
            task.cancel()
        self.cut()
