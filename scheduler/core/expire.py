"""Requests that leave before they are done: cancelled, too late, or given up with their producer or weights."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import and_at, load_at, or_at, store_at
from paellapy.scheduler.core.instances import (
    fill_slot,
    mark_instance_dirty,
    mark_model_dirty,
    recompute_facts,
    remove_queued,
    wait_for_copy,
)
from paellapy.scheduler.core.requests import complete, drop_deadline
from paellapy.scheduler.core.rings import address, bit_at, bit_of, producer_of
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import remove_held_back


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


# Takes back everything that a dead producer had: requests, slots, holds, rings. Other producers are not affected.


_MASK = np.uint64(codes.RESERVED_MASK)
_SHIFT = np.uint64(codes.RESERVED_SHIFT)
_ALL = np.uint64((1 << 64) - 1)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def reclaim(s: State, producer: int, now: int) -> int:
    """Call between two steps, once the process is gone. Renews its rows and rings; returns its number of requests.

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
        reserved = np.int64((load_at(address(s.instance_word, instance)) >> _SHIFT) & _MASK)
        for k in range(reserved):
            if producer_of(s.instance_word, s.slot_producer, instance, k) != producer:
                continue
            if s.instance_known[instance, k >> 6] & bit_of(k) == _ZERO:
                fill_slot(s, instance, k, -1)
                mark_instance_dirty(s, instance)
            or_at(bit_at(s.instance_ready, instance, k), bit_of(k))
            and_at(bit_at(s.instance_hold, instance, k), _ALL ^ bit_of(k))
    for k in range(s.ring.shape[1]):
        store_at(address(s.ring[producer], k), _ZERO)
    for k in range(s.submit.shape[1]):
        s.submit[producer, k].sequence = np.uint64(k)
    s.wake_fd[producer, 1] = 0
    store_at(address(s.wake, producer), _ONE)
    s.core[0].changed = 1
    return n
