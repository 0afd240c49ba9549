"""The dispatcher core: `step` reads new events, asks the policy, and launches. Compiled, without Python objects.

The same `step` drives a real GPU and a simulated one; their loops differ only in the clock, and in the writer of the
completion words. `run` is the loop for real time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.jit import address_of, compiled, part, reachable
from paellapy.instrument.jit_call import call_with
from paellapy.scheduler.core.aside import look_aside
from paellapy.scheduler.core.atomics import call_write, load_at
from paellapy.scheduler.core.choosing import choose, settle_all
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import DONE_TAIL, FAIL_MODE
from paellapy.scheduler.core.completing import poll, tick
from paellapy.scheduler.core.crowd import watch_queue
from paellapy.scheduler.core.gates import LINGERS, watch_gates
from paellapy.scheduler.core.lanes import look_at_held
from paellapy.scheduler.core.launching import host_has_work, measure
from paellapy.scheduler.core.leaving import expire
from paellapy.scheduler.core.loop import wakes
from paellapy.scheduler.core.predict import predict_finish
from paellapy.scheduler.core.reclaim import reclaim
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.submit import fail_all, take_submissions
from paellapy.scheduler.core.tables import Words
from paellapy.scheduler.core.weights import moves_under_way

__all__ = ["attach_loop", "attach_step", "predict_finish", "reclaim", "run", "step"]

_ZERO = np.uint64(0)


@part
def watch_gain(s: State, now: int) -> None:
    """Measures how much more work than one job's the GPU does while several share it: for predictions."""
    core = s.core[0]
    if core.flight < 2:
        core.busy_ns = core.served_ns = 0.0
    else:
        core.busy_ns += now - core.last_ns
        if core.busy_ns > s.tuning[0].gain_window_ns:
            core.gain += 0.25 * (min(max(core.served_ns / core.busy_ns, 0.25), 64.0) - core.gain)
            core.busy_ns = core.served_ns = 0.0
    core.last_ns = now


@reachable
def step(s: State, now: int) -> int:
    """Brings the state up to the time `now` (ns) and launches work; returns the number of events handled."""
    core = s.core[0]
    before = core.launches + core.segments_done
    core.steps += 1
    s.gpu[0].now_ns = now
    watch_queue(s, now)
    watch_gain(s, now)
    news = take_submissions(s, now)
    poll(s, now)
    if core.mode == FAIL_MODE and core.lost_ns == 0:  # now that ended launches are known, which are above suspicion
        fail_all(s, now)
    look_at_held(s)
    expire(s, now)
    tick(s, now)
    moves = s.residency[0].order_moves != _ZERO
    if moves:
        call_with(s.residency[0].look_at_moves, s, now)
    again = True
    while again and not host_has_work(s):
        if core.waiting > 0:
            look_aside(s, now)
        again = False
        if core.changed or (core.ready + core.barred > 0 and now >= core.ask_at_ns):
            while not choose(s, now):
                fail_all(s, now)
            measure(s)
            again = core.waiting > 0  # requests of the same clients may be done
        if moves and call_with(s.residency[0].order_moves, s, now) > 0:
            again = True
    if host_has_work(s):  # requests come while the host computes: lanes must be open for them
        settle_all(s, now)
    watch_gates(s, now)
    return int(news + core.launches + core.segments_done - before)


@part
def wake_fronts(s: State, scratch: NDArray[np.int64]) -> None:
    """Writes to the eventfd of every front end that has new completions and asked to be woken: once per asking.

    A front end first asks and then looks; the core first posts and then checks who asked. So no wake-up is lost.
    """
    for front in range(s.wake_fd.shape[0]):
        tail = np.int64(s.ring[front, DONE_TAIL, 0])
        if tail != s.wake_fd[front, 1]:
            s.wake_fd[front, 1] = tail
            if wakes(address(s.wake, front), False) and s.wake_fd[front, 0] >= 0:
                scratch[2] = 1
                call_write(s.call[0].write, np.int32(s.wake_fd[front, 0]), scratch[2:].ctypes.data, np.uint64(8))


@compiled
def run(s: State, stop: Words, linger_ns: int, scratch: NDArray[np.int64]) -> int:
    """Steps in real time (CLOCK_MONOTONIC) until `stop[0]` is set, or nothing was done for `linger_ns`; 0 if idle.

    While there are gates of other processes, it waits longer for work (`gates.LINGERS`).
    Wakes front ends whenever completions were posted. `scratch` is 4 int64 of the caller's. Before the caller sleeps on
    an eventfd of its own, it announces this to front ends and calls `run` once more; otherwise a wake-up could be lost.
    """
    core = s.core[0]
    last = read_clock(s, scratch)
    while load_at(stop.ctypes.data) == _ZERO:
        now = read_clock(s, scratch)
        if call_with(s.call[0].step, s, now) > 0 or core.live > 0 or core.flight > 0 or moves_under_way(s):
            last = now
        elif now - last >= (linger_ns if core.gates == 0 else LINGERS * linger_ns):
            return 0
        wake_fronts(s, scratch)
    return 1


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def attach_step(state: State) -> None:
    """Sets the step's address, by which loops call it: otherwise each loop would contain a compiled copy of the core.
    """
    state.call["step"][0] = address_of(step, State.numba_type, numba.types.int64)


def attach_loop(state: State) -> None:
    """Sets the functions that loops in real time call: the step, and functions of the C library."""
    attach_step(state)
    libc = ctypes.CDLL(None)
    state.call["clock"][0] = _address(libc.clock_gettime)
    state.call["write"][0] = _address(libc.write)
