"""Which requests are let in: those that would be in time by the core's prediction, and only so many of a model's.

The arithmetic of admission, once: for a server (`paellapy.serving.admission`), for simulated time and for the
benchmarks' load generator. How many of a model's may be in flight follows their latencies: additive increase,
multiplicative decrease, as TCP finds its congestion window; it aims at half of the time there is. And both this and
predictions may use up only part of that time: a margin that shrinks with every request that was let in and is late
after all, and grows with those in time, so that about one in two hundred is late: then 99 % are in time also where it
varies. It begins low and grows fast until the first one is late: predictions know nothing of those who follow, and a
flood begins on an idle GPU. Late ones before any was in time do not count as the first: a model may be slow when it is
cold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paellapy.instrument.device.jit import compiled, part
from paellapy.scheduler.core.codes import EXPIRED, OK
from paellapy.scheduler.core.predict import predict
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tuning import Tuning

LET_IN, NO_ROOM, TOO_LATE = range(3)

ASKED = np.dtype(  # a request at the door, and what the prediction says of it
    [
        ("model", "i8"),  # row
        ("priority", "i8"),
        ("entered_ns", "i8"),
        ("now_ns", "i8"),
        ("deadline_ns", "i8"),
        ("limit_ns", "f8"),  # how long it may take
        ("predicted_ns", "f8"),  # how long it would take,
        ("reach_ns", "f8"),  # and the longest such time that is let in
    ],
    align=True,
)
ALLOWANCE = np.dtype(  # [model]
    [
        ("size", "f8"),  # so many may be in flight
        ("in_flight", "i8"),
        ("shortest_ns", "f8"),  # latency of those in time yet
        ("since_ns", "i8"),  # when it was last made smaller
        ("margin", "f8"),  # part of the time that may be used,
        ("margin_ns", "i8"),  # as of when (0: nobody has asked yet, whatever the clock says),
        ("lowered_ns", "i8"),  # when the first of a row of late ones lowered it, after some in time (0: none yet),
        ("floor", "f8"),  # and what the others of the row leave of it
        ("rate", "f8"),  # requests a nanosecond that were done of late while there were any; 0: no trial has begun it
        ("counted", "i8"),  # requests done since that was last worked out,
        ("counted_ns", "i8"),  # in so much time with requests in flight,
        ("done_ns", "i8"),  # the last of them when
    ],
    align=True,
)


def new_allowances(slots: Iterable[int], tuning: Tuning) -> Table:
    """For models with batches of up to so many requests."""
    found = np.zeros(len(sizes := list(slots)), ALLOWANCE)
    found["size"] = 2.0 * np.array(sizes)
    found["shortest_ns"], found["margin"] = np.inf, tuning.first_margin
    return found


# The next three call nothing, so that Python can run them too (`.py_func`), on rows that are objects of its own.
# `tuning` is a row of TUNING, or a `Tuning`.


@part
def reach_ns(allowance: Any, m: int, limit: float, alone: float, live: int, now: int, tuning: Any) -> float:
    """Longest predicted latency still admitted, given the time on an idle GPU and the live requests.

    Never less than the time on an idle GPU, where that is within the limit: an idle GPU serves.
    """
    w = allowance[m]
    shortest = min(w.shortest_ns if w.shortest_ns < np.inf else alone, limit)
    if w.margin_ns == 0:  # from now on it grows, also where nothing is let in
        w.margin_ns = max(now, 1)
    margin = min(1.0, w.margin + max(0.0, now - w.margin_ns - tuning.quiet_ns) / tuning.margin_back_ns)
    if w.lowered_ns == 0 and (w.in_flight == 0 or live <= tuning.few_requests):
        margin = max(margin, tuning.few_margin)
    return float(max(shortest + margin * (limit - shortest), min(alone, limit)))


@part
def room(allowance: Any, m: int, limit: float, tuning: Any) -> float:
    """How many of the model's may be in flight, whose time is limited so.

    By latencies, a stall of the machine makes it few: as many as are done in part of the time there is, at the rate of
    late, are let in all the same.
    """
    w = allowance[m]
    return float(max(w.size, w.margin * w.rate * limit))


@part
def note_latency(allowance: Any, m: int, entered: int, now: int, limit: float, number: int, tuning: Any) -> None:
    """A request, one of so many in flight, is done, or its deadline has passed: the allowance follows."""
    w = allowance[m]
    took = float(now - entered)
    w.counted += 1
    w.counted_ns += max(0, now - max(w.done_ns, entered))
    w.done_ns = max(now, w.done_ns)
    if w.rate > 0.0 and w.counted_ns >= tuning.rate_ns and w.counted >= tuning.few_requests:
        rate = w.counted / w.counted_ns
        if rate > w.rate:  # a stall is forgotten: the best counts
            w.rate = rate
        elif took > tuning.late_share * limit:  # otherwise it says how many asked, not how many could be done
            w.rate += tuning.rate_back * (rate - w.rate)
        w.counted = w.counted_ns = 0
    if took <= limit:
        w.shortest_ns = min(w.shortest_ns, took)
    known = w.shortest_ns < np.inf
    if known and limit < w.shortest_ns:  # it asked for what nobody had yet, and says nothing
        return
    since = w.margin_ns if w.margin_ns > 0 else now
    margin = min(1.0, w.margin + max(0.0, now - since - tuning.quiet_ns) / tuning.margin_back_ns)
    if not known or limit >= tuning.room_factor * w.shortest_ns:
        if took <= limit:
            margin = min(1.0, margin * (1.0 + (tuning.more_margin if w.lowered_ns > 0 else tuning.first_more_margin)))
        else:
            if known and entered >= w.lowered_ns:  # one that entered before knows nothing of it
                w.lowered_ns, w.floor = now, tuning.stall_share * margin
            margin = max(tuning.least_margin, w.floor, margin * (1.0 - tuning.less_margin))
    w.margin, w.margin_ns = margin, now
    shortest = min(w.shortest_ns, limit)
    if took > shortest + tuning.late_share * margin * (limit - shortest):
        if entered >= w.since_ns:  # here too
            w.size, w.since_ns = max(1.0, w.size * tuning.window_decrease), now
    elif number * 2 >= w.size:  # only an allowance that is used tells whether it could be larger
        w.size = min(tuning.largest_window, w.size + 1.0 / w.size)


@part
def lets_in(s: State, allowance: Table, m: int, asked: Any) -> int:
    """Whether a request has room in row m of the allowances and would be in time by the prediction: then it is in."""
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
    """`lets_in` for a server: one model's allowance, one request. `s` has a scratch of its own (`predict.reader`)."""
    return int(lets_in(s, allowance, 0, asked[0]))


@part
def leaves(
    s: State, allowance: Table, m: int, entered: int, finish: int, limit: float, status: int
) -> None:
    """A request that was let in is over. What was cancelled or failed says nothing of the time it would have taken."""
    if status == OK:
        note_latency(allowance, m, entered, finish, limit, allowance[m].in_flight, s.tuning[0])
    elif status == EXPIRED:  # at its deadline, and so too late
        after = max(finish, entered + int(limit) + 1)
        note_latency(allowance, m, entered, after, limit, allowance[m].in_flight, s.tuning[0])
    allowance[m].in_flight -= 1
