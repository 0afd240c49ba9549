"""Messages from producers to the core: submissions, cancellations, opening and closing models, draining."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ONE, ZERO, load_at, store_at
from paellapy.scheduler.core.concurrency import close_gates
from paellapy.scheduler.core.heaps import heap_add, queue_add
from paellapy.scheduler.core.instances import count_queued, fill_slot, mark_instance_dirty, mark_model_dirty
from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.core.launch import WHOLE_PART
from paellapy.scheduler.core.requests import checked_rank, fill_request_job, post_completion, slots_of
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.shares import count_accepted
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import hold_back, limit_ends_ns, must_hold_back
from paellapy.scheduler.core.weights import count_demand

SUBMISSIONS_PER_STEP = 1024  # a limit, so that a flood of submissions does not delay completions


@part
def refusal(s: State, cell: Any, now: int) -> int:
    """OK, or the status with which the request is refused."""
    core = s.core[0]
    m = cell.model
    if core.mode != codes.RUN_MODE:
        return codes.FAILED if core.mode == codes.FAIL_MODE else codes.DRAINING
    if m < 0 or m >= s.model.shape[0] or s.model[m].state != codes.OPEN:
        return codes.NO_MODEL
    if cell.generation != ZERO and cell.generation != s.model[m].generation:
        return codes.NO_MODEL  # it was meant for the model that had the row before
    if cell.deadline_ns <= now:
        return codes.EXPIRED
    if cell.instance >= 0:
        return codes.OK
    slots = slots_of(s, m)
    room = s.model[m].free_n * slots
    if s.model[m].filling >= 0:
        room += slots - s.instance[s.model[m].filling].taken
    without_slot = s.model[m].queued - room
    c = s.request[cell.request].client
    if core.limited > 0 and s.client[c].limit > 0.0:
        without_slot = s.client[c].held_back + (without_slot if limit_ends_ns(s, c, now) <= now else 0)
    elif core.by_client:
        without_slot += s.held_back[c, m].n
    return codes.QUEUE_FULL if without_slot >= s.model[m].queue_limit else codes.OK


@part
def enqueue(s: State, row: int, now: int) -> None:
    """Puts a request into its model's queue in the policy's order, or into a held-back queue."""
    request = s.request[row]
    m = request.model
    if s.model[m].whole_batches:
        request.order = 0.0
    else:
        fill_request_job(s, 1, row, 0, 1, now)
        request.order = checked_rank(s, s.call[0].order, 1)
    if must_hold_back(s, request.client):
        hold_back(s, row)
        return
    request.state = codes.QUEUED
    queue_add(s, s.model[m], row)
    count_queued(s, m, 1)
    mark_model_dirty(s, m)


@part
def fill_request(s: State, row: int, producer: int, cell: Any) -> None:
    """Copies a submission into its request row."""
    request = s.request[row]
    request.producer = producer
    request.serial = cell.serial
    request.tag = cell.tag
    request.model = cell.model
    request.source = cell.source
    request.items = max(cell.items, 1)
    request.client = cell.client if 0 <= cell.client < s.client.shape[0] else cell.client % s.client.shape[0]
    request.priority = cell.priority
    request.arrival_ns = cell.arrival_ns
    request.deadline_ns = cell.deadline_ns
    request.instance = request.slot = request.due_at = codes.NONE
    request.cancelled = request.released = 0
    request.released_ns = 0.0
    request.sequence = s.core[0].sequence
    s.core[0].sequence += 1


@part
def accept_submission(s: State, producer: int, cell: Any, now: int) -> None:
    """Answers a refused request; puts any other into its slot, its model's queue, or a held-back queue."""
    core = s.core[0]
    row = cell.request
    request = s.request[row]
    fill_request(s, row, producer, cell)
    instance = cell.instance
    status = refusal(s, cell, now)
    if status != codes.OK:
        post_completion(s, row, cell.model, status, now)
        if instance >= 0:
            fill_slot(s, instance, cell.slot, codes.NONE)
            s.slot_client[instance, cell.slot] = request.client  # it is charged for the place that it took
            mark_instance_dirty(s, instance)
        return
    close_gates(s, request.priority, now)
    c = s.client[request.client]
    count_accepted(s, request.model, request.client)
    count_demand(s, request.model, now)
    request.client_start_ns = max(core.start_tag_ns, c.tag_ns)
    c.tag_ns = request.client_start_ns + s.size[request.model, 0].total_ns / c.share
    if request.deadline_ns < codes.NEVER:
        heap_add(s.due, core.due, s.request["due_at"], s.request["deadline_ns"], s.request["sequence"], row)
        core.due += 1
    if instance < 0:
        enqueue(s, row, now)
        return
    fill_slot(s, instance, cell.slot, row)
    mark_instance_dirty(s, instance)


# Rarely used, and therefore called instead of inlined: the step stays small.


@part
def find_priorities(s: State) -> None:
    """Finds the highest and the lowest priority of open models. Only programs of the highest are launched in one
    piece, and only those that hardly delay the next step of a model whose requests are whole batches.
    """
    core = s.core[0]
    core.top_priority, core.least_priority, core.longest_whole_ns = -codes.NEVER, codes.NEVER, np.inf
    for m in range(s.model.shape[0]):
        if s.model[m].state == codes.OPEN:
            core.top_priority = max(core.top_priority, s.model[m].priority)
            core.least_priority = min(core.least_priority, s.model[m].priority)
            if s.model[m].whole_batches and s.model[m].target_ns < codes.NEVER:
                core.longest_whole_ns = min(core.longest_whole_ns, WHOLE_PART * s.model[m].target_ns)


@part
def open_for_requests(s: State, m: int) -> None:
    model = s.model[m]
    model.state = codes.OPEN
    model.root = model.first = model.last = model.filling = codes.NONE
    model.queued = model.live = model.held_back = model.completed = 0
    model.used_ns = model.gpu_ns = 0.0
    for c in range(s.flow.shape[0] if model.flow == m else 0):
        s.flow[c, m].virtual_ns = 0.0
    model.free_n = model.n_instances
    model.warm = 0
    for k in range(s.core[0].own_names):
        s.own[s.core[0].own_at + k * PER_MODEL + m] = s.own_first[k]
    for k in range(model.n_instances):
        s.free_instance[m, k] = s.model_instance[m, model.n_instances - 1 - k]
    find_priorities(s)
    mark_model_dirty(s, m)


@part
def close_for_requests(s: State, m: int) -> None:
    """Refuses new requests for the model; MODEL_CLOSED follows when the accepted ones are done."""
    model = s.model[m]
    if model.state != codes.OPEN:
        return
    model.state = codes.CLOSING
    find_priorities(s)
    store_at(address(s.filling, m), ZERO)
    mark_model_dirty(s, m)


@part
def find_producer(s: State) -> int:
    """A producer with published messages, in round-robin order; or NONE."""
    core = s.core[0]
    mask = np.uint64(s.submit.shape[1] - 1)
    producers = s.submit.shape[0]
    for k in range(producers):
        producer = core.next_producer + k
        if producer >= producers:  # much faster than a remainder
            producer -= producers
        head = s.ring[producer, codes.SUBMIT_HEAD, 0]
        at = np.int64(head & mask)
        if load_at(s.submit[producer, at : at + 1].ctypes.data) == head + ONE:
            core.next_producer = producer + 1 if producer + 1 < producers else 0
            return int(producer)
    return codes.NONE


@part
def take_submissions(s: State, now: int) -> int:
    """Takes all messages from the submission rings, each ring in order; returns their number."""
    core = s.core[0]
    n = 0
    mask = np.uint64(s.submit.shape[1] - 1)
    while n < SUBMISSIONS_PER_STEP:
        producer = find_producer(s)
        if producer < 0:
            break
        head = s.ring[producer, codes.SUBMIT_HEAD, 0]
        at = np.int64(head & mask)
        where = s.submit[producer, at : at + 1].ctypes.data
        cell = s.submit[producer, at]
        if cell.kind == codes.SUBMIT:
            accept_submission(s, producer, cell, now)
        elif cell.kind == codes.CANCEL:
            request = s.request[cell.request]
            if request.serial == cell.serial and request.state != codes.UNUSED and request.cancelled == 0:
                request.cancelled = 1
                s.cancelled[core.cancelled] = cell.request
                core.cancelled += 1
        elif cell.kind == codes.OPEN_MODEL:
            open_for_requests(s, cell.model)
        elif cell.kind == codes.CLOSE_MODEL:
            close_for_requests(s, cell.model)
        elif cell.kind == codes.DRAIN:
            core.mode = max(core.mode, codes.DRAIN_MODE)
        elif cell.kind == codes.FAIL and core.mode != codes.FAIL_MODE:
            core.error, core.mode = np.int64(cell.tag), codes.FAIL_MODE
        store_at(where, head + mask + ONE)
        s.ring[producer, codes.SUBMIT_HEAD, 0] = head + ONE
        n += 1
    return n
