"""The two rings between a front end and the core, and the lanes' shared words: all that front ends call.

Submissions: bounded, many producers (threads of one process), one consumer; a cell's sequence number says whose turn it
is (Vyukov). Completions: one producer, one consumer, never full, because it has a cell for every request row. Every
front end has rings of its own, so that one which dies in the middle of an entry blocks nobody.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.device.jit import compiled, part
from paellapy.scheduler.core.atomics import and_at, exchange_at, load_at, or_at, store_at
from paellapy.scheduler.core.codes import (
    CLOSED,
    DONE_HEAD,
    DONE_TAIL,
    FRONT_MASK,
    GENERATION_MASK,
    GENERATION_SHIFT,
    NONE,
    RESERVED_MASK,
    RESERVED_ONE,
    RESERVED_SHIFT,
    SUBMIT_TAIL,
)
from paellapy.scheduler.core.tables import Table, Words

STAGED = -1
RING_FULL = -2
SLOTS = 1 << 16  # slots a lane could have: `post` answers lane · SLOTS + slot

# Numba makes a float of a u64 plus an int: every number that meets a word is a u64.
ONE = np.uint64(1)
_ALL = np.uint64((1 << 64) - 1)
_CLOSED = np.uint64(CLOSED)
_MASK = np.uint64(RESERVED_MASK)
_FRONT_MASK = np.uint64(FRONT_MASK)
_GENERATION_MASK = np.uint64(GENERATION_MASK)
_GENERATION_SHIFT = np.uint64(GENERATION_SHIFT)
_HALF_WAY = np.uint64(GENERATION_MASK // 2)
_BITS = np.uint64(63)
_ZERO = np.uint64(0)
_RESERVED_ONE = np.uint64(RESERVED_ONE)
_RESERVED_SHIFT = np.uint64(RESERVED_SHIFT)
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


@part
def address(words: Words, row: int) -> int:
    """Of the first word of a row."""
    found: int = words[row].ctypes.data
    return found


@part
def bit_at(masks: Words, lane: int, slot: int) -> int:
    """The address of the word that has the slot's bit."""
    found: int = masks[lane, slot >> 6 :].ctypes.data
    return found


@part
def bit_of(slot: int) -> Any:
    return ONE << (np.uint64(slot) & _BITS)


@part
def note_front(where: Any, word: Any) -> None:
    """Write down who reserved the last slot of the word, before another does and its name is gone from the word.

    Whoever comes next does that, so a front end that dies right after reserving is known all the same. Who was held up
    until the lane has been opened anew knows an older generation, and writes nothing over a newer one.
    """
    generation = (word >> _GENERATION_SHIFT) & _GENERATION_MASK
    while True:
        noted = load_at(where)
        if (generation - (noted >> _GENERATION_SHIFT) - ONE) & _GENERATION_MASK > _HALF_WAY:
            return
        if exchange_at(where, noted, (generation << _GENERATION_SHIFT) | (word & _FRONT_MASK)):
            return


@part
def front_of(lane_word: Words, slot_front: Words, lane: int, slot: int) -> int:
    """Who reserved the slot of a lane that is open, runs or is held."""
    word = load_at(address(lane_word, lane))
    if np.int64((word >> _RESERVED_SHIFT) & _MASK) - 1 == slot:
        return int(np.int64(word & _FRONT_MASK))
    return int(np.int64(load_at(slot_front[lane, slot:].ctypes.data) & _FRONT_MASK))


@part
def reserve(lane_word: Words, slot_front: Words, lane: int, slots: int, front: int) -> int:
    """The next slot of a lane that is open, or NONE."""
    return int(reserve_at(np.uint64(address(lane_word, lane)), np.uint64(address(slot_front, lane)), slots, front))


@part
def reserve_at(where: Any, notes: Any, slots: Any, front: Any) -> int:
    """`reserve`, by the addresses of the lane's word and of its row of `slot_front`.

    One exchange takes the slot and says whose it is.
    """
    while True:
        word = load_at(where)
        taken = np.int64((word >> _RESERVED_SHIFT) & _MASK)
        if word >= _CLOSED or taken >= slots:
            return NONE
        if taken > 0:
            note_front(notes + np.uint64(8 * (taken - 1)), word)
        if exchange_at(where, word, ((word & ~_FRONT_MASK) | np.uint64(front)) + _RESERVED_ONE):
            return int(taken)


@compiled
def post(
    ring: Words, submit: Table, filling: Words, lane_word: Words, slot_front: Words, kind: int, request: int,
    serial: int, tag: int, model: int, client: int, priority: int, arrival_ns: int, deadline_ns: int, source: int,
    direct: bool,
) -> int:  # fmt: skip
    """Hand something to the core, from any thread of the engine's process: `ring` and `submit` are front end 0's.

    With `direct`, try for a slot of the model's filling lane. RING_FULL: nothing happened. STAGED: the core will copy
    from `source`, which must stay until the completion. Otherwise lane · SLOTS + slot: write the inputs there, at once,
    then `mark_ready(lane_ready, lane, slot)`; the lane waits.
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
            slot = reserve(lane_word, slot_front, lane, int(np.int64(open_lane >> _HALF)), 0)
            if slot < 0:
                lane = NONE
    row = submit[cell]
    row.kind, row.request, row.serial, row.tag = kind, request, serial, tag
    row.model, row.lane, row.slot, row.client, row.priority = model, lane, slot, client, priority
    row.arrival_ns, row.deadline_ns, row.source, row.generation = arrival_ns, deadline_ns, source, np.uint64(0)
    store_at(submit[cell : cell + 1].ctypes.data, position + ONE)
    return STAGED if lane < 0 else lane * SLOTS + slot


@compiled
def mark_ready(lane_ready: Words, lane: int, slot: int) -> None:
    """The inputs of a reserved slot are written."""
    or_at(bit_at(lane_ready, lane, slot), bit_of(slot))


@compiled
def release(lane_hold: Words, lane: int, slot: int) -> None:
    """The outputs of a completed request are read."""
    and_at(bit_at(lane_hold, lane, slot), _ALL ^ bit_of(slot))


@compiled
def ask_to_be_woken(wake: Words, front: int) -> None:
    """The next completion is to write to the front end's eventfd. Look at the ring after this, and then sleep."""
    exchange_at(address(wake, front), _ZERO, ONE)


@compiled
def take_done(ring: Words, done: Table, into: Table) -> int:
    """Move completions out of the ring, at most len(into); how many. One consumer at a time."""
    head = load_at(address(ring, DONE_HEAD))
    n = min(np.int64(load_at(address(ring, DONE_TAIL)) - head), into.shape[0])
    for k in range(n):
        into[k] = done[(np.int64(head) + k) & (done.shape[0] - 1)]
    store_at(address(ring, DONE_HEAD), head + np.uint64(n))
    return int(n)
