"""A small HTTP/1.1 client for load generation: keep-alive, answers that say their length, little time of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from instrument.errors import PaellaError


class BenchError(PaellaError):
    """The endpoint cannot be reached, or does not speak the protocol."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @staticmethod
    def of(url: str) -> Endpoint:
        """
        >>> Endpoint.of("127.0.0.1:8000/v2").path
        ''
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url!r} is no address: give one such as http://127.0.0.1:8000")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v2")
        return Endpoint(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    def request(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode() + body


class Connection(asyncio.Protocol):
    """One request at a time: `await ask(bytes)` gives status and body."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self.usable = True

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if self.usable:
            self._transport.write(request)
        else:
            self._answer.set_exception(ConnectionResetError("the server closed the connection"))
        return self._answer

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None or self._answer.done():
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length:")
        if at < 0:
            self._answer.set_exception(BenchError("an answer without Content-Length cannot be measured"))
            self.close()
            return
        length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        if b"\r\nconnection: close" in head:
            self.close()
        self._answer.set_result((int(head[9:12]), body))


class Pool:
    """Connections to one endpoint, opened as they are needed, up to a limit."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._endpoint, self._free = endpoint, deque[Connection]()
        self._room = asyncio.Semaphore(limit)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        async with self._room:
            connection = await self._take()
            try:
                return await connection.ask(request)
            except BaseException:
                connection.close()
                raise
            finally:
                if connection.usable:
                    self._free.append(connection)

    async def _take(self) -> Connection:
        while self._free:
            found = self._free.pop()
            if found.usable:
                return found
        loop, e = asyncio.get_running_loop(), self._endpoint
        _, made = await loop.create_connection(Connection, e.host, e.port, ssl=e.tls)
        return made

    def close(self) -> None:
        while self._free:
            self._free.pop().close()
