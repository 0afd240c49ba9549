"""The core's loop on the virtual GPU, compiled: the SM model's time, the core's steps, sleeping and waking.

It calls Python only where there is something to compute, so that an idle engine and a busy one spend their time on the
same work, and no other thread of the process waits for it meanwhile. Calling costs less than coming back: handing over
all these tables again would take about half as long as computing a small kernel does.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device import sm_core
from paellapy.instrument.device.heaps import Ints
from paellapy.instrument.device.jit import compiled, part
from paellapy.instrument.device.sm_layout import DONE_HEAD, DONE_LINK, NOTIFY, REPORTED, STATUS, UNREPORTED
from paellapy.instrument.device.sm_layout import NOW as SM_NOW
from paellapy.instrument.device.sm_layout import State as SmState
from paellapy.scheduler.core.atomics import call_back, call_ppoll, call_step, call_write, load_at, store_at
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import NEVER, WHOLE
from paellapy.scheduler.core.lanes import reading_matters
from paellapy.scheduler.core.loop import arm
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.step import wake_fronts
from paellapy.scheduler.core.tables import Words

SPIN_NS = 40_000  # what is nearer than this is waited for awake: waking up takes about as long
# Flight: launches whose end is awaited. Drain: kernels of which all blocks are to be on the SMs. Columns of both:
HANDLE, WORD = range(2)
# Orders: what to launch. Columns (`draining` is the address of a word, or 0):
ORDER = ("lane", "size", "segment", "word", "handle", "stream", "draining")
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@part
def note_orders(s: State, orders: Ints, in_flight: Ints) -> None:
    core = s.core[0]
    for k in range(core.out):
        o = s.out[k]
        to = s.whole[o.lane, o.size] if o.segment == WHOLE else s.launch[o.lane, o.size, o.segment]
        orders[k, 0], orders[k, 1], orders[k, 2], orders[k, 3] = o.lane, o.size, o.segment, np.int64(o.word)
        a = s.lane[o.lane]
        orders[k, 4], orders[k, 5] = np.int64(o.handle), np.int64(s.stream[a.pool, a.stream_at])
        orders[k, 6] = np.int64(to.draining)
    in_flight[2] = core.out
    core.out = 0


@compiled
def serve(
    s: State, sm: SmState, orders: Ints, flight: Ints, drain: Ints, in_flight: Ints, stop: Words,
    offset_ns: float, linger_ns: int, scratch: Ints, launch: int, ppoll: int, read: int, bell_fd: int,
) -> None:  # fmt: skip
    """Until `stop[0]` is set, or `launch` asks for it: called with what is to be launched in `in_flight[2]` `orders`.

    `flight` has `in_flight[0]` rows, `drain` `in_flight[1]`. `offset_ns`: the host's clock less the GPU's. Idle for
    `linger_ns`, with nothing due soon, it arms the bell, looks once more, and sleeps. `scratch` is 8 int64.
    """
    core = s.core[0]
    bell = s.bell.ctypes.data
    last = read_clock(s, scratch)
    armed = False
    while True:
        now = read_clock(s, scratch)
        sm_core.run(sm, max(sm.t[SM_NOW], now - offset_ns), False)
        k = 0
        while k < in_flight[1]:
            if sm.cf[drain[k, HANDLE] & (sm.ci.shape[0] - 1), NOTIFY] <= sm.t[SM_NOW]:
                store_at(np.uint64(drain[k, WORD]), _ONE)
                in_flight[1] -= 1
                drain[k, HANDLE], drain[k, WORD] = drain[in_flight[1], HANDLE], drain[in_flight[1], WORD]
            else:  # also while it is not a number
                k += 1
        handle = sm.g[DONE_HEAD]
        for _ in range(sm.g[UNREPORTED]):
            i = handle & (sm.ci.shape[0] - 1)
            sm.ci[i, STATUS] = REPORTED
            for k in range(in_flight[0]):
                if flight[k, HANDLE] == handle:
                    store_at(np.uint64(flight[k, WORD]), _ONE)
                    in_flight[0] -= 1
                    flight[k, HANDLE], flight[k, WORD] = flight[in_flight[0], HANDLE], flight[in_flight[0], WORD]
                    break
            handle = sm.ci[i, DONE_LINK]
        sm.g[UNREPORTED] = 0
        happened = call_step(s.call[0].step, s, now)
        wake_fronts(s, scratch)
        if core.out > 0 or load_at(stop.ctypes.data) != _ZERO:
            store_at(bell, _ZERO)
            armed = False
            if core.out == 0:
                return
            note_orders(s, orders, in_flight)
            if call_back(np.uint64(launch)) != 0:
                return
            last = now
            continue
        if happened > 0:
            if armed:  # for what was so before it happened
                store_at(bell, _ZERO)
                armed = False
            last = now
            continue
        soonest = min(sm_core.next_event(sm) + offset_ns, core.room_at_ns, float(NEVER))
        if core.due > 0:
            soonest = min(soonest, float(s.request[s.due[0]].deadline_ns))
        if soonest - now < SPIN_NS or now - last < linger_ns:
            continue
        if not armed:
            arm(bell, reading_matters(s))
            armed = True
            continue
        until = 0
        if soonest < NEVER:
            wait = np.int64(soonest - now)
            scratch[4], scratch[5] = wait // 1_000_000_000, wait % 1_000_000_000
            until = scratch[4:].ctypes.data
        scratch[6] = np.int64(bell_fd) | (np.int64(1) << 32)  # struct pollfd: POLLIN
        call_ppoll(np.uint64(ppoll), scratch[6:].ctypes.data, _ONE, np.uint64(until), _ZERO)
        call_write(np.uint64(read), np.int32(bell_fd), scratch[7:].ctypes.data, np.uint64(8))  # read has its shape
        store_at(bell, _ZERO)
        armed = False
