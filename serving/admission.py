"""Admission: a request that cannot be done in time is refused at once, instead of late.

Two grounds. The core predicts when a request would be done, from the profiles of what its policy puts before it:
what is hopeless even at that speed is refused. What really happens is slower: the host, kernels that disturb each
other, and on a virtual GPU the CPU that computes for it, all take their time. So a model with limits to keep has only
so many requests in flight at a time, a number that follows their latencies, and predictions may use up only part of the
limit: `paellapy.scheduler.core.admission` has the arithmetic.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paellapy.scheduler.core import admission, codes
from paellapy.scheduler.core.manage import want_weights
from paellapy.scheduler.core.predict import reader
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import struct_fields
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.models.model import Model
from paellapy.serving.errors import RefusedError

Mode = Literal["targets", "deadlines", "off"]

_reach_ns: Any = admission.reach_ns.py_func  # type: ignore[attr-defined]
_room: Any = admission.room.py_func  # type: ignore[attr-defined]
_note_latency: Any = admission.note_latency.py_func  # type: ignore[attr-defined]


class Allowance(ctypes.Structure):
    """How many requests of a model may be in flight, and what predictions are worth: a row of ALLOWANCE as an object.

    The core's functions run on it as they do on the table's rows. A row of NumPy would take ten times as long to read.
    """

    _fields_ = struct_fields(admission.ALLOWANCE)
    size: float
    in_flight: int
    shortest_ns: float
    rate: float

    def __init__(self, max_batch: int, tuning: Tuning, generation: int = 0) -> None:
        super().__init__(*admission.new_allowances([max_batch], tuning)[0].item())
        self.tuning, self.generation = tuning, generation
        self.table = np.frombuffer(self, admission.ALLOWANCE)  # type: ignore[call-overload]

    def begin(self, batch: int, trial_ns: float, workers: int) -> None:
        """A trial took so long for one full batch. Until real requests tell, as many are let in as it had time for."""
        if trial_ns > 0:
            t = self.tuning
            self.rate = t.few_margin / t.first_margin * batch / trial_ns / max(1, workers)

    def is_full(self, limit_ns: float) -> bool:
        """For a request with so much time."""
        return self.in_flight >= self.size and self.in_flight >= _room((self,), 0, limit_ns, self.tuning)

    def reach_ns(self, limit_ns: float, alone_ns: float, live: int, now_ns: int) -> float:
        """Longest predicted latency still admitted."""
        return float(_reach_ns((self,), 0, limit_ns, alone_ns, live, now_ns, self.tuning))

    def done(self, entered_ns: int, now_ns: int, limit_ns: float, was_in_flight: int) -> None:
        """A request that entered as one of so many is done, or its deadline has passed."""
        _note_latency((self,), 0, entered_ns, now_ns, limit_ns, was_in_flight, self.tuning)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was let in."""

    allowance: Allowance
    entered_ns: int
    limit_ns: float
    number: int  # it was one of so many in flight

    def leave(self, answered: bool) -> None:
        """`answered`: it ran, or was too late; not if its client left."""
        self.allowance.in_flight -= 1
        if answered:
            self.allowance.done(self.entered_ns, time.monotonic_ns(), self.limit_ns, self.number)


class Asked(ctypes.Structure):
    """A request at the door: a row of ASKED."""

    _fields_ = struct_fields(admission.ASKED)
    model: int
    priority: int
    entered_ns: int
    now_ns: int
    deadline_ns: int
    limit_ns: float
    predicted_ns: float
    reach_ns: float

    def __init__(self) -> None:
        super().__init__()
        self.table = np.frombuffer(self, admission.ASKED)  # type: ignore[call-overload]


class Admission:
    """`mode`: refuse by the requests' deadlines only, also by their models' targets, or never."""

    def __init__(self, engine: Engine | RemoteEngine, mode: Mode = "targets") -> None:
        self._engine, self.mode = engine, mode
        self.allowances: dict[str, Allowance] = {}
        self._asked = Asked()
        self._state: State = engine.state
        self._reader = reader(engine.state)

    def check_room(self, model: Model) -> None:
        """Before a request's body is read, where every request has a limit: under overload most are refused, and what
        that costs the accepted ones have not.
        """
        if self.mode == "targets" and model.target_ms is not None:
            allowance = self.allowances.get(model.name)
            if allowance is not None and allowance.is_full(model.target_ms * 1e6):
                raise _overloaded(model, allowance, "target", model.target_ms)

    def enter(self, model: Model, row: int, priority: int | None, deadline_ms: float | None) -> Ticket | None:
        """A ticket to be given back with `leave`; None where there is no limit to keep; or RefusedError."""
        limit_ms = deadline_ms if deadline_ms is not None or self.mode != "targets" else model.target_ms
        if limit_ms is None or self.mode == "off":
            return None
        kind = "deadline" if deadline_ms is not None else "target"
        now_ns = time.monotonic_ns()
        state = self._engine.state
        generation = int(state.model["generation"][row])
        allowance = self.allowances.get(model.name)
        if allowance is None or allowance.generation != generation:  # of another model of that name
            tuning = Tuning.of_row(state.tuning[0])
            allowance = self.allowances[model.name] = Allowance(model.max_batch, tuning, generation)
            allowance.begin(model.max_batch, float(state.model["trial_ns"][row]), len(state.wake) - 1)
        asked = self._asked
        asked.model, asked.entered_ns, asked.now_ns, asked.limit_ns = row, now_ns, now_ns, limit_ms * 1e6
        asked.priority = int(state.model["priority"][row]) if priority is None else priority
        asked.deadline_ns = codes.NEVER if deadline_ms is None else now_ns + int(deadline_ms * 1e6)
        verdict = admission.ask(self._own(state), allowance.table, asked.table)
        if verdict == admission.NO_ROOM:
            raise _overloaded(model, allowance, kind, limit_ms)
        if verdict == admission.TOO_LATE:
            predicted_ms, reach_ms = asked.predicted_ns * 1e-6, asked.reach_ns * 1e-6
            if want_weights(state, row):  # else a model whose copy takes longer than its target would never come
                self._engine._front.nudge()
            beyond = "" if predicted_ms > limit_ms else f"; predictions may use {reach_ms:.3g} ms of that for now"
            raise RefusedError(
                f"model {model.name!r}: it would take {predicted_ms:.3g} ms now, and the {kind} is {limit_ms:.3g} ms"
                + beyond,
                f"predicted_{kind}",
                retry_after_s=(predicted_ms - reach_ms) * 1e-3,
            )
        return Ticket(allowance, now_ns, limit_ms * 1e6, allowance.in_flight)

    def _own(self, state: State) -> State:
        """The engine's tables with a scratch of our own, made anew where the engine has other tables now."""
        if state is not self._state:
            self._state, self._reader = state, reader(state)
        return self._reader


def _overloaded(model: Model, allowance: Allowance, kind: str, limit_ms: float) -> RefusedError:
    return RefusedError(
        f"model {model.name!r} has {allowance.in_flight} requests in flight; one more would miss its {kind} of "
        f"{limit_ms:.3g} ms",
        "overloaded",
        retry_after_s=limit_ms * 1e-3,
    )
