"""Admission: a request is let in if the core predicts that it is in time, and if its model's allowance has room.

This is the only implementation: for a server (`paellapy.serving.admission`), for simulated time, and for the load
generator of the benchmarks. The number of a model's requests in flight follows their latencies by additive increase and
multiplicative decrease, like a TCP congestion window, and aims at half of the time limit.

Both this number and predictions may use only a part of the time limit: the margin. It shrinks with every admitted
request that is late, and grows with requests in time, so that about one in two hundred is late; 99 % are then in time
even where latencies vary. The margin starts low, because predictions do not know the requests that follow and a flood
starts on an idle GPU. It grows fast until the first late request. Late requests before any request was in time do not
count: a model may be slow while it is cold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paellapy.instrument.jit import compiled, part
from paellapy.scheduler.core.codes import EXPIRED, OK
from paellapy.scheduler.core.predict import predict
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tuning import Tuning

LET_IN, NO_ROOM, TOO_LATE = range(3)

ASKED = np.dtype(  # a request that asks to be let in, with its prediction
    [
        ("model", "i8"),  # row
        ("priority", "i8"),
        ("entered_ns", "i8"),
        ("now_ns", "i8"),
        ("deadline_ns", "i8"),
        ("limit_ns", "f8"),  # time limit
        ("predicted_ns", "f8"),  # predicted time
        ("reach_ns", "f8"),  # longest predicted time that is let in
    ],
    align=True,
)
ALLOWANCE = np.dtype(  # [model]
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


def new_allowances(slots: Iterable[int], tuning: Tuning) -> Table:
    """Allowances for models with these batch sizes."""
    found = np.zeros(len(sizes := list(slots)), ALLOWANCE)
    found["size"] = 2.0 * np.array(sizes)
    found["shortest_ns"], found["margin"] = np.inf, tuning.first_margin
    return found


# The next three functions call no others, so that Python can run them too (`.py_func`), on plain Python objects as
# rows. `tuning` is a row of TUNING, or a `Tuning`.


@part
def reach_ns(allowance: Any, m: int, limit: float, alone: float, live: int, now: int, tuning: Any) -> float:
    """Longest predicted latency still admitted, given the time on an idle GPU and the live requests.

    Never less than the time on an idle GPU, if that is within the limit: an idle GPU always serves.
    """
    w = allowance[m]
    shortest = min(w.shortest_ns if w.shortest_ns < np.inf else alone, limit)
    if w.margin_ns == 0:  # from now on the margin grows, even if no request is let in
        w.margin_ns = max(now, 1)
    margin = min(1.0, w.margin + max(0.0, now - w.margin_ns - tuning.quiet_ns) / tuning.margin_back_ns)
    if w.lowered_ns == 0 and (w.in_flight == 0 or live <= tuning.few_requests):
        margin = max(margin, tuning.few_margin)
    return float(max(shortest + margin * (limit - shortest), min(alone, limit)))


@part
def room(allowance: Any, m: int, limit: float, tuning: Any) -> float:
    """How many of the model's requests with this time limit may be in flight.

    A stall of the machine reduces the allowance by its latencies. So at least as many requests are let in as complete,
    at the recent rate, within the margin's part of the limit.
    """
    w = allowance[m]
    return float(max(w.size, w.margin * w.rate * limit))


@part
def note_latency(allowance: Any, m: int, entered: int, now: int, limit: float, number: int, tuning: Any) -> None:
    """Adjusts the allowance after a request, one of `number` in flight, is done or its deadline has passed."""
    w = allowance[m]
    took = float(now - entered)
    w.counted += 1
    w.counted_ns += max(0, now - max(w.done_ns, entered))
    w.done_ns = max(now, w.done_ns)
    if w.rate > 0.0 and w.counted_ns >= tuning.rate_ns and w.counted >= tuning.few_requests:
        rate = w.counted / w.counted_ns
        if rate > w.rate:  # the highest rate counts, so that a stall does not lower it
            w.rate = rate
        elif took > tuning.late_share * limit:  # otherwise the rate reflects the demand, not the capacity
            w.rate += tuning.rate_back * (rate - w.rate)
        w.counted = w.counted_ns = 0
    if took <= limit:
        w.shortest_ns = min(w.shortest_ns, took)
    known = w.shortest_ns < np.inf
    if known and limit < w.shortest_ns:  # no request has been this fast: the outcome carries no information
        return
    since = w.margin_ns if w.margin_ns > 0 else now
    margin = min(1.0, w.margin + max(0.0, now - since - tuning.quiet_ns) / tuning.margin_back_ns)
    if not known or limit >= tuning.room_factor * w.shortest_ns:
        if took <= limit:
            margin = min(1.0, margin * (1.0 + (tuning.more_margin if w.lowered_ns > 0 else tuning.first_more_margin)))
        else:
            if known and entered >= w.lowered_ns:  # a request that entered earlier belongs to the same series
                w.lowered_ns, w.floor = now, tuning.stall_share * margin
            margin = max(tuning.least_margin, w.floor, margin * (1.0 - tuning.less_margin))
    w.margin, w.margin_ns = margin, now
    shortest = min(w.shortest_ns, limit)
    if took > shortest + tuning.late_share * margin * (limit - shortest):
        if entered >= w.since_ns:  # likewise
            w.size, w.since_ns = max(1.0, w.size * tuning.window_decrease), now
    elif number * 2 >= w.size:  # only a well-used allowance shows whether it could be larger
        w.size = min(tuning.largest_window, w.size + 1.0 / w.size)


@part
def lets_in(s: State, allowance: Table, m: int, asked: Any) -> int:
    """Lets a request in if row m of the allowances has room and the prediction is in time; returns the verdict."""
    if allowance[m].in_flight >= room(allowance, m, asked.limit_ns, s.tuning[0]):
        return NO_ROOM
    row, now = asked.model, asked.now_ns
    asked.reach_ns = reach_ns(allowance, m, asked.limit_ns, s.size[row, 0].total_ns, s.core[0].live, now, s.tuning[0])
    asked.predicted_ns = predict(s, row, asked.priority, asked.deadline_ns, now) - asked.entered_ns
    if asked.predicted_ns > asked.reach_ns:
        return TOO_LATE
    allowance[m].in_flight += 1
    return LET_IN


@compiled
def ask(s: State, allowance: Table, asked: Table) -> int:
    """`lets_in` for a server: one model's allowance, one request. `s` needs its own scratch (`predict.reader`)."""
    return int(lets_in(s, allowance, 0, asked[0]))


@part
def leaves(
    s: State, allowance: Table, m: int, entered: int, finish: int, limit: float, status: int
) -> None:
    """Ends an admitted request. A cancelled or failed request does not change the allowance."""
    if status == OK:
        note_latency(allowance, m, entered, finish, limit, allowance[m].in_flight, s.tuning[0])
    elif status == EXPIRED:  # ended at its deadline, so it counts as late
        after = max(finish, entered + int(limit) + 1)
        note_latency(allowance, m, entered, after, limit, allowance[m].in_flight, s.tuning[0])
    allowance[m].in_flight -= 1
