"""Takes back everything that a dead front end had: requests, slots, holds, rings. Other front ends are not affected."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import compiled
from paellapy.scheduler.core.atomics import and_at, load_at, or_at, store_at
from paellapy.scheduler.core.codes import CANCELLED, FREE, RESERVED_MASK, RESERVED_SHIFT, UNUSED
from paellapy.scheduler.core.lanes import touch
from paellapy.scheduler.core.leaving import take_out
from paellapy.scheduler.core.rings import address, bit_at, bit_of, front_of
from paellapy.scheduler.core.slots import put
from paellapy.scheduler.core.state import State

_MASK = np.uint64(RESERVED_MASK)
_SHIFT = np.uint64(RESERVED_SHIFT)
_ALL = np.uint64((1 << 64) - 1)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def reclaim(s: State, front: int, now: int) -> int:
    """Call between two steps, once the process is gone. Renews its rows and rings; returns its number of requests.

    Messages that it had published and the core had not read are dropped. A slot that it reserved and never wrote counts
    as written: the batch runs, and the outputs of that slot are never read.
    """
    n = 0
    for row in range(s.request.shape[0]):
        if s.request[row].front == front and s.request[row].state != UNUSED:
            take_out(s, row, CANCELLED, now)
            n += 1
    for lane in range(s.lane.shape[0]):
        if s.lane[lane].model < 0 or s.lane[lane].state == FREE:
            continue
        reserved = np.int64((load_at(address(s.lane_word, lane)) >> _SHIFT) & _MASK)
        for k in range(reserved):
            if front_of(s.lane_word, s.slot_front, lane, k) != front:
                continue
            if s.lane_known[lane, k >> 6] & bit_of(k) == _ZERO:
                put(s, lane, k, -1)
                touch(s, lane)
            or_at(bit_at(s.lane_ready, lane, k), bit_of(k))
            and_at(bit_at(s.lane_hold, lane, k), _ALL ^ bit_of(k))
    for k in range(s.ring.shape[1]):
        store_at(address(s.ring[front], k), _ZERO)
    for k in range(s.submit.shape[1]):
        s.submit[front, k].sequence = np.uint64(k)
    s.wake_fd[front, 1] = 0
    store_at(address(s.wake, front), _ONE)
    s.core[0].changed = 1
    return n
