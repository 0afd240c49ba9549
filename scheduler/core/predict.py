"""Predicts when a new request would be done, from the core's tables: the basis of admission control."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import compiled, part
from paellapy.scheduler.core.atomics import call_asking, load_at
from paellapy.scheduler.core.codes import FILLING, HELD, NEVER, RESERVED_MASK, RESERVED_SHIFT
from paellapy.scheduler.core.job import READS_SEGMENT
from paellapy.scheduler.core.requests import fill_job, fill_lane_job, fill_segment, fill_terms
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.slots import size_for
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import ready_ns

_RESERVED_MASK, _RESERVED_SHIFT = np.uint64(RESERVED_MASK), np.uint64(RESERVED_SHIFT)


@part
def rank_filled(s: State, row: int) -> float:
    """The rank of the job in that scratch row."""
    return float(call_asking(s.call[0].rank, s.job[row:].ctypes.data, s.call[0].rank_2, s.call[0].rank_3))


@part
def rank_new(s: State, m: int, size: int, batch: int, now: int) -> float:
    """The rank of a job that arrives now, whose terms are already filled in."""
    fill_job(s, 1, m, 0, now)
    s.job[1].total_ns = s.job[1].remaining_ns = s.size[m, size].total_ns
    s.job[1].batch, s.job[1].started = batch, 0.0
    if s.core[0].facts & READS_SEGMENT:
        fill_segment(s, s.job[1].segment, m, size, 0)
    return float(rank_filled(s, 1))


@compiled
def predict(s: State, m: int, priority: int, deadline: int, now: int) -> float:
    core = s.core[0]
    model = s.model[m]
    lane = model.filling
    joins, queued_before = 1, 0.0
    slots = s.size[m, model.n_sizes - 1].batch
    if lane < 0:
        queued_before = model.queued / slots
    else:
        # Front ends may have taken slots that the core does not know yet.
        reserved = np.int64((load_at(address(s.lane_word, lane)) >> _RESERVED_SHIFT) & _RESERVED_MASK)
        joins = max(s.lane[lane].taken, reserved) + 1
        if joins > slots:  # the lane is full: it goes first, with the requests queued behind it
            joins, queued_before = 1, 1.0 + model.queued / slots
    k = size_for(s, m, joins)
    alone = s.size[m, k].total_ns
    fill_terms(s, 1, m, now, deadline, priority, core.client_virtual_ns)
    mine = rank_new(s, m, k, joins, now)
    ahead = queued_before * s.size[m, model.n_sizes - 1].total_ns
    demand, idle, beside = s.size[m, k].demand, 1.0 - s.size[m, k].demand, 0
    for other in range(s.lane.shape[0]):
        a = s.lane[other]
        if a.model < 0 or a.state == HELD or other == lane or (a.live == 0 and a.active_at < 0):
            continue
        fill_lane_job(s, other, now)
        left = s.job[0].remaining_ns
        if a.live > 0 and (a.model == m or rank_filled(s, 0) <= mine):
            ahead += left
            if a.state == FILLING:
                n = s.model[a.model].n_sizes - 1
                ahead += s.model[a.model].queued / s.size[a.model, n].batch * s.size[a.model, n].total_ns
        elif a.active_at >= 0:  # it ranks worse, but runs beside the new job
            ahead += min(left, alone)
        elif a.issued > a.done:  # its launched segments come first
            rest = s.segment[a.model, a.size, a.issued].tail_ns if a.issued < a.segments and not a.whole else 0.0
            ahead += left - rest
        if a.active_at >= 0:
            demand += a.demand
            idle *= 1.0 - a.demand
            beside += 1
    least = alone
    if beside > 0:  # its time grows with the total demand of the jobs beside it
        least *= max(1.0, demand / max(1.0 - idle, 1e-3))
    # Weights arrive while other jobs run.
    there = ready_ns(s, m, k, 0, now) - now
    return float(now + max(least, (ahead + alone) / max(core.gain, 1.0), there + least))


def reader(state: State) -> State:
    """The same tables with a scratch of their own, for a thread that predicts."""
    return state._replace(job=np.zeros_like(state.job))


class Predictor:
    """Repeated predictions for one thread. Setting up the tables takes 80 times as long as one prediction."""

    def __init__(self, state: State) -> None:
        self._state, self._reader = state, reader(state)

    def finish(self, state: State, model: int, now: int, priority: int | None = None, deadline_ns: int = NEVER) -> int:
        """As `predict_finish`; `state` is another one after the engine has grown."""
        if state is not self._state:
            self._state, self._reader = state, reader(state)
        urgency = int(state.model["priority"][model]) if priority is None else priority
        return int(predict(self._reader, model, urgency, deadline_ns, now))


def predict_finish(state: State, model: int, now: int, priority: int | None = None, deadline_ns: int = NEVER) -> int:
    """When a request of the model would be done if it arrived now: after the work that goes before it.

    May be called from any thread. It reads tables while the core writes them, so the result is an estimate.
    """
    return Predictor(state).finish(state, model, now, priority, deadline_ns)
