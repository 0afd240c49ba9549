"""Choosing in the core: the lanes that may launch now, by the policy's ranks.

Lanes that may launch are *active*, at most `core.max_active` of them; the others wait in a heap by rank. A better lane
replaces the worst active one that still has segments to launch; segments that are already launched keep running. Ranks
may depend on the time and on other jobs: the heap's top is ranked afresh whenever it is read, and other lanes in turn.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.gpu_model.heaps import heap_pop, heap_push
from paellapy.instrument.jit import part
from paellapy.instrument.jit_call import call_with
from paellapy.scheduler.core.codes import FILLING, NONE
from paellapy.scheduler.core.concurrency import choose_who_stands_back, find_shortest, gives_way, has_room, stands_back
from paellapy.scheduler.core.lanes import (
    close_lane,
    deactivate,
    make_ready,
    set_running,
    settle,
    take_berth,
    touch,
    unready,
)
from paellapy.scheduler.core.lanes import mark_model_dirty as ask
from paellapy.scheduler.core.launch import feed, host_has_work, may_launch, measure, one_by_one
from paellapy.scheduler.core.requests import fill_lane_job, rank_lane
from paellapy.scheduler.core.shares import over_limit
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import lets_go, look_at_top, note_refused, takes_anything

_ZERO = np.uint64(0)
AGAIN = -2


@part
def refresh(s: State, n: int, now: int) -> None:
    """Ranks the heap's top and n other lanes afresh, so that a rank that depends on the time does not get old."""
    core = s.core[0]
    if core.timeless:
        return
    for k in range(min(n + 1, core.ready)):
        i = 0
        if k > 0:
            core.refresh_at += 1
            if core.refresh_at >= core.ready:
                core.refresh_at = 0
            i = core.refresh_at
        lane = s.ready[i]
        rank = rank_lane(s, lane, now)
        if rank != s.lane[lane].rank:  # most ranks have not changed, and then the lane's place in the heap is right
            make_ready(s, lane, rank)


@part
def activate(s: State, lane: int) -> bool:
    """Starts the lane's turn; False if it must wait for its inputs."""
    core = s.core[0]
    a = s.lane[lane]
    unready(s, lane)
    core.decisions += 1
    if a.state == FILLING:
        complete = close_lane(s, lane)
        take_berth(s, lane, lane)
        ask(s, a.model)
        if s.residency[0].managed > 0:
            s.weights[a.model].served += 1
        if not complete:
            return False
        set_running(s, lane)
    s.active[core.active] = lane
    a.active_at = core.active
    core.active += 1
    a.back = 0
    a.demand = s.size[a.model, a.size].demand
    core.demand += a.demand
    return True


@part
def worst(s: State, now: int) -> int:
    """The active lane of the highest last known rank, among lanes with segments left to launch."""
    core = s.core[0]
    found = NONE
    for k in range(core.active):
        lane = s.active[k]
        a = s.lane[lane]
        if a.issued < a.segments and (found < 0 or a.rank > s.lane[found].rank):
            found = lane
    if found >= 0 and not core.timeless:
        s.lane[found].rank = rank_lane(s, found, now)
    return found


@part
def admitted(s: State, lane: int, now: int) -> bool:
    """Whether the policy, and the client's limit, let the lane launch now."""
    if over_limit(s, lane, now):
        return False
    others = s.core[0].active - (1 if s.lane[lane].active_at >= 0 else 0)
    if s.call[0].admit == _ZERO or takes_anything(s, others):
        return True
    measure(s)
    look_at_top(s)
    fill_lane_job(s, lane, now)
    if lets_go(s, now):
        return True
    note_refused(s, lane)
    return False


@part
def best_admitted(s: State, lane: int, full: bool, most: float, now: int) -> int:
    """The best waiting lane that is admitted, asked in order of rank; NONE if there is none. If the active set is full,
    only ranks below `most` count.
    """
    if admitted(s, lane, now):
        return lane
    # The children of a refused lane in the heap come next, so each lane that is read is also asked.
    n = push_behind(s, 0, 0)
    while n > 0:
        at = s.next_at[0]
        lane = int(s.ready[at])
        if full and s.lane[lane].rank >= most:
            return NONE
        if (full or s.core[0].active == 0 or has_room(s, lane)) and admitted(s, lane, now):
            return lane
        heap_pop(s.next_rank, s.next_at, 0, n)
        n = push_behind(s, at, n - 1)
    return NONE


@part
def push_behind(s: State, at: int, n: int) -> int:
    """Adds the children of a place in the heap of waiting lanes to the scratch heap of n places; returns its new size.
    """
    for k in range(2 * at + 1, min(2 * at + 3, s.core[0].ready)):
        heap_push(s.next_rank, s.next_at, 0, n, s.lane[s.ready[k]].rank, k)
        n += 1
    return n


@part
def settle_all(s: State, now: int) -> None:
    """Puts lanes that have changed, and requests that were kept out of lanes and now may enter, into the heap."""
    settle(s, now)
    if s.core[0].barred > 0:
        call_with(s.call[0].look_at_barred, s, now)
        settle(s, now)


@part
def next_turn(s: State, n: int, swaps: int, now: int) -> int:
    """The lane whose turn comes next, with a place made for it in the active set; NONE if no change is needed; AGAIN if
    requests of other clients may take the lanes of refused ones.
    """
    core = s.core[0]
    settle_all(s, now)
    if core.ready == 0:
        return NONE
    full = core.active >= core.max_active
    # Programs launched in one piece cannot be held back any more.
    if full and (core.whole_always or core.preemptions >= swaps):
        return NONE
    refresh(s, n, now)
    lane = int(s.ready[0])
    if not full and core.active > 0:
        full = not has_room(s, lane)
        if full and (core.whole_always or core.preemptions >= swaps):
            return NONE
    other = NONE
    most = np.inf
    if full:
        other = worst(s, now)
        if other < 0 or s.lane[lane].rank >= s.lane[other].rank:
            return NONE
        most = s.lane[other].rank
    lane = best_admitted(s, lane, full, most, now)
    if core.refused > 0 and call_with(s.call[0].give_up_refused, s, now) > 0 and lane < 0:
        return AGAIN  # each time, a request of a refused client is kept out of lanes until the next round
    if lane < 0 or (one_by_one(s) and best_active(s, s.lane[lane].rank, now) >= 0):
        return NONE
    if other >= 0:
        deactivate(s, other)
        touch(s, other)
        core.preemptions += 1
    return lane


@part
def goes_on(s: State, lane: int, now: int) -> bool:
    """Whether an active lane stays: a policy with `admit`, or a limit, may stop it between segments."""
    a = s.lane[lane]
    asked = s.call[0].admit != _ZERO or s.core[0].limited > 0
    if not asked or a.issued == 0 or a.issued >= a.segments or admitted(s, lane, now):
        return True
    deactivate(s, lane)
    make_ready(s, lane, a.rank)
    return False


@part
def best_active(s: State, most: float, now: int) -> int:
    """The active lane of the lowest rank, at most `most`, that has a segment to launch now; NONE if there is none."""
    core = s.core[0]
    found = NONE
    for k in range(core.active):
        lane = s.active[k]
        if may_launch(s, lane) and not stands_back(s, lane):
            if not core.timeless:
                s.lane[lane].rank = rank_lane(s, lane, now)
            if s.lane[lane].rank <= most and (found < 0 or s.lane[lane].rank < s.lane[found].rank):
                found = lane
    return int(found)


@part
def goes_before_new(s: State, n: int, now: int) -> int:
    """The best active lane, if no waiting lane ranks better; else NONE."""
    settle_all(s, now)
    if s.core[0].ready == 0:
        return best_active(s, np.inf, now)
    refresh(s, n, now)
    return best_active(s, s.lane[s.ready[0]].rank, now)


@part
def choose(s: State, now: int) -> bool:
    """Fills the active set with the best waiting lanes and launches their segments; False if the backend fails.

    Where the host computes the launches, several at once would delay each other and all later requests. There the best
    lane launches one segment, and the choice goes on (`core.changed`) when the host has computed it.
    """
    core = s.core[0]
    n = core.refresh
    swaps = core.preemptions + core.max_active
    stops = core.max_active
    k = NONE
    core.ask_at_ns = np.inf
    core.rounds += 1
    if one_by_one(s):  # a round may end before it comes to the lanes that stand back
        choose_who_stands_back(s)
    while k < core.active:
        lane = NONE
        if host_has_work(s):
            core.changed = 1
            return True
        if one_by_one(s):
            lane = goes_before_new(s, n, now) if k < 0 else best_active(s, np.inf, now)
        # First new lanes, each fed at once, so that the next one is judged by the remaining room.
        if lane < 0 and k < 0:
            lane = next_turn(s, n, swaps, now)
            if lane == AGAIN:
                continue
            if lane < 0:
                k = 0
                choose_who_stands_back(s)
                continue
            n = 0
            if not activate(s, lane) or gives_way(s, lane, find_shortest(s)):
                continue
        else:
            lane = s.active[k] if lane < 0 else lane
            if not goes_on(s, lane, now):  # another lane may have its turn, or have stood back for it
                stops -= 1
                k = NONE if stops >= 0 else 0
                choose_who_stands_back(s)
                continue
            k += 1
            if stands_back(s, lane):
                continue
        if not feed(s, lane, now):
            return False
    core.changed = 0
    core.room_at_ns = min(core.room_at_ns, core.ask_at_ns)
    return True
