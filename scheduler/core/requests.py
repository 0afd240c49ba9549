"""Requests in the core: their completion, and the facts about a job that a policy sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_asking, store_at
from paellapy.scheduler.core.heaps import heap_remove
from paellapy.scheduler.core.job import (
    READS_CLIENT,
    READS_DEFICIT,
    READS_PARAMS,
    READS_SEGMENT,
    READS_USE,
    READS_WEIGHTS,
)
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.shares import count_ended, flow_of
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import missing_bytes, ready_ns


@part
def slots_of(s: State, m: int) -> int:
    """The slots of each instance of the model: one for each item of its largest batch, or one for a whole batch."""
    return 1 if s.model[m].whole_batches else int(s.size[m, s.model[m].n_sizes - 1].batch)


# --- completions ---------------------------------------------------------------------------------------------------


@part
def count_outcome(s: State, entry: Any) -> None:
    """Counts a completion for the statistics, whichever producer the request came from."""
    m = entry.model
    if m < 0 or m >= s.outcome.shape[0]:
        return
    if entry.status == codes.OK:
        at = s.outcome[m, codes.OK] & (s.recent_ns.shape[1] - 1)  # a power of two
        s.recent_ns[m, at, 0] = entry.finish_ns - entry.arrival_ns
        s.recent_ns[m, at, 1] = entry.started_ns - entry.arrival_ns
        s.outcome[m, s.outcome.shape[1] - 1] += entry.batch
    s.outcome[m, entry.status] += 1


@part
def drop_deadline(s: State, row: int) -> None:
    """Drops the request's deadline, because it no longer matters."""
    core = s.core[0]
    if s.request[row].due_at >= 0:
        heap_remove(s.due, core.due, s.request["due_at"], s.request["deadline_ns"], s.request["sequence"], row)
        core.due -= 1


@part
def post_completion(s: State, row: int, model: int, status: int, now: int) -> None:
    """Posts one completion to the producer, which then owns the row again. A row of NONE concerns the model."""
    core = s.core[0]
    producer = s.request[row].producer if row >= 0 else 0
    tail = s.ring[producer, codes.DONE_TAIL, 0]
    entry = s.done[producer, np.int64(tail) & (s.done.shape[1] - 1)]
    entry.request = row
    entry.model = model
    entry.status = status
    entry.finish_ns = now
    entry.error = core.error
    entry.first = core.first_of_batch
    core.first_of_batch = 0
    entry.batch = 0
    entry.size = codes.NONE
    entry.started_ns = codes.NEVER
    if row < 0:
        entry.instance = entry.slot = entry.client = codes.NONE
        entry.priority = 0
        entry.arrival_ns, entry.deadline_ns = now, codes.NEVER
        entry.serial = entry.tag = np.uint64(0)
    else:
        request = s.request[row]
        entry.instance = request.instance
        entry.slot = request.slot
        entry.client = request.client
        entry.priority = request.priority
        entry.arrival_ns = request.arrival_ns
        entry.deadline_ns = request.deadline_ns
        entry.serial = request.serial
        entry.tag = request.tag
        if request.instance >= 0:
            entry.batch = s.instance[request.instance].items
            entry.size = s.instance[request.instance].size
            entry.started_ns = s.instance[request.instance].started_ns
        request.state = codes.UNUSED
        request.instance = request.slot = codes.NONE
        request.cancelled = 0
        count_outcome(s, entry)
        if core.logs_completions > 0:
            s.completion_log[core.log_tail & (s.completion_log.shape[0] - 1)] = entry
            core.log_tail += 1
    store_at(address(s.ring[producer], codes.DONE_TAIL), tail + np.uint64(1))


@part
def end_release(s: State, row: int) -> None:
    """Counts a request no longer among the work that its client's limit has released."""
    request = s.request[row]
    if request.released_ns > 0.0:
        client = s.client[request.client]
        client.released -= 1
        client.released_ns = client.released_ns - request.released_ns if client.released > 0 else 0.0
        request.released_ns = 0.0


@part
def complete(s: State, row: int, status: int, now: int) -> None:
    """Ends an accepted request. The caller clears its queue or slot."""
    request = s.request[row]
    drop_deadline(s, row)
    m = request.model
    end_release(s, row)
    count_ended(s, m, request.client)
    s.model[m].completed += 1
    s.client[request.client].completed += 1
    post_completion(s, row, m, status, now)


# --- facts for a policy --------------------------------------------------------------------------------------------


@part
def fill_job(s: State, k: int, m: int, client: int, now: int) -> None:
    """Fills scratch row k with the facts about the model and the client. Policies are asked for several jobs at each
    decision, so facts that need other tables are left out for policies that do not read them.
    """
    core = s.core[0]
    job = s.job[k]
    model = s.model[m]
    facts = core.facts
    job.now_ns = now
    job.target_ns = model.target_ns
    job.model = m
    job.client = client
    job.tenant = client
    if facts & READS_DEFICIT:
        flow = s.flow[flow_of(s, client), model.flow]
        # A flow without requests would start at the common clock.
        job.deficit_ns = (
            (core.virtual_ns - flow.virtual_ns) * model.share * s.client[client].share if flow.live > 0 else 0.0
        )
    if facts & READS_CLIENT:
        share = s.client[client].share
        job.share = model.share * share
        job.client_deficit_ns = (core.client_virtual_ns - s.client[client].virtual_ns) * share
    if facts & READS_USE:
        job.occupancy = s.gpu[0].occupancy
        job.used_ns = model.used_ns
    if facts & READS_WEIGHTS:
        job.missing_bytes, job.ready_ns = missing_bytes(s, m), ready_ns(s, m, 0, 0, now)
    if facts & READS_PARAMS:
        p = job.params
        p.p0, p.p1, p.p2, p.p3 = s.param[m, 0], s.param[m, 1], s.param[m, 2], s.param[m, 3]
        p.p4, p.p5, p.p6, p.p7 = s.param[m, 4], s.param[m, 5], s.param[m, 6], s.param[m, 7]


@part
def due_ns(s: State, m: int, arrival: int, deadline: int) -> int:
    """The deadline, or the model's target if there is none."""
    return int(deadline if deadline < codes.NEVER else arrival + s.model[m].target_ns)


@part
def fill_terms(s: State, k: int, m: int, arrival: int, deadline: int, priority: int, client_start: float) -> None:
    """Fills scratch row k with the facts that instances and requests have in common."""
    job = s.job[k]
    job.arrival_ns = arrival
    job.deadline_ns = due_ns(s, m, arrival, deadline)
    job.priority = priority
    job.client_start_ns = client_start


@part
def fill_segment(s: State, facts: Any, m: int, size: int, segment: int) -> None:
    """Fills in the facts about a segment."""
    f = s.segment[m, size, segment]
    facts.ns, facts.blocks, facts.compute, facts.memory = f.time_ns, f.blocks, f.compute, f.memory
    facts.copy_bytes, facts.occupancy = f.copy_bytes, f.occupancy


@part
def fill_instance_job(s: State, instance: int, now: int) -> None:
    """Fills scratch row 0 with the instance's current facts."""
    inst = s.instance[instance]
    m = inst.model
    fill_job(s, 0, m, inst.client, now)
    fill_terms(s, 0, m, inst.arrival_ns, inst.deadline_ns, inst.priority, inst.client_start_ns)
    job = s.job[0]
    total = s.size[m, inst.size].total_ns
    job.total_ns = total
    if inst.whole or inst.done >= s.size[m, inst.size].segments:
        job.remaining_ns = total if inst.done == 0 else 0.0
    else:
        job.remaining_ns = s.segment[m, inst.size, inst.done].tail_ns
    job.batch = inst.items
    job.started = inst.issued > 0
    if s.core[0].facts & READS_SEGMENT:
        fill_segment(s, job.segment, m, inst.size, min(inst.issued, s.size[m, inst.size].segments - 1))


@part
def fill_unstarted(s: State, k: int, m: int, size: int, batch: int) -> None:
    """Fills scratch row k with the remaining facts of a job that has not started."""
    job = s.job[k]
    job.total_ns = job.remaining_ns = s.size[m, size].total_ns
    job.batch = batch
    job.started = 0.0
    if s.core[0].facts & READS_SEGMENT:
        fill_segment(s, job.segment, m, size, 0)


@part
def fill_request_job(s: State, k: int, row: int, size: int, batch: int, now: int) -> None:
    """Fills scratch row k with the job that the request, as the first of its batch, would form."""
    request = s.request[row]
    fill_job(s, k, request.model, request.client, now)
    fill_terms(s, k, request.model, request.arrival_ns, request.deadline_ns, request.priority, request.client_start_ns)
    fill_unstarted(s, k, request.model, size, batch)


@part
def ask_about(s: State, callback: Any, k: int) -> float:
    """The answer of a policy's function about the job in scratch row k."""
    return float(call_asking(callback.function, s.job[k:].ctypes.data, callback.second, callback.third))


@part
def checked_rank(s: State, callback: Any, k: int) -> float:
    """The policy's rank for scratch row k; a rank that is not a number goes last, and is counted."""
    rank = ask_about(s, callback, k)
    if np.isnan(rank):
        s.core[0].bad_ranks += 1
        return float(np.inf)
    return rank


@part
def rank_instance(s: State, instance: int, now: int) -> float:
    fill_instance_job(s, instance, now)
    return checked_rank(s, s.call[0].rank, 0)
