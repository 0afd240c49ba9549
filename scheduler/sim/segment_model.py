"""Simulated time at the level of segments: a compiled fluid model of the GPU, with the dispatcher core in its loop.

Each instance's oldest launched segment progresses at a rate up to 1 (its time alone), computed by `share`. The host is
modelled too: the core launches one graph after the other, and makes no decisions during a launch.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import call_with, compiled, part, reachable
from paellapy.scheduler.core.admission import predict
from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.codes import EVICT, EVICTED, MOVE_TAIL, NEVER, WHOLE
from paellapy.scheduler.core.profiles import MOST_BUSY
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.tables import (
    COMPUTE,
    FACTOR,
    GAIN,
    ISSUE,
    LIVE,
    MEMORY,
    SLOTS,
    SimGpu,
    load,
    next_for_core,
    next_load,
    occupy,
    record_some,
)

NO_PRIORITY = -(1 << 40)
TURNS = 8
DONE, MORE_RECORDS, STEPS_ENDED = range(3)  # results of `run_segments`
# Steps in a row in which a policy may launch nothing while the GPU is idle and no request comes. A policy whose `admit`
# always asks for more time, or whose `tick` never opens its gate, would run for ever.
MOST_IN_VAIN = 1 << 18
_WORD, _ONE = np.uint64(8), np.uint64(1)


# -- how concurrent segments share the GPU: the rate of each, up to 1 (its time alone)
#
# * *Slots* (blocks, warps, registers, shared memory: the fullest), *memory bandwidth* and *arithmetic* are shared in
#   proportion to demand, since the block scheduler and the memory system serve larger demands more: all slow down by
#   the total demand, once it is above 1.
# * *Kernel issue* is shared max-min fairly, because the GPU alternates between streams: a job that issues few kernels
#   is not slowed.
#
# A measured demand of a program is better than these estimates: chains of short kernels use a resource from time to
# time rather than a part of it continuously, and wait for each other whenever they want it at once. Programs that
# independently want the GPU for fractions u of the time keep it busy for 1 - Π(1 - u) of the time. With u = 0.18, this
# agrees with runs of Paella's CNNs on an H200 (not stored):
#
#     programs at once          6     8    10    12    16    24
#     throughput, measured    3.6   4.3   4.7   5.0   5.3   5.5
#     throughput, modelled    3.9   4.4   4.8   5.0   5.3   5.5
#
# The programs divide the busy time by weight. If each met the others at independent times for ever, the weight would be
# -log(1 - u) = u + u²/2 + u³/3 + …, whose n-th term counts the work that finds the GPU taken n - 1 times in a row. It
# would be infinite for a program that always wants the GPU, and leave nothing to others. But the hardware serves
# kernels of different streams in turn, so the series ends after TURNS terms. Up to u = 0.5 this changes nothing; with 5
# to 10 terms, pairs of programs that want the GPU nearly always agree with an H200 within a fifth.
#
# Stream priorities matter little between chains of kernels: when a kernel of high priority ends, its successor is not
# there yet, so the waiting kernel of low priority takes its place, and its blocks are not removed.
#
# Jobs that are confined to SM partitions compete less, and the less the more jobs there are. This rule has one number,
# fitted to one sweep on the H200 in which 24 jobs reached 1.19 times the throughput without partitions. Its validity
# for more jobs is not known, and no more are let in.
#
# If the number of hardware queues is given, launches wait in them. CUDA assigns graphs to queues one after the other,
# regardless of their streams. A graph waits behind another graph of the same queue, but not behind its last kernels,
# since a queue looks some way ahead: graphs of 100 kernels wait for each other, graphs of 2 kernels do not. The number
# of kernels that it looks ahead (`deep_kernels`) was measured on an H200. Later segments of a job are assumed to stay
# in the job's queue; this was not measured.


@part
def weight(busy: float) -> float:
    """The weight of a program that wants the GPU for this fraction of its time: busy + busy²/2 + busy³/3 + …"""
    total = 0.0
    for n in range(TURNS, 0, -1):
        total = busy * (1.0 / n + total)
    return total


@part
def least_ns(f: SimGpu) -> float:
    """The smallest time step: a smaller one counts as zero, and would not move the clock late in simulated time."""
    return float(max(1e-3, 4.5e-16 * f.sim[0].now_ns))


@part
def holds_ns(f: SimGpu, s: State, instance: int) -> float:
    """The part of an instance's launched work, as time alone, for which other instances of its queue wait."""
    a = s.instance[instance]
    m, size = a.model, a.size
    return float(
        f.left[instance] - s.tuning[0].deep_kernels * f.work[m, size, f.work.shape[2] - 1] / f.kernels[m, size]
    )


@part
def is_before(f: SimGpu, other: int, instance: int) -> bool:
    """Whether another instance was assigned to the same queue earlier."""
    apart = f.order[instance] - f.order[other]
    return bool(apart > 0 and apart % f.sim[0].queues == 0)


@part
def line_up(f: SimGpu, s: State) -> None:
    """Determines which instances wait in a hardware queue."""
    sim = f.sim[0]
    if sim.queues == 0:
        return
    for instance in f.run[: sim.running]:
        f.waits[instance] = 0
    for other in f.run[: sim.running]:
        if holds_ns(f, s, other) > least_ns(f):
            for instance in f.run[: sim.running]:
                if is_before(f, other, instance):
                    f.waits[instance] = 1


@part
def next_in_queue(f: SimGpu, s: State) -> float:
    """The time until some graph has so few kernels left that others no longer wait for it."""
    sim = f.sim[0]
    found = np.inf
    if sim.queues > 0:
        for instance in f.run[: sim.running]:
            holds = holds_ns(f, s, instance)
            if f.rate[instance] > 0.0 and holds > least_ns(f):
                found = min(found, holds / f.rate[instance])
    return float(found)


@part
def runs(f: SimGpu, instance: int) -> bool:
    return bool(f.delay[instance] <= 0.0 and f.waits[instance] == 0)


@part
def used(f: SimGpu, s: State, instance: int, what: int) -> float:
    """The fraction of a resource that an instance's running segment takes at rate 1."""
    segment = f.work.shape[2] - 1 if f.segment[instance] == WHOLE else f.segment[instance]
    return float(f.use[s.instance[instance].model, s.instance[instance].size, segment, what])


@part
def measured_busy(f: SimGpu, s: State, instance: int) -> float:
    """The fraction of its time for which an instance's program wants the GPU, if measured; otherwise 0."""
    return float(f.busy[s.instance[instance].model, s.instance[instance].size])


@part
def share(f: SimGpu, s: State) -> None:
    """Computes all rates from all demands."""
    sim = f.sim[0]
    line_up(f, s)
    slots = memory = issue = compute = 0.0
    for instance in f.run[: sim.running]:
        if runs(f, instance):
            slots += used(f, s, instance, SLOTS)
            memory += used(f, s, instance, MEMORY)
            issue += used(f, s, instance, ISSUE)
            compute += used(f, s, instance, COMPUTE)
    common = 1.0 / max(1.0, slots, memory, compute)
    level = 1.0 if issue * common <= 1.0 else issue_level(f, s, common)
    for instance in f.run[: sim.running]:
        want = used(f, s, instance, ISSUE) * common
        f.rate[instance] = 0.0 if not runs(f, instance) else common if want <= level else common * level / want
    share_measured(f, s)
    prefer(f, s)


@part
def prefer(f: SimGpu, s: State) -> None:
    """Applies stream priorities: blocks of higher priority are placed first, but running blocks are not removed. So
    each instance's rate lies between the rate under strict priorities and the rate without priorities.
    """
    sim = f.sim[0]
    top, least = NO_PRIORITY, -NO_PRIORITY
    for instance in f.run[: sim.running]:
        if runs(f, instance):
            priority = s.model[s.instance[instance].model].priority
            top, least = max(top, priority), min(least, priority)
    if top <= least:
        return
    left, idle = 1.0, 1.0
    while top > NO_PRIORITY:  # from the highest downwards
        slots, wants, before, below = 0.0, 0.0, idle, NO_PRIORITY
        for instance in f.run[: sim.running]:
            priority = s.model[s.instance[instance].model].priority
            if runs(f, instance) and priority == top:
                busy = measured_busy(f, s, instance)
                slots += used(f, s, instance, SLOTS)
                idle *= 1.0 - busy
                wants += weight(busy)
            elif runs(f, instance) and priority < top:
                below = max(below, priority)
        for instance in f.run[: sim.running]:
            if runs(f, instance) and s.model[s.instance[instance].model].priority == top:
                busy = measured_busy(f, s, instance)
                f.strict[instance] = min(1.0, left / max(slots, 1e-9))
                if busy > 0.0:
                    f.strict[instance] = min(1.0, weight(busy) / wants * (before - idle) / busy)
        left = max(0.0, left - slots)
        top = below
    part = s.tuning[0].priority_share
    for instance in f.run[: sim.running]:
        if runs(f, instance):
            f.rate[instance] += part * (f.strict[instance] - f.rate[instance])


@part
def issue_level(f: SimGpu, s: State, common: float) -> float:
    """The max-min level: instances above it share the capacity that the others leave. Waiting instances have no part.
    """
    level = 0.0
    while True:  # upwards, from below every fair part: each round but the last settles at least one instance
        below = 0.0
        above = 0
        for instance in f.run[: f.sim[0].running]:
            if runs(f, instance):
                want = used(f, s, instance, ISSUE) * common
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
def share_measured(f: SimGpu, s: State) -> None:
    """Rates of programs with measured demand: they fill the GPU as if independent, and share it by demand."""
    core = s.core[0]
    sim = f.sim[0]
    idle = 1.0
    wants = 0.0
    apart = 1.0
    if core.partitions > 0 and not core.whole_always:  # where the hardware decides, no job is confined
        apart += s.tuning[0].apart_share * max(0, sim.running - s.tuning[0].roomy_jobs)
    for instance in f.run[: sim.running]:
        if runs(f, instance):
            busy = measured_busy(f, s, instance) / apart
            if busy == 0.0:
                fullest = max(used(f, s, instance, SLOTS), used(f, s, instance, MEMORY), used(f, s, instance, ISSUE))
                busy = min(fullest, MOST_BUSY)
            idle *= 1.0 - busy
            wants += weight(busy)
    memory = compute = 0.0
    for instance in f.run[: sim.running]:
        busy = measured_busy(f, s, instance) / apart
        if runs(f, instance) and busy > 0.0:
            f.rate[instance] = min(1.0, weight(busy) / wants * (1.0 - idle) / busy)
        memory += used(f, s, instance, MEMORY) * f.rate[instance]
        compute += used(f, s, instance, COMPUTE) * f.rate[instance]
    if max(memory, compute) <= 1.0:
        return
    for instance in f.run[: sim.running]:  # those with a large part of an oversubscribed resource
        if runs(f, instance) and measured_busy(f, s, instance) > 0.0:
            slower = 1.0 + min(1.0, 2.0 * used(f, s, instance, MEMORY)) * (max(1.0, memory) - 1.0)
            slower = max(slower, 1.0 + min(1.0, 2.0 * used(f, s, instance, COMPUTE)) * (max(1.0, compute) - 1.0))
            f.rate[instance] /= slower


# -- the copy engine: weights arrive over one link, chunk after chunk, in the core's order
#
# Evicting takes no time of the link. Copies and kernels do not slow each other in this model.


@part
def begin_chunk(f: SimGpu, s: State) -> None:
    """Computes when the next chunk of the first model in line arrives."""
    sim = f.sim[0]
    if sim.line == 0:
        sim.chunk_at_ns = np.inf
        return
    w = s.weights[f.line[0]]
    nbytes = min(w.chunk_bytes, w.bytes - sim.copied * w.chunk_bytes)
    mapping = s.tuning[0].map_ns if sim.copied == 0 else 0.0
    sim.chunk_at_ns = sim.now_ns + mapping + nbytes * s.residency[0].ns_per_byte


@part
def take_orders(f: SimGpu, s: State) -> None:
    """Carries out the core's orders."""
    sim = f.sim[0]
    while sim.orders < load_at(address(s.move_ring, MOVE_TAIL)):
        cell = s.move[sim.orders & (s.move.shape[0] - 1)]
        sim.orders += 1
        if cell.kind == EVICT:
            store_at(address(s.moved, cell.model), np.uint64(EVICTED))
            sim.news = 1
            continue
        f.line[sim.line] = cell.model
        sim.line += 1
        if sim.line == 1:
            sim.copied = 0
            begin_chunk(f, s)


@part
def copy_chunks(f: SimGpu, s: State) -> None:
    """Sets the words of chunks that have arrived."""
    sim = f.sim[0]
    while sim.chunk_at_ns <= sim.now_ns:
        w = s.weights[f.line[0]]
        store_at(w.word + _WORD * np.uint64(sim.copied), _ONE)
        sim.news = 1
        sim.copied += 1
        if sim.copied == w.chunks:
            sim.copied = 0
            sim.line -= 1
            for k in range(sim.line):
                f.line[k] = f.line[k + 1]
        begin_chunk(f, s)


# -- the loop


@part
def start(f: SimGpu, s: State, instance: int, segment: int, delay: float) -> None:
    a = s.instance[instance]
    m, size = a.model, a.size
    f.segment[instance] = segment
    k = f.work.shape[2] - 1 if segment == WHOLE else segment
    f.left[instance] = f.work[m, size, k]
    f.delay[instance] = delay


@part
def note(f: SimGpu, s: State, ns: float) -> None:
    """Adds an interval to the occupancy over time."""
    sim = f.sim[0]
    slots = memory = issue = 0.0
    for instance in f.run[: sim.running]:
        rate = f.rate[instance]
        slots += used(f, s, instance, SLOTS) * rate
        memory += used(f, s, instance, MEMORY) * rate
        issue += used(f, s, instance, ISSUE) * rate
    # Where the demand of a whole program was measured, the shares of its segments are estimates, and may sum to more
    # than 1.
    occupy(f, sim.now_ns, ns, min(slots, 1.0), min(memory, 1.0), min(issue, 1.0), sim.running)


@part
def next_event(f: SimGpu) -> float:
    """When the GPU, its link, or the load has its next event."""
    sim = f.sim[0]
    at = np.inf
    for instance in f.run[: sim.running]:
        if f.delay[instance] > 0.0:
            at = min(at, f.delay[instance])
        elif f.rate[instance] > 0.0:
            at = min(at, f.left[instance] / f.rate[instance])
    return float(min(at + sim.now_ns, next_load(f), sim.chunk_at_ns))


@part
def progress(f: SimGpu, s: State, until: float) -> None:
    """Lets the GPU run until a time: completion words are written, and queued launches start."""
    sim = f.sim[0]
    ns = until - sim.now_ns
    note(f, s, ns)
    sim.now_ns = until
    copy_chunks(f, s)
    k = 0
    while k < sim.running:
        instance = f.run[k]
        if f.delay[instance] > 0.0:
            f.delay[instance] = max(0.0, f.delay[instance] - ns)
            if f.delay[instance] < least_ns(f):
                f.delay[instance] = 0.0
            k += 1
            continue
        f.left[instance] -= ns * f.rate[instance]
        if f.left[instance] > least_ns(f):
            k += 1
            continue
        sim.events += 1
        sim.news = 1
        size = s.instance[instance].size
        if f.segment[instance] == WHOLE:
            store_at(s.whole[instance, size].word, np.uint64(1))
        else:
            store_at(s.launch[instance, size, f.segment[instance]].word, np.uint64(1))
        if f.behind[instance] > 0:
            f.behind[instance] -= 1
            # Between two graphs of a stream the instance uses no resources, so others may.
            start(f, s, instance, f.segment[instance] + 1, sim.segment_gap_ns)
            k += 1
        else:
            f.idle[instance] = 1
            sim.running -= 1
            f.run[k] = f.run[sim.running]


@part
def note_opened(f: SimGpu, s: State, instance: int) -> None:
    a = s.instance[instance]
    if f.generation[instance] != a.generation:
        f.generation[instance] = a.generation
        f.opened[instance] = f.sim[0].now_ns


@part
def hand_over(f: SimGpu, s: State, instance: int) -> float:
    """How long an instance's first launch waits for the inputs of requests that came before the instance was opened.
    These are copied from then on, one after the other; inputs of later requests were copied on arrival.
    """
    a = s.instance[instance]
    note_opened(f, s, instance)
    copy = f.copy[a.model]
    if copy == 0.0:
        return 0.0
    ns = 0.0
    for k in range(a.taken):
        row = s.slot[instance, k]
        if row >= 0 and s.request[row].arrival_ns < f.opened[instance]:
            ns += copy
    return max(0.0, f.opened[instance] + s.tuning[0].hand_over_ns + ns - f.sim[0].now_ns) if ns > 0.0 else 0.0


@part
def launch(f: SimGpu, s: State) -> None:
    """Carries out the core's launches one after the other, each taking the host's time."""
    core = s.core[0]
    sim = f.sim[0]
    sim.core_free_ns = max(sim.core_free_ns, sim.now_ns)
    for k in range(core.out):
        out = s.out[k]
        instance = out.instance
        sim.core_free_ns += sim.launch_ns
        first = out.segment <= 0
        if first:
            f.idle[instance] = 1
        if not first and f.idle[instance] == 0:
            f.behind[instance] += 1
            continue
        # A program's time alone includes the latency of its first launch; an instance that ran out of work pays it
        # again.
        delay = sim.core_free_ns - sim.now_ns - sim.launch_ns
        delay += hand_over(f, s, instance) if first else sim.resume_ns
        f.idle[instance] = 0
        f.order[instance] = sim.launched
        sim.launched += 1
        f.run[sim.running] = instance
        sim.running += 1
        start(f, s, instance, out.segment, delay)
    core.out = 0


@part
def is_stuck(f: SimGpu, s: State) -> bool:
    """Whether requests wait although the GPU is idle and nothing else will happen: only the policy can go on."""
    idle = f.sim[0].running == 0 and s.core[0].out == 0 and f.sim[0].chunk_at_ns == np.inf
    return bool(idle and s.core[0].live > 0 and next_load(f) == np.inf)


@part
def run_until(f: SimGpu, s: State, end: float) -> int:
    """Runs until a time, or until no more requests come and nothing runs; MORE_RECORDS: call again with more records.
    """
    core = s.core[0]
    sim = f.sim[0]
    in_vain = 0
    while True:
        if not load(f, s):
            return MORE_RECORDS
        if sim.news and sim.core_free_ns <= sim.now_ns:
            sim.news = 0
            call_with(s.call[0].step, s, int(sim.now_ns))
            in_vain = in_vain + 1 if is_stuck(f, s) else 0
            if in_vain > MOST_IN_VAIN:
                return DONE
            while record_some(f, s) == f.taken.shape[0]:
                pass
            if core.out > 0:
                launch(f, s)
            take_orders(f, s)
            for m in range(f.copy.shape[0]):
                if s.model[m].filling >= 0:
                    note_opened(f, s, s.model[m].filling)
            if sim.steps > 0:
                sim.steps = 0
                return STEPS_ENDED
        share(f, s)
        at = min(next_event(f), sim.now_ns + next_in_queue(f, s))
        if sim.news:
            at = min(at, sim.core_free_ns)
        else:
            soonest = next_for_core(s)
            if soonest <= at:
                at = soonest
                sim.news = 1
        if at >= end:
            if end < np.inf:
                progress(f, s, max(end, sim.now_ns))
            return DONE
        progress(f, s, max(at, sim.now_ns))


@compiled
def run_segments(f: SimGpu, s: State, end: float) -> int:
    """Runs until a time, or until no more requests come and nothing is running. MORE_RECORDS: call again with more
    records; STEPS_ENDED: steps of language models have.
    """
    return run_until(f, s, end)


@reachable
def advance(f: SimGpu, s: State, end: float) -> int:
    """Runs until a time, with the arrivals until then. A GPU of a cluster then reports to routers when a new request of
    each model would be done, and how many requests are live.
    """
    answer = run_until(f, s, end)
    if answer == DONE:
        f.sim[0].next_arrival = 0
    now = int(f.sim[0].now_ns)
    for m in range(s.model.shape[0]):
        f.report[m] = predict(s, m, s.model[m].priority, NEVER, now) - now
    n = f.report.shape[0]
    f.report[n + GAIN] = max(s.core[0].gain, 1.0)
    f.report[n + FACTOR] = f.sim[0].actual_ns / max(f.sim[0].predicted_ns, 1.0)
    f.report[n + LIVE] = s.core[0].live
    return answer
