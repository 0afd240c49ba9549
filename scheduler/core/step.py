"""The dispatcher core: `step` reads new events, asks the policy, and launches. Compiled, without Python objects.

The same `step` drives a real GPU and a simulated one; their loops differ only in the clock, and in the writer of the
completion words. `run` is the loop for real time.
"""

from __future__ import annotations

import ctypes

import numba
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import address_of, call_with, compiled, part, reachable
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.abort import expire, fail_all
from paellapy.scheduler.core.atomics import ZERO, c_address, call_telling, load_at, store_at
from paellapy.scheduler.core.choose import choose, reconcile_all
from paellapy.scheduler.core.concurrency import LINGERS, average_queue, update_gates
from paellapy.scheduler.core.instances import mark_instance_dirty, poll_held
from paellapy.scheduler.core.launch import (
    began_ns,
    count_resources,
    host_has_work,
    leave_stream,
    next_is_due,
    note_next_launch,
    update_gpu_facts,
)
from paellapy.scheduler.core.requests import fill_instance_job, fill_segment
from paellapy.scheduler.core.rings import address, must_ring, write_event
from paellapy.scheduler.core.shares import charge, leave_gpu, take_gpu_time
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.submit import take_submissions
from paellapy.scheduler.core.tables import Words
from paellapy.scheduler.core.throttle import update_top_priority
from paellapy.scheduler.core.weights import moves_under_way

# --- segments that have ended, and the policy's `done` and `tick`


@part
def call_done(s: State, instance: int, segment: int, now: int) -> None:
    """Calls a policy's `done` with the job's current state and the segment's duration."""
    inst = s.instance[instance]
    fact = s.done_segment[0]
    fill_segment(s, fact, inst.model, inst.size, segment)
    if inst.whole:
        fact.ns = s.size[inst.model, inst.size].total_ns
    fact.took_ns = now - began_ns(s, instance, segment)
    fact.number = segment
    fill_instance_job(s, instance, now)
    callback = s.call[0].done
    call_telling(callback.function, callback.first, callback.second, callback.third)
    s.core[0].changed = 1


@part
def tick(s: State, now: int) -> None:
    """Calls a policy's `tick` every tick_ns while there is work."""
    callback = s.call[0].tick
    if callback.function == ZERO:
        return
    if s.core[0].live == 0:
        s.core[0].tick_at_ns = 0.0
        return
    if s.core[0].tick_at_ns == 0.0:
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
    elif now >= s.core[0].tick_at_ns:
        update_gpu_facts(s)
        update_top_priority(s)
        call_telling(callback.function, callback.first, callback.second, ZERO)
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
        s.core[0].changed = 1
    s.core[0].wake_at_ns = min(s.core[0].wake_at_ns, s.core[0].tick_at_ns)


@part
def segment_done(s: State, instance: int, now: int) -> None:
    core = s.core[0]
    inst = s.instance[instance]
    m = inst.model
    s.segment_ns[instance, inst.done, 1] = now
    count_resources(s, instance, inst.done, -1.0, 0.0)
    alone_ns = s.size[m, inst.size].total_ns if inst.whole else s.segment[m, inst.size, inst.done].time_ns
    charge(s, instance, alone_ns, take_gpu_time(s, instance, now), began_ns(s, instance, inst.done))
    inst.done += 1
    core.segments_done += 1
    if s.call[0].done.function != ZERO:
        call_done(s, instance, inst.done - 1, now)
    mark_instance_dirty(s, instance)
    if inst.issued > inst.done:
        count_resources(s, instance, inst.done, 1.0, -1.0)
        return
    leave_stream(s, instance)
    leave_gpu(s, instance)
    core.flight -= 1
    last = s.flight[core.flight]
    s.flight[inst.flight_at] = last
    s.instance[last].flight_at = inst.flight_at
    inst.flight_at = codes.NONE


@part
def poll_completions(s: State, now: int) -> None:
    """Reads the completion words of the instances in flight: each instance's oldest launch."""
    core = s.core[0]
    core.wake_at_ns = core.admit_at_ns if core.ready + core.held_queues > 0 else np.inf
    k = 0
    while k < core.flight:
        instance = s.flight[k]
        inst = s.instance[instance]
        word = s.whole[instance, inst.size].word if inst.whole else s.launch[instance, inst.size, inst.done].word
        if load_at(word) == ZERO:
            if next_is_due(s, instance, now):
                inst.draining = core.changed = 1
            else:
                note_next_launch(s, instance)
            k += 1
        else:  # look at k again: the instance may have more completions, or another instance may have moved there
            store_at(word, ZERO)
            segment_done(s, instance, now)


# --- the step and the loop


@part
def measure_gain(s: State, now: int) -> None:
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
    average_queue(s, now)
    measure_gain(s, now)
    news = take_submissions(s, now)
    poll_completions(s, now)
    if core.mode == codes.FAIL_MODE and core.lost_ns == 0:  # polled first: requests that have ended are not blamed
        fail_all(s, now)
    poll_held(s)
    expire(s, now)
    tick(s, now)
    moves = s.residency[0].order_moves != ZERO
    if moves:
        call_with(s.residency[0].poll_moves, s, now)
    again = True
    while again and not host_has_work(s):
        again = False
        if core.changed or (core.ready + core.held_queues > 0 and now >= core.admit_at_ns):
            while not choose(s, now):
                fail_all(s, now)
            update_gpu_facts(s)
        if moves and call_with(s.residency[0].order_moves, s, now) > 0:
            again = True
    if host_has_work(s):  # requests come while the host computes: instances must be open for them
        reconcile_all(s, now)
    update_gates(s, now)
    return int(news + core.launches + core.segments_done - before)


@part
def wake_producers(s: State, scratch: NDArray[np.int64]) -> None:
    """Writes to the eventfd of every producer that has new completions and asked to be woken: once per asking.

    A producer first asks and then looks; the core first posts and then checks who asked. So no wake-up is lost.
    """
    for producer in range(s.wake_fd.shape[0]):
        tail = np.int64(s.ring[producer, codes.DONE_TAIL, 0])
        if tail != s.wake_fd[producer, 1]:
            s.wake_fd[producer, 1] = tail
            if must_ring(address(s.wake, producer), False) and s.wake_fd[producer, 0] >= 0:
                write_event(s, s.wake_fd[producer, 0], scratch[2:])


@compiled
def run(s: State, stop: Words, linger_ns: int, scratch: NDArray[np.int64]) -> int:
    """Steps in real time (CLOCK_MONOTONIC) until `stop[0]` is set, or nothing was done for `linger_ns`; 0 if idle.

    While there are gates of other processes, it waits longer for work (`concurrency.LINGERS`).
    Wakes producers whenever completions were posted. `scratch` is 4 int64 of the caller's. Before the caller sleeps on
    an eventfd of its own, it announces this to producers and calls `run` once more; otherwise a wake-up could be lost.
    """
    core = s.core[0]
    last = read_clock(s, scratch)
    while load_at(stop.ctypes.data) == ZERO:
        now = read_clock(s, scratch)
        if call_with(s.call[0].step, s, now) > 0 or core.live > 0 or core.flight > 0 or moves_under_way(s):
            last = now
        elif now - last >= (linger_ns if core.gates == 0 else LINGERS * linger_ns):
            return 0
        wake_producers(s, scratch)
    return 1


def attach_step(state: State) -> None:
    """Sets the address by which loops call the step; otherwise each loop would contain a compiled copy of the core."""
    state.call["step"][0] = address_of(step, State.numba_type, numba.types.int64)


def attach_loop(state: State) -> None:
    """Sets the functions that loops in real time call: the step, and functions of the C library."""
    attach_step(state)
    libc = ctypes.CDLL(None)
    state.call["clock"][0] = c_address(libc.clock_gettime)
    state.call["write"][0] = c_address(libc.write)
