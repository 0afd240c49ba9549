"""One request on its way through a router: to the engine likely to finish it first, and to the next one if need be.

A request goes to another engine when one refuses it, and when one is lost before its answer is complete: no byte of an
answer is passed on before all of it has arrived. A request with the header `X-At-Most-Once` goes to another engine only
if it cannot have run: the connection was not made, or the model has left the engine (404).
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from paellapy.cluster.engine_state import EngineView
from paellapy.serving.bodies import Held
from paellapy.serving.errors import RefusedError, error_answer
from paellapy.serving.fast_path.connection import Client, Head
from paellapy.serving.fast_path.inference import Clock, of_error
from paellapy.serving.inference import Pieces
from paellapy.serving.logs import request_id
from paellapy.serving.protocol import MOST_TIMEOUT_US

# The deadline of a request (`parameters.timeout`, µs from when it is sent), read only when it matters.


_NUMBERS = re.compile(rb"(\r\n(?:content-length|inference-header-content-length):[ \t]*)([0-9]+)", re.I)
_JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)
_PACKED = re.compile(rb"\r\ncontent-encoding:", re.I)


class _Parameters(msgspec.Struct):
    timeout: float | None = None


class _Body(msgspec.Struct):
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


_timeout = msgspec.json.Decoder(_Body).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_parameters = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def _json_end(head: bytes, body: bytes) -> int:
    found = _JSON_LENGTH.search(head)
    return len(body) if found is None else min(int(found[1]), len(body))


def timeout_s(head: bytes, body: bytes) -> float | None:
    """The request's timeout; None: it has none, or it cannot be read, and the engine reports the error.

    >>> timeout_s(b"POST / HTTP/1.1\\r\\n\\r\\n", b'{"inputs": [], "parameters": {"timeout": 5000}}')
    0.005
    """
    if _PACKED.search(head):
        return None
    try:
        found = _timeout(body[: _json_end(head, body)]).parameters.timeout
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found * 1e-6 if found is not None and 0 < found <= MOST_TIMEOUT_US else None


def with_timeout(head: bytes, body: bytes, left_s: float) -> tuple[bytes, bytes]:
    """The same request with its remaining time as timeout.

    >>> head = b"POST / HTTP/1.1\\r\\nContent-Length: 31\\r\\n\\r\\n"
    >>> with_timeout(head, b'{"parameters":{"timeout":50000}}', 0.01)
    (b'POST / HTTP/1.1\\r\\nContent-Length: 32\\r\\n\\r\\n', b'{"parameters":{"timeout":10000}}')
    """
    end = _json_end(head, body)
    fields = _fields(body[:end])
    parameters = _parameters(fields["parameters"])
    parameters["timeout"] = msgspec.Raw(_encode(max(1, int(left_s * 1e6))))
    fields["parameters"] = msgspec.Raw(_encode(parameters))
    json = _encode(fields)
    body = json + body[end:]
    is_json_length = rb"\r\ninference-header-content-length:"

    def number(found: re.Match[bytes]) -> bytes:
        inner = found[1].lower().strip().startswith(is_json_length[4:])
        return found[1] + b"%d" % (len(json) if inner else len(body))

    return _NUMBERS.sub(number, head), body


MOST_LOSSES = 5  # engines that may die during a request, which may be the cause
AT_MOST_ONCE = "X-At-Most-Once"
_AT_MOST_ONCE = re.compile(rb"\r\nx-at-most-once:[ \t]*(?!0[ \t]*\r|false[ \t]*\r)[^\r]", re.I)
_CLOSE = b"Connection: close\r\n"
_clock = Clock()


@dataclass(slots=True)
class Counts:
    """Counters of a router since it started."""

    requests: int = 0
    refused: int = 0  # answers 503, 429 and 404 of engines, after which other engines were asked
    lost: int = 0  # engines that ended, or fell silent, before an answer
    again: int = 0  # requests sent again after a loss
    held: int = 0  # requests that had to wait for an engine
    by_model: dict[str, int] = field(default_factory=dict)


class Dispatcher(Protocol):
    """The part of a router that its requests use."""

    in_flight: int
    draining: bool
    counts: Counts
    held: Held

    def check_model(self, model: str) -> None:
        """Raises UnknownModelError if there is no model of that name."""

    def dispatch(self, work: Forward, again: bool = False) -> None:
        """Sends the request to an engine, holds it, or refuses it."""

    def accepted(self, work: Forward) -> None:
        """An engine has run the request, and so accepted its key."""

    def forget(self, work: Forward) -> None:
        """The request is over."""


class Forward:
    """A request from its arrival to its answer. `answer` is called once, with the parts of a whole HTTP answer."""

    __slots__ = (
        "_answer", "_at_engine", "_deadline_at", "_held_bytes", "_over", "_predicted_ms", "_refusal", "_router",
        "_sent_at", "_timer", "body", "client", "head", "losses", "model", "raw", "refused_by", "seen", "started_at",
        "tried",
    )  # fmt: skip

    def __init__(
        self, router: Dispatcher, model: str, raw: bytes, answer: Callable[[Pieces], object] | None = None
    ) -> None:
        self._router, self.model, self.raw = router, model, raw
        self._answer = answer
        self.head: Head
        self.client: Client | None = None
        self.body = b""
        self.tried: set[str] = set()  # engines that have refused or lost it
        self.refused_by: set[str] = set()
        self.losses, self.seen = 0, False  # seen: the router has already looked for an engine
        self.started_at = self._sent_at = time.monotonic()
        self._predicted_ms = 0.0
        self._refusal: Pieces | None = None
        self._deadline_at: float | None = -1.0  # -1: not read yet
        self._timer: asyncio.TimerHandle | None = None
        self._over = self._at_engine = False
        self._held_bytes = 0
        router.in_flight += 1

    # -- interface to a connection of the fast path

    def look(self) -> None:
        self._router.check_model(self.model)

    def claim(self, nbytes: int) -> None:
        """Takes memory for that much of the body; RefusedError if the router holds too much already."""
        self._router.held.change(self._held_bytes, nbytes)
        self._held_bytes = nbytes

    def start(self, body: Any, json_length: str | None = None) -> None:
        try:
            self.claim(len(body))
        except RefusedError as e:
            self.fail(e)
            return
        self.body = bytes(body)
        self._router.dispatch(self)

    def fail(self, error: Exception) -> None:
        number = request_id(None)
        answer = of_error(error_answer(error, number, f"/v2/models/{self.model}/infer"), number)
        self._give(answer.parts(_clock.date(), close=self.client is not None and self.client.closing))

    def leave(self) -> None:
        """The client has left: the engine goes on, and its answer is dropped."""
        self._end()

    def settle(self) -> None:
        pass

    # -- interface to an engine's connection

    def bytes_of(self) -> list[bytes]:
        return [self.raw, self.body]

    def send_to(self, view: EngineView) -> None:
        self._sent_at = time.monotonic()
        self._predicted_ms = view.predicted_ms(self.model) or 0.0
        view.note_sent(self.model)
        self._at_engine = True
        assert view.pool is not None
        view.pool.send(self)

    def answered(self, view: EngineView, head: bytes, body: list[bytes]) -> None:
        if self._came_back(view):
            return
        status = head[9:12]
        if status == b"200":
            self._router.accepted(self)
            view.note_answer(self.model, self._predicted_ms, (time.monotonic() - self._sent_at) * 1e3)
        elif status in (b"404", b"429") or (status == b"503" and not self.at_most_once):
            # 404: the model has just left that engine. 429: the client has its part of that engine's requests. Nothing
            # has run in either case. 503: it is full, or failed later.
            self._refusal = self._parts(view, head, body)
            self.tried.add(view.name)
            self.refused_by.add(view.name)
            self._router.counts.refused += 1
            self._router.dispatch(self)
            return
        self._give(self._parts(view, head, body))

    def _parts(self, view: EngineView, head: bytes, body: list[bytes]) -> Pieces:
        if _CLOSE in head:
            head = head.replace(_CLOSE, b"")
        return [head[:-2] + b"X-Engine: %b\r\n\r\n" % view.name.encode(), *body]

    def _came_back(self, view: EngineView) -> bool:
        """Notes that the engine no longer has it; returns whether it is over."""
        view.outstanding -= 1
        self._at_engine = False
        if self._over:
            self._let_go()
        return self._over

    def lost(self, view: EngineView, was_sent: bool) -> None:
        if self._came_back(view):
            return
        self.tried.add(view.name)
        if was_sent:
            self.losses += 1
            self._router.counts.lost += 1
            if self.at_most_once or self.losses >= MOST_LOSSES:
                why = f"it is marked {AT_MOST_ONCE}" if self.at_most_once else f"{self.losses} engines ended with it"
                said = f"engine {view.name} ended before its answer; the request is not sent again, since {why}"
                self.fail(RefusedError(said, "engine_away"))
                return
        self._router.dispatch(self, again=was_sent)

    @property
    def at_most_once(self) -> bool:
        return _AT_MOST_ONCE.search(self.raw) is not None

    # -- waiting, and ending

    def left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        if self._deadline_at is not None and self._deadline_at < 0:
            limit_s = timeout_s(self.raw, self.body)
            self._deadline_at = None if limit_s is None else self.started_at + limit_s
        return None if self._deadline_at is None else self._deadline_at - time.monotonic()

    def shorten(self) -> None:
        """Shortens its timeout before it is sent again, since an engine counts from the sending."""
        left_s = self.left_s()
        if left_s is not None:
            self.raw, self.body = with_timeout(self.raw, self.body, max(left_s, 1e-6))

    def refuse(self, error: Exception) -> None:
        """Answers with the last engine's refusal, if there is one, else with the error."""
        if self._refusal is not None:
            self._give(self._refusal)
        else:
            self.fail(error)

    def wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def over(self) -> bool:
        return self._over

    def _give(self, parts: Pieces) -> None:
        if self._over:
            return
        self._end()
        if self._answer is not None:
            self._answer(parts)
        elif self.client is not None:
            closing = self.client.closing or self._router.draining
            if closing and _CLOSE not in (head := bytes(parts[0])):
                parts[0] = head[:-2] + _CLOSE + b"\r\n"
            self.client.send(self, parts, closing)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self.wake()
            self._router.in_flight -= 1
            self._router.forget(self)
            if not self._at_engine:
                self._let_go()

    def _let_go(self) -> None:
        """Frees the body, once neither the client nor an engine needs it."""
        self.body = b""
        self.claim(0)


# Persistent connections to one engine: each carries one request at a time, and holds its answer until it is
# complete.


IDLE_S = 20.0  # shorter than a server's `keepalive_s`, so that nothing is sent into a closing connection
CONNECT_S = 2.0
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)


class Sent(Protocol):
    """A request that was sent to an engine."""

    def bytes_of(self) -> list[bytes]:
        """Its header and its body."""

    def answered(self, view: EngineView, head: bytes, body: list[bytes]) -> None: ...

    def lost(self, view: EngineView, was_sent: bool) -> None:
        """The engine will not answer; `was_sent`: the request may have run nevertheless."""


class Link(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = ("_head", "_held", "_left", "_pool", "_work", "transport", "used_at")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._work: Sent | None = None
        self._head, self._held, self._left = b"", [b""], -1
        self.used_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return self._work is not None

    def send(self, work: Sent) -> None:
        assert self.transport is not None
        self._work = work
        parts = work.bytes_of()
        self.transport.write(parts[0] + parts[1] if len(parts[1]) < 1 << 16 else parts[0])
        if len(parts[1]) >= 1 << 16:
            self.transport.write(parts[1])

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

    def __init__(self, view: EngineView, context: ssl.SSLContext | None = None) -> None:
        self.view, self._context = view, context
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, work: Sent) -> None:
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

    async def _open(self, work: Sent) -> None:
        host, port, tls = self.view.member.address
        loop = asyncio.get_running_loop()
        make: Callable[[], Link] = lambda: Link(self)  # noqa: E731
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(make, host, port, ssl=self._context if tls else None)
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
