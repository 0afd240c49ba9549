"""Admission: a request that cannot be done in time is refused at once, instead of late.

Two grounds. The core predicts when a request would be done, from the profiles of what its policy puts before it:
what is hopeless even at that speed is refused. What really happens is slower: the host, kernels that disturb each
other, and on a virtual GPU the CPU that computes for it, all take their time. So a model with limits to keep has only
so many requests in flight at a time, a number that follows their latencies: additive increase, multiplicative
decrease, as TCP finds its window. And predictions may use up only part of the limit: a margin that shrinks whenever
requests that were let in are late after all, and grows back in seconds.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

from scheduler import state as st
from scheduler.core_predict import predict_finish
from scheduler.engine import Engine
from scheduler.model import Model
from scheduler.remote import RemoteEngine
from serving.errors import RefusedError

Mode = Literal["targets", "deadlines", "off"]

LATE = 0.5  # of the way from the shortest latency ever to the limit: one above says that too many are in flight
DECREASE = 0.85
LARGEST = 4096.0
LESS_MARGIN = 0.1  # of the margin, where one was late that entered since the last time
LEAST_MARGIN = 0.2
MARGIN_BACK_S = 4.0  # from nothing to all of it: one moment in which nothing went on must not cost minutes
ROOM = 2.0  # times the shortest latency: who is late with less asked for too much, and says nothing of predictions


def margin_after(margin: float, seconds: float) -> float:
    return min(1.0, margin + seconds / MARGIN_BACK_S)


def lower(margin: float) -> float:
    return max(LEAST_MARGIN, margin * (1.0 - LESS_MARGIN))


def reach(shortest: float, margin: float, limit: float) -> float:
    """How long a request may be predicted to take."""
    shortest = min(shortest, limit)
    return shortest + margin * (limit - shortest)


class Window:
    """How many requests of a model may be in flight.

    It aims at half of the time there is, so that most are in time too when the machine is slow for a moment.
    """

    __slots__ = ("_lowered_s", "_margin", "_shortest_s", "_since", "generation", "in_flight", "size")

    def __init__(self, size: float, generation: int = 0) -> None:
        self.size, self.generation, self.in_flight = size, generation, 0
        self._since, self._shortest_s = 0.0, math.inf
        self._margin, self._lowered_s = 1.0, 0.0

    def margin(self, now_s: float) -> float:
        """The part of its time that a request may be predicted to take."""
        return margin_after(self._margin, now_s - self._lowered_s)

    def reach_s(self, limit_s: float, now_s: float) -> float:
        return reach(self._shortest_s, self.margin(now_s), limit_s)

    def done(self, entered_s: float, now_s: float, limit_s: float, was_in_flight: int) -> None:
        """A request that entered as one of so many is done, or its deadline has passed."""
        took_s = now_s - entered_s
        self._shortest_s = min(self._shortest_s, took_s, limit_s)
        if took_s > limit_s >= ROOM * self._shortest_s and entered_s >= self._lowered_s:
            self._margin, self._lowered_s = lower(self.margin(now_s)), now_s
        if took_s > self._shortest_s + LATE * (limit_s - self._shortest_s):
            if entered_s >= self._since:  # one that entered before the last decrease knows nothing of it
                self.size, self._since = max(1.0, self.size * DECREASE), now_s
        elif was_in_flight * 2 >= self.size:  # only a window that is used tells whether it could be larger
            self.size = min(LARGEST, self.size + 1.0 / self.size)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was let in."""

    window: Window
    entered_s: float
    limit_s: float
    number: int  # it was one of so many in flight

    def leave(self, answered: bool) -> None:
        """`answered`: it ran, or was too late; not if its client left."""
        self.window.in_flight -= 1
        if answered:
            self.window.done(self.entered_s, time.monotonic(), self.limit_s, self.number)


class Admission:
    """`mode`: refuse by the requests' deadlines only, also by their models' targets, or never."""

    def __init__(self, engine: Engine | RemoteEngine, mode: Mode = "targets") -> None:
        self._engine, self.mode = engine, mode
        self.windows: dict[str, Window] = {}

    def check_room(self, model: Model) -> None:
        """Before a request's body is read, where every request has a limit: under overload most are refused, and what
        that costs the accepted ones have not.
        """
        if self.mode == "targets" and model.target_ms is not None:
            window = self.windows.get(model.name)
            if window is not None and window.in_flight >= window.size:
                raise _overloaded(model, window, "target", model.target_ms)

    def enter(self, model: Model, row: int, priority: int | None, deadline_ms: float | None) -> Ticket | None:
        """A ticket to be given back with `leave`; None where there is no limit to keep; or RefusedError."""
        limit_ms = deadline_ms if deadline_ms is not None or self.mode != "targets" else model.target_ms
        if limit_ms is None or self.mode == "off":
            return None
        kind = "deadline" if deadline_ms is not None else "target"
        now_ns = time.monotonic_ns()
        state = self._engine.state
        generation = int(state.model["generation"][row])
        window = self.windows.get(model.name)
        if window is None or window.generation != generation:  # another model of that name knows nothing of this one's
            window = self.windows[model.name] = Window(2.0 * model.max_batch, generation)
        if window.in_flight >= window.size:
            raise _overloaded(model, window, kind, limit_ms)
        deadline_ns = st.NEVER if deadline_ms is None else now_ns + int(deadline_ms * 1e6)
        predicted_ms = (predict_finish(state, row, now_ns, priority, deadline_ns) - now_ns) * 1e-6
        alone_ms = float(state.size["total_ns"][row, 0]) * 1e-6  # an idle GPU serves
        reach_ms = max(window.reach_s(limit_ms * 1e-3, now_ns * 1e-9) * 1e3, min(alone_ms, limit_ms))
        if predicted_ms > reach_ms:
            beyond = "" if predicted_ms > limit_ms else f"; predictions may use {reach_ms:.3g} ms of that for now"
            raise RefusedError(
                f"model {model.name!r}: it would take {predicted_ms:.3g} ms now, and the {kind} is {limit_ms:.3g} ms"
                + beyond,
                f"predicted_{kind}",
                retry_after_s=(predicted_ms - reach_ms) * 1e-3,
            )
        window.in_flight += 1
        return Ticket(window, now_ns * 1e-9, limit_ms * 1e-3, window.in_flight)


def _overloaded(model: Model, window: Window, kind: str, limit_ms: float) -> RefusedError:
    return RefusedError(
        f"model {model.name!r} has {window.in_flight} requests in flight; one more would miss its {kind} of "
        f"{limit_ms:.3g} ms",
        "overloaded",
        retry_after_s=limit_ms * 1e-3,
    )
