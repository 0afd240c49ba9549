"""What a front end does to the shared tables on every request, compiled: claim a slot, post, mark ready, ring, take.

Handing NumPy tables to compiled code costs a microsecond for every few of them. So a front end keeps the addresses it
needs in one array, its `view`, and hands over that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.jit import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import (
    add_at,
    and_at,
    call_write,
    copy_bytes,
    exchange_at,
    load_at,
    or_at,
    store_at,
)
from paellapy.scheduler.core.loop import wakes
from paellapy.scheduler.core.rings import SLOTS, STAGED, reserve_at
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION, Words

# Indices of a view. Addresses, but for the last.
(V_FILLING, V_LANE_WORD, V_SLOT_FRONT, V_READY, V_HOLD, V_SUBMIT_TAIL, V_SUBMIT, V_DONE_HEAD, V_DONE_TAIL, V_DONE,
 V_WAKE, V_BELL, V_WRITE, V_SCRATCH, V_SLOTS, V_SUBMIT_MASK, V_DONE_MASK, V_FRONT, V_BELL_FD) = range(19)  # fmt: skip

_LINE = np.uint64(64)  # bytes from one row of atomic words to the next
_WORD = np.uint64(8)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_ALL = np.uint64((1 << 64) - 1)
_LOW, _HALF = np.uint64(0xFFFF_FFFF), np.uint64(32)
_SIX, _SIXTY_THREE = np.uint64(6), np.uint64(63)
_SUBMISSION_BYTES = np.uint64(SUBMISSION.itemsize)
_COMPLETION_BYTES = np.uint64(COMPLETION.itemsize)
COMPLETION_WORDS = COMPLETION.itemsize // 8

# A completion as a list of numbers: the columns that are looked at.
(E_REQUEST, E_MODEL, E_LANE, E_SLOT, E_STATUS, E_ERROR, E_ARRIVAL_NS, E_FINISH_NS) = (
    (COMPLETION.names or ()).index(name)
    for name in ("request", "model", "lane", "slot", "status", "error", "arrival_ns", "finish_ns")
)


def make_view(state: State, front: int, bell_fd: int, scratch: NDArray[np.int64]) -> Words:
    """`scratch` is one int64 that stays where it is."""
    line, ring = 64, state.ring[front].ctypes.data
    write = ctypes.cast(ctypes.CDLL(None).write, ctypes.c_void_p).value or 0
    view = {
        V_FILLING: state.filling.ctypes.data,
        V_LANE_WORD: state.lane_word.ctypes.data,
        V_SLOT_FRONT: state.slot_front.ctypes.data,
        V_READY: state.lane_ready.ctypes.data,
        V_HOLD: state.lane_hold.ctypes.data,
        V_SUBMIT_TAIL: ring + line * codes.SUBMIT_TAIL,
        V_SUBMIT: state.submit[front].ctypes.data,
        V_DONE_HEAD: ring + line * codes.DONE_HEAD,
        V_DONE_TAIL: ring + line * codes.DONE_TAIL,
        V_DONE: state.done[front].ctypes.data,
        V_WAKE: state.wake[front].ctypes.data,
        V_BELL: state.bell.ctypes.data,
        V_WRITE: write,
        V_SCRATCH: scratch.ctypes.data,
        V_SLOTS: state.slot_front.shape[1],
        V_SUBMIT_MASK: state.submit.shape[1] - 1,
        V_DONE_MASK: state.done.shape[1] - 1,
        V_FRONT: front,
        V_BELL_FD: bell_fd,
    }
    return np.array([view[k] for k in range(len(view))], np.uint64)


@compiled
def claim(view: Words, model: int) -> int:
    """A slot of the lane that is open to front ends: lane · SLOTS + slot, or STAGED. Post it, whatever comes."""
    opened = load_at(view[V_FILLING] + _LINE * np.uint64(model))
    if opened == _ZERO:
        return STAGED
    lane = (opened & _LOW) - _ONE
    notes = view[V_SLOT_FRONT] + _WORD * view[V_SLOTS] * lane
    slot = reserve_at(view[V_LANE_WORD] + _LINE * lane, notes, np.int64(opened >> _HALF), np.int64(view[V_FRONT]))
    return STAGED if slot < 0 else int(np.int64(lane) * SLOTS + slot)


@part
def publish(
    view: Words, kind: int, request: int, serial: int, model: int, generation: int, lane: int, slot: int, client: int,
    priority: int, arrival_ns: int, deadline_ns: int, source: int,
) -> bool:  # fmt: skip
    tail = view[V_SUBMIT_TAIL]
    while True:
        position = load_at(tail)
        cell = view[V_SUBMIT] + (position & view[V_SUBMIT_MASK]) * _SUBMISSION_BYTES
        turn = load_at(cell)
        if turn == position:
            if exchange_at(tail, position, position + _ONE):
                break
        elif turn < position:
            return False
    at = cell
    # In the order of SUBMISSION; the third is the tag.
    for value in (kind, request, serial, 0, model, lane, slot, client, priority, arrival_ns, deadline_ns, source,
                  generation):  # fmt: skip
        at += _WORD
        store_at(at, np.uint64(value))
    store_at(cell, position + _ONE)
    return True


@part
def wake_core(view: Words, for_request: bool) -> None:
    if wakes(view[V_BELL], for_request):
        store_at(view[V_SCRATCH], _ONE)
        call_write(view[V_WRITE], np.int32(view[V_BELL_FD]), view[V_SCRATCH], _WORD)


@part
def written(view: Words, lane: int, slot: int) -> None:
    word = view[V_READY] + _LINE * np.uint64(lane) + _WORD * (np.uint64(slot) >> _SIX)
    or_at(word, _ONE << (np.uint64(slot) & _SIXTY_THREE))


@compiled
def post(
    view: Words, kind: int, request: int, serial: int, model: int, generation: int, lane: int, slot: int, client: int,
    priority: int, arrival_ns: int, deadline_ns: int, source: int,
) -> bool:  # fmt: skip
    """Hand something to the core and wake it; False when the ring is full. A claimed slot is still to be written."""
    there = publish(view, kind, request, serial, model, generation, lane, slot, client, priority, arrival_ns,
                    deadline_ns, source)  # fmt: skip
    wake_core(view, True)
    return there


@compiled
def post_written(
    view: Words, request: int, serial: int, model: int, generation: int, lane: int, slot: int, client: int,
    priority: int, arrival_ns: int, deadline_ns: int,
) -> bool:  # fmt: skip
    """`post` for a slot whose inputs are there already."""
    there = publish(view, codes.SUBMIT, request, serial, model, generation, lane, slot, client, priority, arrival_ns,
                    deadline_ns, 0)  # fmt: skip
    if there:
        written(view, lane, slot)
    wake_core(view, True)
    return there


@compiled
def ready(view: Words, lane: int, slot: int) -> None:
    """The inputs of a claimed slot are written."""
    written(view, lane, slot)
    wake_core(view, True)


@compiled
def ring_read(view: Words) -> None:
    """Outputs have been released: wake the core where somebody waits for their lane."""
    wake_core(view, False)


@compiled
def release(view: Words, lane: int, slot: int) -> None:
    """The outputs of a completed request are read. `ring_read` when all that were taken are."""
    word = view[V_HOLD] + _LINE * np.uint64(lane) + _WORD * (np.uint64(slot) >> _SIX)
    and_at(word, _ALL ^ (_ONE << (np.uint64(slot) & _SIXTY_THREE)))


@compiled
def take(view: Words, into: NDArray[np.int64]) -> int:
    """Completions, at most len(into); how many. One consumer at a time. When none is left the next one will wake us."""
    store_at(view[V_WAKE], _ONE)
    add_at(view[V_WAKE], _ZERO)  # a full barrier: asked, then looked
    head = load_at(view[V_DONE_HEAD])
    n = min(np.int64(load_at(view[V_DONE_TAIL]) - head), into.shape[0])
    for k in range(n):
        cell = view[V_DONE] + ((head + np.uint64(k)) & view[V_DONE_MASK]) * _COMPLETION_BYTES
        copy_bytes(into[k].ctypes.data, cell, _COMPLETION_BYTES)
    store_at(view[V_DONE_HEAD], head + np.uint64(n))
    return int(n)


@compiled
def find_client(keys: Words, clients: Any, key: int) -> int:
    """The number of a client, known by a hash of its name to all front ends; 0 is nobody in particular.

    Once all numbers are given away a newcomer takes that of a client without requests, or shares with one.
    """
    n = keys.shape[0] - 1
    home = np.int64(np.uint64(key) % np.uint64(n))
    for k in range(n):
        i = 1 + (home + k) % n
        where = keys[i:].ctypes.data
        known = load_at(where)
        if known == np.uint64(key) or (known == _ZERO and exchange_at(where, _ZERO, np.uint64(key))):
            return int(i)
    if clients[1 + home].live == 0:
        store_at(keys[1 + home :].ctypes.data, np.uint64(key))
    return int(1 + home)


def warm_up(state: State) -> None:
    """Loads every function of this module, with tables that nobody else uses."""
    scratch = np.zeros(1, np.int64)
    view = make_view(state, 0, 0, scratch)  # the bell is not armed, and so its descriptor not used
    claim(view, 0)
    post(view, codes.CANCEL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    post_written(view, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    ready(view, 0, 0)
    release(view, 0, 0)
    ring_read(view)
    take(view, np.zeros((1, COMPLETION_WORDS), np.int64))
    find_client(state.client_key, state.client, 1)
