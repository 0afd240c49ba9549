"""The core's loop on the virtual GPU, compiled: the SM model's time, the core's steps, sleeping and waking.

It calls Python only when there is data to compute, so that neither an idle nor a busy engine wastes time in the
interpreter, and other threads of the process need not wait. It calls instead of returning, because passing all these
tables again would take about half as long as computing a small kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.device.heaps import Ints
from paellapy.instrument.device.sm_layout import INF, REPORTED
from paellapy.instrument.device.sm_layout import State as SmState
from paellapy.instrument.jit import compiled, part
from paellapy.instrument.jit_call import call_with
from paellapy.instrument.table_set import TableSet, table, table_set
from paellapy.scheduler.core.atomics import call_back, call_ppoll, call_run, call_write, load_at, store_at
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import NEVER, WHOLE
from paellapy.scheduler.core.lanes import reading_matters
from paellapy.scheduler.core.loop import arm
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.step import wake_fronts
from paellapy.scheduler.core.tables import Table, Words

SPIN_NS = 40_000  # shorter waits are spent awake: waking up takes about as long
POLLIN = 1 << 32  # of a struct pollfd, behind the descriptor
_ZERO, _ONE = np.uint64(0), np.uint64(1)

LOOP = np.dtype(  # [1]
    [
        ("orders", "i8"),  # number of rows in each of the tables below
        ("flight", "i8"),
        ("drain", "i8"),
        ("offset_ns", "f8"),  # the host's clock minus the GPU's
        ("linger_ns", "i8"),  # time without work after which it sleeps
        ("bell_fd", "i8"),
        ("run", "u8"),  # address of the SM model's `run`
        ("launch", "u8"),  # address of the function that carries out orders
        ("ppoll", "u8"),  # address of ppoll of the C library
        ("read", "u8"),
    ],
    align=True,
)
# A launch to carry out; `draining` is the address of a word, or 0.
ORDER = np.dtype([(name, "i8") for name in ("lane", "size", "segment", "word", "handle", "stream", "draining")])
AWAITED = np.dtype([("handle", "i8"), ("word", "u8")])  # a launch or a kernel, and the word to set for it


@table_set
class Loop(TableSet):
    """Tables that the loop shares with the backend."""

    loop: Table = table(LOOP, 1)
    orders: Table = table(ORDER, "launches")
    flight: Table = table(AWAITED, "launches")  # launches whose end is awaited
    drain: Table = table(AWAITED, "launches")  # kernels whose last block start is awaited
    stop: Words = table(np.uint64, 8)
    scratch: Ints = table(np.int64, 8)


def new_loop(launches: int) -> Loop:
    return Loop(
        loop=np.zeros(1, LOOP),
        orders=np.zeros(launches, ORDER),
        flight=np.zeros(launches, AWAITED),
        drain=np.zeros(launches, AWAITED),
        stop=np.zeros(8, np.uint64),
        scratch=np.zeros(8, np.int64),
    )


@part
def note_orders(s: State, w: Loop) -> None:
    """Records the core's launches for the backend."""
    core = s.core[0]
    for k in range(core.out):
        out, order = s.out[k], w.orders[k]
        a = s.lane[out.lane]
        to = s.whole[out.lane, out.size] if out.segment == WHOLE else s.launch[out.lane, out.size, out.segment]
        order.lane, order.size, order.segment = out.lane, out.size, out.segment
        order.word, order.handle = np.int64(out.word), np.int64(out.handle)
        order.stream, order.draining = np.int64(s.stream[a.pool, a.stream_at]), np.int64(to.draining)
    w.loop[0].orders = core.out
    core.out = 0


@part
def forget(awaited: Any, k: int, last: int) -> None:
    """Removes a row: the last one takes its place."""
    awaited[k].handle, awaited[k].word = awaited[last].handle, awaited[last].word


@part
def tell_of_drained(sm: SmState, w: Loop) -> None:
    """Sets the words of kernels that have started all their blocks."""
    loop = w.loop[0]
    k = 0
    while k < loop.drain:
        if sm.command[w.drain[k].handle & (sm.command.shape[0] - 1)].notify_ns <= sm.gpu[0].now_ns:
            store_at(w.drain[k].word, _ONE)
            loop.drain -= 1
            forget(w.drain, k, loop.drain)
        else:  # also if it is not a number
            k += 1


@part
def tell_of_completed(sm: SmState, w: Loop) -> None:
    """Sets the completion words of launches that are done."""
    loop, gpu = w.loop[0], sm.gpu[0]
    handle = gpu.done_head
    for _ in range(gpu.unreported):
        command = sm.command[handle & (sm.command.shape[0] - 1)]
        command.status = REPORTED
        for k in range(loop.flight):
            if w.flight[k].handle == handle:
                store_at(w.flight[k].word, _ONE)
                loop.flight -= 1
                forget(w.flight, k, loop.flight)
                break
        handle = command.done_link
    gpu.unreported = 0


@part
def next_due(s: State, sm: SmState, w: Loop) -> float:
    """When there is something to do even without a message."""
    core, loop = s.core[0], w.loop[0]
    call_run(loop.run, sm, -INF, 0)  # finds the next event, and changes nothing
    soonest = min(sm.gpu[0].next_ns + loop.offset_ns, core.room_at_ns, float(NEVER))
    if core.due > 0:
        soonest = min(soonest, float(s.request[s.due[0]].deadline_ns))
    return float(soonest)


@part
def sleep(w: Loop, soonest: float, now: int) -> None:
    """Sleeps until the bell rings, or something is due."""
    loop = w.loop[0]
    until = 0
    if soonest < NEVER:
        wait = np.int64(soonest - now)
        w.scratch[4], w.scratch[5] = wait // 1_000_000_000, wait % 1_000_000_000
        until = w.scratch[4:].ctypes.data
    w.scratch[6] = loop.bell_fd | np.int64(POLLIN)
    call_ppoll(loop.ppoll, w.scratch[6:].ctypes.data, _ONE, np.uint64(until), _ZERO)
    # read() has the same signature
    call_write(loop.read, np.int32(loop.bell_fd), w.scratch[7:].ctypes.data, np.uint64(8))


@compiled
def serve(s: State, sm: SmState, w: Loop) -> None:
    """Runs until `stop[0]` is set, or `launch` asks for it; `launch` is called when there are rows in `orders`.

    After `linger_ns` without work, with nothing due soon, the loop arms the bell, looks once more, and sleeps.
    """
    core, loop = s.core[0], w.loop[0]
    bell = s.bell.ctypes.data
    last = read_clock(s, w.scratch)
    armed = False
    while True:
        now = read_clock(s, w.scratch)
        call_run(loop.run, sm, max(sm.gpu[0].now_ns, now - loop.offset_ns), 0)
        tell_of_drained(sm, w)
        tell_of_completed(sm, w)
        happened = call_with(s.call[0].step, s, now)
        wake_fronts(s, w.scratch)
        asked = load_at(w.stop.ctypes.data) != _ZERO
        if core.out > 0 or asked:
            store_at(bell, _ZERO)
            armed = False
            if core.out > 0:
                note_orders(s, w)
                if call_back(loop.launch) != 0:
                    return
            if asked:  # also under constant load, or the asking thread would wait for ever
                return
            last = now
            continue
        if happened > 0:
            if armed:  # the bell was armed for the state before this event
                store_at(bell, _ZERO)
                armed = False
            last = now
            continue
        soonest = next_due(s, sm, w)
        if soonest - now < SPIN_NS or now - last < loop.linger_ns:
            continue
        if not armed:
            arm(bell, reading_matters(s))
            armed = True
            continue
        sleep(w, soonest, now)
        store_at(bell, _ZERO)
        armed = False
