"""An engine as a router sees it: its latest outlook, and the connections to it.

The outlook is corrected by the requests sent and the answers received since.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientResponse, ClientSession, ClientTimeout

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.admission import PREDICTED_WEIGHT, SLOW
from paellapy.serving.load_report import Outlook
from paellapy.serving.logs import log
from paellapy.serving.registry import READY

LEARN = 0.05  # weight of the newest answer in an engine's learned speed
FORGET = 0.005  # part forgotten with every line while no request is there, so that an avoided engine is tried again
LEAST_MS = 1e-3  # predictions are GPU time; with shorter ones only the host's time would count
CONNECT_S = 2.0
AGAIN_S = 0.1  # pause after a stream of outlooks has ended or could not be opened
LONGEST_LINE = 1 << 20
IDLE_S = 20.0  # shorter than a server's `keepalive_s`, so that nothing is sent into a closing connection
_JOINED = 1 << 16  # shorter bodies are sent together with their header
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)

_decode = msgspec.json.Decoder(Outlook).decode


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
            said = f"engine {self.name!r} has the address {self.url!r}: give http://HOST:PORT"
            raise ArgumentError(said, field="url", given=self.url) from None


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


class EngineView:
    """One engine. `up`: it is heard, takes requests, and its last connection did not break."""

    def __init__(self, member: Member) -> None:
        self.member, self.name = member, member.name
        self.pool = Pool(self)
        self.why = "not reached yet"  # why it is away
        self.outlook: Outlook | None = None
        self.up = False
        self.quiet_ticks = 0
        self.silent = False  # given up, until it is heard again
        self.added_ms = 0.0  # work sent since its latest line
        self.added = 0  # requests sent since then
        self.outstanding = 0  # this router's requests in flight there
        self.sent = 0
        self.learned: dict[str, Learned] = {}

    def hear(self, outlook: Outlook) -> bool:
        """Takes a new line; returns whether the models it offers have changed."""
        before = self.offers() if self.up else None
        if self.outlook is None or self.outlook.since != outlook.since:
            self.learned.clear()
        self.outlook, self.added_ms, self.added = outlook, 0.0, 0
        self.quiet_ticks, self.silent = 0, False
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

    def cost_ms(self, model: str) -> float | None:
        """What a router minimizes: the work there, as if all requests took as long as this one, and a part of the
        estimate. None: it does not have the model.
        """
        estimate_ms = self.estimate_ms(model)
        if estimate_ms is None or self.outlook is None:
            return None
        slow = max(1.0, self.learned[model].factor / SLOW) if model in self.learned else 1.0
        work_ms = (self.outlook.live + self.added + 1) * self.outlook.models[model].step_ms * slow
        return work_ms + PREDICTED_WEIGHT * estimate_ms

    def note_sent(self, model: str) -> None:
        self.outstanding += 1
        self.added += 1
        self.sent += 1
        if self.outlook is not None and (found := self.outlook.models.get(model)) is not None:
            self.added_ms += found.step_ms

    def note_answer(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        learned = self.learned.get(model)
        if learned is None:
            learned = self.learned[model] = Learned()
            learned.actual_ms, learned.predicted_ms = actual_ms, max(predicted_ms, LEAST_MS)
        learned.note(predicted_ms, actual_ms)


# -- its outlooks


async def listen(
    view: EngineView, heard: Callable[[EngineView, Outlook], None], every_ms: float, key: str | None = None
) -> None:
    """Reads an engine's outlooks over one connection, and opens it again whenever it ends. Runs until it is cancelled.

    `heard` is called with every outlook. Between connections the engine gets no requests.
    """
    url = f"{view.member.url.rstrip('/')}/v2/outlook?every_ms={every_ms:g}"
    headers = {} if key is None else {"X-API-Key": key}
    async with ClientSession(headers=headers, timeout=ClientTimeout(sock_connect=CONNECT_S)) as session:
        while True:
            before = view.why
            try:
                async with session.get(url, allow_redirects=False) as answer:
                    view.why = await _read_outlooks(view, heard, answer)
            except (ClientError, OSError, TimeoutError) as e:
                view.why = _why_away(view, e)
            view.up = False  # it may still answer earlier requests
            if view.why != before:
                log.info("engine away", extra={"fields": {"engine": view.name, "why": view.why}})
            await asyncio.sleep(AGAIN_S)


async def _read_outlooks(
    view: EngineView, heard: Callable[[EngineView, Outlook], None], answer: ClientResponse
) -> str:
    """Returns why the stream has ended. Of several lines that arrive at once only the last is used."""
    if answer.status != 200:
        return f"it answers {answer.status} {answer.reason}"
    held = b""
    async for data in answer.content.iter_any():
        *lines, held = (held + data).split(b"\n")
        if len(held) > LONGEST_LINE:
            return "it sent a line without an end"
        if lines:
            try:
                heard(view, _decode(lines[-1]))
            except msgspec.DecodeError as e:
                return f"it is not an engine of this version of paellapy: {e}"
    return "the connection ended"


def _why_away(view: EngineView, error: Exception) -> str:
    if isinstance(error, ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "starting: it does not listen yet" if view.outlook is None else "ended: nothing listens at its address"
    return f"it cannot be reached: {str(error) or 'no answer'}"


# -- its requests
#
# Through aiohttp's client a request takes 3.4 times the router's processor time: 6,800 requests for each CPU-second
# instead of 23,300.


class Exchange(ABC):
    """A request to an engine: its header and its body, and what happens to it there."""

    __slots__ = ("body", "raw")
    raw: bytes
    body: bytes

    @abstractmethod
    def answered(self, view: EngineView, head: bytes, body: list[bytes]) -> None: ...

    @abstractmethod
    def lost(self, view: EngineView, was_sent: bool) -> None:
        """The engine will not answer; `was_sent`: the request may have run nevertheless."""


class Link(asyncio.Protocol):
    """One connection to an engine. It carries one request at a time, and holds its answer until it is complete."""

    __slots__ = ("_head", "_held", "_left", "_pool", "_work", "transport", "used_at")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._work: Exchange | None = None
        self._head, self._held, self._left = b"", [b""], -1
        self.used_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return self._work is not None

    def send(self, work: Exchange) -> None:
        assert self.transport is not None
        self._work = work
        if len(work.body) < _JOINED:
            self.transport.write(work.raw + work.body)
        else:
            self.transport.write(work.raw)
            self.transport.write(work.body)

    def data_received(self, data: bytes) -> None:
        if self._work is None:  # an engine sends nothing unasked, so it is about to close
            self.abort()
            return
        if self._left < 0:
            data = self._held[0] + data if self._held[0] else data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._held[0] = data
                return
            length = _LENGTH.search(data, 0, end)
            if length is None or not data.startswith(b"HTTP/1.1 "):
                self.abort()
                return
            self._head, data = data[:end], data[end:]
            self._left, self._held = int(length[1]), []
        self._held.append(data)
        self._left -= len(data)
        if self._left == 0:
            self._answer()
        elif self._left < 0:
            self.abort()

    def _answer(self) -> None:
        work, head, body = self._work, self._head, self._held
        self._work, self._head, self._held, self._left = None, b"", [b""], -1
        assert work is not None
        self._pool.give_back(self, head)
        work.answered(self._pool.view, head, body)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.forget(self)
        work, self._work = self._work, None
        if work is not None:
            self._pool.view.up = False  # until it is heard again
            work.lost(self._pool.view, was_sent=True)


class Pool:
    """Connections to one engine, one for each of this router's requests in flight."""

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self._context = ssl.create_default_context() if view.member.address[2] else None
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
        host, port, _ = self.view.member.address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(lambda: Link(self), host, port, ssl=self._context)
        except (OSError, TimeoutError):
            self.view.up = False
            work.lost(self.view, was_sent=False)
            return
        except asyncio.CancelledError:
            work.lost(self.view, was_sent=False)
            raise
        self._links.add(link)
        link.send(work)

    def give_back(self, link: Link, head: bytes) -> None:
        if b"\r\nConnection: close\r\n" in head:
            if link.transport is not None:
                link.transport.close()
            return
        link.used_at = time.monotonic()
        self._idle.append(link)

    def forget(self, link: Link) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def cut(self) -> None:
        """Drops all connections to an engine that has fallen silent; their requests are lost."""
        for link in list(self._links):
            link.abort()

    async def close(self) -> None:
        for task in list(self._opening):
            task.cancel()
        for link in list(self._links):
            link.abort()
        await asyncio.sleep(0)
