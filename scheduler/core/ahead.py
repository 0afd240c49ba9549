"""When to launch a job's next segment, if the job may have one segment on the GPU: just before that one ends.

By then another job may rank better; if none does, the next segment arrives before the GPU runs out of work.
Instrumented kernels report when they have started their last block. For other kernels, the end is predicted from the
segment's time alone, and from the slowdown of the segment before it.
"""

from __future__ import annotations

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import load_at
from paellapy.scheduler.core.state import State


@part
def began_ns(s: State, lane: int, segment: int) -> int:
    """When the segment began on the GPU: after its launch and the end of the segment before it."""
    launched = s.segment_ns[lane, segment, 0]
    return int(launched if segment == 0 else max(launched, s.segment_ns[lane, segment - 1, 1]))


@part
def ends_soon_at(s: State, lane: int) -> float:
    """When the oldest segment in flight is about to end. An integer, so that simulated time reaches it exactly."""
    a = s.lane[lane]
    tuning = s.tuning[0]
    k = a.done
    stretch = 1.0
    if k > 0:
        took = s.segment_ns[lane, k - 1, 1] - began_ns(s, lane, k - 1)
        stretch = min(max(took / max(s.segment[a.model, a.size, k - 1].time_ns, 1.0), 1.0), tuning.most_stretch)
    return began_ns(s, lane, k) + float(int(stretch * s.segment[a.model, a.size, k].time_ns - tuning.just_ahead_ns))


@part
def may_go_on(s: State, lane: int) -> bool:
    """Whether a lane in flight has a next segment that could be launched before the current one is done."""
    a = s.lane[lane]
    one_ahead = s.core[0].look_ahead == 1 and a.issued - a.done == 1
    return bool(one_ahead and not a.draining and not a.whole and a.issued < a.segments)


@part
def note_room(s: State, lane: int) -> None:
    """Records when the next segment may be launched, so that a simulation or a sleeping loop returns at that time."""
    core = s.core[0]
    a = s.lane[lane]
    if may_go_on(s, lane) and not s.launch[lane, a.size, a.done].draining:
        core.room_at_ns = min(core.room_at_ns, ends_soon_at(s, lane))


@part
def leaves_room(s: State, lane: int, now: int) -> bool:
    """Whether it is time for the next segment of a lane in flight."""
    a = s.lane[lane]
    if not may_go_on(s, lane):
        return False
    word = s.launch[lane, a.size, a.done].draining
    return bool(load_at(word)) if word else ends_soon_at(s, lane) <= now
