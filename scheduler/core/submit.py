"""Messages from producers to the core: submissions, cancellations, opening and closing models, draining."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.codes import (
    CANCEL,
    CLOSE_MODEL,
    CLOSING,
    DRAIN,
    DRAIN_MODE,
    DRAINING,
    EXPIRED,
    FAIL,
    FAIL_MODE,
    FAILED,
    FILLING,
    NEVER,
    NO_MODEL,
    NONE,
    OK,
    OPEN,
    OPEN_MODEL,
    PASSED,
    QUEUE_FULL,
    QUEUED,
    RUN_MODE,
    RUNNING,
    SLOTTED,
    SUBMIT,
    SUBMIT_HEAD,
    SUSPECTED,
    UNUSED,
)
from paellapy.scheduler.core.concurrency import close_gates
from paellapy.scheduler.core.heaps import heap_add, queue_add
from paellapy.scheduler.core.instances import close_instance, count_queued, free_instance, put, touch, wait_for_copy
from paellapy.scheduler.core.instances import mark_model_dirty as ask
from paellapy.scheduler.core.job import PER_MODEL, READS_SEGMENT
from paellapy.scheduler.core.requests import checked_rank, complete, fill_job, fill_segment, fill_terms, post_done
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.shares import enter
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import bar, forget_barred, may_come_ns, set_aside
from paellapy.scheduler.core.weights import note_demand

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
SUBMISSIONS_PER_STEP = 1024  # a limit, so that a flood of submissions does not delay completions


@part
def verdict(s: State, cell: Any, now: int) -> int:
    """OK, or the status with which the request is refused."""
    core = s.core[0]
    m = cell.model
    if core.mode != RUN_MODE:
        return FAILED if core.mode == FAIL_MODE else DRAINING
    if m < 0 or m >= s.model.shape[0] or s.model[m].state != OPEN:
        return NO_MODEL
    if cell.generation != _ZERO and cell.generation != s.model[m].generation:
        return NO_MODEL  # it was meant for the model that had the row before
    if cell.deadline_ns <= now:
        return EXPIRED
    if cell.instance >= 0:
        return OK
    slots = s.size[m, s.model[m].n_sizes - 1].batch
    room = s.model[m].free_n * slots
    if s.model[m].filling >= 0:
        room += slots - s.instance[s.model[m].filling].taken
    without_slot = s.model[m].queued - room
    c = s.request[cell.request].client
    if core.limited > 0 and s.client[c].limit > 0.0:
        without_slot = s.client[c].aside + (without_slot if may_come_ns(s, c, now) <= now else 0)
    if core.by_client:
        without_slot += s.kept[c, m].n
    return QUEUE_FULL if without_slot >= s.model[m].queue_limit else OK


@part
def enqueue(s: State, row: int, now: int) -> None:
    """Puts a request into its model's queue, in the policy's order; into its client's where the client has a limit, or
    where `admit` looks at the client.
    """
    r = s.request[row]
    m = r.model
    fill_job(s, 1, m, r.client, now)
    fill_terms(s, 1, m, r.arrival_ns, r.deadline_ns, r.priority, r.client_start_ns)
    job = s.job[1]
    job.total_ns = job.remaining_ns = s.size[m, 0].total_ns
    job.batch = 1.0
    job.started = 0.0
    if s.core[0].facts & READS_SEGMENT:
        fill_segment(s, job.segment, m, 0, 0)
    r.order = checked_rank(s, s.call[0].order, 1, s.call[0].order_2, s.call[0].order_3)
    if s.core[0].limited > 0 and s.client[r.client].limit > 0.0:
        set_aside(s, row)
        return
    if s.core[0].by_client:
        bar(s, row)
        return
    r.state = QUEUED
    queue_add(s, s.model[m], row)
    count_queued(s, m, 1)
    ask(s, m)


@part
def submitted(s: State, producer: int, cell: Any, now: int) -> None:
    core = s.core[0]
    row = cell.request
    r = s.request[row]
    r.producer = producer
    r.serial, r.tag, r.model, r.source = cell.serial, cell.tag, cell.model, cell.source
    r.client = cell.client if 0 <= cell.client < s.client.shape[0] else cell.client % s.client.shape[0]
    r.priority, r.arrival_ns, r.deadline_ns = cell.priority, cell.arrival_ns, cell.deadline_ns
    r.instance = r.slot = r.due_at = NONE
    r.leaving = 0
    r.let_ns = 0.0
    r.sequence = core.sequence
    core.sequence += 1
    instance = cell.instance
    status = verdict(s, cell, now)
    if status != OK:
        post_done(s, row, cell.model, status, now)
        if instance >= 0:
            put(s, instance, cell.slot, NONE)
            s.slot_client[instance, cell.slot] = r.client  # it is charged for the place that it took
            touch(s, instance)
        return
    close_gates(s, r.priority, now)
    c = s.client[r.client]
    enter(s, r.model, r.client)
    note_demand(s, r.model, now)
    r.client_start_ns = max(core.client_virtual_ns, c.tag_ns)
    c.tag_ns = r.client_start_ns + s.size[r.model, 0].total_ns / c.share
    if r.deadline_ns < NEVER:
        heap_add(s.due, core.due, s.request["due_at"], s.request["deadline_ns"], s.request["sequence"], row)
        core.due += 1
    if instance < 0:
        enqueue(s, row, now)
        return
    put(s, instance, cell.slot, row)
    touch(s, instance)


# Rarely used, and therefore called instead of inlined: the step stays small.


@part
def look_for_top(s: State) -> None:
    """Finds the highest and the lowest priority of open models. Only programs of the highest are launched in one
    piece.
    """
    core = s.core[0]
    core.top_priority, core.least_priority = -NEVER, NEVER
    for m in range(s.model.shape[0]):
        if s.model[m].state == OPEN:
            core.top_priority = max(core.top_priority, s.model[m].priority)
            core.least_priority = min(core.least_priority, s.model[m].priority)


@part
def opened(s: State, m: int) -> None:
    model = s.model[m]
    model.state = OPEN
    model.root = model.first = model.last = model.filling = NONE
    model.queued = model.live = model.aside = model.completed = 0
    model.used_ns = model.gpu_ns = 0.0
    for c in range(s.flow.shape[0]):
        s.flow[c, m].virtual_ns = 0.0
    model.free_n = model.n_instances
    model.warm = 0
    for k in range(s.core[0].own_names):
        s.own[s.core[0].own_at + k * PER_MODEL + m] = s.own_first[k]
    for k in range(model.n_instances):
        s.free_instance[m, k] = s.model_instance[m, model.n_instances - 1 - k]
    look_for_top(s)
    ask(s, m)


@part
def closed(s: State, m: int) -> None:
    """Refuses new requests for the model; MODEL_CLOSED follows when the accepted ones are done."""
    model = s.model[m]
    if model.state != OPEN:
        return
    model.state = CLOSING
    look_for_top(s)
    store_at(address(s.filling, m), _ZERO)
    ask(s, m)


@part
def was_on_gpu(s: State, row: int) -> bool:
    """Whether a launch for the request has not ended."""
    r = s.request[row]
    if r.state != SLOTTED:
        return False
    a = s.instance[r.instance]
    return bool(a.state == RUNNING and a.issued > a.done)


@part
def fail_all(s: State, now: int) -> None:
    """Ends every request after the GPU is lost; nothing is launched again."""
    core = s.core[0]
    core.mode, core.lost_ns, core.suspects = FAIL_MODE, max(now, 1), core.outside
    for row in range(s.request.shape[0]):
        core.suspects += was_on_gpu(s, row)
    for instance in range(s.instance.shape[0]):
        a = s.instance[instance]
        if a.model >= 0 and a.state == RUNNING and a.issued > a.done:
            s.model[a.model].lost = 1
    for row in range(s.request.shape[0]):
        if s.request[row].state != UNUSED:
            if s.request[row].state == PASSED:
                s.kept[s.request[row].client, s.request[row].model].passed = 0
            suspected = was_on_gpu(s, row)
            if s.request[row].state == SLOTTED:
                wait_for_copy(s, row)
                s.slot[s.request[row].instance, s.request[row].slot] = NONE
            complete(s, row, SUSPECTED if suspected else FAILED, now)
    for m in range(s.model.shape[0]):
        s.model[m].root = s.model[m].first = s.model[m].last = NONE
        s.model[m].queued = s.model[m].aside = 0
        ask(s, m)
    for c in range(s.client.shape[0]):
        client = s.client[c]
        client.root = client.first = client.last = NONE
        client.aside = client.waits = client.let = 0
        client.let_ns = 0.0
    forget_barred(s)
    core.queued = core.waiting = core.ready = core.active = core.flight = core.out = 0
    core.demand = core.queued_jobs = 0.0
    s.stream_jobs[...] = 0
    s.arena[...] = 0
    s.partition_load[...] = 0
    for instance in range(s.instance.shape[0]):
        a = s.instance[instance]
        if a.model >= 0:
            a.live = 0
            a.ready_at = a.active_at = a.flight_at = a.stream_at = a.partition = NONE
            if a.state == RUNNING or (a.state == FILLING and close_instance(s, instance)):
                free_instance(s, instance)
    gpu = s.gpu[0]
    gpu.resident_blocks = gpu.resident_warps = gpu.resident_registers = gpu.resident_shared_bytes = 0.0
    gpu.pending_blocks = gpu.pending_warps = gpu.pending_registers = gpu.pending_shared_bytes = 0.0
    gpu.resident_issue = gpu.pending_issue = 0.0


@part
def next_producer(s: State) -> int:
    """A producer with published messages, in round-robin order; or NONE."""
    core = s.core[0]
    mask = np.uint64(s.submit.shape[1] - 1)
    producers = s.submit.shape[0]
    for k in range(producers):
        producer = core.turn + k
        if producer >= producers:  # much faster than a remainder
            producer -= producers
        head = s.ring[producer, SUBMIT_HEAD, 0]
        at = np.int64(head & mask)
        if load_at(s.submit[producer, at : at + 1].ctypes.data) == head + _ONE:
            core.turn = producer + 1 if producer + 1 < producers else 0
            return int(producer)
    return NONE


@part
def take_submissions(s: State, now: int) -> int:
    """Takes all messages from the submission rings, each ring in order; returns their number."""
    core = s.core[0]
    n = 0
    mask = np.uint64(s.submit.shape[1] - 1)
    while n < SUBMISSIONS_PER_STEP:
        producer = next_producer(s)
        if producer < 0:
            break
        head = s.ring[producer, SUBMIT_HEAD, 0]
        at = np.int64(head & mask)
        where = s.submit[producer, at : at + 1].ctypes.data
        cell = s.submit[producer, at]
        if cell.kind == SUBMIT:
            submitted(s, producer, cell, now)
        elif cell.kind == CANCEL:
            r = s.request[cell.request]
            if r.serial == cell.serial and r.state != UNUSED and r.leaving == 0:
                r.leaving = 1
                s.leaving[core.leaving] = cell.request
                core.leaving += 1
        elif cell.kind == OPEN_MODEL:
            opened(s, cell.model)
        elif cell.kind == CLOSE_MODEL:
            closed(s, cell.model)
        elif cell.kind == DRAIN:
            core.mode = max(core.mode, DRAIN_MODE)
        elif cell.kind == FAIL and core.mode != FAIL_MODE:
            core.error, core.mode = np.int64(cell.tag), FAIL_MODE
        store_at(where, head + mask + _ONE)
        s.ring[producer, SUBMIT_HEAD, 0] = head + _ONE
        n += 1
    return n
