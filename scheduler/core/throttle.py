"""Requests that are held back: by their client's limit, or by a policy's `admit` that depends on the client.

An instance holds requests of several clients and runs as one job. If one client's requests had slots before they may
run, the requests of the others would wait with them. So requests of a client with a limit, and all requests under a
policy whose `admit` reads a fact of the client, first come into a queue of their client and model. They are released
into the model's queue, a batch at a time, once the client's work in instances fits its limit and `admit` agrees. A job
that `admit` refuses before its first launch gives up its instance: its requests go back to the held-back queues.

Few engines hold requests back, so the functions that release them are compiled for the first one that does.
"""

from __future__ import annotations

import numpy as np
from numba import types

from paellapy.instrument.numba_ext.link import address_of, part, reachable
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ZERO
from paellapy.scheduler.core.heaps import before, queue_add, queue_first, queue_remove
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
from paellapy.scheduler.core.job import READS_TOP
from paellapy.scheduler.core.launch import update_gpu_facts
from paellapy.scheduler.core.requests import ask_about, checked_rank, end_release, fill_request_job, slots_of
from paellapy.scheduler.core.shares import LIMIT_KEPT_NS
from paellapy.scheduler.core.state import State

# --- asking a policy's `admit`


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
    answer = ask_about(s, s.call[0].admit, 0)
    if np.isnan(answer):
        core.bad_ranks += 1
        return False
    if answer == 0.0:
        return False
    if answer == 1.0 or answer <= now:
        return True
    core.admit_at_ns = min(core.admit_at_ns, np.ceil(answer))
    return False


# --- holding requests back ------------------------------------------------------------------------------------------


@part
def must_hold_back(s: State, c: int) -> bool:
    """Whether a new request of the client comes into a held-back queue."""
    return bool(s.core[0].by_client or (s.core[0].limited > 0 and s.client[c].limit > 0.0))


@part
def hold_back(s: State, row: int) -> None:
    """Puts a request into the queue of its client and model."""
    core = s.core[0]
    request = s.request[row]
    queue = s.held_back[request.client, request.model]
    if queue.listed == 0:
        queue.listed = 1
        queue.over_limit = 0
        queue.root = queue.first = queue.last = codes.NONE
        s.held_queues[core.held_queues] = (request.client << 32) | request.model
        core.held_queues += 1
        core.awaiting_admit += core.by_client
    request.state = codes.HELD_BACK
    queue_add(s, queue, row)
    queue.n += 1
    count_held_back(s, row, 1)
    core.changed = 1


@part
def count_held_back(s: State, row: int, n: int) -> None:
    """Adds n requests to the counts of the row's client and model."""
    s.client[s.request[row].client].held_back += n
    s.model[s.request[row].model].held_back += n
    s.core[0].held_back += n


@part
def remove_held_back(s: State, row: int) -> None:
    """Removes a request from its held-back queue."""
    queue = s.held_back[s.request[row].client, s.request[row].model]
    queue_remove(s, queue, row)
    queue.n -= 1
    count_held_back(s, row, -1)


@part
def forget_held_back(s: State) -> None:
    """Empties all queues, after their requests were answered."""
    core = s.core[0]
    for k in range(core.held_queues):
        queue = s.held_back[s.held_queues[k] >> 32, s.held_queues[k] & 0xFFFF_FFFF]
        queue.n = queue.listed = 0
    for m in range(s.model.shape[0]):
        s.model[m].held_back = 0
    for c in range(s.client.shape[0]):
        client = s.client[c]
        client.held_back = client.released = 0
        client.released_ns = 0.0
    core.held_queues = core.held_back = core.awaiting_admit = 0


# --- releasing them -------------------------------------------------------------------------------------------------


@part
def limit_ends_ns(s: State, c: int, now: int) -> float:
    """The time at which the work that a client has in instances fits its limit."""
    client = s.client[c]
    if client.limit <= 0.0:
        return float(now)
    return float(max(client.resume_ns, now - LIMIT_KEPT_NS) + client.released_ns / client.limit)


@part
def slots_beside(s: State, c: int, m: int) -> int:
    """The free slots of the model's filling instance, if the client already has a request there."""
    instance = s.model[m].filling
    if instance < 0:
        return 0
    for k in range(s.instance[instance].taken):
        if s.slot[instance, k] >= 0 and s.slot_client[instance, k] == c:
            return int(slots_of(s, m) - s.instance[instance].taken - s.model[m].queued)
    return 0


@part
def allowed_by_limit(s: State, c: int, m: int, now: int) -> int:
    """How many of the client's next requests for the model its limit lets go: a batch, or those that run anyway with
    others in an instance. If none, notes when it does.
    """
    at = limit_ends_ns(s, c, now)
    if at <= now:
        return slots_of(s, m)
    s.core[0].admit_at_ns = min(s.core[0].admit_at_ns, np.ceil(at))
    return slots_beside(s, c, m)


@part
def may_be_asked(s: State, c: int, m: int) -> bool:
    """Whether `admit` can be asked about the queue's next batch: at most one batch waits in the model's queue, and a
    client whose job was refused is not asked again in the same round.
    """
    queue = s.held_back[c, m]
    if queue.n == 0 or queue.asked_at == s.core[0].releases:
        return False
    if s.core[0].by_client == 0:
        return True
    room = slots_of(s, m) - queue.released
    return bool(room > 0 and queue.refused_at != s.core[0].rounds)


@part
def next_model(s: State, c: int) -> int:
    """The model of the client's first request, among queues that may be asked; NONE if there is none."""
    found = codes.NONE
    for m in range(s.model.shape[0]):
        if s.held_back[c, m].listed and may_be_asked(s, c, m):
            first = queue_first(s, s.held_back[c, m])
            if found < 0 or before(s.request, first, queue_first(s, s.held_back[c, found])):
                found = m
    return int(found)


@part
def fill_next_job(s: State, c: int, m: int, now: int) -> None:
    """Fills scratch row 0 with the job that the client's next requests would form."""
    queue = s.held_back[c, m]
    n = min(queue.n, slots_of(s, m))
    fill_request_job(s, 0, queue_first(s, queue), size_for(s, m, n), n, now)


@part
def release(s: State, c: int, m: int, most: int) -> None:
    """Moves the client's next requests, at most `most`, into the model's queue."""
    queue, client = s.held_back[c, m], s.client[c]
    limited, in_order = client.limit > 0.0, client.limit > 0.0 and s.core[0].by_client == 0
    n = min(client.held_back if in_order else queue.n, most)
    if s.core[0].by_client:
        n = min(n, slots_of(s, m) - queue.released)
    each_ns = max(s.size[m, size_for(s, m, n)].total_ns / n, 1.0) if limited else 0.0
    for k in range(n):
        if in_order and k > 0 and next_model(s, c) != m:  # the client's next request is for another model
            n = k
            break
        row = queue_first(s, queue)
        remove_held_back(s, row)
        request = s.request[row]
        request.state = codes.QUEUED
        request.released = 1
        if limited:
            request.released_ns = each_ns
            client.released += 1
            client.released_ns += each_ns
        queue_add(s, s.model[m], row)
    queue.released += n
    count_queued(s, m, n)
    mark_model_dirty(s, m)


@reachable
def release_held_back(s: State, now: int) -> int:
    """Releases the requests that may go now; returns the number of queues left. An idle GPU takes the best batch
    without asking `admit`, unless the policy may leave it idle.
    """
    core = s.core[0]
    core.releases += 1
    skips_admit = True
    if core.by_client:
        update_gpu_facts(s)
        update_top_priority(s)
        skips_admit = may_skip_admit(s, core.active)
    best_client, best_model, best_most = codes.NONE, codes.NONE, 0
    least = np.inf
    awaiting = 0
    k = 0
    while k < core.held_queues:
        c, m = s.held_queues[k] >> 32, s.held_queues[k] & 0xFFFF_FFFF
        limited = s.client[c].limit > 0.0
        while True:
            if limited:  # in the order of the client's requests, whatever their models are
                m = next_model(s, c)
            if m < 0 or not may_be_asked(s, c, m):
                break
            most = allowed_by_limit(s, c, m, now) if limited else s.held_back[c, m].n
            if most <= 0:
                break
            if core.by_client == 0:
                release(s, c, m, most)
                continue
            s.held_back[c, m].asked_at = core.releases
            fill_next_job(s, c, m, now)
            if skips_admit:
                rank = checked_rank(s, s.call[0].rank, 0)
                if best_client < 0 or rank < least:
                    best_client, best_model, best_most, least = c, m, most, rank
            elif admits(s, now):
                release(s, c, m, most)
        queue = s.held_back[c, s.held_queues[k] & 0xFFFF_FFFF]
        if queue.n == 0:
            queue.listed = 0
            core.held_queues -= 1
            s.held_queues[k] = s.held_queues[core.held_queues]
        else:
            queue.over_limit = 1 if limit_ends_ns(s, c, now) > now else 0
            awaiting += 1 - queue.over_limit
            k += 1
    core.awaiting_admit = awaiting
    if best_client >= 0:
        release(s, best_client, best_model, best_most)
    return int(core.held_queues)


# --- jobs that `admit` refuses ---------------------------------------------------------------------------------------


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
            if s.slot[instance, k] >= 0 and s.request[s.slot[instance, k]].source == ZERO:
                return False
    return inputs_written(s, instance)


@part
def give_up_instance(s: State, instance: int) -> None:
    """Frees the instance of a refused job, and holds its requests back again."""
    inst = s.instance[instance]
    m = inst.model
    unready(s, instance)
    s.held_back[inst.client, m].refused_at = s.core[0].rounds
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
            end_release(s, row)
            hold_back(s, row)
    free_instance(s, instance)
    mark_model_dirty(s, m)


@reachable
def give_up_refused(s: State, now: int) -> int:
    """Gives up the instances that were refused; returns their number."""
    core = s.core[0]
    found = 0
    while core.refused > 0:
        core.refused -= 1
        instance = s.refused[core.refused]
        if is_staged(s, instance):
            give_up_instance(s, instance)
            found += 1
    return found


def attach_held_back(state: State) -> None:
    """Lets the core hold requests back. Call before a policy or a limit requires it."""
    for each in (release_held_back, give_up_refused):
        state.call[each.__name__][0] = address_of(each, State.numba_type, types.int64)
