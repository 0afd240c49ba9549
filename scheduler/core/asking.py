"""Asking a policy's `admit`: the facts about the GPU that it sees, and the meaning of its answer."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import call_asking
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import READS_TOP
from paellapy.scheduler.core.state import State


@part
def look_at_top(s: State) -> None:
    """Finds the highest priority among active jobs, and, for policies that read it, their resources on the GPU."""
    top = -NEVER
    for k in range(s.core[0].active):
        top = max(top, s.lane[s.active[k]].priority)
    gpu = s.gpu[0]
    gpu.active_priority = top
    if s.core[0].facts & READS_TOP:
        of_top = gpu.top
        of_top.ns = of_top.blocks = of_top.compute = of_top.memory = gpu.lower_ns = 0.0
        for k in range(s.core[0].flight):
            lane = s.flight[k]
            a = s.lane[lane]
            ns = 0.0
            for j in range(a.done, a.issued):
                ns += s.segment[a.model, a.size, j].time_ns
            if a.whole:  # the expected remainder
                ns = max(0.0, s.size[a.model, a.size].total_ns - (s.gpu[0].now_ns - s.segment_ns[lane, 0, 0]))
            if a.priority >= top:
                f = s.segment[a.model, a.size, a.done]
                of_top.ns += ns
                of_top.blocks += f.blocks
                of_top.compute += f.compute
                of_top.memory += f.memory
            else:
                gpu.lower_ns += ns


@part
def takes_anything(s: State, others: int) -> bool:
    """Whether the best job goes without a question: the GPU is idle, and no other job is active (`others` is 0). A
    policy that may not leave the GPU idle only orders work, and wastes no time.
    """
    return bool(s.core[0].may_idle == 0 and s.core[0].flight == 0 and others == 0)


@part
def lets_go(s: State, now: int) -> bool:
    """The answer for the job in scratch row 0. If it may go later, notes when."""
    core = s.core[0]
    answer = call_asking(s.call[0].admit, s.job.ctypes.data, s.call[0].admit_2, s.call[0].admit_3)
    if np.isnan(answer):
        core.bad_ranks += 1
        return False
    if answer == 0.0:
        return False
    if answer == 1.0 or answer <= now:
        return True
    core.ask_at_ns = min(core.ask_at_ns, np.ceil(answer))
    return False
