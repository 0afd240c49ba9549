"""Buffers of the fast path: from the socket to the decoder, and from slots to the socket.

Every copy of a large tensor costs time. So the socket's bytes are read into a buffer that all connections share, or
directly into the request's body, and an answer is sent directly from its slot.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol

import numpy as np

READ_BYTES = 1 << 20  # per read; the kernel usually holds less for one connection
# Initial size of a body; a longer one grows as it arrives, so that a large Content-Length alone takes no memory
FIRST_BYTES = 1 << 20
AHEAD_BYTES = 1 << 16  # limit of the bytes kept behind a request that is still being answered
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
