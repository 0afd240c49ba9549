"""Requests set aside: a client that has used up its limit keeps its requests out of lanes until it may go on.

A lane holds requests of several clients, and runs as one. If such a request had a slot, the others in its lane would
wait with it. So requests of a client with a limit first come into a queue of the client's own, and are let in, a batch
at a time, once the work that the client already has in lanes fits its limit.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.barred import bar
from paellapy.scheduler.core.codes import ASIDE, QUEUED
from paellapy.scheduler.core.heaps import queue_add, queue_first, queue_remove
from paellapy.scheduler.core.lanes import ask
from paellapy.scheduler.core.shares import LIMIT_KEPT_NS
from paellapy.scheduler.core.slots import count_queued, size_for
from paellapy.scheduler.core.state import State


@part
def set_aside(s: State, row: int) -> None:
    """Puts a request into its client's queue."""
    core = s.core[0]
    r = s.request[row]
    client = s.client[r.client]
    r.state = ASIDE
    queue_add(s, client, row)
    client.aside += 1
    s.model[r.model].aside += 1
    if client.waits == 0:
        client.waits = 1
        s.waiting[core.waiting] = r.client
        core.waiting += 1


@part
def may_come_ns(s: State, c: int, now: int) -> float:
    """The time at which the work that a client has in lanes fits its limit."""
    client = s.client[c]
    if client.limit <= 0.0:
        return float(now)
    return float(max(client.may_ns, now - LIMIT_KEPT_NS) + client.let_ns / client.limit)


@part
def places_beside(s: State, c: int, m: int) -> int:
    """The free places of the model's filling lane, if the client already has a request there: others may join it."""
    lane = s.model[m].filling
    if lane < 0:
        return 0
    for k in range(s.lane[lane].taken):
        if s.slot[lane, k] >= 0 and s.slot_client[lane, k] == c:
            return int(s.size[m, s.model[m].n_sizes - 1].batch - s.lane[lane].taken - s.model[m].queued)
    return 0


@part
def let_in(s: State, c: int, m: int, most: int) -> None:
    """Moves the client's next requests of one model into the model's queue, at most `most` of them."""
    client = s.client[c]
    n = min(client.aside, most)
    each_ns = max(s.size[m, size_for(s, m, n)].total_ns / n, 1.0)
    while n > 0 and client.aside > 0:
        row = queue_first(s, client)
        r = s.request[row]
        if r.model != m:
            break
        queue_remove(s, client, row)
        client.aside -= 1
        s.model[m].aside -= 1
        client.let += 1
        client.let_ns += each_ns
        r.let_ns = each_ns
        n -= 1
        if s.core[0].by_client:
            bar(s, row)
            continue
        r.state = QUEUED
        queue_add(s, s.model[m], row)
        count_queued(s, m, 1)
    ask(s, m)


@part
def look_aside(s: State, now: int) -> None:
    """Lets in the requests that may come now."""
    core = s.core[0]
    k = 0
    while k < core.waiting:
        c = s.waiting[k]
        client = s.client[c]
        while client.aside > 0:
            m = int(s.request[queue_first(s, client)].model)
            most = s.size[m, s.model[m].n_sizes - 1].batch
            at = may_come_ns(s, c, now)
            if at > now:
                core.room_at_ns = min(core.room_at_ns, np.ceil(at))
                most = places_beside(s, c, m)
                if most <= 0:
                    break
            let_in(s, c, m, most)
        if client.aside == 0:
            client.waits = 0
            core.waiting -= 1
            s.waiting[k] = s.waiting[core.waiting]
        else:
            k += 1
