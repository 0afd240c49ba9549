"""Progress of the mover and the link: chunks that have arrived, weights that have left, and orders that failed."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part, reachable
from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.codes import (
    BROKEN,
    COMING,
    FAIL_MODE,
    FILLING,
    GOES,
    GONE,
    HERE,
    LEAVING,
    MOVE_TAIL,
    NO_WEIGHTS,
    NONE,
    OUT,
    UNUSED,
)
from paellapy.scheduler.core.lanes import touch
from paellapy.scheduler.core.leaving import take_out
from paellapy.scheduler.core.residency import touch_lanes
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import copy_ns, start_ns

_ZERO, _WORD = np.uint64(0), np.uint64(8)


@part
def give_up(s: State, m: int, now: int) -> None:
    """Ends the requests that wait for weights which cannot be brought."""
    s.residency[0].held_bytes -= s.weights[m].bytes
    s.residency[0].coming -= 1
    s.residency[0].failed += 1
    s.weights[m].stage, s.weights[m].arrived, s.weights[m].unwanted = OUT, 0, 0
    for row in range(s.request.shape[0]):
        if s.request[row].state != UNUSED and s.request[row].model == m:
            take_out(s, row, NO_WEIGHTS, now)


@part
def let_go(s: State, m: int) -> None:
    """Counts weights that have left."""
    r, w = s.residency[0], s.weights[m]
    r.leaving -= 1
    r.evicted += 1
    r.evicted_bytes += w.bytes
    r.look = 1
    w.evicted += 1
    w.stage, w.unwanted = OUT, 0


@part
def put_back(s: State, m: int) -> None:
    """Keeps weights that could not leave. The mover refuses the weights that were ordered to take their place, and a
    load that waits for memory is refused here: otherwise the same eviction would be ordered again and again.
    """
    r, w = s.residency[0], s.weights[m]
    r.leaving -= 1
    r.held_bytes += w.bytes
    r.failed += 1
    r.look = 1
    if r.load_bytes > 0 and r.load_granted == 0:
        r.load_granted = NONE
    w.stuck += 1
    w.stage, w.unwanted = HERE, 0
    if w.keep == GOES:
        w.asked = 1  # it stays until its memory is needed, or until it is ordered to leave
    touch_lanes(s, m)
    r.stuck_before = np.int64(load_at(address(s.move_ring, MOVE_TAIL)))
    store_at(address(s.moved, m), _ZERO)


@part
def look_at_chunks(s: State, m: int, now: int) -> None:
    """Notes chunks that have arrived, so that segments may start."""
    r, w = s.residency[0], s.weights[m]
    before = w.arrived
    while w.arrived < w.chunks and load_at(w.word + _WORD * np.uint64(w.arrived)) != _ZERO:
        w.arrived += 1
    if w.arrived > before:
        s.core[0].changed = 1
        late = now - copy_ns(s, m, min(w.arrived * w.chunk_bytes, w.bytes)) - w.begin_ns
        w.begin_ns += late
        r.link_free_ns += late
    if w.arrived == w.chunks:
        w.stage, w.came_ns = HERE, now
        r.coming -= 1
        r.brought += 1
        r.brought_bytes += w.bytes
        r.reload_ns += now - w.ordered_ns
        w.brought += 1
        w.reload_ns += now - w.ordered_ns
        r.look = 1
        touch_lanes(s, m)
        return
    for k in range(s.model[m].n_lanes):
        lane = s.model_lane[m, k]
        a = s.lane[lane]
        if a.state == FILLING and a.live > 0 and a.ready_at < 0 and s.core[0].whole_always == 0:
            at = start_ns(s, m, a.size, now)
            if at <= now:
                touch(s, lane)
            else:
                s.core[0].room_at_ns = min(s.core[0].room_at_ns, at)


@reachable
def look_at_moves(s: State, now: int) -> int:
    """Handles the moves since the last step: lanes may start, and other weights may come. Returns whether some may."""
    r = s.residency[0]
    if r.managed == 0 or s.core[0].mode == FAIL_MODE:
        return 0
    if r.coming + r.leaving > 0:
        for m in range(s.model.shape[0]):
            stage = s.weights[m].stage
            if stage == COMING:
                if load_at(address(s.moved, m)) == np.uint64(BROKEN):
                    give_up(s, m, now)
                else:
                    look_at_chunks(s, m, now)
            elif stage == LEAVING:
                if load_at(address(s.moved, m)) == np.uint64(BROKEN):
                    put_back(s, m)
                elif load_at(address(s.moved, m)) == np.uint64(GONE):
                    let_go(s, m)
    if r.coming == 0:
        r.link_free_ns = min(r.link_free_ns, float(now))
    return int(r.look)
