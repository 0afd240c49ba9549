"""Lanes in the core: opening one to front ends, filling its slots, closing it, answering its requests, freeing it.

Changes to a lane or a model are noted (`touch`, `ask`) and handled in one place (`settle`). So each rule is written
once, and compiled once into the step, which would otherwise be many times as large.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import load_at, or_at, store_at
from paellapy.scheduler.core.codes import (
    ABSENT,
    CLOSED,
    CLOSING,
    FAIL_MODE,
    FAULTED,
    FILLING,
    FREE,
    GENERATION_MASK,
    GENERATION_SHIFT,
    HELD,
    MODEL_CLOSED,
    NEVER,
    NONE,
    OK,
    OPEN,
    READY_WAIT,
    RESERVED_MASK,
    RESERVED_SHIFT,
    RUN_MODE,
    RUNNING,
)
from paellapy.scheduler.core.heaps import heap_down, heap_remove, heap_up, queue_first
from paellapy.scheduler.core.requests import complete, post_done, rank_lane
from paellapy.scheduler.core.rings import ONE, address, bit_of
from paellapy.scheduler.core.slots import fit_to_run, move_in
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import berth_is_free, may_start

_CLOSED = np.uint64(CLOSED)
_MASK = np.uint64(RESERVED_MASK)
_SHIFT = np.uint64(RESERVED_SHIFT)
_GENERATION_SHIFT = np.uint64(GENERATION_SHIFT)
_ZERO = np.uint64(0)
_ALL = np.uint64((1 << 64) - 1)


@part
def touch(s: State, lane: int) -> None:
    """Marks a changed lane, to be settled before the next decision."""
    core = s.core[0]
    a = s.lane[lane]
    if a.touched == 0:
        a.touched = 1
        s.touched[core.touched] = lane
        core.touched += 1
    core.changed = 1


@part
def ask(s: State, m: int) -> None:
    """Marks a model that may have requests for a lane, a free lane for requests, or, while closing, nothing left to do.
    """
    core = s.core[0]
    model = s.model[m]
    if model.asking == 0:
        model.asking = 1
        s.asking[core.asking] = m
        core.asking += 1
    core.changed = 1


# --- the heap of lanes that wait for their turn, and the set of active lanes ------------------------------------------


@part
def make_ready(s: State, lane: int, rank: float) -> None:
    """Lets the lane compete with this rank."""
    core = s.core[0]
    a = s.lane[lane]
    a.rank = rank
    keys, ties, at = s.lane["rank"], s.lane["arrival_ns"], s.lane["ready_at"]
    if a.ready_at < 0:
        s.ready[core.ready] = lane
        a.ready_at = core.ready
        core.ready += 1
    i = heap_up(s.ready, at, keys, ties, a.ready_at)
    heap_down(s.ready, core.ready, at, keys, ties, i)


@part
def unready(s: State, lane: int) -> None:
    core = s.core[0]
    if s.lane[lane].ready_at >= 0:
        heap_remove(s.ready, core.ready, s.lane["ready_at"], s.lane["rank"], s.lane["arrival_ns"], lane)
        core.ready -= 1


@part
def deactivate(s: State, lane: int) -> None:
    core = s.core[0]
    a = s.lane[lane]
    i = a.active_at
    if i >= 0:
        core.active -= 1
        last = s.active[core.active]
        s.active[i] = last
        s.lane[last].active_at = i
        a.active_at = NONE
        core.demand = core.demand - a.demand if core.active > 0 else 0.0


# --- a lane's life -------------------------------------------------------------------------------------------------


@part
def fill_lane(s: State, m: int) -> None:
    """Moves the model's queue into its filling lane; opens a free lane if there is no filling one."""
    model = s.model[m]
    lane = model.filling
    if lane < 0:
        idle = model.queued == 0
        if model.free_n == 0 or s.core[0].mode == FAIL_MODE or model.state == ABSENT:
            return
        if idle and model.state == CLOSING:
            return
        model.free_n -= 1
        lane = s.free_lane[m, model.free_n]
        a = s.lane[lane]
        a.state, a.size, a.taken, a.live, a.issued, a.done, a.whole = FILLING, 0, 0, 0, 0, 0, 0
        a.faulty = 0
        a.segments = NONE
        a.started_ns = NEVER
        a.generation = (a.generation + 1) & GENERATION_MASK
        model.filling = lane
        model.warm = 0
        for k in range(s.lane_ready.shape[1]):
            s.lane_ready[lane, k] = s.lane_hold[lane, k] = s.lane_known[lane, k] = _ZERO
        store_at(address(s.lane_word, lane), np.uint64(a.generation) << _GENERATION_SHIFT)
    if model.queued > 0:
        while model.queued > 0 and move_in(s, lane, queue_first(s, model)):
            pass
        touch(s, lane)
    if model.state != CLOSING:  # after the queue is served: waiting requests go first
        slots = s.size[m, model.n_sizes - 1].batch
        store_at(address(s.filling, m), (np.uint64(slots) << np.uint64(32)) | np.uint64(lane + 1))


@part
def all_in(s: State, lane: int) -> bool:
    """Whether every reserved slot is known to the core and written."""
    word = load_at(address(s.lane_word, lane))
    reserved = np.int64((word >> _SHIFT) & _MASK)
    if s.lane[lane].taken != reserved:
        return False
    k = 0
    while reserved > 0:
        wanted = _ALL if reserved >= 64 else (ONE << np.uint64(reserved)) - ONE
        if load_at(s.lane_ready[lane, k:].ctypes.data) != wanted:
            return False
        reserved -= 64
        k += 1
    return True


@part
def all_read(s: State, lane: int) -> bool:
    """Whether all outputs of the lane have been read."""
    bits = _ZERO
    for k in range(s.lane_hold.shape[1]):
        bits |= load_at(s.lane_hold[lane, k:].ctypes.data)
    return bool(bits == _ZERO)


@part
def close_lane(s: State, lane: int) -> bool:
    """Closes the lane to requests; returns whether it is complete. If not, it waits as READY_WAIT among the held lanes.
    """
    core = s.core[0]
    a = s.lane[lane]
    m = a.model
    store_at(address(s.filling, m), _ZERO)
    or_at(address(s.lane_word, lane), _CLOSED)
    s.model[m].filling = NONE
    a.state = READY_WAIT
    if all_in(s, lane):
        return True
    s.held[core.held] = lane
    core.held += 1
    return False


@part
def set_running(s: State, lane: int) -> None:
    a = s.lane[lane]
    fit_to_run(s, lane)
    a.state = RUNNING
    a.segments = s.size[a.model, a.size].segments


@part
def free_lane(s: State, lane: int) -> None:
    """Returns the lane to its model's free lanes."""
    a = s.lane[lane]
    m = a.model
    a.state = FREE
    for k in range(a.taken):
        s.slot_client[lane, k] = 0  # a front end may take a slot and die before it says for whom
    a.taken = a.live = 0
    s.free_lane[m, s.model[m].free_n] = lane
    s.model[m].free_n += 1
    s.model[m].warm = 1


@part
def take_berth(s: State, lane: int, holder: int) -> None:
    """Gives the berth to the lane, or to none (NONE), and updates which lanes of the berth compete."""
    b = s.lane[lane].berth
    if b < 0:
        return
    s.berth[b] = holder + 1
    for other in range(s.lane.shape[0]):
        if s.lane[other].berth == b and other != lane and s.lane[other].state == FILLING and s.lane[other].live > 0:
            touch(s, other)


@part
def is_faulty(s: State, lane: int, slot: int) -> bool:
    """Whether the model failed on the values in this slot."""
    return bool(s.lane[lane].faulty and s.lane_fault[lane, slot >> 6] & bit_of(slot) != _ZERO)


@part
def end_lane(s: State, lane: int, now: int) -> None:
    """Answers the requests of a lane whose launches are done. The lane is HELD until all outputs are read."""
    core = s.core[0]
    a = s.lane[lane]
    deactivate(s, lane)
    take_berth(s, lane, NONE)
    if core.hold and a.live > 0:
        # Set before the first completion is visible: from then on, front ends clear their bits.
        for k in range(a.taken):
            if s.slot[lane, k] >= 0 and not is_faulty(s, lane, k):
                s.lane_hold[lane, k >> 6] |= bit_of(k)
        a.state = HELD
        s.held[core.held] = lane
        core.held += 1
    core.first = 1
    for k in range(a.taken):
        row = s.slot[lane, k]
        s.slot[lane, k] = NONE
        if row >= 0:
            complete(s, row, FAULTED if is_faulty(s, lane, k) else OK, now)
    a.live = 0


@part
def settle_lane(s: State, lane: int, now: int) -> None:
    """Moves a lane to its proper place: into the heap with its current rank, to its end, or back to be filled."""
    a = s.lane[lane]
    over = False  # whether the lane is no longer needed
    competes = False
    if a.state == FILLING:
        competes = a.live > 0 and may_start(s, lane, now) and berth_is_free(s, lane)
        if a.live == 0 and (a.taken > 0 or s.model[a.model].state == CLOSING):
            over = close_lane(s, lane)
            ask(s, a.model)
    elif a.state == RUNNING:
        if a.live == 0:
            a.segments = a.issued  # the remaining segments are not needed
        if a.done == a.segments:
            end_lane(s, lane, now)
            over = a.state != HELD
        else:
            competes = a.active_at < 0 and a.issued < a.segments
    if competes or a.active_at >= 0:
        a.rank = rank_lane(s, lane, now)
    if competes:
        make_ready(s, lane, a.rank)
    else:
        unready(s, lane)
    if over:
        free_lane(s, lane)
        ask(s, a.model)


@part
def look_at_held(s: State) -> None:
    """Checks the lanes that wait for a front end to read outputs or to write inputs."""
    core = s.core[0]
    k = 0
    while k < core.held:
        lane = s.held[k]
        a = s.lane[lane]
        if a.state == HELD:
            over = all_read(s, lane)
        else:
            over = all_in(s, lane)
        if not over:
            k += 1
            continue
        core.held -= 1
        s.held[k] = s.held[core.held]
        if a.state == HELD:
            free_lane(s, lane)
            ask(s, a.model)
        else:
            set_running(s, lane)
            touch(s, lane)


@part
def reading_matters(s: State) -> bool:
    """Whether any request waits for a lane whose outputs are being read. If not, the core may learn of it later."""
    core = s.core[0]
    if core.mode != RUN_MODE:
        return bool(core.held > 0)
    for k in range(core.held):
        m = s.model[s.lane[s.held[k]].model]
        if m.state != OPEN or m.queued > 0 or m.filling < 0:
            return True
    return False


@part
def stay_warm(s: State, m: int) -> None:
    """Opens the lane that ran last instead of an empty one, because its memory is in the GPU's cache. On the H200,
    densenet121 with one request at a time took 3 to 4 % longer on two alternating lanes than on one. Not where the
    hardware decides: that mode reproduces programs without a scheduler.
    """
    core = s.core[0]
    model = s.model[m]
    lane = model.filling
    if model.warm == 0 or lane < 0 or s.lane[lane].taken > 0:
        return
    if model.state != OPEN or core.mode != RUN_MODE or core.whole_always:
        return
    if (load_at(address(s.lane_word, lane)) >> _SHIFT) & _MASK == _ZERO and close_lane(s, lane):
        free_lane(s, lane)
        top = model.free_n - 1
        s.free_lane[m, top], s.free_lane[m, top - 1] = s.free_lane[m, top - 1], s.free_lane[m, top]


@part
def settle_model(s: State, m: int, now: int) -> None:
    model = s.model[m]
    stay_warm(s, m)
    fill_lane(s, m)
    lane = model.filling
    if model.state == CLOSING and lane >= 0 and s.lane[lane].live == 0:
        touch(s, lane)
    if model.state == CLOSING and model.live == 0 and model.free_n == model.n_lanes:
        model.state = ABSENT
        post_done(s, NONE, m, MODEL_CLOSED, now)


@part
def settle(s: State, now: int) -> None:
    core = s.core[0]
    while core.touched + core.asking > 0:
        if core.touched > 0:
            core.touched -= 1
            lane = s.touched[core.touched]
            s.lane[lane].touched = 0
            settle_lane(s, lane, now)
        else:
            core.asking -= 1
            m = s.asking[core.asking]
            s.model[m].asking = 0
            settle_model(s, m, now)
