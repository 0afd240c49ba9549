"""Choosing in the core: the instances that may launch now, by the policy's ranks.

Instances that may launch are *active*, at most `core.max_active` of them; the others wait in a heap by rank. A better
instance replaces the worst active one that still has segments to launch; segments that are already launched keep
running. Ranks may depend on the time and on other jobs: the heap's top is ranked afresh whenever it is read, and other
instances in turn.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.gpu_model.tables import heap_pop, heap_push
from paellapy.instrument.numba_ext.link import call_with, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ZERO
from paellapy.scheduler.core.concurrency import choose_yielding, has_room, may_yield_to, must_yield, shortest_active
from paellapy.scheduler.core.heaps import heap_down
from paellapy.scheduler.core.instances import (
    close_instance,
    deactivate,
    make_ready,
    mark_instance_dirty,
    mark_model_dirty,
    reconcile,
    return_terms,
    set_arena_holder,
    set_running,
    unready,
)
from paellapy.scheduler.core.launch import host_has_work, launch_segments, may_launch, one_by_one, update_gpu_facts
from paellapy.scheduler.core.requests import checked_rank, fill_instance_job, rank_instance
from paellapy.scheduler.core.shares import over_limit
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import admits, may_skip_admit, note_refused, update_top_priority
from paellapy.scheduler.core.weights import holder

AGAIN = -2


@part
def refresh_ranks(s: State, n: int, now: int) -> None:
    """Ranks the heap's top and n other instances afresh, or all of them, so that a rank that depends on the time does
    not get old.
    """
    core = s.core[0]
    if core.timeless:
        return
    if n >= core.ready:
        for k in range(core.ready):
            s.instance[s.ready[k]].rank = rank_instance(s, s.ready[k], now)
        for k in range(core.ready // 2 - 1, -1, -1):
            heap_down(s.ready, core.ready, s.instance["ready_at"], s.instance["rank"], s.instance["arrival_ns"], k)
        return
    for k in range(min(n + 1, core.ready)):
        i = 0
        if k > 0:
            core.refresh_at += 1
            if core.refresh_at >= core.ready:
                core.refresh_at = 0
            i = core.refresh_at
        instance = s.ready[i]
        rank = rank_instance(s, instance, now)
        if rank != s.instance[instance].rank:  # most have not changed: the instance's place in the heap is right
            make_ready(s, instance, rank)


@part
def activate(s: State, instance: int, now: int) -> bool:
    """Starts the instance's turn; False if it must wait for its inputs, or if the request behind it goes first."""
    core = s.core[0]
    inst = s.instance[instance]
    goes = True
    unready(s, instance)
    core.decisions += 1
    if inst.state == codes.FILLING:
        complete = close_instance(s, instance)
        set_arena_holder(s, instance, instance)
        mark_model_dirty(s, inst.model)
        if s.residency[0].managed > 0:
            s.weights[holder(s, inst.model)].served += 1
        goes = not return_terms(s, instance, now)
        if not complete:
            return False
        set_running(s, instance)
    s.active[core.active] = instance
    inst.active_at = core.active
    core.active += 1
    inst.yields = 0
    inst.demand = s.size[inst.model, inst.size].demand
    core.demand += inst.demand
    return goes


@part
def worst_active(s: State, now: int) -> int:
    """The active instance of the highest last known rank, among instances with segments left to launch."""
    core = s.core[0]
    found = codes.NONE
    for k in range(core.active):
        instance = s.active[k]
        inst = s.instance[instance]
        if inst.issued < inst.segments and (found < 0 or inst.rank > s.instance[found].rank):
            found = instance
    if found >= 0 and not core.timeless:
        s.instance[found].rank = rank_instance(s, found, now)
    return found


@part
def admitted(s: State, instance: int, now: int) -> bool:
    """Whether the policy, and the client's limit, let the instance launch now."""
    if over_limit(s, instance, now):
        return False
    others = s.core[0].active - (1 if s.instance[instance].active_at >= 0 else 0)
    if s.call[0].admit.function == ZERO or may_skip_admit(s, others):
        return True
    update_gpu_facts(s)
    update_top_priority(s)
    fill_instance_job(s, instance, now)
    if admits(s, now):
        return True
    note_refused(s, instance)
    return False


@part
def first_of_lengths(s: State, instance: int, now: int) -> int:
    """The waiting instance whose turn it is when the best length of a model has its turn: that of the first request in
    the policy's order. A rank by time per request alone would serve frequent lengths, whose batches are full, and let
    the others starve.
    """
    of = s.model[s.instance[instance].model].length_of
    if of == ZERO:
        return instance
    first, least = instance, np.inf
    for k in range(s.core[0].ready):
        other = int(s.ready[k])
        if s.model[s.instance[other].model].length_of == of:
            fill_instance_job(s, other, now)
            order = checked_rank(s, s.call[0].order, 0)
            if order < least or (order == least and s.instance[other].arrival_ns < s.instance[first].arrival_ns):
                first, least = other, order
    return first


@part
def is_same_length(s: State, instance: int, other: int) -> bool:
    """Whether two instances belong to lengths of one model: these do not take the GPU from each other."""
    of = s.model[s.instance[instance].model].length_of
    return bool(of != ZERO and s.model[s.instance[other].model].length_of == of)


@part
def best_admitted(s: State, instance: int, full: bool, most: float, now: int) -> int:
    """The waiting instance to start: this one if it is admitted, otherwise the best that is, asked in order of rank;
    NONE if there is none. If the active set is full, only ranks below `most` count.
    """
    if admitted(s, instance, now):
        return instance
    # The children of a refused instance in the heap come next, so each instance that is read is also asked.
    n = 1
    if instance == s.ready[0]:
        n = push_children(s, 0, 0)
    else:
        heap_push(s.next_rank, s.next_at, 0, 0, s.instance[s.ready[0]].rank, 0)
    while n > 0:
        at = s.next_at[0]
        instance = int(s.ready[at])
        if full and s.instance[instance].rank >= most:
            return codes.NONE
        if (full or s.core[0].active == 0 or has_room(s, instance)) and admitted(s, instance, now):
            return instance
        heap_pop(s.next_rank, s.next_at, 0, n)
        n = push_children(s, at, n - 1)
    return codes.NONE


@part
def push_children(s: State, at: int, n: int) -> int:
    """Adds the children of a place in the heap of waiting instances to the scratch heap of n places; returns its new
    size.
    """
    for k in range(2 * at + 1, min(2 * at + 3, s.core[0].ready)):
        heap_push(s.next_rank, s.next_at, 0, n, s.instance[s.ready[k]].rank, k)
        n += 1
    return n


@part
def reconcile_all(s: State, now: int) -> None:
    """Puts changed instances, and requests that were held back and may go now, into their places."""
    reconcile(s, now)
    if s.core[0].held_queues > 0:
        call_with(s.call[0].release_held_back, s, now)
        reconcile(s, now)


@part
def next_instance(s: State, n: int, swaps: int, now: int) -> int:
    """The instance whose turn comes next, with a place made for it in the active set; NONE if no change is needed;
    AGAIN if requests of other clients may take the instances of refused ones.
    """
    core = s.core[0]
    reconcile_all(s, now)
    if core.ready == 0:
        return codes.NONE
    full = core.active >= core.max_active
    # Programs launched in one piece cannot be held back any more.
    if full and (core.whole_always or core.preemptions >= swaps):
        return codes.NONE
    refresh_ranks(s, n, now)
    rank = s.instance[s.ready[0]].rank
    first = instance = first_of_lengths(s, int(s.ready[0]), now)
    if not full and core.active > 0:
        full = not has_room(s, instance)
        if full and (core.whole_always or core.preemptions >= swaps):
            return codes.NONE
    other = codes.NONE
    most = np.inf
    if full:
        other = worst_active(s, now)
        if other < 0 or rank >= s.instance[other].rank or is_same_length(s, first, other):
            return codes.NONE
        most = s.instance[other].rank
    instance = best_admitted(s, instance, full, most, now)
    if core.refused > 0 and call_with(s.call[0].give_up_refused, s, now) > 0 and instance < 0:
        return AGAIN  # each time, the requests of a refused client are held back until the next round
    if instance < 0:
        return codes.NONE
    if instance != first:
        rank = s.instance[instance].rank
    if one_by_one(s) and best_active(s, rank, now) >= 0:
        return codes.NONE
    if other >= 0:
        deactivate(s, other)
        mark_instance_dirty(s, other)
        core.preemptions += 1
    return instance


@part
def stays_active(s: State, instance: int, now: int) -> bool:
    """Whether an active instance stays: a policy with `admit`, a limit, or other jobs beside one that ranks infinitely
    low may stop it between segments.
    """
    inst = s.instance[instance]
    alone = inst.rank < np.inf or s.core[0].active == 1
    asked = s.call[0].admit.function != ZERO or s.core[0].limited > 0
    if inst.issued == 0 or inst.issued >= inst.segments or (alone and (not asked or admitted(s, instance, now))):
        return True
    deactivate(s, instance)
    make_ready(s, instance, inst.rank)
    return False


@part
def best_active(s: State, most: float, now: int) -> int:
    """The active instance of the lowest rank, at most `most`, that has a segment to launch now; NONE if none."""
    core = s.core[0]
    found = codes.NONE
    for k in range(core.active):
        instance = s.active[k]
        if may_launch(s, instance) and not must_yield(s, instance):
            if not core.timeless:
                s.instance[instance].rank = rank_instance(s, instance, now)
            if s.instance[instance].rank <= most and (found < 0 or s.instance[instance].rank < s.instance[found].rank):
                found = instance
    return int(found)


@part
def best_before_new(s: State, n: int, now: int) -> int:
    """The best active instance, if no waiting instance ranks better; else NONE."""
    reconcile_all(s, now)
    if s.core[0].ready == 0:
        return best_active(s, np.inf, now)
    refresh_ranks(s, n, now)
    return best_active(s, s.instance[s.ready[0]].rank, now)


@part
def choose(s: State, now: int) -> bool:
    """Fills the active set with the best waiting instances and launches their segments; False if the backend fails.

    Where the host computes the launches, several at once would delay each other and all later requests. There the best
    instance launches one segment, and the choice goes on (`core.changed`) when the host has computed it.
    """
    core = s.core[0]
    n = core.refresh
    swaps = core.preemptions + core.max_active
    stops = core.max_active
    k = codes.NONE
    core.admit_at_ns = np.inf
    core.rounds += 1
    if one_by_one(s):  # a round may end before it comes to the instances that yield
        choose_yielding(s)
    while k < core.active:
        instance = codes.NONE
        if host_has_work(s):
            core.changed = 1
            return True
        if one_by_one(s):
            instance = best_before_new(s, n, now) if k < 0 else best_active(s, np.inf, now)
        # First new instances, each fed at once, so that the next one is judged by the remaining room.
        if instance < 0 and k < 0:
            instance = next_instance(s, n, swaps, now)
            if instance == AGAIN:
                continue
            if instance < 0:
                k = 0
                choose_yielding(s)
                continue
            n = 0
            if not activate(s, instance, now) or may_yield_to(s, instance, shortest_active(s)):
                continue
        else:
            instance = s.active[k] if instance < 0 else instance
            if not stays_active(s, instance, now):  # another instance may have its turn, or have yielded to it
                stops -= 1
                k = codes.NONE if stops >= 0 else 0
                choose_yielding(s)
                continue
            k += 1
            if must_yield(s, instance):
                continue
        if not launch_segments(s, instance, now):
            return False
    core.changed = 0
    core.wake_at_ns = min(core.wake_at_ns, core.admit_at_ns)
    return True
