"""How concurrent segments share the simulated GPU: the rate of each, up to 1 (its time alone).

* *Slots* (blocks, warps, registers, shared memory: the fullest), *memory bandwidth* and *arithmetic* are shared in
  proportion to demand, since the block scheduler and the memory system serve larger demands more: all slow down by the
  total demand, once it is above 1.
* *Kernel issue* is shared max-min fairly, because the front end alternates between streams: a job that issues few
  kernels is not slowed.

A measured demand of a program is better than these estimates: chains of short kernels use a resource from time to time
rather than a part of it continuously, and wait for each other whenever they want it at once. Programs that
independently want the GPU for fractions u of the time keep it busy for 1 - Π(1 - u) of the time. With u = 0.18, this
agrees with trial runs of Paella's CNNs on an H200 (not stored):

    programs at once          6     8    10    12    16    24
    throughput, measured    3.6   4.3   4.7   5.0   5.3   5.5
    throughput, modelled    3.9   4.4   4.8   5.0   5.3   5.5

The programs divide the busy time by weight. If each met the others at independent times for ever, the weight would be
-log(1 - u) = u + u²/2 + u³/3 + …, whose n-th term counts the work that finds the GPU taken n - 1 times in a row. It
would be infinite for a program that always wants the GPU, and leave nothing to others. But the hardware serves kernels
of different streams in turn, so no kernel finds the GPU taken any number of times: the series ends after TURNS terms.
Up to u = 0.5 this changes nothing. It matters beside programs that want the GPU nearly always: with 5 to 10 terms, all
pairs of `systems_stretch.json` agree with an H200 within a fifth. For resnet50 beside large batches, more terms agree
better.

Stream priorities matter little between chains of kernels: when a kernel of high priority ends, its successor is not
there yet, so the waiting kernel of low priority takes its place, and its blocks are not removed.

Jobs that are confined to windows of SMs compete less, and the less the more jobs there are. This rule has one number,
fitted to one sweep on the H200 in which 24 jobs reached 1.19 times the throughput without windows. Its validity for
more jobs is not known, and no more are let in.

If the number of hardware queues is given, launches wait in them. `benchmarks/stream_queues.py` shows the behaviour of
an H200: CUDA assigns graphs to queues one after the other, regardless of their streams. A graph waits behind another
graph of the same queue, but not behind its last kernels, since a queue looks some way ahead: graphs of 100 kernels wait
for each other, graphs of 2 kernels do not. The modelled look-ahead is the largest that this benchmark allows. A larger
one would fit the sweep of Paella's CNNs better, so the model is not exact; and because it was fitted to one sweep, it
cannot predict that sweep. Later segments of a job are assumed to stay in the job's queue; this was not measured.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.codes import WHOLE
from paellapy.scheduler.core.demand import MOST_BUSY
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_state import COMPUTE, ISSUE, MEMORY, SLOTS, Fluid

NO_PRIORITY = -(1 << 40)
TURNS = 8


@part
def weight(busy: float) -> float:
    """The weight of a program that wants the GPU for this fraction of its time: busy + busy²/2 + busy³/3 + …"""
    total = 0.0
    for n in range(TURNS, 0, -1):
        total = busy * (1.0 / n + total)
    return total


@part
def least_ns(f: Fluid) -> float:
    """The smallest time step: a smaller one counts as zero, and would not move the clock late in simulated time."""
    return float(max(1e-3, 4.5e-16 * f.sim[0].now_ns))


@part
def holds_ns(f: Fluid, s: State, lane: int) -> float:
    """The part of a lane's launched work, as time alone, for which other lanes of its queue wait."""
    a = s.lane[lane]
    m, size = a.model, a.size
    return float(f.left[lane] - s.tuning[0].deep_kernels * f.work[m, size, f.work.shape[2] - 1] / f.kernels[m, size])


@part
def is_before(f: Fluid, other: int, lane: int) -> bool:
    """Whether another lane was assigned to the same queue earlier."""
    apart = f.order[lane] - f.order[other]
    return bool(apart > 0 and apart % f.sim[0].queues == 0)


@part
def line_up(f: Fluid, s: State) -> None:
    """Determines which lanes wait in a hardware queue."""
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
    """The time until some graph has so few kernels left that others no longer wait for it."""
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
    """The fraction of a resource that a lane's running segment takes at rate 1."""
    segment = f.work.shape[2] - 1 if f.segment[lane] == WHOLE else f.segment[lane]
    return float(f.use[s.lane[lane].model, s.lane[lane].size, segment, what])


@part
def share(f: Fluid, s: State) -> None:
    """Computes all rates from all demands."""
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
    """Applies stream priorities: blocks of higher priority are placed first, but running blocks are not removed. So
    each lane's rate lies between the rate under strict priorities and the rate without priorities.
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
                wants += weight(busy)
            elif runs(f, lane) and priority < top:
                below = max(below, priority)
        for k in range(sim.running):
            lane = f.run[k]
            if runs(f, lane) and s.model[s.lane[lane].model].priority == top:
                busy = f.busy[s.lane[lane].model, s.lane[lane].size]
                f.strict[lane] = min(1.0, left / max(slots, 1e-9))
                if busy > 0.0:
                    f.strict[lane] = min(1.0, weight(busy) / wants * (before - idle) / busy)
        left = max(0.0, left - slots)
        top = below
    part = s.tuning[0].priority_share
    for k in range(sim.running):
        lane = f.run[k]
        if runs(f, lane):
            f.rate[lane] += part * (f.strict[lane] - f.rate[lane])


@part
def issue_level(f: Fluid, s: State, common: float) -> float:
    """The max-min level: lanes above it share the capacity that the others leave. Waiting lanes have no part."""
    last = f.work.shape[2] - 1
    level = 0.0
    while True:  # upwards, from below every fair part: each round but the last settles at least one lane
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
    """Rates of programs with measured demand: they fill the GPU as if independent, and share it by demand."""
    core = s.core[0]
    sim = f.sim[0]
    idle = 1.0
    wants = 0.0
    last = f.work.shape[2] - 1
    apart = 1.0
    if core.windows > 0 and not core.whole_always:  # where the hardware decides, no job is confined
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
            wants += weight(busy)
    memory = compute = 0.0
    for k in range(sim.running):
        lane = f.run[k]
        busy = f.busy[s.lane[lane].model, s.lane[lane].size] / apart
        if runs(f, lane) and busy > 0.0:
            f.rate[lane] = min(1.0, weight(busy) / wants * (1.0 - idle) / busy)
        memory += used(f, s, lane, MEMORY) * f.rate[lane]
        compute += used(f, s, lane, COMPUTE) * f.rate[lane]
    if max(memory, compute) <= 1.0:
        return
    for k in range(sim.running):  # lanes with a large part of an oversubscribed resource
        lane = f.run[k]
        if runs(f, lane) and f.busy[s.lane[lane].model, s.lane[lane].size] > 0.0:
            slower = 1.0 + min(1.0, 2.0 * used(f, s, lane, MEMORY)) * (max(1.0, memory) - 1.0)
            slower = max(slower, 1.0 + min(1.0, 2.0 * used(f, s, lane, COMPUTE)) * (max(1.0, compute) - 1.0))
            f.rate[lane] /= slower
