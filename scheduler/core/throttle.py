"""Requests set aside: a client that has used up its limit keeps its requests out of instances until it may go on.

An instance holds requests of several clients, and runs as one. If such a request had a slot, the others in its instance
would wait with it. So requests of a client with a limit first come into a queue of the client's own, and are let in, a
batch at a time, once the work that the client already has in instances fits its limit.
"""

from __future__ import annotations

import numpy as np
from numba import types

from paellapy.instrument.numba_ext.link import address_of, part, reachable
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_asking
from paellapy.scheduler.core.heaps import queue_add, queue_first, queue_remove
from paellapy.scheduler.core.instances import (
    close_instance,
    count_queued,
    free_instance,
    inputs_written,
    mark_model_dirty,
    set_arena_holder,
    size_for,
    unready,
)
from paellapy.scheduler.core.job import READS_SEGMENT, READS_TOP
from paellapy.scheduler.core.launch import update_gpu_facts
from paellapy.scheduler.core.requests import checked_rank, fill_job, fill_segment, fill_terms
from paellapy.scheduler.core.shares import LIMIT_KEPT_NS
from paellapy.scheduler.core.state import State

# Asking a policy's `admit`: the facts about the GPU that it sees, and the meaning of its answer.


@part
def update_top_priority(s: State) -> None:
    """Finds the highest priority among active jobs, and, for policies that read it, their resources on the GPU."""
    top = -codes.NEVER
    for k in range(s.core[0].active):
        top = max(top, s.instance[s.active[k]].priority)
    gpu = s.gpu[0]
    gpu.active_priority = top
    if s.core[0].facts & READS_TOP:
        of_top = gpu.top
        of_top.ns = of_top.blocks = of_top.compute = of_top.memory = gpu.lower_ns = 0.0
        for k in range(s.core[0].flight):
            instance = s.flight[k]
            inst = s.instance[instance]
            ns = 0.0
            for j in range(inst.done, inst.issued):
                ns += s.segment[inst.model, inst.size, j].time_ns
            if inst.whole:  # the expected remainder
                ns = max(0.0, s.size[inst.model, inst.size].total_ns - (s.gpu[0].now_ns - s.segment_ns[instance, 0, 0]))
            if inst.priority >= top:
                f = s.segment[inst.model, inst.size, inst.done]
                of_top.ns += ns
                of_top.blocks += f.blocks
                of_top.compute += f.compute
                of_top.memory += f.memory
            else:
                gpu.lower_ns += ns


@part
def may_skip_admit(s: State, others: int) -> bool:
    """Whether the best job goes without a question: the GPU is idle, and no other job is active (`others` is 0). A
    policy that may not leave the GPU idle only orders work, and wastes no time.
    """
    return bool(s.core[0].may_idle == 0 and s.core[0].flight == 0 and others == 0)


@part
def admits(s: State, now: int) -> bool:
    """The answer for the job in scratch row 0. If it may go later, notes when."""
    core = s.core[0]
    answer = call_asking(s.call[0].admit, s.job.ctypes.data, s.call[0].admit_2, s.call[0].admit_3)
    if np.isnan(answer):
        core.bad_ranks += 1
        return False
    if answer == 0.0:
        return False
    if answer == 1.0 or answer <= now:
        return True
    core.admit_at_ns = min(core.admit_at_ns, np.ceil(answer))
    return False


# Requests that `admit` keeps out of instances, where it looks at the client.
#
# An instance holds requests of several clients, and runs as one job. If `admit` refused the job because of one client,
# the others would wait with it. So under a policy whose `admit` reads a fact of the client, requests first come into a
# queue of their client and model. `admit` is asked about the next batch of each such queue, and lets it pass into the
# model's queue. A job that is refused before its first launch gives up its instance: its requests go back to the
# clients' queues, and are staged, so that their inputs can be copied again.
#
# Few policies look at the client, so the functions that ask about these queues are compiled for the first one that
# does.


_ZERO = np.uint64(0)


@part
def bar(s: State, row: int) -> None:
    """Puts a request into the queue of its client and model."""
    core = s.core[0]
    request = s.request[row]
    kept = s.kept[request.client, request.model]
    if kept.listed == 0:
        kept.listed = 1
        kept.root = kept.first = kept.last = codes.NONE
        s.barred[core.barred] = (request.client << 32) | request.model
        core.barred += 1
    request.state = codes.BARRED
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
    request = s.request[queue_first(s, kept)]
    fill_job(s, 0, m, c, now)
    fill_terms(s, 0, m, request.arrival_ns, request.deadline_ns, request.priority, request.client_start_ns)
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
        s.request[row].state = codes.PASSED
        queue_add(s, s.model[m], row)
    kept.passed += n
    count_queued(s, m, n)
    mark_model_dirty(s, m)


@reachable
def look_at_barred(s: State, now: int) -> int:
    """Lets the requests pass about which `admit` says yes: of each client at most one batch at a time into a model's
    queue. An idle GPU takes the best batch without asking. Returns the number of queues that are left.
    """
    core = s.core[0]
    update_gpu_facts(s)
    update_top_priority(s)
    anything = may_skip_admit(s, core.active)
    best = np.int64(codes.NONE)
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
            elif admits(s, now):
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
def note_refused(s: State, instance: int) -> None:
    """Marks a refused instance, to be given up if it has launched nothing."""
    core = s.core[0]
    if core.by_client and s.instance[instance].issued == 0:
        s.refused[core.refused] = instance
        core.refused += 1


@part
def is_staged(s: State, instance: int) -> bool:
    """Whether the inputs of all requests in the instance can be copied again. Not if they were written to their slots,
    before the policy was changed.
    """
    if s.model[s.instance[instance].model].n_inputs > 0:
        for k in range(s.instance[instance].taken):
            if s.slot[instance, k] >= 0 and s.request[s.slot[instance, k]].source == _ZERO:
                return False
    return inputs_written(s, instance)


@part
def give_up(s: State, instance: int) -> None:
    """Frees the instance of a refused job; its requests wait for `admit` again."""
    inst = s.instance[instance]
    m = inst.model
    unready(s, instance)
    s.kept[inst.client, m].refused_at = s.core[0].rounds
    if inst.state == codes.FILLING:
        mark_model_dirty(s, m)
        if not close_instance(s, instance):  # a producer has just taken a slot, before the policy was changed
            return
    else:
        set_arena_holder(s, instance, codes.NONE)
    for k in range(inst.taken):
        row = s.slot[instance, k]
        s.slot[instance, k] = codes.NONE
        if row >= 0:
            s.request[row].instance = s.request[row].slot = codes.NONE
            bar(s, row)
    free_instance(s, instance)
    mark_model_dirty(s, m)


@reachable
def give_up_refused(s: State, now: int) -> int:
    """Gives up the instances that were refused; returns the number of instances given up."""
    core = s.core[0]
    found = 0
    while core.refused > 0:
        core.refused -= 1
        instance = s.refused[core.refused]
        if is_staged(s, instance):
            give_up(s, instance)
            found += 1
    return found


def attach_barred(state: State) -> None:
    """Lets the core ask about clients. Call before the policy decides."""
    for each in (look_at_barred, give_up_refused):
        state.call[each.__name__][0] = address_of(each, State.numba_type, types.int64)


@part
def set_aside(s: State, row: int) -> None:
    """Puts a request into its client's queue."""
    core = s.core[0]
    request = s.request[row]
    client = s.client[request.client]
    request.state = codes.ASIDE
    queue_add(s, client, row)
    client.aside += 1
    s.model[request.model].aside += 1
    if client.waits == 0:
        client.waits = 1
        s.waiting[core.waiting] = request.client
        core.waiting += 1


@part
def may_come_ns(s: State, c: int, now: int) -> float:
    """The time at which the work that a client has in instances fits its limit."""
    client = s.client[c]
    if client.limit <= 0.0:
        return float(now)
    return float(max(client.resume_ns, now - LIMIT_KEPT_NS) + client.let_ns / client.limit)


@part
def places_beside(s: State, c: int, m: int) -> int:
    """The free places of the model's filling instance, if the client already has a request there: others may join it.
    """
    instance = s.model[m].filling
    if instance < 0:
        return 0
    for k in range(s.instance[instance].taken):
        if s.slot[instance, k] >= 0 and s.slot_client[instance, k] == c:
            return int(s.size[m, s.model[m].n_sizes - 1].batch - s.instance[instance].taken - s.model[m].queued)
    return 0


@part
def let_in(s: State, c: int, m: int, most: int) -> None:
    """Moves the client's next requests of one model into the model's queue, at most `most` of them."""
    client = s.client[c]
    n = min(client.aside, most)
    each_ns = max(s.size[m, size_for(s, m, n)].total_ns / n, 1.0)
    while n > 0 and client.aside > 0:
        row = queue_first(s, client)
        request = s.request[row]
        if request.model != m:
            break
        queue_remove(s, client, row)
        client.aside -= 1
        s.model[m].aside -= 1
        client.let += 1
        client.let_ns += each_ns
        request.let_ns = each_ns
        n -= 1
        if s.core[0].by_client:
            bar(s, row)
            continue
        request.state = codes.QUEUED
        queue_add(s, s.model[m], row)
        count_queued(s, m, 1)
    mark_model_dirty(s, m)


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
                core.wake_at_ns = min(core.wake_at_ns, np.ceil(at))
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
