"""`Router`: sends requests to the engine where they cost least, and holds requests that no engine can take."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paellapy.cluster.engine_state import EngineView, listen, members_of
from paellapy.cluster.headers import AT_MOST_ONCE, KnownKeys, at_most_once, digest_of, timeout_s, with_timeout
from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.errors import UnknownModelError
from paellapy.serving.access import CLIENT_HEADER
from paellapy.serving.errors import RefusedError, error_answer, short
from paellapy.serving.fast_path.client import AnswerError, Link
from paellapy.serving.fast_path.connection import FastConnection
from paellapy.serving.fast_path.headers import Clock, Head, error_pieces
from paellapy.serving.limits import BESIDE_BYTES, DEFAULTS, RequestBudget
from paellapy.serving.load_report import Outlook
from paellapy.serving.logs import log, request_id
from paellapy.serving.protocol import Pieces

HELD_BYTES = 256_000_000
TICK_S = 0.05
LAST_TIMES = 4
MOST_WAITING = 8192
MOST_ASKING = 16  # questions to all engines at once, whose answers are held in memory
FIRST_S = 3.0  # a new router waits this long for all engines before it treats unknown models as missing
MOST_LOSSES = 5  # engines that may die during a request, which may be the cause
_CLOSE = b"Connection: close\r\n"
_clock = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    every_ms: float = 5.0  # between an engine's lines
    silent_s: float = 0.6  # without a line, an engine's requests go to others
    hold_s: float = 20.0  # limit of a request's wait for an engine with its model, unless its deadline is shorter
    key: str | None = None  # for engines that need one
    client_header: str = CLIENT_HEADER
    max_body_bytes: int = DEFAULTS.max_body_bytes
    body_timeout_s: float | None = DEFAULTS.body_timeout_s
    drain_s: float = 30.0
    max_held_bytes: int = HELD_BYTES  # of all requests that are not answered yet

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # the resolver would take it modulo 65536
            raise ArgumentError(f"the port {self.port} does not exist: give 0 to 65535", field="port", given=self.port)
        held_mb = self.max_held_bytes / 1e6
        for name, value in (("every_ms", self.every_ms), ("hold_s", self.hold_s), ("held_mb", held_mb)):
            if not 0 < value < math.inf:
                raise ArgumentError(f"{name} is {value:g}: give a finite number above 0", field=name, given=value)


@dataclass(slots=True)
class Counts:
    requests: int = 0
    refused: int = 0  # answers 503, 429 and 404 of engines, after which other engines were asked
    lost: int = 0  # engines that ended, or fell silent, before an answer
    again: int = 0  # requests sent again after a loss
    held: int = 0  # requests that had to wait for an engine


@dataclass(slots=True, eq=False)
class Forward:
    """A request from its arrival to its answer, which goes to `client`, or is the result of `answer`.

    It goes to the engine of the least cost. It goes to another one when that engine refuses it, and when that
    engine is lost before its answer is complete: no byte of an answer is passed on before all of it has arrived, unless
    it comes in pieces (`stream`). With the header `X-At-Most-Once` it goes to another engine only if it cannot have
    run: the connection was not made, or the model has left the engine (404).
    """

    router: Router
    model: str
    raw: bytes = b""
    answer: asyncio.Future[Pieces] | None = None
    cancels: bool = False  # an engine stops working on it when its client leaves
    client: FastConnection | None = None
    head: Head = None  # type: ignore[assignment]  # of a connection of the fast path
    body: bytes = b""
    most: int = sys.maxsize  # of an answer's bytes: all
    tried: set[str] = field(default_factory=set)  # engines that have refused or lost it
    refused_by: set[str] = field(default_factory=set)
    losses: int = 0
    seen: bool = False  # the router has already looked for an engine
    over: bool = False
    link: Link | None = None
    stream: asyncio.StreamReader | None = None
    started_at: float = field(default_factory=time.monotonic)
    _sent_at: float = 0.0
    _predicted_ms: float = 0.0
    _refusal: Pieces | None = None
    _deadline_at: float | None = -1.0  # -1: not read yet
    timer: asyncio.TimerHandle | None = None  # ends its wait for an engine
    _held_bytes: int = 0
    _at: EngineView | None = None  # the engine that has it

    def __post_init__(self) -> None:
        self.router.in_flight += 1

    # -- interface to a connection of the fast path

    def look(self) -> None:
        self.router.check_model(self.model)

    def claim(self, nbytes: int) -> None:
        """Takes memory for that much of the body; RefusedError if the router holds too much already."""
        self.router.held.change(self._held_bytes, nbytes)
        self._held_bytes = nbytes

    def start(self, body: Any, json_length: str | None = None) -> None:
        try:
            self.claim(len(body))
        except RefusedError as e:
            self.fail(e)
            return
        self.body = bytes(body)
        self.router.dispatch(self)

    def fail(self, error: Exception) -> None:
        if self.answer is not None:
            self._end()
            if not self.answer.done():
                self.answer.set_exception(error)
            return
        number = request_id(None)
        found = error_answer(error, number, f"/v2/models/{self.model}/infer")
        close = self.client is not None and self.client.closing
        self._give(error_pieces(found, number, _clock.date(), close))

    def leave(self) -> None:
        """The client has left: the engine goes on, and its answer is dropped, unless the request is cancelled."""
        self._end()
        if self.cancels and self._at is not None and self.link is not None:
            self.link.drop()
            self._came_back()

    def release(self) -> None:
        pass

    # -- interface to an engine's connection

    def send_to(self, view: EngineView) -> None:
        self._sent_at = time.monotonic()
        self._predicted_ms = view.predicted_ms(self.model) or 0.0
        view.note_sent(self.model)
        self._at, self.link = view, None
        view.pool.send(self)

    def begun(self, head: bytes, stream: asyncio.StreamReader) -> None:
        if self.answer is None or self._at is None:
            raise AnswerError("an inference is answered in pieces")
        self.stream = stream
        if not self.answer.done():
            self.answer.set_result(self._parts(self._at, head, []))

    def answered(self, head: bytes, body: list[bytes]) -> None:
        view = self._came_back()
        if self.over:
            return
        status = head[9:12]
        if status == b"200":
            self.router.accepted(self)
            view.note_answer(self.model, self._predicted_ms, (time.monotonic() - self._sent_at) * 1e3)
        elif status in (b"404", b"429") or (status == b"503" and not at_most_once(self.raw)):
            # 404: the model has just left that engine. 429: the client has its part of that engine's requests. Nothing
            # has run in either case. 503: it is full, or failed later.
            self._refusal = self._parts(view, head, body)
            self.tried.add(view.name)
            self.refused_by.add(view.name)
            self.router.counts.refused += 1
            self.router.dispatch(self)
            return
        self._give(self._parts(view, head, body))

    def _parts(self, view: EngineView, head: bytes, body: list[bytes]) -> Pieces:
        return [head.replace(_CLOSE, b"")[:-2] + b"X-Engine: %b\r\n\r\n" % view.name.encode(), *body]

    def _came_back(self) -> EngineView:
        """Notes that the engine no longer has it."""
        view, self._at = self._at, None
        assert view is not None
        view.outstanding -= 1
        if self.stream is not None:
            self._end()
        if self.over:
            self._let_go()
        return view

    def lost(self, was_sent: bool, why: Exception) -> None:
        self.router.counts.lost += was_sent and not self.over
        view = self._came_back()
        view.up = False  # until it is heard again
        if self.over:
            return
        self.tried.add(view.name)
        if was_sent:
            self.losses += 1
            once = at_most_once(self.raw)
            if once or self.losses >= MOST_LOSSES:
                why_not = f"it is marked {AT_MOST_ONCE}" if once else f"{self.losses} engines ended with it"
                said = f"engine {view.name} ended before its answer; the request is not sent again, since {why_not}"
                self.fail(RefusedError(said, "engine_away"))
                return
        self.router.dispatch(self, again=was_sent)

    # -- waiting, and ending

    def left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        if self._deadline_at is not None and self._deadline_at < 0:
            limit_s = timeout_s(self.raw, self.body)
            self._deadline_at = None if limit_s is None else self.started_at + limit_s
        return None if self._deadline_at is None else self._deadline_at - time.monotonic()

    def refuse(self, error: Exception) -> None:
        """Answers with the last engine's refusal, if there is one, else with the error."""
        if self._refusal is not None:
            self._give(self._refusal)
        else:
            self.fail(error)

    def wake(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _give(self, parts: Pieces) -> None:
        if self.over:
            return
        self._end()
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(parts)
        elif self.client is not None:
            closing = self.client.closing or self.router.draining
            if closing and _CLOSE not in (head := bytes(parts[0])):
                parts[0] = head[:-2] + _CLOSE + b"\r\n"
            self.client.send(self, parts, closing)

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self.wake()
            self.router.in_flight -= 1
            self.router.forget(self)
            if self._at is None:
                self._let_go()

    def _let_go(self) -> None:
        """Frees the body, once neither the client nor an engine needs it."""
        self.body = b""
        self.claim(0)


class Router:
    """Distributes requests over engines, which `set_engines` adds and removes.

    `models` are the names to serve: their requests are held while no engine has them. Other names are unknown until an
    engine has them.
    """

    def __init__(self, options: RouterOptions | None = None, models: Iterable[str] = ()) -> None:
        self.options = options or RouterOptions()
        self._planned = frozenset(models)
        self.models = set(models)
        self.views: dict[str, EngineView] = {}
        self.counts = Counts()
        self.held = RequestBudget(self.options.max_held_bytes)
        self.keys = KnownKeys()
        self.asking = asyncio.Semaphore(MOST_ASKING)
        self.in_flight = 0
        self.draining = False
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[Forward, None] = {}  # in the order of their arrival
        self._turn = itertools.count()
        self._ticker: asyncio.Task[None] | None = None
        self._ticks, self._knew_all = 0, False
        self._gone: set[asyncio.Task[None]] = set()

    # -- members

    def set_engines(self, engines: Mapping[str, str]) -> None:
        """Replaces the addresses of engines, by name. One that leaves finishes its requests."""
        wanted = members_of(engines)
        for name in [name for name, view in self.views.items() if wanted.get(name) != view.member]:
            view = self.views.pop(name)
            view.up = False
            self._listeners.pop(name).cancel()
            task = asyncio.create_task(self._see_off(view))
            self._gone.add(task)
            task.add_done_callback(self._gone.discard)
        for name, member in wanted.items():
            if name not in self.views:
                view = self.views[name] = EngineView(member)
                listening = listen(view, self.hear, self.options.every_ms, self.options.key)
                self._listeners[name] = asyncio.create_task(listening)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    async def _see_off(self, view: EngineView) -> None:
        until = time.monotonic() + self.options.drain_s
        while view.outstanding and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        view.pool.close()

    def hear(self, view: EngineView, outlook: Outlook) -> None:
        if self.views.get(view.name) is view and view.hear(outlook):
            self.models.update(view.offers())
            self._wake()

    async def _tick(self) -> None:
        """Ticks are counted instead of time: while this process was suspended, lines have waited in its sockets."""
        most = max(1, round(self.options.silent_s / TICK_S))
        while True:
            await asyncio.sleep(TICK_S)
            self._ticks += 1
            if not self._knew_all and self.knows_all:
                self._knew_all = True
                self._wake()
            for view in self.views.values():
                view.quiet_ticks += 1
                # The last engine that is up gets more time, since its requests have nowhere else to go.
                is_last = view.up and sum(each.up for each in self.views.values()) == 1
                if view.quiet_ticks < most * (LAST_TIMES if is_last else 1) or view.silent:
                    continue
                if view.outlook is not None and not view.outlook.draining:  # its requests go to others
                    view.silent, view.up = True, False
                    log.warning("engine silent", extra={"fields": {"engine": view.name, "requests": view.outstanding}})
                    view.pool.cut()

    # -- requests

    @property
    def knows_all(self) -> bool:
        """Whether names it has not heard of are unknown models."""
        heard = bool(self.views) and all(view.knows_models for view in self.views.values())
        return heard or self._ticks * TICK_S > FIRST_S

    def with_model(self, model: str) -> list[str]:
        """Engines that take requests to it."""
        return [view.name for view in self.views.values() if view.up and model in view.offers()]

    def check_model(self, model: str) -> None:
        if model not in self.models and self.knows_all:
            # Where clients need keys, this may be answered before the key is checked.
            names = "" if self.options.key else f"; there are {', '.join(sorted(self.models))}"
            raise UnknownModelError(f"no model is named {short(model)}{names}")

    def choose(self, model: str, tried: Iterable[str] = ()) -> EngineView | None:
        """The engine of the least cost; equal ones take turns."""
        best, best_key = None, (float("inf"), 0, 0)
        turn, n = next(self._turn), max(1, len(self.views))
        for k, view in enumerate(self.views.values()):
            cost_ms = view.cost_ms(model)
            if cost_ms is not None and view.name not in tried:
                key = (cost_ms, view.outstanding, (k - turn) % n)
                if key < best_key:
                    best, best_key = view, key
        return best

    def dispatch(self, work: Forward, again: bool = False) -> None:
        if not work.seen:
            work.seen = True
            self.counts.requests += 1
            try:
                self.check_model(work.model)
            except UnknownModelError as e:
                work.fail(e)
                return
        elif (left_s := work.left_s()) is not None:
            if left_s <= 0:
                work.refuse(RefusedError(f"model {work.model!r}: the deadline has passed", "deadline"))
                return
            # An engine counts from the sending
            work.raw, work.body = with_timeout(work.raw, work.body, max(left_s, 1e-6))
        # An engine that lost it and is back comes last: a busy machine may have silenced all engines for a moment.
        view = self.choose(work.model, work.tried) or self.choose(work.model, work.refused_by)
        if view is not None:
            self.counts.again += again
            work.send_to(view)
        elif self.with_model(work.model):
            work.refuse(RefusedError(f"model {work.model!r}: every engine refuses it now; try again", "overloaded"))
        else:
            self._hold(work)

    def _hold(self, work: Forward) -> None:
        refusal = RefusedError(f"model {work.model!r}: no engine has it now; try again", "engine_away", 2.0)
        left_s = work.left_s()
        if len(self._waiting) >= MOST_WAITING:
            work.refuse(refusal)
            return
        self.counts.held += 1
        self._waiting[work] = None
        hold_s = self.options.hold_s if left_s is None else min(left_s, self.options.hold_s)
        work.timer = asyncio.get_running_loop().call_later(hold_s, work.refuse, refusal)

    def accepted(self, work: Forward) -> None:
        """Remembers the key longer: a connection whose long body has an unknown key leaves the fast path for good."""
        if self.options.key is not None and len(work.body) > BESIDE_BYTES:
            self.keys.add(digest_of(work.raw))

    def forget(self, work: Forward) -> None:
        """Its client has its answer, or has left: it waits no longer."""
        self._waiting.pop(work, None)

    def _wake(self) -> None:
        """Tries held requests again, since an engine offers something new."""
        waiting, self._waiting = self._waiting, {}
        for work in waiting:
            if work.over:
                continue
            known = work.model in self.models or not self.knows_all
            if known and not self.with_model(work.model):
                self._waiting[work] = None
                continue
            work.wake()
            work.seen &= known  # unknown ones are refused with the list of known names
            work.tried.clear()  # every engine may be asked again
            work.refused_by.clear()
            self.dispatch(work, again=work.losses > 0)

    def most_bytes(self, model: str) -> int:
        """Largest body of a request to the model, as far as engines have said."""
        found = max((v.models[model].largest_bytes for v in self.views.values() if model in v.models), default=0)
        return min(found or self.options.max_body_bytes, self.options.max_body_bytes)

    def missing(self) -> list[str]:
        """Models that should be there and are on no engine: planned ones, and those that an engine should have."""
        wanted = self._planned.union(*(view.wants() for view in self.views.values()))
        return sorted(wanted.difference(*(view.offers() for view in self.views.values() if view.up)))

    def unheard(self) -> list[str]:
        """Engines that have not said yet which models they should have."""
        return [view.name for view in self.views.values() if not view.knows_models]

    @property
    def ready(self) -> bool:
        """Whether every model is on an engine. An engine that was never heard is waited for only at the start."""
        starting = any(view.up and not view.knows_models for view in self.views.values())
        return self.knows_all and not starting and bool(self.models) and not self.missing() and not self.draining

    async def close(self) -> None:
        tasks = [*self._listeners.values(), *([self._ticker] if self._ticker else []), *self._gone]
        for task in tasks:
            task.cancel()
        for view in self.views.values():
            view.pool.close()
        for work in list(self._waiting):
            work.refuse(RefusedError("the router is stopping; try again", "closing"))
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections close in the loop's next turn
