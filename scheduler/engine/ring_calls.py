"""Compiled operations of a producer on the shared tables: claim a slot, post, mark ready, ring, take.

`core.rings` describes the protocol. Passing a table set or an array to compiled code takes longer than these functions
together. So a producer passes the address of its *line*: one row with the state's address and the other values that
these functions need.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import brief, compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import c_address, call_write, load_at
from paellapy.scheduler.core.rings import (
    ANYTHING,
    Message,
    address,
    announce_sleep,
    claim_slot,
    clear_hold,
    must_ring,
    publish,
    publish_all,
    set_ready,
    take_completions,
)
from paellapy.scheduler.core.state import State, monotonic_ns, state_at
from paellapy.scheduler.core.tables import COMPLETION
from paellapy.scheduler.core.tenants import find_client

LINE = np.dtype(
    [
        ("one", "u8"),  # the value that is written to the bell, read from this address
        ("state", "u8"),  # address of the state
        ("producer", "i8"),
        ("bell_fd", "i8"),
        ("write", "u8"),  # addresses of libc's write() and clock_gettime()
        ("clock", "u8"),
    ],
    align=True,
)
_OFFSETS: Any = LINE.fields
_STATE, _PRODUCER, _BELL_FD, _WRITE, _CLOCK = (
    np.uint64(_OFFSETS[name][1]) for name in ("state", "producer", "bell_fd", "write", "clock")
)
COMPLETION_WORDS = COMPLETION.itemsize // 8
_WORD = np.uint64(8)

# Indices of the columns that producers read, in a completion given as a list of numbers.
(E_REQUEST, E_MODEL, E_INSTANCE, E_SLOT, E_STATUS, E_ERROR, E_ARRIVAL_NS, E_STARTED_NS, E_FINISH_NS,
 E_BATCH) = (
    (COMPLETION.names or ()).index(name)
    for name in ("request", "model", "instance", "slot", "status", "error", "arrival_ns", "started_ns", "finish_ns",
                 "batch")
)  # fmt: skip


class Line:
    """The line of one producer. It is valid for as long as it and the state are kept."""

    def __init__(self, state: State, producer: int, bell_fd: int) -> None:
        write, clock = (c_address(getattr(ctypes.CDLL(None), name)) for name in ("write", "clock_gettime"))
        self._row = np.array([(1, state.address, producer, bell_fd, write, clock)], LINE)
        self.address = int(self._row.ctypes.data)


@part
def field(line: int, offset: Any) -> Any:
    """A field of the line at this address."""
    return load_at(np.uint64(line) + offset)


@part
def producer_of(line: int) -> Any:
    return np.int64(field(line, _PRODUCER))


@part
def wake_core(line: int, for_request: bool) -> None:
    if must_ring(state_at(field(line, _STATE)).bell.ctypes.data, for_request):
        call_write(field(line, _WRITE), np.int32(field(line, _BELL_FD)), np.uint64(line), _WORD)


@brief
def claim(line: int, model: int, client: int) -> int:
    """Claims a slot of the instance open to producers: instance · SLOTS + slot, or STAGED. A claimed slot must be
    posted.
    """
    return int(claim_slot(state_at(field(line, _STATE)), producer_of(line), model, client))


@brief
def post(line: int, message: int) -> bool:
    """Posts a message to the core and wakes it; False when the ring is full. The inputs of a claimed slot come later.
    """
    there = publish(state_at(field(line, _STATE)), producer_of(line), message)
    wake_core(line, True)
    return bool(there)


@brief
def post_all(line: int, messages: int, n: int) -> bool:
    """As `post`, for n messages that lie one behind the other: the core takes all of them in one step."""
    there = publish_all(state_at(field(line, _STATE)), producer_of(line), messages, n)
    wake_core(line, True)
    return bool(there)


@brief
def post_written(line: int, message: int, instance: int, slot: int) -> bool:
    """As `post`, for a slot whose inputs are already written."""
    s = state_at(field(line, _STATE))
    there = publish(s, producer_of(line), message)
    if there:
        set_ready(s, instance, slot)
    wake_core(line, True)
    return bool(there)


@brief
def ready(line: int, instance: int, slot: int) -> None:
    """Marks the inputs of a claimed slot as written."""
    set_ready(state_at(field(line, _STATE)), instance, slot)
    wake_core(line, True)


@brief
def ring_read(line: int) -> None:
    """Wakes the core, after outputs were released, if a request waits for their instance."""
    wake_core(line, False)


@brief
def release(line: int, instance: int, slot: int) -> None:
    """Marks the outputs of a completed request as read. Call `ring_read` once all completions taken are released."""
    clear_hold(state_at(field(line, _STATE)), instance, slot)


@brief
def take(line: int, into: NDArray[np.int64]) -> int:
    """Takes completions, at most len(into), and returns their number. One consumer at a time, which goes on until this
    returns 0: only then the next completion wakes it. Completions that come while it answers others cost the core no
    system call.
    """
    s = state_at(field(line, _STATE))
    producer = producer_of(line)
    n = take_completions(s, producer, into.ctypes.data, into.shape[0])
    if n == 0:
        announce_sleep(address(s.wake, producer), ANYTHING)
        n = take_completions(s, producer, into.ctypes.data, into.shape[0])
    return int(n)


@brief
def take_early(line: int, into: NDArray[np.int64]) -> int:
    """As `take`, before the consumer is woken: it is, or will be, woken for these completions or for earlier ones."""
    return int(take_completions(state_at(field(line, _STATE)), producer_of(line), into.ctypes.data, into.shape[0]))


_LOOKS = 64  # between two readings of the clock


@compiled
def await_any(line: int, most_ns: int, scratch: NDArray[np.int64]) -> bool:
    """Spins, without the interpreter's lock, until a completion is there; False: none came in this time. `scratch` is
    of two int64.
    """
    s = state_at(field(line, _STATE))
    words = s.ring[producer_of(line)]
    head, tail = words[codes.DONE_HEAD :].ctypes.data, words[codes.DONE_TAIL :].ctypes.data
    clock = field(line, _CLOCK)
    end = monotonic_ns(clock, scratch) + most_ns
    while True:
        for _ in range(_LOOKS):
            if load_at(tail) != load_at(head):
                return True
        if monotonic_ns(clock, scratch) >= end:
            return False


def warm_up(state: State) -> None:
    """Loads every function of this module, on tables that nothing else uses."""
    made = Line(state, 0, 0)  # the bell is not armed, so its descriptor is not used
    line = made.address
    message = Message(kind=codes.CANCEL)
    claim(line, 0, 0)
    post(line, message.address)
    post_all(line, message.address, 1)
    post_written(line, message.address, 0, 0)
    ready(line, 0, 0)
    release(line, 0, 0)
    ring_read(line)
    take(line, np.zeros((1, COMPLETION_WORDS), np.int64))
    take_early(line, np.zeros((1, COMPLETION_WORDS), np.int64))
    await_any(line, 0, np.zeros(2, np.int64))
    find_client(state.client_key, state.client, 1)
