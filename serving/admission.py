"""Admission: a request that cannot finish in time is refused at once, instead of answered late.

A request is refused on one of two grounds. First, the core predicts its finish time from the profiles of the work that
the policy puts before it; a request that would be late even by that prediction is refused. Second, reality is slower
than the prediction: the host, kernels that disturb each other and, on a virtual GPU, the CPU all add time. So each
model with a time limit has an admission limit: a number of requests in flight that follows their measured latencies,
and the part of the time limit that a prediction may use. `paellapy.scheduler.core.admission` has the arithmetic.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paellapy.scheduler.core import admission, codes
from paellapy.scheduler.core.admission import reader
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import struct_fields
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.serving.errors import RefusedError

Mode = Literal["targets", "deadlines", "off"]

_longest_admitted_ns: Any = admission.longest_admitted_ns.py_func  # type: ignore[attr-defined]
_most_in_flight: Any = admission.most_in_flight.py_func  # type: ignore[attr-defined]
_note_latency: Any = admission.note_latency.py_func  # type: ignore[attr-defined]


class AdmissionLimit(ctypes.Structure):
    """How many requests of a model may be in flight, and how far predictions are trusted: a row of ADMISSION_LIMIT.

    The core's functions take this object in place of a table row; reading a NumPy row takes ten times as long.
    """

    _fields_ = struct_fields(admission.ADMISSION_LIMIT)
    size: float
    in_flight: int
    shortest_ns: float
    rate: float

    def __init__(self, max_batch: int, tuning: Tuning, generation: int = 0) -> None:
        super().__init__(*admission.new_limits([max_batch], tuning)[0].item())
        self.tuning, self.generation = tuning, generation
        self.table = np.frombuffer(self, admission.ADMISSION_LIMIT)  # type: ignore[call-overload]

    def begin(self, batch: int, trial_ns: float, workers: int) -> None:
        """Sets the first rate from the time that a trial took for one full batch. Measured requests then correct it."""
        if trial_ns > 0:
            t = self.tuning
            self.rate = t.few_margin / t.first_margin * batch / trial_ns / max(1, workers)

    def is_full(self, limit_ns: float) -> bool:
        """Whether a request with this limit must be refused."""
        return self.in_flight >= self.size and self.in_flight >= _most_in_flight((self,), 0, limit_ns, self.tuning)

    def longest_admitted_ns(self, limit_ns: float, alone_ns: float, live: int, now_ns: int) -> float:
        """Longest predicted latency still admitted."""
        return float(_longest_admitted_ns((self,), 0, limit_ns, alone_ns, live, now_ns, self.tuning))

    def done(self, entered_ns: int, now_ns: int, limit_ns: float, was_in_flight: int) -> None:
        """Notes a request that has finished, or whose deadline has passed, with the number in flight when it
        entered.
        """
        _note_latency((self,), 0, entered_ns, now_ns, limit_ns, was_in_flight, self.tuning)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admitted request."""

    limit: AdmissionLimit
    entered_ns: int
    limit_ns: float
    number: int  # requests in flight when it entered, itself included

    def leave(self, answered: bool) -> None:
        """`answered`: it ran or missed its deadline; False: its client left."""
        self.limit.in_flight -= 1
        if answered:
            self.limit.done(self.entered_ns, time.monotonic_ns(), self.limit_ns, self.number)


class Asked(ctypes.Structure):
    """A request that asks for admission: a row of ADMISSION_REQUEST."""

    _fields_ = struct_fields(admission.ADMISSION_REQUEST)
    model: int
    priority: int
    entered_ns: int
    now_ns: int
    deadline_ns: int
    limit_ns: float
    predicted_ns: float
    longest_admitted_ns: float

    def __init__(self) -> None:
        super().__init__()
        self.table = np.frombuffer(self, admission.ADMISSION_REQUEST)  # type: ignore[call-overload]


class Admission:
    """Decides which requests enter. `mode`: "deadlines" heeds requests' deadlines, "targets" also models' targets."""

    def __init__(self, engine: Engine | RemoteEngine, mode: Mode = "targets") -> None:
        self._engine, self.mode = engine, mode
        self.limits: dict[str, AdmissionLimit] = {}
        self._asked = Asked()
        self._state: State = engine.state
        self._reader = reader(engine.state)

    def check_room(self, model: Served) -> None:
        """Refuses a request before its body is read, where the model's target limits every request.

        Under overload most requests are refused; reading their bodies would take time from the accepted ones.
        """
        if self.mode == "targets" and model.target_ms is not None:
            limit = self.limits.get(model.name)
            if limit is not None and limit.is_full(model.target_ms * 1e6):
                raise _overloaded(model, limit, "target", model.target_ms)

    def enter(self, model: Served, row: int, priority: int | None, deadline_ms: float | None) -> Ticket | None:
        """Returns a ticket, to be given back with `leave`, or None where there is no limit to keep. May raise
        RefusedError.
        """
        limit_ms = deadline_ms if deadline_ms is not None or self.mode != "targets" else model.target_ms
        if limit_ms is None or self.mode == "off":
            return None
        kind = "deadline" if deadline_ms is not None else "target"
        now_ns = time.monotonic_ns()
        state = self._engine.state
        generation = int(state.model["generation"][row])
        limit = self.limits.get(model.name)
        if limit is None or limit.generation != generation:  # belongs to an earlier model of that name
            tuning = Tuning.of_row(state.tuning[0])
            limit = self.limits[model.name] = AdmissionLimit(model.max_batch, tuning, generation)
            limit.begin(model.max_batch, float(state.model["trial_ns"][row]), len(state.wake) - 1)
        asked = self._asked
        asked.model, asked.entered_ns, asked.now_ns, asked.limit_ns = row, now_ns, now_ns, limit_ms * 1e6
        asked.priority = int(state.model["priority"][row]) if priority is None else priority
        asked.deadline_ns = codes.NEVER if deadline_ms is None else now_ns + int(deadline_ms * 1e6)
        verdict = admission.admit_one(self._own(state), limit.table, asked.table)
        if verdict == admission.AT_LIMIT:
            raise _overloaded(model, limit, kind, limit_ms)
        if verdict == admission.TOO_LATE:
            predicted_ms, longest_ms = asked.predicted_ns * 1e-6, asked.longest_admitted_ns * 1e-6
            # else a model whose copy takes longer than its target would never be copied
            self._engine.client.want_weights(row)
            beyond = "" if predicted_ms > limit_ms else f", of which predictions may use {longest_ms:.3g} ms for now"
            raise RefusedError(
                f"model {model.name!r}: this request would take {predicted_ms:.3g} ms; its {kind} is {limit_ms:.3g} ms"
                + beyond,
                f"predicted_{kind}",
                retry_after_s=(predicted_ms - longest_ms) * 1e-3,
                limit=limit_ms,
                given=predicted_ms,
            )
        return Ticket(limit, now_ns, limit_ms * 1e6, limit.in_flight)

    def _own(self, state: State) -> State:
        """The engine's tables with scratch space of our own; made again when the engine has new tables."""
        if state is not self._state:
            self._state, self._reader = state, reader(state)
        return self._reader


def _overloaded(model: Served, limit: AdmissionLimit, kind: str, limit_ms: float) -> RefusedError:
    return RefusedError(
        f"model {model.name!r} has {limit.in_flight} requests in flight; one more would miss its {kind} of "
        f"{limit_ms:.3g} ms",
        "overloaded",
        retry_after_s=limit_ms * 1e-3,
        limit=limit_ms,
        given=limit.in_flight,
    )
