"""`Router`: sends requests to the engine with the earliest predicted finish, and holds requests that no engine can
take.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import re
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass

from paellapy.cluster.engine_state import EngineView, Listener, Member
from paellapy.cluster.forward import Counts, Forward, Pool
from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.errors import UnknownModelError
from paellapy.serving.app import BODY_TIMEOUT_S, CLIENT_HEADER, MAX_BODY_BYTES
from paellapy.serving.bodies import Held
from paellapy.serving.errors import RefusedError, short
from paellapy.serving.load_report import Outlook
from paellapy.serving.logs import log
from paellapy.serving.protocol import BESIDE_BYTES

# Keys of clients that an engine has accepted a short time ago.
#
# Engines know the keys and check every request. A router asks them before it reads a long body, so that clients without
# a key cannot fill its memory, and it remembers the answer for a while.


KEPT_S = 60.0
MOST_KEYS = 4096
_KEY = re.compile(rb"\r\n(x-api-key|authorization):[ \t]*([^\r]*)", re.I)


def digest_of(head: bytes) -> bytes:
    """A digest of the key in a request's header.

    >>> digest_of(b"GET / HTTP/1.1\\r\\nX-API-Key: a\\r\\n") == digest_of(b"POST / HTTP/1.1\\r\\nx-api-key: a\\r\\n")
    True
    """
    found: dict[bytes, bytes] = {}
    for name, value in _KEY.findall(head):
        found.setdefault(name.lower(), value.rstrip(b" \t"))  # engines read the first one too
    given = b"\n".join(found.get(name, b"") for name in (b"x-api-key", b"authorization"))
    return hashlib.sha256(given).digest()


class KnownKeys:
    """Digests of keys, and when they were accepted."""

    def __init__(self) -> None:
        self._accepted_at: dict[bytes, float] = {}

    def __contains__(self, digest: bytes) -> bool:
        return time.monotonic() - self._accepted_at.get(digest, float("-inf")) < KEPT_S

    def was_accepted(self, digest: bytes) -> bool:
        """Whether it was accepted at any time."""
        return digest in self._accepted_at

    def add(self, digest: bytes) -> None:
        if len(self._accepted_at) >= MOST_KEYS:
            self._accepted_at.clear()
        self._accepted_at[digest] = time.monotonic()


HELD_BYTES = 256_000_000
TICK_S = 0.05
LAST_TIMES = 4
MOST_WAITING = 8192
MOST_ASKING = 16  # questions to all engines at once, whose answers are held in memory
FIRST_S = 3.0  # a new router waits this long for all engines before it treats unknown models as missing


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Options of a router."""

    host: str = "127.0.0.1"
    port: int = 8000
    every_ms: float = 5.0  # between an engine's lines
    silent_s: float = 0.6  # without a line, an engine's requests go to others
    hold_s: float = 20.0  # limit of a request's wait for an engine with its model, unless its deadline is shorter
    key: str | None = None  # for engines that need one
    client_header: str = CLIENT_HEADER
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float | None = BODY_TIMEOUT_S
    drain_s: float = 30.0
    max_held_bytes: int = HELD_BYTES  # of all requests that are not answered yet

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # the resolver would take it modulo 65536
            raise ArgumentError(f"the port {self.port} does not exist: give 0 to 65535")
        held_mb = self.max_held_bytes / 1e6
        for name, value in (("every_ms", self.every_ms), ("hold_s", self.hold_s), ("held_mb", held_mb)):
            if not 0 < value < math.inf:
                raise ArgumentError(f"{name} is {value:g}: give a finite number above 0")


class Router:
    """Distributes requests over engines, which `set_members` adds and removes.

    `models` are the names to serve: their requests are held while no engine has them. Other names are unknown until an
    engine has them.
    """

    def __init__(self, options: RouterOptions | None = None, models: Iterable[str] = ()) -> None:
        self.options = options or RouterOptions()
        self._planned = frozenset(models)
        self.models = set(models)
        self.views: dict[str, EngineView] = {}
        self.counts = Counts()
        self.held = Held(self.options.max_held_bytes)
        self.keys = KnownKeys()
        self.asking = asyncio.Semaphore(MOST_ASKING)
        self.in_flight = 0
        self.draining = False
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, Listener] = {}
        self._waiting: dict[Forward, None] = {}  # in the order of their arrival
        self._turn = itertools.count()
        self._ticker: asyncio.Task[None] | None = None
        self._ticks, self._knew_all = 0, False
        self._gone: set[asyncio.Task[None]] = set()

    # -- members

    def set_members(self, members: Iterable[Member]) -> None:
        """Replaces the list of engines. One that leaves finishes its requests."""
        wanted = {each.name: each for each in members}
        addresses = {each.address for each in wanted.values()}
        if len(addresses) < len(wanted):
            raise ArgumentError("two engines have the same address: list each engine once")
        for name in [name for name, view in self.views.items() if wanted.get(name) != view.member]:
            self._drop(name)
        for name, member in wanted.items():
            if name not in self.views:
                self._add(member)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    def _add(self, member: Member) -> None:
        o, view = self.options, EngineView(member)
        context = ssl.create_default_context() if member.address[2] else None
        view.pool = Pool(view, context)
        self.views[member.name] = view
        listener = self._reasons[member.name] = Listener(view, self._hear, self._left, o.every_ms, o.key, context)
        self._listeners[member.name] = asyncio.create_task(listener.run())

    def _drop(self, name: str) -> None:
        view = self.views.pop(name)
        view.up = False
        self._listeners.pop(name).cancel()
        self._reasons.pop(name)
        task = asyncio.create_task(self._see_off(view))
        self._gone.add(task)
        task.add_done_callback(self._gone.discard)

    async def _see_off(self, view: EngineView) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_s):
                while view.outstanding:
                    await asyncio.sleep(TICK_S)
        assert view.pool is not None
        await view.pool.close()

    def _hear(self, view: EngineView, outlook: Outlook) -> None:
        if self.views.get(view.name) is view and view.hear(outlook):
            self.models.update(view.offers())
            self._wake()

    def _left(self, view: EngineView) -> None:
        """The engine's stream has ended: it gets no more requests, but may still answer earlier ones."""
        view.up = False

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
                if view.quiet_ticks >= most * (LAST_TIMES if is_last else 1) and not view.silent:
                    self._give_up(view)

    def _give_up(self, view: EngineView) -> None:
        """Gives up a silent engine: its requests go to others."""
        if view.outlook is not None and not view.outlook.draining:
            view.silent, view.up = True, False
            log.warning("engine silent", extra={"fields": {"engine": view.name, "requests": view.outstanding}})
            assert view.pool is not None
            view.pool.cut()

    # -- requests

    @property
    def knows_all(self) -> bool:
        """Whether names it has not heard of are unknown models."""
        heard = bool(self.views) and all(view.knows_models for view in self.views.values())
        return heard or self._ticks * TICK_S > FIRST_S

    def check_model(self, model: str) -> None:
        if model not in self.models and self.knows_all:
            # Where clients need keys, this may be answered before the key is checked.
            names = "" if self.options.key else f"; there are {', '.join(sorted(self.models))}"
            raise UnknownModelError(f"no model is named {short(model)}{names}")

    def choose(self, model: str, tried: Iterable[str] = ()) -> EngineView | None:
        """The engine likely to finish first; equal ones take turns."""
        best, best_key = None, (float("inf"), 0, 0)
        turn, n = next(self._turn), max(1, len(self.views))
        for k, view in enumerate(self.views.values()):
            estimate_ms = view.estimate_ms(model)
            if estimate_ms is not None and view.name not in tried:
                key = (estimate_ms, view.outstanding, (k - turn) % n)
                if key < best_key:
                    best, best_key = view, key
        return best

    def dispatch(self, work: Forward, again: bool = False) -> None:
        """Sends the request, holds it, or refuses it."""
        if not work.seen:
            work.seen = True
            self.counts.requests += 1
            try:
                self.check_model(work.model)
            except UnknownModelError as e:
                work.fail(e)
                return
            if work.model in self.models:  # only known names are counted: clients may invent others
                self.counts.by_model[work.model] = self.counts.by_model.get(work.model, 0) + 1
        elif (left_s := work.left_s()) is not None:
            if left_s <= 0:
                work.refuse(RefusedError(f"model {work.model!r}: the deadline has passed", "deadline"))
                return
            work.shorten()
        # An engine that lost it and is back comes last: a busy machine may have silenced all engines for a moment.
        view = self.choose(work.model, work.tried) or self.choose(work.model, work.refused_by)
        if view is not None:
            self.counts.again += again
            work.send_to(view)
        elif any(v.up and work.model in v.offers() for v in self.views.values()):
            work.refuse(RefusedError(f"model {work.model!r}: every engine refuses it now; try again", "overloaded"))
        else:
            self._hold(work)

    def _hold(self, work: Forward) -> None:
        """Holds a request while no engine has its model."""
        refusal = RefusedError(f"model {work.model!r}: no engine has it now; try again", "engine_away", 2.0)
        left_s = work.left_s()
        if len(self._waiting) >= MOST_WAITING:
            work.refuse(refusal)
            return
        self.counts.held += 1
        self._waiting[work] = None
        hold_s = self.options.hold_s if left_s is None else min(left_s, self.options.hold_s)
        work.wait(hold_s, lambda: work.refuse(refusal))

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
            if known and not any(work.model in view.offers() for view in self.views.values() if view.up):
                self._waiting[work] = None
                continue
            work.wake()
            work.seen &= known  # unknown ones are refused with the list of known names
            work.tried.clear()  # every engine may be asked again
            work.refused_by.clear()
            self.dispatch(work, again=work.losses > 0)

    def most_bytes(self, model: str) -> int:
        """Largest body of a request to the model, as far as engines have said."""
        outlooks = (view.outlook for view in self.views.values() if view.outlook is not None)
        found = max((o.models[model].largest_bytes for o in outlooks if model in o.models), default=0)
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

    def why_away(self, name: str) -> str:
        return self._reasons[name].why

    async def close(self) -> None:
        for task in [*self._listeners.values(), *([self._ticker] if self._ticker else [])]:
            task.cancel()
        self._ticker = None
        for view in self.views.values():
            assert view.pool is not None
            await view.pool.close()
        for work in list(self._waiting):
            work.refuse(RefusedError("the router is stopping; try again", "closing"))
        for task in list(self._gone):
            task.cancel()
