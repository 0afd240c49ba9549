"""Compiled operations of a front end on the shared tables: claim a slot, post, mark ready, ring, take.

`core.rings` describes the protocol. Passing a table set to compiled code takes longer than these functions together, so
a front end passes its *line*: one row with the state's address and the other values that these functions need.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.jit import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_write
from paellapy.scheduler.core.clients import find_client
from paellapy.scheduler.core.loop import ANYTHING, ask, wakes
from paellapy.scheduler.core.rings import (
    Message,
    address,
    claim_slot,
    clear_hold,
    publish,
    publish_all,
    set_ready,
    take_into,
)
from paellapy.scheduler.core.state import State, state_at
from paellapy.scheduler.core.tables import COMPLETION, Table

LINE = np.dtype(
    [
        ("one", "u8"),  # the value that is written to the bell, read from this address
        ("state", "u8"),  # address of the state
        ("front", "i8"),
        ("bell_fd", "i8"),
        ("write", "u8"),  # address of libc's write()
    ],
    align=True,
)
COMPLETION_WORDS = COMPLETION.itemsize // 8
_WORD = np.uint64(8)

# Indices of the columns that front ends read, in a completion given as a list of numbers.
(E_REQUEST, E_MODEL, E_LANE, E_SLOT, E_STATUS, E_ERROR, E_ARRIVAL_NS, E_FINISH_NS) = (
    (COMPLETION.names or ()).index(name)
    for name in ("request", "model", "lane", "slot", "status", "error", "arrival_ns", "finish_ns")
)


def make_line(state: State, front: int, bell_fd: int) -> Table:
    """The line of one front end. It is valid for as long as the state is kept."""
    write = ctypes.cast(ctypes.CDLL(None).write, ctypes.c_void_p).value or 0
    return np.array([(1, state.address, front, bell_fd, write)], LINE)


@part
def wake_core(line: Table, for_request: bool) -> None:
    if wakes(state_at(line[0].state).bell.ctypes.data, for_request):
        call_write(line[0].write, np.int32(line[0].bell_fd), line.ctypes.data, _WORD)


@compiled
def claim(line: Table, model: int, client: int) -> int:
    """Claims a slot of the lane open to front ends: lane · SLOTS + slot, or STAGED. A claimed slot must be posted."""
    return int(claim_slot(state_at(line[0].state), line[0].front, model, client))


@compiled
def post(line: Table, message: int) -> bool:
    """Posts a message to the core and wakes it; False when the ring is full. The inputs of a claimed slot come later.
    """
    there = publish(state_at(line[0].state), line[0].front, message)
    wake_core(line, True)
    return bool(there)


@compiled
def post_all(line: Table, messages: int, n: int) -> bool:
    """As `post`, for n messages that lie one behind the other: the core takes all of them in one step."""
    there = publish_all(state_at(line[0].state), line[0].front, messages, n)
    wake_core(line, True)
    return bool(there)


@compiled
def post_written(line: Table, message: int, lane: int, slot: int) -> bool:
    """As `post`, for a slot whose inputs are already written."""
    s = state_at(line[0].state)
    there = publish(s, line[0].front, message)
    if there:
        set_ready(s, lane, slot)
    wake_core(line, True)
    return bool(there)


@compiled
def ready(line: Table, lane: int, slot: int) -> None:
    """Marks the inputs of a claimed slot as written."""
    set_ready(state_at(line[0].state), lane, slot)
    wake_core(line, True)


@compiled
def ring_read(line: Table) -> None:
    """Wakes the core, after outputs were released, if a request waits for their lane."""
    wake_core(line, False)


@compiled
def release(line: Table, lane: int, slot: int) -> None:
    """Marks the outputs of a completed request as read. Call `ring_read` once all completions taken are released."""
    clear_hold(state_at(line[0].state), lane, slot)


@compiled
def take(line: Table, into: NDArray[np.int64]) -> int:
    """Takes completions, at most len(into), and returns their number. One consumer at a time. Once the ring is empty,
    the next completion wakes the consumer.
    """
    s = state_at(line[0].state)
    front = line[0].front
    ask(address(s.wake, front), ANYTHING)
    return int(take_into(s, front, into.ctypes.data, into.shape[0]))


def warm_up(state: State) -> None:
    """Loads every function of this module, on tables that nothing else uses."""
    line = make_line(state, 0, 0)  # the bell is not armed, so its descriptor is not used
    message = Message(kind=codes.CANCEL)
    claim(line, 0, 0)
    post(line, message.address)
    post_all(line, message.address, 1)
    post_written(line, message.address, 0, 0)
    ready(line, 0, 0)
    release(line, 0, 0)
    ring_read(line)
    take(line, np.zeros((1, COMPLETION_WORDS), np.int64))
    find_client(state.client_key, state.client, 1)
