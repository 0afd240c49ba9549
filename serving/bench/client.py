"""A small, fast HTTP/1.1 client for load generation: keep-alive, and answers with a Content-Length.

aiohttp's client takes 95 µs of CPU time for a request, this one 17 µs, and the server's fast path 60 µs (32 clients,
256 bytes of tensors). With aiohttp's, the load generator and not the server would limit the throughput.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from paellapy.instrument.errors import PaellaError
from paellapy.serving.fast_path.headers import header_length, header_values

READ_BYTES = 1 << 20  # per read
LONGEST_HEAD = 1 << 16
LONGEST_ANSWER = 1 << 30


class BenchError(PaellaError):
    """The endpoint cannot be reached or does not speak the protocol, or the load is invalid.

    `field` is the wrong part of the answer or the load, `given` its value, and `limit` what is allowed.
    """

    field: str = ""
    limit: Any = None
    given: Any = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @staticmethod
    def of(url: str, ca: str | None = None) -> Endpoint:
        """The endpoint of a URL. `ca`: a PEM file of certificates to trust besides the machine's own.

        >>> Endpoint.of("127.0.0.1:8000/v2").path
        ''
        """
        wrong = BenchError(f"{url!r} is not a URL: give one such as http://127.0.0.1:8000", field="url", given=url)
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:  # half of an IPv6 address, or a port that cannot be
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        if ca is not None:
            if tls is None:
                said = f"{url!r} is not https, so it has no certificate to check: leave out --ca"
                raise BenchError(said, field="ca", limit="https", given=url)
            try:
                tls.load_verify_locations(ca)
            except (OSError, ssl.SSLError) as e:
                raise BenchError(f"no certificates can be read from {ca}: {e}", field="ca", given=ca) from None
        path = parts.path.rstrip("/").removesuffix("/v2")
        return Endpoint(parts.hostname, port or (443 if tls else 80), path, tls)

    def request(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode() + body


class Reply(NamedTuple):
    """Status and body of an answer, and the Retry-After time of a refusal."""

    status: int
    body: bytes
    retry_after_s: float = 0.0


class Connection(asyncio.BufferedProtocol):
    """One request at a time: `await ask(bytes)` returns status and body.

    All connections share one read buffer, and only the needed part of an answer is copied: on a machine that also runs
    the server, the client's time is taken from the server's.
    """

    def __init__(self, shared: memoryview) -> None:
        self._shared = shared
        self._head = b""  # the header as far as it has arrived
        self._status, self._left = 0, 0  # status of the answer whose body is being read, and its remaining bytes
        self._kept, self._most = bytearray(), 0
        self._answer: asyncio.Future[Reply] | None = None
        self._transport: asyncio.Transport | None = None
        self._retry_after_s = 0.0
        self._last = False  # the server closes the connection after this answer
        self.usable = True

    def ask(self, request: bytes, most: int) -> asyncio.Future[Reply]:
        """Sends a request; at most `most` bytes of the body are kept."""
        assert self._transport is not None
        self._answer, self._most = asyncio.get_running_loop().create_future(), most
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class only has the methods of one

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None or self._answer.done():  # an answer without a request
            self.close()
            return
        at = 0 if self._left else self._read_head(nbytes)
        if at < 0:
            return
        body = nbytes - at
        if body > self._left:
            self._answer.set_exception(BenchError("an answer is longer than its Content-Length says"))
            self.close()
            return
        wanted = min(body, self._most - len(self._kept))
        if wanted > 0:
            self._kept += self._shared[at : at + wanted]
        self._left -= body
        if self._left == 0:
            kept, self._kept = bytes(self._kept), bytearray()
            if self._last:
                self.close()
            self._answer.set_result(Reply(self._status, kept, self._retry_after_s))

    def _read_head(self, nbytes: int) -> int:
        """Offset of the body in the received bytes; -1: the header is incomplete."""
        assert self._answer is not None
        before = len(self._head)
        head = self._head + bytes(self._shared[: min(nbytes, LONGEST_HEAD)])
        end = head.find(b"\r\n\r\n")
        if end < 0:
            self._head = head
            if len(head) >= LONGEST_HEAD:
                self._answer.set_exception(BenchError("the headers of an answer do not end"))
                self.close()
            return -1
        self._head, head = b"", head[: end + 2]
        status, length = head[9:12], header_length(head)
        if length is None or not status.isdigit() or not head.startswith(b"HTTP/1."):
            said = "an answer is not HTTP/1.1, or has no Content-Length that is a number, which this client needs"
            self._answer.set_exception(BenchError(said))
            self.close()
            return -1
        self._status, self._left = int(status), length
        self._last = b"close" in header_values(head, b"connection")
        self._retry_after_s = 0.0 if self._status == 200 else float(header_length(head, b"retry-after") or 0)
        return end + 4 - before


class Pool:
    """Connections to one endpoint, opened on demand up to a limit."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._endpoint, self._free = endpoint, deque[Connection]()
        self._shared = memoryview(bytearray(READ_BYTES))
        self._room = asyncio.Semaphore(limit)

    async def ask(self, request: bytes, most: int = LONGEST_ANSWER) -> Reply:
        """Sends a request on a free connection; at most `most` bytes of the body are kept."""
        async with self._room:
            connection = await self._take()
            try:
                return await connection.ask(request, most)
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
        _, made = await loop.create_connection(lambda: Connection(self._shared), e.host, e.port, ssl=e.tls)
        return made

    def close(self) -> None:
        while self._free:
            self._free.pop().close()
