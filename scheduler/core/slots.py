"""Slots of lanes in the core: which request has which slot, the lane's resulting facts, and how inputs get there."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import call_write, copy_bytes, load_at, or_at, store_at
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import COPY_BELL, COPY_TAIL, LATER, NEVER, PASSED, SLOTTED, WANTED
from paellapy.scheduler.core.heaps import queue_remove
from paellapy.scheduler.core.loop import wakes
from paellapy.scheduler.core.rings import ONE, address, bit_at, bit_of, reserve
from paellapy.scheduler.core.state import State

_ZERO = np.uint64(0)


@part
def size_for(s: State, m: int, n: int) -> int:
    """The smallest captured size that holds n requests; the largest if none does."""
    k = 0
    last = s.model[m].n_sizes - 1
    while k < last and (s.size[m, k].batch < n or s.size[m, k].segments == 0):
        k += 1
    return k


@part
def fit(s: State, lane: int) -> None:
    """Selects the size at which the lane runs."""
    a = s.lane[lane]
    a.size = size_for(s, a.model, a.taken)


@part
def fit_to_run(s: State, lane: int) -> None:
    """As `fit`; also marks the size at which the lane would run if it were captured."""
    fit(s, lane)
    a = s.lane[lane]
    k = a.size
    while k > 0 and s.size[a.model, k - 1].batch >= a.taken:
        k -= 1
    if k < a.size and s.size[a.model, k].capture == LATER:
        s.size[a.model, k].capture = WANTED


@part
def count_queued(s: State, m: int, n: int) -> None:
    """Adds n requests to the count of the model's queue."""
    core = s.core[0]
    model = s.model[m]
    model.queued += n
    core.queued += n
    core.queued_jobs += n / s.size[m, model.n_sizes - 1].batch
    if core.queued == 0:
        core.queued_jobs = 0.0  # drops rounding errors


@part
def put(s: State, lane: int, slot: int, row: int) -> None:
    """Puts the request into this slot and updates the lane's facts. NONE: the slot was reserved in vain."""
    a = s.lane[lane]
    a.taken += 1
    s.lane_known[lane, slot >> 6] |= bit_of(slot)
    s.slot[lane, slot] = row
    fit(s, lane)
    if row < 0:
        return
    r = s.request[row]
    r.state, r.lane, r.slot = SLOTTED, lane, slot
    s.slot_client[lane, slot] = r.client
    if a.live == 0 or r.arrival_ns < a.arrival_ns:
        a.client = r.client
    a.latest_ns = max(a.latest_ns, r.arrival_ns) if a.live > 0 else r.arrival_ns
    if a.live == 0:
        a.arrival_ns, a.deadline_ns, a.priority, a.client_start_ns = (
            r.arrival_ns, r.deadline_ns, r.priority, r.client_start_ns)  # fmt: skip
    else:
        a.arrival_ns = min(a.arrival_ns, r.arrival_ns)
        a.deadline_ns = min(a.deadline_ns, r.deadline_ns)
        a.priority = max(a.priority, r.priority)
        a.client_start_ns = min(a.client_start_ns, r.client_start_ns)
    a.live += 1


@part
def look_again(s: State, lane: int) -> None:
    """Recomputes the lane's facts from the remaining requests, after one has left."""
    a = s.lane[lane]
    a.arrival_ns, a.deadline_ns, a.priority, a.client_start_ns = NEVER, NEVER, -NEVER, np.inf
    for k in range(s.slot.shape[1]):
        row = s.slot[lane, k]
        if row >= 0:
            r = s.request[row]
            if r.arrival_ns < a.arrival_ns:
                a.arrival_ns = r.arrival_ns
                a.client = r.client
            a.deadline_ns = min(a.deadline_ns, r.deadline_ns)
            a.priority = max(a.priority, r.priority)
            a.client_start_ns = min(a.client_start_ns, r.client_start_ns)


@part
def copy_inputs(s: State, source: Any, lane: int, slot: int, m: int) -> None:
    for k in range(s.model[m].n_inputs):
        n = s.input_bytes[m, k]
        copy_bytes(s.input_address[lane, k] + np.uint64(slot * n), source, np.uint64(n))
        source += np.uint64(n)


@part
def hand_to_copier(s: State, source: int, lane: int, slot: int, m: int) -> None:
    """Lets the copier copy the inputs and mark the slot ready, as a front end would; the core continues meanwhile."""
    tail = load_at(address(s.copy_ring, COPY_TAIL))
    cell = s.copy[np.int64(tail) & (s.copy.shape[0] - 1)]
    cell.source, cell.lane, cell.slot, cell.model = source, lane, slot, m
    cell.at_ns = read_clock(s, s.clock) if s.call[0].clock != _ZERO else 0
    store_at(address(s.copy_ring, COPY_TAIL), tail + ONE)
    if wakes(address(s.copy_ring, COPY_BELL), False):
        s.clock[2] = 1
        call_write(s.call[0].write, np.int32(s.core[0].copier_fd), s.clock[2:].ctypes.data, np.uint64(8))


@part
def wait_for_copy(s: State, row: int) -> None:
    """Waits for a copy in progress before a request is given up, because its inputs may disappear afterwards."""
    r = s.request[row]
    if r.lane >= 0 and r.source != _ZERO and s.core[0].copier_fd >= 0:
        while load_at(bit_at(s.lane_ready, r.lane, r.slot)) & bit_of(r.slot) == _ZERO:
            pass


@part
def move_in(s: State, lane: int, row: int) -> bool:
    """Gives a queued request the lane's next slot, and copies its inputs there; False if the lane is full."""
    r = s.request[row]
    m = s.lane[lane].model
    slots = s.size[m, s.model[m].n_sizes - 1].batch
    slot = reserve(s.lane_word, s.slot_front, lane, slots, r.front)
    if slot < 0:
        return False
    queue_remove(s, s.model[m], row)
    count_queued(s, m, -1)
    if r.state == PASSED:
        s.kept[r.client, m].passed -= 1
    source = r.source
    n = np.int64(0)
    for k in range(s.model[m].n_inputs):
        n += s.input_bytes[m, k]
    if source != _ZERO and s.core[0].copier_fd >= 0 and n >= s.tuning[0].long_copy_bytes:
        hand_to_copier(s, source, lane, slot, m)
    else:
        if source != _ZERO:
            copy_inputs(s, source, lane, slot, m)
        or_at(bit_at(s.lane_ready, lane, slot), bit_of(slot))
    put(s, lane, slot, row)
    return True
