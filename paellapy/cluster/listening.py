"""Receives an engine's outlook over a connection that stays open, and is opened again whenever it ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import msgspec

from paellapy.cluster.view import EngineView
from paellapy.serving.logs import log
from paellapy.serving.outlook import Outlook

AGAIN_S = 0.1  # pause after a stream has ended or could not be opened
CONNECT_S = 2.0
LONGEST_LINE = 1 << 20

_decode = msgspec.json.Decoder(Outlook).decode


class _Stream(asyncio.Protocol):
    """Reads lines; of several that arrive at once only the last is used."""

    def __init__(self, hear: Callable[[Outlook], None]) -> None:
        self._hear, self._held = hear, b""
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._held += data
        if not self._begun:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            if not self._held.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")):
                self._end(self._held[:end].split(b"\r\n")[0].decode("latin-1"))
                return
            self._begun, self._held = True, self._held[end + 4 :]
        *lines, self._held = self._held.split(b"\n")
        if len(self._held) > LONGEST_LINE:
            self._end("it sent a line without an end")
        if lines:
            try:
                self._hear(_decode(lines[-1]))
            except msgspec.DecodeError as e:
                self._end(f"it is not an engine of this version of paellapy: {e}")

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection ended")


class Listener:
    """Listens to one engine. `heard` is called with every line, `left` when a stream ends."""

    def __init__(
        self,
        view: EngineView,
        heard: Callable[[EngineView, Outlook], None],
        left: Callable[[EngineView], None],
        every_ms: float,
        key: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._view, self._heard, self._left, self._context = view, heard, left, context
        host = view.member.url.partition("://")[2].rstrip("/")
        lines = [f"GET /v2/outlook?every_ms={every_ms:g} HTTP/1.0", f"Host: {host}", "Connection: close"]
        if key is not None:
            lines.append(f"X-API-Key: {key}")
        self._request = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
        self.why = "not reached yet"

    async def run(self) -> None:
        """Runs until it is cancelled."""
        host, port, tls = self._view.member.address
        loop = asyncio.get_running_loop()
        while True:
            said = self.why
            try:
                async with asyncio.timeout(CONNECT_S):
                    transport, stream = await loop.create_connection(
                        lambda: _Stream(lambda line: self._heard(self._view, line)),
                        host, port, ssl=self._context if tls else None,
                    )  # fmt: skip
            except ConnectionRefusedError:
                unheard = self._view.outlook is None
                self.why = "starting: it does not listen yet" if unheard else "ended: nothing listens at its address"
            except (OSError, TimeoutError) as e:
                self.why = f"it cannot be reached: {e or 'no answer'}"
            else:
                transport.write(self._request)
                try:
                    self.why = await stream.ended
                finally:
                    transport.abort()
            self._left(self._view)
            if self.why != said:
                log.info("engine away", extra={"fields": {"engine": self._view.name, "why": self.why}})
            await asyncio.sleep(AGAIN_S)
