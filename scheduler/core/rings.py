"""The two rings between a producer and the core, and the instances' shared words: all functions that producers call.

Submission rings are bounded, with many producers (threads of one process) and one consumer; a cell's sequence number
shows whose turn it is (Vyukov). Completion rings have one producer and one consumer, and never fill up, because they
have a cell for every request row. Every producer has its own rings, so one that dies while it writes an entry blocks
no other.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import (
    ALL,
    ONE,
    ZERO,
    and_at,
    call_write,
    copy_bytes,
    exchange_at,
    fence,
    load_at,
    or_at,
    store_at,
)
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION, Words, struct_fields

# --- sleeping and waking: an eventfd with a flag beside it, so that ringing a loop that is awake needs no system call

# Values of the word beside a bell: the loop is awake; it sleeps, and everything wakes it; it sleeps, and everything
# wakes it except outputs that were read, because no request waits for their instances.
AWAKE, ANYTHING, REQUESTS = np.uint64(0), np.uint64(1), np.uint64(2)


@part
def must_ring(word: int, for_request: bool) -> bool:
    """Whether the caller has to write to the bell's descriptor.

    Work that was posted before is visible to a loop that armed the bell after. Only the first caller that rings has to
    write; the loop looks at everything when it wakes.
    """
    fence()
    seen = load_at(word)
    if seen == AWAKE or (seen == REQUESTS and not for_request):
        return False
    return bool(exchange_at(word, seen, AWAKE))


@part
def announce_sleep(word: int, value: np.uint64) -> None:
    """Announces that the caller is about to sleep. The caller looks for work once more after this."""
    store_at(word, value)
    fence()


@part
def arm(word: int, for_anything: bool) -> None:
    announce_sleep(word, ANYTHING if for_anything else REQUESTS)


@part
def write_event(s: State, fd: int, scratch: NDArray[np.int64]) -> None:
    """Adds 1 to an eventfd. `scratch` is one int64."""
    scratch[0] = 1
    call_write(s.call[0].write, np.int32(fd), scratch.ctypes.data, np.uint64(8))


class Bell:
    """Wakes one sleeping loop. The loop arms the bell, looks for work once more, and only then sleeps.

    No work is lost: work that was posted before the bell was armed is seen by the second look, and later work rings it.
    """

    def __init__(self, word: Words, blocking: bool = False, fd: int = -1) -> None:
        """`blocking`: for a loop that sleeps by reading the descriptor. `fd`: that of a loop in another process."""
        self.fd = fd if fd >= 0 else os.eventfd(0, os.EFD_CLOEXEC | (0 if blocking else os.EFD_NONBLOCK))
        self.word = word

    @property
    def armed(self) -> bool:
        return bool(self.word[0])

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


STAGED = -1
SLOTS = 1 << 16  # largest number of slots of an instance: `claim` returns instance · SLOTS + slot

_CLOSED = np.uint64(codes.CLOSED)
_RESERVED_MASK = np.uint64(codes.RESERVED_MASK)
_PRODUCER_MASK = np.uint64(codes.PRODUCER_MASK)
_GENERATION_MASK = np.uint64(codes.GENERATION_MASK)
_GENERATION_SHIFT = np.uint64(codes.GENERATION_SHIFT)
_HALF_WAY = np.uint64(codes.GENERATION_MASK // 2)
_BITS = np.uint64(63)
_RESERVED_ONE = np.uint64(codes.RESERVED_ONE)
_RESERVED_SHIFT = np.uint64(codes.RESERVED_SHIFT)
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_WORD = np.uint64(8)
_MESSAGE_BYTES = np.uint64(SUBMISSION.itemsize) - _WORD
_COMPLETION_BYTES = np.uint64(COMPLETION.itemsize)


class Message(ctypes.Structure):
    """A SUBMISSION to be filled in and posted by its address. Each thread has one: posting copies it."""

    _fields_ = struct_fields(SUBMISSION)
    address: int
    kind: int
    request: int
    serial: int
    tag: int
    model: int
    instance: int
    slot: int
    client: int
    priority: int
    arrival_ns: int
    deadline_ns: int
    source: int
    generation: int
    items: int

    def __init__(self, **values: int) -> None:
        """Defaults: no slot, no deadline, otherwise zero."""
        super().__init__(**{"instance": codes.NONE, "slot": codes.NONE, "deadline_ns": codes.NEVER, **values})
        self.address = ctypes.addressof(self)


@part
def address(words: Words, row: int) -> int:
    """The address of the first word of a row."""
    found: int = words[row].ctypes.data
    return found


@part
def bit_at(masks: Words, instance: int, slot: int) -> int:
    """The address of the word that has the slot's bit."""
    found: int = masks[instance, slot >> 6 :].ctypes.data
    return found


@part
def bit_of(slot: int) -> Any:
    return ONE << (np.uint64(slot) & _BITS)


@part
def reserved_of(word: Any) -> int:
    """The number of slots that the instance with this word has given away."""
    return int(np.int64((word >> _RESERVED_SHIFT) & _RESERVED_MASK))


@part
def reserved_slots(s: State, instance: int) -> int:
    return int(reserved_of(load_at(address(s.instance_word, instance))))


@part
def record_producer(where: Any, word: Any) -> None:
    """Records which producer reserved the last slot of the word, before the next reservation overwrites its number.

    The next producer to reserve does this, so one that dies right after reserving is recorded all the same. A producer
    end that was delayed until the instance was opened anew has an older generation, and does not overwrite a newer
    record.
    """
    generation = (word >> _GENERATION_SHIFT) & _GENERATION_MASK
    while True:
        noted = load_at(where)
        if (generation - (noted >> _GENERATION_SHIFT) - ONE) & _GENERATION_MASK > _HALF_WAY:
            return
        if exchange_at(where, noted, (generation << _GENERATION_SHIFT) | (word & _PRODUCER_MASK)):
            return


@part
def producer_of(instance_word: Words, slot_producer: Words, instance: int, slot: int) -> int:
    """The producer that reserved the slot, for an instance that is open, running or held."""
    word = load_at(address(instance_word, instance))
    if reserved_of(word) - 1 == slot:
        return int(np.int64(word & _PRODUCER_MASK))
    return int(np.int64(load_at(slot_producer[instance, slot:].ctypes.data) & _PRODUCER_MASK))


@part
def reserve(instance_word: Words, slot_producer: Words, instance: int, slots: int, producer: int) -> int:
    """The next slot of an open instance, or NONE. One exchange both takes the slot and records its producer."""
    where, notes = np.uint64(address(instance_word, instance)), np.uint64(address(slot_producer, instance))
    while True:
        word = load_at(where)
        taken = reserved_of(word)
        if word >= _CLOSED or taken >= slots:
            return codes.NONE
        if taken > 0:
            record_producer(notes + np.uint64(8 * (taken - 1)), word)
        if exchange_at(where, word, ((word & ~_PRODUCER_MASK) | np.uint64(producer)) + _RESERVED_ONE):
            return int(taken)


@part
def claim_slot(s: State, producer: int, model: int, client: int) -> int:
    """A slot of the instance that is open to producers: instance · SLOTS + slot, or STAGED. Requests that the core may
    keep out of instances are always staged: those of a client with a limit, and all where `admit` looks at the client.
    The client is recorded at once: if the producer dies before it posts the request, this client is charged for the
    slot.
    """
    if s.client[client].limit > 0.0 or s.core[0].by_client:
        return STAGED
    opened = load_at(address(s.filling, model))
    if opened == ZERO:
        return STAGED
    instance = int(np.int64(opened & _LOW)) - 1
    slot = reserve(s.instance_word, s.slot_producer, instance, int(np.int64(opened >> _HALF)), producer)
    if slot < 0:
        return STAGED
    s.slot_client[instance, slot] = client
    return instance * SLOTS + slot


@part
def publish_all(s: State, producer: int, messages: int, n: int) -> bool:
    """Copies n messages, SUBMISSIONs that lie one behind the other at an address, into the producer's ring; False if
    the ring has no room for all of them now.

    The first becomes visible last, so the core takes all of them in one step.
    """
    tail = s.ring[producer, codes.SUBMIT_TAIL :].ctypes.data
    mask = np.uint64(s.submit.shape[1] - 1)
    last = np.uint64(n - 1)
    while True:
        position = load_at(tail)
        at = np.int64((position + last) & mask)
        sequence = load_at(s.submit[producer, at:].ctypes.data)
        if sequence == position + last:  # the core takes messages in order, so the cells before it are free too
            if exchange_at(tail, position, position + np.uint64(n)):
                break
        elif sequence < position + last:
            return False
    for k in range(n - 1, -1, -1):
        at = np.int64((position + np.uint64(k)) & mask)
        cell = np.uint64(s.submit[producer, at:].ctypes.data)
        source = np.uint64(messages) + np.uint64(k) * (_MESSAGE_BYTES + _WORD)
        copy_bytes(cell + _WORD, source + _WORD, _MESSAGE_BYTES)  # all but the cell's own sequence number
        store_at(cell, position + np.uint64(k) + ONE)
    return True


@part
def publish(s: State, producer: int, message: int) -> bool:
    return bool(publish_all(s, producer, message, 1))


@part
def set_ready(s: State, instance: int, slot: int) -> None:
    or_at(bit_at(s.instance_ready, instance, slot), bit_of(slot))


@part
def clear_hold(s: State, instance: int, slot: int) -> None:
    and_at(bit_at(s.instance_hold, instance, slot), ALL ^ bit_of(slot))


@part
def take_completions(s: State, producer: int, into: int, most: int) -> int:
    """Moves at most `most` completions of a producer's ring to an address; returns their number. One consumer."""
    head = load_at(s.ring[producer, codes.DONE_HEAD :].ctypes.data)
    n = min(int(np.int64(load_at(s.ring[producer, codes.DONE_TAIL :].ctypes.data) - head)), most)
    mask = np.int64(s.done.shape[1] - 1)
    for k in range(n):
        cell = s.done[producer, (np.int64(head) + k) & mask :].ctypes.data
        copy_bytes(np.uint64(into) + np.uint64(k) * _COMPLETION_BYTES, cell, _COMPLETION_BYTES)
    store_at(s.ring[producer, codes.DONE_HEAD :].ctypes.data, head + np.uint64(n))
    return n


@compiled
def post(s: State, producer: int, message: int) -> bool:
    """Posts a `Message`, by its address, to the core, from any thread; False if the ring is full.

    Without a slot, the core copies the inputs from `source`, which must stay until the completion. With a slot, write
    the inputs there at once, then mark the slot as ready; the instance waits for it.
    """
    return bool(publish(s, producer, message))
