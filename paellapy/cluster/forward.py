"""One request on its way through a router: to the engine likely to finish it first, and to the next one if need be.

A request goes to another engine when one refuses it, and when one is lost before its answer is complete: no byte of an
answer is passed on before all of it has arrived. A request with the header `X-At-Most-Once` goes to another engine only
if it cannot have run: the connection was not made, or the model has left the engine (404).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paellapy.cluster.deadline import timeout_s, with_timeout
from paellapy.cluster.view import EngineView
from paellapy.serving.errors import RefusedError, error_answer
from paellapy.serving.fast_path.answers import Clock, of_error
from paellapy.serving.fast_path.head import Head
from paellapy.serving.fast_path.way import Client
from paellapy.serving.held import Held
from paellapy.serving.inference import Pieces
from paellapy.serving.logs import request_id

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
