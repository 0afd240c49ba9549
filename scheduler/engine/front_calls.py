"""What a front end does to the shared tables on every request, compiled: claim a slot, post, mark ready, ring, take.

`core.rings` has the protocol. Handing a table set to compiled code takes longer than all of this together, so a front
end hands over its *line*: one row with the state's address and what else these functions need.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.jit import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_write, exchange_at, load_at, store_at
from paellapy.scheduler.core.loop import ANYTHING, ask, wakes
from paellapy.scheduler.core.rings import Message, address, claim_slot, clear_hold, publish, set_ready, take_into
from paellapy.scheduler.core.state import State, state_at
from paellapy.scheduler.core.tables import COMPLETION, Table, Words

LINE = np.dtype(
    [
        ("one", "u8"),  # what is written to the bell, from here
        ("state", "u8"),  # its address
        ("front", "i8"),
        ("bell_fd", "i8"),
        ("write", "u8"),  # the address of libc's function
    ],
    align=True,
)
COMPLETION_WORDS = COMPLETION.itemsize // 8
_WORD = np.uint64(8)
_ZERO = np.uint64(0)

# A completion as a list of numbers: the columns that are looked at.
(E_REQUEST, E_MODEL, E_LANE, E_SLOT, E_STATUS, E_ERROR, E_ARRIVAL_NS, E_FINISH_NS) = (
    (COMPLETION.names or ()).index(name)
    for name in ("request", "model", "lane", "slot", "status", "error", "arrival_ns", "finish_ns")
)


def make_line(state: State, front: int, bell_fd: int) -> Table:
    """For as long as the state is kept."""
    write = ctypes.cast(ctypes.CDLL(None).write, ctypes.c_void_p).value or 0
    return np.array([(1, state.address, front, bell_fd, write)], LINE)


@part
def wake_core(line: Table, for_request: bool) -> None:
    if wakes(state_at(line[0].state).bell.ctypes.data, for_request):
        call_write(line[0].write, np.int32(line[0].bell_fd), line.ctypes.data, _WORD)


@compiled
def claim(line: Table, model: int) -> int:
    """A slot of the lane that is open to front ends: lane · SLOTS + slot, or STAGED. Post it, whatever comes."""
    return int(claim_slot(state_at(line[0].state), line[0].front, model))


@compiled
def post(line: Table, message: int) -> bool:
    """Hand a message to the core and wake it; False when the ring is full. A claimed slot is still to be written."""
    there = publish(state_at(line[0].state), line[0].front, message)
    wake_core(line, True)
    return bool(there)


@compiled
def post_written(line: Table, message: int, lane: int, slot: int) -> bool:
    """`post` for a slot whose inputs are there already."""
    s = state_at(line[0].state)
    there = publish(s, line[0].front, message)
    if there:
        set_ready(s, lane, slot)
    wake_core(line, True)
    return bool(there)


@compiled
def ready(line: Table, lane: int, slot: int) -> None:
    """The inputs of a claimed slot are written."""
    set_ready(state_at(line[0].state), lane, slot)
    wake_core(line, True)


@compiled
def ring_read(line: Table) -> None:
    """Outputs have been released: wake the core where somebody waits for their lane."""
    wake_core(line, False)


@compiled
def release(line: Table, lane: int, slot: int) -> None:
    """The outputs of a completed request are read. `ring_read` when all that were taken are."""
    clear_hold(state_at(line[0].state), lane, slot)


@compiled
def take(line: Table, into: NDArray[np.int64]) -> int:
    """Completions, at most len(into); how many. One consumer at a time. When none is left the next one will wake us."""
    s = state_at(line[0].state)
    front = line[0].front
    ask(address(s.wake, front), ANYTHING)
    return int(take_into(s, front, into.ctypes.data, into.shape[0]))


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
    for _ in range(n):  # a tenant's number stays its own
        if clients[1 + home].tenant == 0:
            break
        home = (home + 1) % n
    if clients[1 + home].live == 0 and clients[1 + home].tenant == 0:
        store_at(keys[1 + home :].ctypes.data, np.uint64(key))
    return int(1 + home)


def warm_up(state: State) -> None:
    """Loads every function of this module, with tables that nobody else uses."""
    line = make_line(state, 0, 0)  # the bell is not armed, and so its descriptor not used
    message = Message(kind=codes.CANCEL)
    claim(line, 0)
    post(line, message.address)
    post_written(line, message.address, 0, 0)
    ready(line, 0, 0)
    release(line, 0, 0)
    ring_read(line)
    take(line, np.zeros((1, COMPLETION_WORDS), np.int64))
    find_client(state.client_key, state.client, 1)
