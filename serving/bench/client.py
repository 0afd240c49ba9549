"""Requests of the load generator: an endpoint, and connections to it."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from paellapy.instrument.errors import PaellaError
from paellapy.serving.fast_path import client
from paellapy.serving.fast_path.client import AnswerError, Link
from paellapy.serving.fast_path.headers import header_length

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


class _Ask:
    """A request of `Pool`."""

    __slots__ = ("body", "link", "most", "over", "raw", "reply")

    def __init__(self, raw: bytes, most: int) -> None:
        self.raw, self.body, self.most = raw, b"", most
        self.over, self.link = False, cast("Link | None", None)
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answered(self, head: bytes, body: list[bytes]) -> None:
        if not self.reply.done():
            again_s = 0.0 if head[9:12] == b"200" else float(header_length(head, b"retry-after") or 0)
            self.reply.set_result(Reply(int(head[9:12]), b"".join(body), again_s))

    def begun(self, head: bytes, stream: asyncio.StreamReader) -> None:
        raise AnswerError("an answer has no Content-Length, which the load generator needs")

    def lost(self, was_sent: bool, why: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(BenchError(str(why)) if isinstance(why, AnswerError) else why)


class Pool:
    """Connections to one endpoint, opened on demand up to a limit."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._pool = client.Pool(endpoint.host, endpoint.port, endpoint.tls)
        self._room = asyncio.Semaphore(limit)

    async def ask(self, request: bytes, most: int = LONGEST_ANSWER) -> Reply:
        """Sends a request on a free connection; at most `most` bytes of the body are kept."""
        async with self._room:
            work = _Ask(request, most)
            self._pool.send(work)
            try:
                return await work.reply
            except BaseException:
                work.over = True
                if work.link is not None:
                    work.link.drop()
                raise

    def close(self) -> None:
        self._pool.close()
