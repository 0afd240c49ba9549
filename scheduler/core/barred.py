"""Requests that `admit` keeps out of lanes, where it looks at the client.

A lane holds requests of several clients, and runs as one job. If `admit` refused the job because of one client, the
others would wait with it. So under a policy whose `admit` reads a fact of the client, requests first come into a queue
of their client and model. `admit` is asked about the next batch of each such queue, and lets it pass into the model's
queue. A job that is refused before its first launch gives up its lane: its requests go back to the clients' queues, and
are staged, so that their inputs can be copied again.

Few policies look at the client, so the functions that ask about these queues are compiled for the first one that does.
"""

from __future__ import annotations

import numpy as np
from numba import types

from paellapy.instrument.jit import address_of, part, reachable
from paellapy.scheduler.core.asking import lets_go, look_at_top, takes_anything
from paellapy.scheduler.core.codes import BARRED, FILLING, NONE, PASSED
from paellapy.scheduler.core.heaps import queue_add, queue_first, queue_remove
from paellapy.scheduler.core.job import READS_SEGMENT
from paellapy.scheduler.core.lanes import all_in, ask, close_lane, free_lane, take_berth, unready
from paellapy.scheduler.core.launching import measure
from paellapy.scheduler.core.requests import checked_rank, fill_job, fill_segment, fill_terms
from paellapy.scheduler.core.slots import count_queued, size_for
from paellapy.scheduler.core.state import State

_ZERO = np.uint64(0)


@part
def bar(s: State, row: int) -> None:
    """Puts a request into the queue of its client and model."""
    core = s.core[0]
    r = s.request[row]
    kept = s.kept[r.client, r.model]
    if kept.listed == 0:
        kept.listed = 1
        kept.root = kept.first = kept.last = NONE
        s.barred[core.barred] = (r.client << 32) | r.model
        core.barred += 1
    r.state = BARRED
    queue_add(s, kept, row)
    kept.n += 1
    core.kept_out += 1
    core.changed = 1


@part
def unbar(s: State, row: int) -> None:
    kept = s.kept[s.request[row].client, s.request[row].model]
    queue_remove(s, kept, row)
    kept.n -= 1
    s.core[0].kept_out -= 1


@part
def forget_barred(s: State) -> None:
    """Empties all queues, after their requests were answered."""
    core = s.core[0]
    for k in range(core.barred):
        kept = s.kept[s.barred[k] >> 32, s.barred[k] & 0xFFFF_FFFF]
        kept.n = kept.listed = 0
    core.barred = core.kept_out = 0


@part
def fill_next_job(s: State, c: int, m: int, now: int) -> None:
    """Fills scratch row 0 with the job that the client's next requests would form, by the facts of the first."""
    kept = s.kept[c, m]
    n = min(kept.n, s.size[m, s.model[m].n_sizes - 1].batch)
    size = size_for(s, m, n)
    r = s.request[queue_first(s, kept)]
    fill_job(s, 0, m, c, now)
    fill_terms(s, 0, m, r.arrival_ns, r.deadline_ns, r.priority, r.client_start_ns)
    job = s.job[0]
    job.total_ns = job.remaining_ns = s.size[m, size].total_ns
    job.batch = n
    job.started = 0.0
    if s.core[0].facts & READS_SEGMENT:
        fill_segment(s, job.segment, m, size, 0)


@part
def let_pass(s: State, c: int, m: int, most: int) -> None:
    """Moves the client's next requests, at most `most`, into the model's queue."""
    kept = s.kept[c, m]
    n = min(kept.n, most)
    for _ in range(n):
        row = queue_first(s, kept)
        unbar(s, row)
        s.request[row].state = PASSED
        queue_add(s, s.model[m], row)
    kept.passed += n
    count_queued(s, m, n)
    ask(s, m)


@reachable
def look_at_barred(s: State, now: int) -> int:
    """Lets the requests pass about which `admit` says yes: of each client at most one batch at a time into a model's
    queue. An idle GPU takes the best batch without asking. Returns the number of queues that are left.
    """
    core = s.core[0]
    measure(s)
    look_at_top(s)
    anything = takes_anything(s, core.active)
    best = np.int64(NONE)
    least = np.inf
    k = 0
    while k < core.barred:
        c, m = s.barred[k] >> 32, s.barred[k] & 0xFFFF_FFFF
        kept = s.kept[c, m]
        if core.by_client == 0:  # the policy was changed
            let_pass(s, c, m, kept.n)
        room = s.size[m, s.model[m].n_sizes - 1].batch - kept.passed
        if kept.n > 0 and room > 0 and kept.refused_at != core.rounds:
            fill_next_job(s, c, m, now)
            if anything:
                rank = checked_rank(s, s.call[0].rank, 0, s.call[0].rank_2, s.call[0].rank_3)
                if best < 0 or rank < least:
                    best, least = s.barred[k], rank
            elif lets_go(s, now):
                let_pass(s, c, m, room)
        if kept.n == 0:
            kept.listed = 0
            core.barred -= 1
            s.barred[k] = s.barred[core.barred]
        else:
            k += 1
    if best >= 0:
        c, m = int(best >> 32), int(best & 0xFFFF_FFFF)
        let_pass(s, c, m, s.size[m, s.model[m].n_sizes - 1].batch - s.kept[c, m].passed)
    return int(core.barred)


@part
def note_refused(s: State, lane: int) -> None:
    """Marks a refused lane, to be given up if it has launched nothing."""
    core = s.core[0]
    if core.by_client and s.lane[lane].issued == 0:
        s.refused[core.refused] = lane
        core.refused += 1


@part
def is_staged(s: State, lane: int) -> bool:
    """Whether the inputs of all requests in the lane can be copied again. Not if they were written to their slots,
    before the policy was changed.
    """
    if s.model[s.lane[lane].model].n_inputs > 0:
        for k in range(s.lane[lane].taken):
            if s.slot[lane, k] >= 0 and s.request[s.slot[lane, k]].source == _ZERO:
                return False
    return all_in(s, lane)


@part
def give_up(s: State, lane: int) -> None:
    """Frees the lane of a refused job; its requests wait for `admit` again."""
    a = s.lane[lane]
    m = a.model
    unready(s, lane)
    s.kept[a.client, m].refused_at = s.core[0].rounds
    if a.state == FILLING:
        ask(s, m)
        if not close_lane(s, lane):  # a front end has just taken a slot, before the policy was changed
            return
    else:
        take_berth(s, lane, NONE)
    for k in range(a.taken):
        row = s.slot[lane, k]
        s.slot[lane, k] = NONE
        if row >= 0:
            s.request[row].lane = s.request[row].slot = NONE
            bar(s, row)
    free_lane(s, lane)
    ask(s, m)


@reachable
def give_up_refused(s: State, now: int) -> int:
    """Gives up the lanes that were refused; returns the number of lanes given up."""
    core = s.core[0]
    found = 0
    while core.refused > 0:
        core.refused -= 1
        lane = s.refused[core.refused]
        if is_staged(s, lane):
            give_up(s, lane)
            found += 1
    return found


def attach_barred(state: State) -> None:
    """Lets the core ask about clients. Call before the policy decides."""
    for each in (look_at_barred, give_up_refused):
        state.call[each.__name__][0] = address_of(each, State.numba_type, types.int64)
