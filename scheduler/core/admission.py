"""Admission: a request is admitted if it is predicted to be in time and its model has not reached its admission limit.

This is the only implementation: for a server (`paellapy.serving.admission`), for simulated time, and for the load
generator of the benchmarks. A model's *admission limit* is the number of its requests in flight. It follows their
latencies by additive increase and multiplicative decrease, like a TCP congestion window, and aims at half of the time
limit.

The admission limit and predictions use only a part of the time limit: the margin. The margin shrinks with every
admitted request that is late and grows with requests in time, so that about one request in two hundred is late. It
starts low, because predictions do not know the requests that follow, and a flood starts on an idle GPU. It grows fast
until the first late request. Late requests do not count until one was in time: a model may be slow while it is cold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.instances import size_for
from paellapy.scheduler.core.requests import (
    ask_about,
    fill_instance_job,
    fill_job,
    fill_terms,
    fill_unstarted,
)
from paellapy.scheduler.core.rings import reserved_slots
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.core.weights import ready_ns

# Of routers: weight of the predicted finish beside the work at a GPU. With more, routers avoid stragglers and GPUs that
# lack weights better; with less, fewer routers choose the same GPU by old reports (`benchmarks/cluster_sim.py`).
PREDICTED_WEIGHT = 0.25
SLOW = 2.0  # of routers: a GPU that takes more times its predictions than this counts as slower than its profiles


@compiled
def predict(s: State, m: int, priority: int, deadline: int, now: int) -> float:
    core = s.core[0]
    model = s.model[m]
    instance = model.filling
    full = s.size[m, model.n_sizes - 1]
    joins, batches_before = 1, 0.0
    if instance < 0:
        batches_before = model.queued / full.batch
    else:
        # Producers may have taken slots that the core does not know yet.
        joins = max(s.instance[instance].taken, reserved_slots(s, instance)) + 1
        if joins > full.batch:  # the instance is full: it goes first, with the requests queued behind it
            joins, batches_before = 1, 1.0 + model.queued / full.batch
    k = size_for(s, m, joins)
    alone = s.size[m, k].total_ns
    fill_job(s, 1, m, 0, now)
    fill_terms(s, 1, m, now, deadline, priority, core.start_tag_ns)
    fill_unstarted(s, 1, m, k, joins)
    mine = ask_about(s, s.call[0].rank, 1)
    ahead = batches_before * full.total_ns
    demand, idle, beside = s.size[m, k].demand, 1.0 - s.size[m, k].demand, 0
    for other in range(s.instance.shape[0]):
        inst = s.instance[other]
        if inst.model < 0 or inst.state == codes.HELD or other == instance or (inst.live == 0 and inst.active_at < 0):
            continue
        fill_instance_job(s, other, now)
        left = s.job[0].remaining_ns
        if inst.live > 0 and (inst.model == m or ask_about(s, s.call[0].rank, 0) <= mine):
            ahead += left
            if inst.state == codes.FILLING:
                its = s.size[inst.model, s.model[inst.model].n_sizes - 1]
                ahead += s.model[inst.model].queued / its.batch * its.total_ns
        elif inst.active_at >= 0:  # it ranks worse, but runs beside the new job
            ahead += min(left, alone)
        elif inst.issued > inst.done:  # its launched segments come first
            rest = 0.0
            if inst.issued < inst.segments and not inst.whole:
                rest = s.segment[inst.model, inst.size, inst.issued].tail_ns
            ahead += left - rest
        if inst.active_at >= 0:
            demand += inst.demand
            idle *= 1.0 - inst.demand
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

    def finish(
        self, state: State, model: int, now: int, priority: int | None = None, deadline_ns: int = codes.NEVER
    ) -> int:
        """As `predict_finish`; `state` is another one after the engine has grown."""
        if state is not self._state:
            self._state, self._reader = state, reader(state)
        urgency = int(state.model["priority"][model]) if priority is None else priority
        return int(predict(self._reader, model, urgency, deadline_ns, now))


def predict_finish(
    state: State, model: int, now: int, priority: int | None = None, deadline_ns: int = codes.NEVER
) -> int:
    """When a request of the model would be done if it arrived now: after the work that goes before it.

    May be called from any thread. It reads tables while the core writes them, so the result is an estimate.
    """
    return Predictor(state).finish(state, model, now, priority, deadline_ns)


ADMITTED, AT_LIMIT, TOO_LATE = range(3)

ADMISSION_REQUEST = np.dtype(  # a request that asks for admission, with its prediction
    [
        ("model", "i8"),  # row
        ("priority", "i8"),
        ("entered_ns", "i8"),
        ("now_ns", "i8"),
        ("deadline_ns", "i8"),
        ("limit_ns", "f8"),  # time limit
        ("predicted_ns", "f8"),  # predicted time
        ("longest_admitted_ns", "f8"),  # longest predicted time that is admitted
    ],
    align=True,
)
ADMISSION_LIMIT = np.dtype(  # [model]
    [
        ("size", "f8"),  # number of requests that may be in flight
        ("in_flight", "i8"),
        ("shortest_ns", "f8"),  # shortest latency of a request in time so far
        ("since_ns", "i8"),  # when it was last reduced
        ("margin", "f8"),  # part of the time limit that may be used
        ("margin_ns", "i8"),  # time of the latest margin (0: no request has come yet, at any clock time)
        ("lowered_ns", "i8"),  # when the first of a series of late requests lowered the margin (0: not yet)
        ("floor", "f8"),  # least margin that the other requests of the series can cause
        # recent completions per nanosecond while requests were in flight; 0: not measured by a trial batch yet
        ("rate", "f8"),
        ("counted", "i8"),  # completions since the rate was last computed
        ("counted_ns", "i8"),  # time with requests in flight since then
        ("done_ns", "i8"),  # the latest of these completions
    ],
    align=True,
)


def new_limits(slots: Iterable[int], tuning: Tuning) -> Table:
    """The first admission limits of models with these batch sizes."""
    found = np.zeros(len(sizes := list(slots)), ADMISSION_LIMIT)
    found["size"] = 2.0 * np.array(sizes)
    found["shortest_ns"], found["margin"] = np.inf, tuning.first_margin
    return found


# The next three functions call no others, so that Python can run them too (`.py_func`), on plain Python objects as
# rows. `tuning` is a row of TUNING, or a `Tuning`.


@part
def longest_admitted_ns(limits: Any, m: int, limit_ns: float, alone: float, live: int, now: int, tuning: Any) -> float:
    """Longest predicted latency still admitted, given the time on an idle GPU and the live requests.

    Never less than the time on an idle GPU, if that is within the time limit: an idle GPU always serves.
    """
    limit = limits[m]
    shortest = min(limit.shortest_ns if limit.shortest_ns < np.inf else alone, limit_ns)
    if limit.margin_ns == 0:  # from now on the margin grows, even if no request is admitted
        limit.margin_ns = max(now, 1)
    margin = min(1.0, limit.margin + max(0.0, now - limit.margin_ns - tuning.quiet_ns) / tuning.margin_back_ns)
    if limit.lowered_ns == 0 and (limit.in_flight == 0 or live <= tuning.few_requests):
        margin = max(margin, tuning.few_margin)
    return float(max(shortest + margin * (limit_ns - shortest), min(alone, limit_ns)))


@part
def most_in_flight(limits: Any, m: int, limit_ns: float, tuning: Any) -> float:
    """How many of the model's requests with this time limit may be in flight.

    A stall of the machine lowers the admission limit. So at least as many requests are admitted as complete, at the
    recent rate, within the margin's part of the time limit.
    """
    limit = limits[m]
    return float(max(limit.size, limit.margin * limit.rate * limit_ns))


@part
def note_latency(limits: Any, m: int, entered: int, now: int, limit_ns: float, number: int, tuning: Any) -> None:
    """Adjusts the admission limit after a request, one of `number` in flight, is done or its deadline has passed."""
    limit = limits[m]
    took = float(now - entered)
    limit.counted += 1
    limit.counted_ns += max(0, now - max(limit.done_ns, entered))
    limit.done_ns = max(now, limit.done_ns)
    if limit.rate > 0.0 and limit.counted_ns >= tuning.rate_ns and limit.counted >= tuning.few_requests:
        rate = limit.counted / limit.counted_ns
        if rate > limit.rate:  # the highest rate counts, so that a stall does not lower it
            limit.rate = rate
        elif took > tuning.late_share * limit_ns:  # otherwise the rate reflects the demand, not the capacity
            limit.rate += tuning.rate_back * (rate - limit.rate)
        limit.counted = limit.counted_ns = 0
    if took <= limit_ns:
        limit.shortest_ns = min(limit.shortest_ns, took)
    known = limit.shortest_ns < np.inf
    if known and limit_ns < limit.shortest_ns:  # no request has been this fast: the outcome carries no information
        return
    since = limit.margin_ns if limit.margin_ns > 0 else now
    margin = min(1.0, limit.margin + max(0.0, now - since - tuning.quiet_ns) / tuning.margin_back_ns)
    if not known or limit_ns >= tuning.room_factor * limit.shortest_ns:
        if took <= limit_ns:
            margin = min(
                1.0, margin * (1.0 + (tuning.more_margin if limit.lowered_ns > 0 else tuning.first_more_margin))
            )
        else:
            if known and entered >= limit.lowered_ns:  # a request that entered earlier belongs to the same series
                limit.lowered_ns, limit.floor = now, tuning.stall_share * margin
            margin = max(tuning.least_margin, limit.floor, margin * (1.0 - tuning.less_margin))
    limit.margin, limit.margin_ns = margin, now
    shortest = min(limit.shortest_ns, limit_ns)
    if took > shortest + tuning.late_share * margin * (limit_ns - shortest):
        if entered >= limit.since_ns:  # likewise
            limit.size, limit.since_ns = max(1.0, limit.size * tuning.limit_decrease), now
    elif number * 2 >= limit.size:  # only a limit that is nearly reached shows whether it could be higher
        limit.size = min(tuning.largest_limit, limit.size + 1.0 / limit.size)


@part
def try_admit(s: State, limits: Table, m: int, asked: Any) -> int:
    """Admits a request if its model is below its admission limit and the prediction is in time: ADMITTED … TOO_LATE."""
    if limits[m].in_flight >= most_in_flight(limits, m, asked.limit_ns, s.tuning[0]):
        return AT_LIMIT
    row, now = asked.model, asked.now_ns
    asked.longest_admitted_ns = longest_admitted_ns(
        limits, m, asked.limit_ns, s.size[row, 0].total_ns, s.core[0].live, now, s.tuning[0]
    )
    asked.predicted_ns = predict(s, row, asked.priority, asked.deadline_ns, now) - asked.entered_ns
    if asked.predicted_ns > asked.longest_admitted_ns:
        return TOO_LATE
    limits[m].in_flight += 1
    return ADMITTED


@compiled
def admit_one(s: State, limits: Table, asked: Table) -> int:
    """`try_admit` for a server: one model's limits, one request. `s` needs its own scratch (`reader`)."""
    return int(try_admit(s, limits, 0, asked[0]))


@part
def end_admitted(s: State, limits: Table, m: int, entered: int, finish: int, limit_ns: float, status: int) -> None:
    """Ends an admitted request. A cancelled or failed request does not change the admission limit."""
    if status == codes.OK:
        note_latency(limits, m, entered, finish, limit_ns, limits[m].in_flight, s.tuning[0])
    elif status == codes.EXPIRED:  # ended at its deadline, so it counts as late
        after = max(finish, entered + int(limit_ns) + 1)
        note_latency(limits, m, entered, after, limit_ns, limits[m].in_flight, s.tuning[0])
    limits[m].in_flight -= 1
