"""Gates in the core: launches of other processes wait while there are jobs of higher priority than theirs.

A gate is closed until a certain time, which the core extends while such jobs exist. So the gate opens by itself if the
core ends. A job that can launch nothing, because its inputs or its weights are missing, closes gates only for a while:
a front end may take a slot and never write it, and weights may wait for memory that never becomes free.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import store_at
from paellapy.scheduler.core.codes import NEVER, READY_WAIT
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import all_here

LEASE_NS = 20_000_000  # a closed gate opens this long after the core's last update
# The core's loop stays awake this many times as long while there are gates, because a loop that must wake up closes
# them late. At 250 requests a second on an H200, up to 9 of the 22 slowest requests beside a script found it asleep.
LINGERS = 5
# From the arrival of a lane's latest request. Inputs are usually written within a millisecond. 100 ms is a guess; the
# optimum was not measured.
WAITS_NS = 100_000_000
_ZERO = np.uint64(0)


@part
def shut(s: State, k: int, now: int) -> None:
    """Closes a gate, or keeps it closed."""
    g = s.gate[k]
    if g.closed_until_ns < now + LEASE_NS // 2:
        if g.closed_until_ns == 0:
            g.closed_since_ns = now
            g.closes += 1
        g.closed_until_ns = now + LEASE_NS
        store_at(g.word, np.uint64(g.closed_until_ns))


@part
def close_gates(s: State, priority: int, now: int) -> None:
    """Closes the gates of lower priority for a request that has come. The other processes' last kernels can then end
    while the request's inputs are written.
    """
    if s.core[0].gates == 0:
        return
    for k in range(s.gate.shape[0]):
        if s.gate[k].word != _ZERO and priority > s.gate[k].priority:
            shut(s, k, now)


@part
def closes_gates(s: State, lane: int, now: int) -> bool:
    """Whether gates are closed for this lane: its segments can be, or soon may be, on the GPU."""
    a = s.lane[lane]
    if now < a.latest_ns + WAITS_NS or a.flight_at >= 0:
        return True
    return bool(a.state != READY_WAIT and all_here(s, a.model))


@part
def watch_gates(s: State, now: int) -> None:
    """Closes and opens the gates of other processes."""
    if s.core[0].gates == 0:
        return
    top = -NEVER
    for k in range(s.core[0].active):
        if closes_gates(s, s.active[k], now):
            top = max(top, s.lane[s.active[k]].priority)
    for k in range(s.core[0].ready):
        if closes_gates(s, s.ready[k], now):
            top = max(top, s.lane[s.ready[k]].priority)
    for k in range(s.core[0].held):
        if s.lane[s.held[k]].state == READY_WAIT and closes_gates(s, s.held[k], now):
            top = max(top, s.lane[s.held[k]].priority)
    for k in range(s.gate.shape[0]):
        g = s.gate[k]
        if g.word == _ZERO:
            continue
        if top > g.priority:
            shut(s, k, now)
        elif g.closed_until_ns != 0:
            g.closed_ns += now - g.closed_since_ns
            g.closed_until_ns = 0
            store_at(g.word, _ZERO)
