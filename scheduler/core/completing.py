"""Completing in the core: segments that have ended, and the policy's `done` and `tick`."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.ahead import began_ns, leaves_room, note_room
from paellapy.scheduler.core.asking import look_at_top
from paellapy.scheduler.core.atomics import call_telling, load_at, store_at
from paellapy.scheduler.core.codes import NONE
from paellapy.scheduler.core.lanes import touch
from paellapy.scheduler.core.launching import account, leave_stream, measure
from paellapy.scheduler.core.requests import fill_lane_job, fill_segment
from paellapy.scheduler.core.shares import charge, leave_gpu, part_of_time
from paellapy.scheduler.core.state import State

_ZERO = np.uint64(0)


@part
def tell_done(s: State, lane: int, segment: int, now: int) -> None:
    """Calls a policy's `done` with the job's current state and the segment's duration."""
    a = s.lane[lane]
    fact = s.done_segment[0]
    fill_segment(s, fact, a.model, a.size, segment)
    if a.whole:
        fact.ns = s.size[a.model, a.size].total_ns
    fact.took_ns = now - began_ns(s, lane, segment)
    fact.number = segment
    fill_lane_job(s, lane, now)
    call_telling(s.call[0].done, s.call[0].done_1, s.call[0].done_2, s.call[0].done_3)
    s.core[0].changed = 1


@part
def tick(s: State, now: int) -> None:
    """Calls a policy's `tick` every tick_ns while there is work."""
    if s.call[0].tick == _ZERO:
        return
    if s.core[0].live == 0:
        s.core[0].tick_at_ns = 0.0
        return
    if s.core[0].tick_at_ns == 0.0:
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
    elif now >= s.core[0].tick_at_ns:
        measure(s)
        look_at_top(s)
        call_telling(s.call[0].tick, s.call[0].tick_1, s.call[0].tick_2, _ZERO)
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
        s.core[0].changed = 1
    s.core[0].room_at_ns = min(s.core[0].room_at_ns, s.core[0].tick_at_ns)


@part
def segment_done(s: State, lane: int, now: int) -> None:
    core = s.core[0]
    a = s.lane[lane]
    m = a.model
    s.segment_ns[lane, a.done, 1] = now
    account(s, lane, a.done, -1.0, 0.0)
    alone_ns = s.size[m, a.size].total_ns if a.whole else s.segment[m, a.size, a.done].time_ns
    charge(s, lane, alone_ns, part_of_time(s, lane, now), began_ns(s, lane, a.done))
    a.done += 1
    core.segments_done += 1
    if s.call[0].done != _ZERO:
        tell_done(s, lane, a.done - 1, now)
    touch(s, lane)
    if a.issued > a.done:
        account(s, lane, a.done, 1.0, -1.0)
        return
    leave_stream(s, lane)
    leave_gpu(s, lane)
    core.flight -= 1
    last = s.flight[core.flight]
    s.flight[a.flight_at] = last
    s.lane[last].flight_at = a.flight_at
    a.flight_at = NONE


@part
def poll(s: State, now: int) -> None:
    """Reads the completion words of the lanes in flight: each lane's oldest launch."""
    core = s.core[0]
    core.room_at_ns = core.ask_at_ns if core.ready + core.barred > 0 else np.inf
    k = 0
    while k < core.flight:
        lane = s.flight[k]
        a = s.lane[lane]
        word = s.whole[lane, a.size].word if a.whole else s.launch[lane, a.size, a.done].word
        if load_at(word) == _ZERO:
            if leaves_room(s, lane, now):
                a.draining = core.changed = 1
            else:
                note_room(s, lane)
            k += 1
        else:  # look at k again: the lane may have more completions, or another lane may have moved there
            store_at(word, _ZERO)
            segment_done(s, lane, now)
