"""An engine as a router sees it: its latest outlook, corrected by the requests sent and answers received since."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from paellapy.instrument.errors import ArgumentError
from paellapy.serving.load_report import Outlook
from paellapy.serving.logs import log
from paellapy.serving.registry import READY

LEARN = 0.05  # weight of the newest answer in an engine's learned speed
FORGET = 0.005  # part forgotten with every line while no request is there, so that an avoided engine is tried again
LEAST_MS = 1e-3  # predictions are GPU time; with shorter ones only the host's time would count


@dataclass(frozen=True, slots=True)
class Member:
    """Name and address of an engine."""

    name: str
    url: str

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it uses TLS."""
        try:
            parts = urlsplit(self.url)
            tls = parts.scheme == "https"
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError
            return parts.hostname, parts.port or (443 if tls else 80), tls
        except ValueError:
            raise ArgumentError(f"engine {self.name!r} has the address {self.url!r}: give http://HOST:PORT") from None


class Learned:
    """How long one engine's answers for one model take, relative to its predictions."""

    __slots__ = ("actual_ms", "predicted_ms")

    def __init__(self) -> None:
        self.actual_ms = self.predicted_ms = 1.0

    @property
    def factor(self) -> float:
        """Actual time / predicted time. Long answers weigh more than short ones, which are mostly the host's time."""
        return self.actual_ms / self.predicted_ms

    def note(self, predicted_ms: float, actual_ms: float) -> None:
        self.actual_ms += LEARN * (actual_ms - self.actual_ms)
        self.predicted_ms += LEARN * (max(predicted_ms, LEAST_MS) - self.predicted_ms)

    def forget(self) -> None:
        self.actual_ms += FORGET * (self.predicted_ms - self.actual_ms)


class Connections(Protocol):
    """A router's connections to an engine."""

    def send(self, work: Any) -> None: ...

    def cut(self) -> None:
        """Drops the connections to an engine that has fallen silent; their requests are lost."""

    async def close(self) -> None: ...


class EngineView:
    """One engine. `up`: it is heard, takes requests, and its last connection did not break."""

    def __init__(self, member: Member) -> None:
        self.member, self.name = member, member.name
        self.outlook: Outlook | None = None
        self.up = False
        self.quiet_ticks = 0
        self.silent = False  # given up, until it is heard again
        self.added_ms = 0.0  # work sent since its latest line
        self.outstanding = 0  # this router's requests in flight there
        self.sent = 0
        self.learned: dict[str, Learned] = {}
        self.pool: Connections | None = None

    def hear(self, outlook: Outlook) -> bool:
        """Takes a new line; returns whether the models it offers have changed."""
        before = self.offers() if self.up else None
        if self.outlook is None or self.outlook.since != outlook.since:
            self.learned.clear()
        self.outlook, self.added_ms, self.quiet_ticks, self.silent = outlook, 0.0, 0, False
        self.up = not outlook.draining
        if not self.outstanding:
            for each in self.learned.values():
                each.forget()
        return (self.offers() if self.up else None) != before

    def offers(self) -> frozenset[str]:
        """Models that are loaded."""
        models = {} if self.outlook is None else self.outlook.models
        return frozenset(name for name, each in models.items() if each.state == READY)

    def wants(self) -> frozenset[str]:
        """Models that should be loaded, by its latest line."""
        models = {} if self.outlook is None else self.outlook.models
        return frozenset(name for name, each in models.items() if each.wanted or each.state == READY)

    @property
    def knows_models(self) -> bool:
        """Whether it has said which models it should have; a server that starts may not know yet."""
        return self.outlook is not None and (self.outlook.ready or bool(self.outlook.models))

    def predicted_ms(self, model: str) -> float | None:
        """Time that a request sent now would take, by the engine's outlook; None: it does not have the model."""
        if not self.up or self.outlook is None:
            return None
        found = self.outlook.models.get(model)
        return None if found is None or found.state != READY else found.predicted_ms + self.added_ms

    def estimate_ms(self, model: str) -> float | None:
        """The same, corrected by the times of its answers."""
        predicted_ms = self.predicted_ms(model)
        if predicted_ms is None:
            return None
        learned = self.learned.get(model)
        return predicted_ms if learned is None else max(predicted_ms, LEAST_MS) * learned.factor

    def note_sent(self, model: str) -> None:
        self.outstanding += 1
        self.sent += 1
        if self.outlook is not None and (found := self.outlook.models.get(model)) is not None:
            self.added_ms += found.step_ms

    def note_answer(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        learned = self.learned.get(model)
        if learned is None:
            learned = self.learned[model] = Learned()
            learned.actual_ms, learned.predicted_ms = actual_ms, max(predicted_ms, LEAST_MS)
        learned.note(predicted_ms, actual_ms)


# Receives an engine's outlook over a connection that stays open, and is opened again whenever it ends.


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
