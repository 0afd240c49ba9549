"""Requests that end before they are done: cancelled, too late, or lost with their producer, weights or GPU."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ALL, ONE, ZERO, and_at, or_at, store_at
from paellapy.scheduler.core.copier import wait_for_copy
from paellapy.scheduler.core.instances import (
    close_instance,
    fill_slot,
    free_instance,
    mark_instance_dirty,
    mark_model_dirty,
    recompute_facts,
    remove_queued,
)
from paellapy.scheduler.core.requests import complete, drop_deadline
from paellapy.scheduler.core.rings import address, bit_at, bit_of, producer_of, reserved_slots
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import forget_held_back, remove_held_back


@part
def abort(s: State, row: int, status: int, now: int) -> None:
    """Cancels or expires a request in any state."""
    request = s.request[row]
    instance = request.instance
    if instance < 0:
        if request.state == codes.HELD_BACK:
            remove_held_back(s, row)
        else:
            remove_queued(s, row)
        mark_model_dirty(s, request.model)
    else:
        wait_for_copy(s, row)
        s.slot[instance, request.slot] = codes.NONE
        s.instance[instance].live -= 1
        recompute_facts(s, instance)
        mark_instance_dirty(s, instance)
    complete(s, row, status, now)


@part
def expire(s: State, now: int) -> None:
    """Removes requests that were cancelled or are too late."""
    core = s.core[0]
    while True:
        status = codes.EXPIRED
        if core.cancelled > 0:
            core.cancelled -= 1
            row = s.cancelled[core.cancelled]
            status = codes.CANCELLED
            if s.request[row].cancelled == 0:  # it got another answer in the meantime
                continue
        elif core.due > 0 and s.request[s.due[0]].deadline_ns <= now:
            row = s.due[0]
        else:
            break
        instance = s.request[row].instance
        if (
            status == codes.EXPIRED
            and instance >= 0
            and s.instance[instance].state == codes.RUNNING
            and s.instance[instance].issued == s.instance[instance].segments
        ):
            drop_deadline(s, row)  # all of it is on the GPU: it is late, but dropping it would save nothing
        else:
            abort(s, row, status, now)


@compiled
def reclaim(s: State, producer: int, now: int) -> int:
    """Takes back everything that a dead producer had: requests, slots, holds, rings; returns its number of requests.
    Call between two steps, once its process is gone. Other producers are not affected.

    Messages that it had published and the core had not read are dropped. A slot that it reserved and never wrote counts
    as written: the batch runs, and the outputs of that slot are never read.
    """
    n = 0
    for row in range(s.request.shape[0]):
        if s.request[row].producer == producer and s.request[row].state != codes.UNUSED:
            abort(s, row, codes.CANCELLED, now)
            n += 1
    for instance in range(s.instance.shape[0]):
        if s.instance[instance].model < 0 or s.instance[instance].state == codes.FREE:
            continue
        for k in range(reserved_slots(s, instance)):
            if producer_of(s.instance_word, s.slot_producer, instance, k) != producer:
                continue
            if s.instance_known[instance, k >> 6] & bit_of(k) == ZERO:
                fill_slot(s, instance, k, -1)
                mark_instance_dirty(s, instance)
            or_at(bit_at(s.instance_ready, instance, k), bit_of(k))
            and_at(bit_at(s.instance_hold, instance, k), ALL ^ bit_of(k))
    for k in range(s.ring.shape[1]):
        store_at(address(s.ring[producer], k), ZERO)
    for k in range(s.submit.shape[1]):
        s.submit[producer, k].sequence = np.uint64(k)
    s.wake_fd[producer, 1] = 0
    store_at(address(s.wake, producer), ONE)
    s.core[0].changed = 1
    return n


@part
def is_on_gpu(s: State, row: int) -> bool:
    """Whether a launch for the request has not ended."""
    request = s.request[row]
    if request.state != codes.SLOTTED:
        return False
    inst = s.instance[request.instance]
    return bool(inst.state == codes.RUNNING and inst.issued > inst.done)


@part
def fail_all(s: State, now: int) -> None:
    """Ends every request after the GPU is lost; nothing is launched again."""
    core = s.core[0]
    core.mode, core.lost_ns, core.suspects = codes.FAIL_MODE, max(now, 1), core.outside
    for row in range(s.request.shape[0]):
        core.suspects += is_on_gpu(s, row)
    for instance in range(s.instance.shape[0]):
        inst = s.instance[instance]
        if inst.model >= 0 and inst.state == codes.RUNNING and inst.issued > inst.done:
            s.model[inst.model].lost = 1
    for row in range(s.request.shape[0]):
        if s.request[row].state != codes.UNUSED:
            s.held_back[s.request[row].client, s.request[row].model].released = 0
            suspected = is_on_gpu(s, row)
            if s.request[row].state == codes.SLOTTED:
                wait_for_copy(s, row)
                s.slot[s.request[row].instance, s.request[row].slot] = codes.NONE
            complete(s, row, codes.SUSPECTED if suspected else codes.FAILED, now)
    for m in range(s.model.shape[0]):
        s.model[m].root = s.model[m].first = s.model[m].last = codes.NONE
        s.model[m].queued = 0
        mark_model_dirty(s, m)
    forget_held_back(s)
    core.queued = core.ready = core.active = core.flight = core.out = 0
    core.demand = core.queued_jobs = 0.0
    s.stream_jobs[...] = 0
    s.arena[...] = 0
    s.partition_load[...] = 0
    for instance in range(s.instance.shape[0]):
        inst = s.instance[instance]
        if inst.model >= 0:
            inst.live = 0
            inst.ready_at = inst.active_at = inst.flight_at = inst.stream_at = inst.partition = codes.NONE
            if inst.state == codes.RUNNING or (inst.state == codes.FILLING and close_instance(s, instance)):
                free_instance(s, instance)
    gpu = s.gpu[0]
    gpu.resident_blocks = gpu.resident_warps = gpu.resident_registers = gpu.resident_shared_bytes = 0.0
    gpu.pending_blocks = gpu.pending_warps = gpu.pending_registers = gpu.pending_shared_bytes = 0.0
    gpu.resident_issue = gpu.pending_issue = 0.0
