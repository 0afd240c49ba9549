"""The two rings between front ends and the core, and the lanes' shared words: all that front ends call.

Submissions: bounded, many producers, one consumer; a cell's sequence number says whose turn it is (Vyukov).
Completions: one producer, one consumer, never full, because it has a cell for every request row.
"""

from __future__ import annotations

import numpy as np

from instrument.device.heaps import compiled, inlined
from scheduler.atomics import add_at, exchange_at, load_at, store_at
from scheduler.state import (
    CLOSED,
    DONE_HEAD,
    DONE_TAIL,
    NONE,
    READY_MASK,
    RESERVED_ONE,
    RESERVED_SHIFT,
    SUBMIT_TAIL,
    Table,
    Words,
)

STAGED = -1
RING_FULL = -2
SLOTS = 1 << 16  # slots a lane could have: `post` answers lane · SLOTS + slot

# Numba makes a float of a u64 plus an int: every number that meets a word is a u64.
ONE = np.uint64(1)
_MINUS_ONE = np.uint64((1 << 64) - 1)
_CLOSED = np.uint64(CLOSED)
_MASK = np.uint64(READY_MASK)
_RESERVED_ONE = np.uint64(RESERVED_ONE)
_RESERVED_SHIFT = np.uint64(RESERVED_SHIFT)
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


@inlined
def address(words: Words, row: int) -> int:
    """Of the first word of a row."""
    found: int = words[row].ctypes.data
    return found


@inlined
def reserve(lane_word: Words, lane: int, slots: int) -> int:
    """The next slot of a lane that is open, or NONE."""
    where = address(lane_word, lane)
    while True:
        word = load_at(where)
        taken = np.int64((word >> _RESERVED_SHIFT) & _MASK)
        if word >= _CLOSED or taken >= slots:
            return NONE
        if exchange_at(where, word, word + _RESERVED_ONE):
            return int(taken)


@compiled
def post(
    ring: Words, submit: Table, filling: Words, lane_word: Words, kind: int, request: int, serial: int, tag: int,
    model: int, client: int, priority: int, arrival_ns: int, deadline_ns: int, source: int, direct: bool,
) -> int:  # fmt: skip
    """Hand something to the core, from any thread. With `direct`, try for a slot of the model's filling lane.

    RING_FULL: nothing happened. STAGED: the core will copy from `source`, which must stay until the completion.
    Otherwise lane · SLOTS + slot: write the inputs there, at once, then `mark_ready(lane_word, lane)`; the lane waits.
    """
    tail = address(ring, SUBMIT_TAIL)
    mask = np.uint64(submit.shape[0] - 1)
    while True:
        position = load_at(tail)
        cell = np.int64(position & mask)
        turn = load_at(submit[cell : cell + 1].ctypes.data)
        if turn == position:
            if exchange_at(tail, position, position + ONE):
                break
        elif turn < position:
            return RING_FULL
    lane = slot = NONE
    if direct:
        open_lane = load_at(address(filling, model))
        if open_lane:
            lane = int(np.int64(open_lane & _LOW)) - 1
            slot = reserve(lane_word, lane, int(np.int64(open_lane >> _HALF)))
            if slot < 0:
                lane = NONE
    row = submit[cell]
    row.kind, row.request, row.serial, row.tag = kind, request, serial, tag
    row.model, row.lane, row.slot, row.client, row.priority = model, lane, slot, client, priority
    row.arrival_ns, row.deadline_ns, row.source = arrival_ns, deadline_ns, source
    store_at(submit[cell : cell + 1].ctypes.data, position + ONE)
    return STAGED if lane < 0 else lane * SLOTS + slot


@compiled
def mark_ready(lane_word: Words, lane: int) -> None:
    """The inputs of one reserved slot are written."""
    add_at(address(lane_word, lane), ONE)


@compiled
def release(lane_hold: Words, lane: int) -> None:
    """The outputs of one completed request are read."""
    add_at(address(lane_hold, lane), _MINUS_ONE)


@compiled
def take_done(ring: Words, done: Table, into: Table) -> int:
    """Move completions out of the ring, at most len(into); how many. One consumer at a time."""
    head = load_at(address(ring, DONE_HEAD))
    n = min(np.int64(load_at(address(ring, DONE_TAIL)) - head), into.shape[0])
    for k in range(n):
        into[k] = done[(np.int64(head) + k) & (done.shape[0] - 1)]
    store_at(address(ring, DONE_HEAD), head + np.uint64(n))
    return int(n)
