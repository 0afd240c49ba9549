"""How segments that run at once share the simulated GPU: the rate of each, up to 1, its time alone.

* *slots* (blocks, warps, registers, shared memory: the fullest), *memory bandwidth* and *arithmetic* in proportion to
  demand, as block scheduler and memory system serve whoever asks more, more: all slow down by the total demand, once
  above 1;
* *kernel issue* max-min fairly, because the front end takes turns between streams: who issues little is not held back.

Where it was measured how much of the GPU a program keeps busy, that is better than these estimates: chains of short
kernels use a resource now and then, not a part of it all the time, and wait for each other whenever they want it at
once. Programs that want it independently of each other, parts u of the time, keep it busy 1 - Π(1 - u) of the time
together. In trial runs on an H200 (not kept) 6, 8, 10, 12, 16 and 24 of Paella's CNNs at once did 3.6, 4.3, 4.7, 5.0,
5.3 and 5.5 times what one does; with u = 0.18 this says 3.9, 4.4, 4.8, 5.0, 5.3 and 5.5.

Where jobs keep to windows of SMs they want less of what others have, the less the more they are: a rule chosen with a
sweep on the H200 in view, and its one number so that 24 of them do 1.19 times what they do without, as there. Whether
it holds for more of them is not known, and no more are let in.

What is launched takes its turn in the hardware's queues, if their number is given. `benchmarks/stream_queues.py` shows
how on an H200: CUDA deals graphs out to them one after the other, whatever their streams, and one graph waits behind
another of the same queue, but not behind its last kernels: a queue looks some way ahead. Of graphs of 100 kernels one
waits for another, of those of 2 none does. How far it looks is the most that this allows; further would fit the sweep
of Paella's CNNs better (side runs, not kept), so it is not quite what the hardware does; and it was chosen by one such
sweep, of which it therefore predicts nothing. Segments that follow another of their job stay in its queue here, which
nobody has looked at.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.jit import part
from paellapy.scheduler.core.codes import WHOLE
from paellapy.scheduler.core.demand import MOST_BUSY
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_state import COMPUTE, ISSUE, MEMORY, SLOTS, Fluid

NO_PRIORITY = -(1 << 40)


@part
def least_ns(f: Fluid) -> float:
    """Less of something is nothing, and late in simulated time would not move the clock."""
    return float(max(1e-3, 4.5e-16 * f.sim[0].now_ns))


@part
def holds_ns(f: Fluid, s: State, lane: int) -> float:
    """How much of what a lane has launched others of its queue wait for, in time alone."""
    a = s.lane[lane]
    m, size = a.model, a.size
    return float(f.left[lane] - s.tuning[0].deep_kernels * f.work[m, size, f.work.shape[2] - 1] / f.kernels[m, size])


@part
def is_before(f: Fluid, other: int, lane: int) -> bool:
    """Whether it was dealt to the same queue, sooner."""
    apart = f.order[lane] - f.order[other]
    return bool(apart > 0 and apart % f.sim[0].queues == 0)


@part
def line_up(f: Fluid, s: State) -> None:
    """Who waits in a hardware queue."""
    sim = f.sim[0]
    if sim.queues == 0:
        return
    for lane in f.run[: sim.running]:
        f.waits[lane] = 0
    for other in f.run[: sim.running]:
        if holds_ns(f, s, other) > least_ns(f):
            for lane in f.run[: sim.running]:
                if is_before(f, other, lane):
                    f.waits[lane] = 1


@part
def next_in_queue(f: Fluid, s: State) -> float:
    """How long it takes until a graph has so few kernels left that others need not wait for it any more."""
    sim = f.sim[0]
    found = np.inf
    if sim.queues > 0:
        for lane in f.run[: sim.running]:
            holds = holds_ns(f, s, lane)
            if f.rate[lane] > 0.0 and holds > least_ns(f):
                found = min(found, holds / f.rate[lane])
    return float(found)


@part
def runs(f: Fluid, lane: int) -> bool:
    return bool(f.delay[lane] <= 0.0 and f.waits[lane] == 0)


@part
def used(f: Fluid, s: State, lane: int, what: int) -> float:
    """Part of a resource that what runs of a lane takes at rate 1."""
    segment = f.work.shape[2] - 1 if f.segment[lane] == WHOLE else f.segment[lane]
    return float(f.use[s.lane[lane].model, s.lane[lane].size, segment, what])


@part
def share(f: Fluid, s: State) -> None:
    """Everybody's rate, from what all want."""
    sim = f.sim[0]
    line_up(f, s)
    slots = memory = issue = compute = 0.0
    for k in range(sim.running):
        lane = f.run[k]
        if runs(f, lane):
            slots += used(f, s, lane, SLOTS)
            memory += used(f, s, lane, MEMORY)
            issue += used(f, s, lane, ISSUE)
            compute += used(f, s, lane, COMPUTE)
    common = 1.0 / max(1.0, slots, memory, compute)
    level = 1.0 if issue * common <= 1.0 else issue_level(f, s, common)
    for k in range(sim.running):
        lane = f.run[k]
        want = used(f, s, lane, ISSUE) * common
        f.rate[lane] = 0.0 if not runs(f, lane) else common if want <= level else common * level / want
    share_measured(f, s)
    prefer(f, s)


@part
def prefer(f: Fluid, s: State) -> None:
    """Streams of higher priority: their blocks are placed first, but blocks that run are not sent away. So each lane
    gets some of what it would have if priorities were all that counts, and else what it has without them.
    """
    sim = f.sim[0]
    top, least = NO_PRIORITY, -NO_PRIORITY
    for k in range(sim.running):
        if runs(f, f.run[k]):
            priority = s.model[s.lane[f.run[k]].model].priority
            top, least = max(top, priority), min(least, priority)
    if top <= least:
        return
    left, idle = 1.0, 1.0
    while top > NO_PRIORITY:  # from the highest downwards
        slots, wants, before, below = 0.0, 0.0, idle, NO_PRIORITY
        for k in range(sim.running):
            lane = f.run[k]
            priority = s.model[s.lane[lane].model].priority
            if runs(f, lane) and priority == top:
                busy = f.busy[s.lane[lane].model, s.lane[lane].size]
                slots += used(f, s, lane, SLOTS)
                idle *= 1.0 - busy
                wants -= np.log1p(-busy)
            elif runs(f, lane) and priority < top:
                below = max(below, priority)
        for k in range(sim.running):
            lane = f.run[k]
            if runs(f, lane) and s.model[s.lane[lane].model].priority == top:
                busy = f.busy[s.lane[lane].model, s.lane[lane].size]
                f.strict[lane] = min(1.0, left / max(slots, 1e-9))
                if busy > 0.0:
                    f.strict[lane] = min(1.0, -np.log1p(-busy) / wants * (before - idle) / busy)
        left = max(0.0, left - slots)
        top = below
    part = s.tuning[0].priority_share
    for k in range(sim.running):
        lane = f.run[k]
        if runs(f, lane):
            f.rate[lane] += part * (f.strict[lane] - f.rate[lane])


@part
def issue_level(f: Fluid, s: State, common: float) -> float:
    """Max-min: the level at which those above it fill what the others leave. Who waits has no part in it."""
    last = f.work.shape[2] - 1
    level = 0.0
    while True:  # upwards, from below every fair part: each round but the last settles at least one
        below = 0.0
        above = 0
        for k in range(f.sim[0].running):
            lane = f.run[k]
            if runs(f, lane):
                seg = last if f.segment[lane] == WHOLE else f.segment[lane]
                want = f.use[s.lane[lane].model, s.lane[lane].size, seg, ISSUE] * common
                if want > level:
                    above += 1
                else:
                    below += want
        if above == 0:
            return level
        higher = (1.0 - below) / above
        if higher <= level * (1.0 + 1e-9):
            return level
        level = higher


@part
def share_measured(f: Fluid, s: State) -> None:
    """Rates of programs whose part of the GPU was measured: all together keep it busy as if they did not know of each
    other, and each gets its part of that by what it wants.
    """
    core = s.core[0]
    sim = f.sim[0]
    idle = 1.0
    wants = 0.0
    last = f.work.shape[2] - 1
    apart = 1.0
    if core.windows > 0 and not core.whole_always:  # where the hardware decides, nobody keeps to one
        apart += s.tuning[0].apart_share * max(0, sim.running - s.tuning[0].roomy_jobs)
    for k in range(sim.running):
        lane = f.run[k]
        if runs(f, lane):
            m, size = s.lane[lane].model, s.lane[lane].size
            busy = f.busy[m, size] / apart
            if busy == 0.0:
                seg = last if f.segment[lane] == WHOLE else f.segment[lane]
                use = f.use[m, size, seg]
                busy = min(max(use[SLOTS], use[MEMORY], use[ISSUE]), MOST_BUSY)
            idle *= 1.0 - busy
            wants -= np.log1p(-busy)
    memory = compute = 0.0
    for k in range(sim.running):
        lane = f.run[k]
        busy = f.busy[s.lane[lane].model, s.lane[lane].size] / apart
        if runs(f, lane) and busy > 0.0:
            f.rate[lane] = min(1.0, -np.log1p(-busy) / wants * (1.0 - idle) / busy)
        memory += used(f, s, lane, MEMORY) * f.rate[lane]
        compute += used(f, s, lane, COMPUTE) * f.rate[lane]
    if max(memory, compute) <= 1.0:
        return
    for k in range(sim.running):  # who takes much of what all want more of than there is
        lane = f.run[k]
        if runs(f, lane) and f.busy[s.lane[lane].model, s.lane[lane].size] > 0.0:
            slower = 1.0 + min(1.0, 2.0 * used(f, s, lane, MEMORY)) * (max(1.0, memory) - 1.0)
            slower = max(slower, 1.0 + min(1.0, 2.0 * used(f, s, lane, COMPUTE)) * (max(1.0, compute) - 1.0))
            f.rate[lane] /= slower
