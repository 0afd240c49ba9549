"""How many jobs share the GPU, which long jobs yield to a short one, SM partitions, and gates of other processes.

Jobs share the GPU until their total demand reaches `demand_limit` GPUs: a burst ends soonest for most jobs if few share
the GPU. While a queue persists, total throughput matters more, and it grows with the number of jobs as long as each
leaves most of the GPU idle. On the H200, 6, 12 and 24 small jobs at once reached 0.72, 0.94 and 1.01 of the throughput
of 48. So the limit grows with a persistent queue, for jobs of the largest batch size: a batch that is not full gains
more by waiting.

On an oversubscribed GPU a short job would be as slow as without a scheduler. So jobs that take several times as long
and rank behind it yield between their segments, the worst rank first, until the others fit the limit that holds without
a queue. If a short job is there most of the time, no job yields: it would only cost throughput.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ZERO, store_at
from paellapy.scheduler.core.requests import checked_rank, fill_instance_job, slots_of
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import weights_resident

# --- SM partitions: where many jobs share the GPU, each launch is confined to some of its SMs
#
# Kernels of small batches leave most of the GPU idle and still slow each other, less so on different SMs. Confined to
# partitions, they meet fewer others. Partitions overlap, an instance has several to choose from, and every launch goes
# to the emptiest one: with one fixed partition each, jobs would wait for each other while other partitions are empty.
# While few jobs share the GPU, each has all of it.
#
# A partition has its own streams, and a launch starts sooner on one of these. A job keeps its stream while any of its
# launches is in flight, so it changes partitions then only if another one is much emptier.


@part
def count_in_partition(s: State, partition: int, change: int) -> None:
    """Adds or removes a job in a partition, and so in the partitions that share SMs with it."""
    for other in range(s.core[0].partitions):
        s.partition_load[other] += change * s.overlap[partition, other]


@part
def leave_partition(s: State, instance: int) -> None:
    inst = s.instance[instance]
    if inst.partition >= 0:
        count_in_partition(s, inst.partition, -1)
        inst.partition = codes.NONE


@part
def can_be_confined(s: State, instance: int) -> bool:
    return bool(
        s.core[0].partitions > 0 and s.confined[instance, s.instance[instance].size, s.confined.shape[2] - 1, 0] != ZERO
    )


@part
def choose_handle(s: State, instance: int, segment: int, wide: Any, sms: float) -> Any:
    """The handle of an instance's next launch: `wide`, or the same launch in the emptiest of the instance's partitions.

    Where the hardware decides, every launch has all SMs. `sms`: the part of the SMs that the policy wants; 0: it does
    not say.
    """
    core = s.core[0]
    leave_partition(s, instance)
    inst = s.instance[instance]
    at = s.confined.shape[2] - 1 if inst.whole else segment
    roomy = core.flight <= s.tuning[0].roomy_jobs if sms == 0.0 else sms >= 1.0
    if core.whole_always or roomy or s.instance_partition[instance, 0] < 0:
        return wide
    best = 0
    least = np.inf
    for k in range(codes.CHOICES):
        partition = s.instance_partition[instance, k]
        if partition >= 0:
            load = float(s.partition_load[partition])
            if (
                inst.stream_at >= codes.OF_PARTITIONS
                and (inst.stream_at - codes.OF_PARTITIONS) // codes.QUEUES == partition
            ):
                load -= s.tuning[0].staying_jobs * s.overlap[partition, partition]
            if load < least:
                best, least = k, load
    handle = s.confined[instance, inst.size, at, best]
    if handle == ZERO:
        return wide
    inst.partition = s.instance_partition[instance, best]
    count_in_partition(s, inst.partition, 1)
    core.confined_launches += 1
    return handle


@part
def average_queue(s: State, now: int) -> None:
    """Averages the number of waiting jobs, and how often instances yielded, over about `queue_memory_ns`."""
    part = min(1.0, (now - s.core[0].last_ns) / s.tuning[0].queue_memory_ns)
    s.core[0].waiting_jobs += part * (s.core[0].ready + s.core[0].queued_jobs - s.core[0].waiting_jobs)
    s.core[0].yielding_share += part * ((1.0 if s.core[0].yielding > 0 else 0.0) - s.core[0].yielding_share)


# Jobs that each fill the GPU gain nothing from each other: below this demand, two do at least 3 % more than one.
FULL_DEMAND = 0.97


@part
def would_only_share(s: State, demand: float) -> bool:
    """Whether a job that fills the GPU would come beside others that fill it and run in segments: both would take
    longer, and the policy's order would be lost. Beside a program in one piece, which cannot yield, a job may run.
    """
    core = s.core[0]
    if min(demand, core.demand) < FULL_DEMAND or core.demand_limit == np.inf:
        return False
    in_segments = core.active
    for k in range(core.active):
        in_segments -= s.instance[s.active[k]].whole
    return bool(in_segments > 0)


@part
def has_room(s: State, instance: int) -> bool:
    """Whether an instance may be active beside the active instances, by their total demand."""
    if s.instance[instance].rank == np.inf:
        return False
    m = s.instance[instance].model
    tuning = s.tuning[0]
    demand = s.size[m, s.instance[instance].size].demand
    if would_only_share(s, demand):
        return False
    limit, most, growth = s.core[0].demand_limit, tuning.most_demand, 0.0
    full = s.instance[instance].taken == slots_of(s, m)
    if can_be_confined(s, instance):
        most = tuning.most_confined_demand
        if full:
            limit *= tuning.confined_factor
    if full:
        growth = min(s.core[0].waiting_jobs / tuning.long_queue_jobs, tuning.most_growth) * max(0.0, 1.0 - demand)
    return bool(s.core[0].demand + demand <= min(max(most, limit), limit * (1.0 + growth)))


@part
def is_oversubscribed(s: State) -> bool:
    return bool(s.core[0].demand > s.tuning[0].oversubscribed_factor * s.core[0].demand_limit)


@part
def is_uncontended(s: State, instance: int) -> bool:
    """Whether an instance is alone on the GPU; or short, and one of the few that have all SMs before further jobs go to
    partitions. Such an instance is launched in one piece: every segment costs time, and no waiting job would gain by
    holding it back. Not where jobs that come later often have to overtake it.
    """
    core = s.core[0]
    if core.ready > 0 or core.queued > 0 or core.awaiting_admit > 0 or core.overtaking_share > MOST_OVERTAKING:
        return False
    if core.active == 1 and core.flight == 0:
        return True
    few = s.core[0].active <= s.tuning[0].roomy_jobs
    short = s.instance[instance].segments <= s.tuning[0].short_job_segments
    return bool(few and short and can_be_confined(s, instance))


# A program in one piece saves about 2 % of its time, and takes half of its time from a job that should overtake it. So
# pieces pay once 4 % of jobs overtake; where those are shorter, sooner.
MOST_OVERTAKING = 0.02
OVERTAKING_JOBS = 32  # over which that is averaged: after one that overtakes, some ten jobs go in pieces


@part
def note_overtaking(s: State, instance: int, now: int) -> None:
    """Notes for a new job whether it should overtake the only job on the GPU: it ranks better, and the GPU is too small
    for both. Jobs that come one at a time, and those in order of arrival, overtake nobody.
    """
    core, inst = s.core[0], s.instance[instance]
    if core.flight > 1:
        return
    overtakes = 0.0
    full = core.demand + s.size[inst.model, inst.size].demand > 1.0 or core.active >= core.max_active
    if core.flight == 1 and full:
        other = s.flight[0]
        fill_instance_job(s, other, now)
        if s.instance[other].whole:  # the expected remainder
            s.job[0].remaining_ns = max(0.0, s.job[0].total_ns - (now - s.segment_ns[other, 0, 0]))
        overtakes = 1.0 if inst.rank < checked_rank(s, s.call[0].rank, 0) else 0.0
    core.overtaking_share += (overtakes - core.overtaking_share) / OVERTAKING_JOBS


@part
def may_launch_whole(s: State, instance: int) -> bool:
    """Whether a queue persists and the job is short. Then jobs take turns anyway, and each segment costs the GPU a node
    and the host a launch. Not where later jobs often have to overtake it, nor on an oversubscribed GPU, where jobs may
    have to yield.
    """
    if (
        s.core[0].waiting_jobs < s.tuning[0].steady_queue_jobs
        or s.instance[instance].segments > s.tuning[0].short_job_segments
        or s.core[0].overtaking_share > MOST_OVERTAKING
    ):
        return False
    return bool(s.core[0].yielding_share >= s.tuning[0].most_yielding_share or not is_oversubscribed(s))


@part
def max_in_flight(s: State) -> int:
    """Segments of one job on the GPU at a time: one on an oversubscribed GPU, where there is always other work and
    launched segments cannot yield. Where no job yields, one would only make the host launch the next segment late.
    """
    return (
        1
        if is_oversubscribed(s) and s.core[0].yielding_share < s.tuning[0].most_yielding_share
        else int(s.core[0].max_in_flight)
    )


@part
def length_ns(s: State, instance: int) -> float:
    inst = s.instance[instance]
    return float(s.size[inst.model, inst.size].total_ns)


@part
def shortest_active(s: State) -> int:
    """The shortest active instance on an oversubscribed GPU; NONE if it is not oversubscribed."""
    found = codes.NONE
    if is_oversubscribed(s):
        for k in range(s.core[0].active):
            if found < 0 or length_ns(s, s.active[k]) < length_ns(s, found):
                found = s.active[k]
    return int(found)


@part
def may_yield_to(s: State, instance: int, shortest: int) -> bool:
    """Whether an instance may have to yield to the shortest."""
    if shortest < 0 or length_ns(s, instance) < s.tuning[0].much_longer * length_ns(s, shortest):
        return False
    return bool(s.instance[instance].rank > s.instance[shortest].rank)


@part
def choose_yielding(s: State) -> None:
    """Marks the active instances that launch nothing for now: of the instances that may yield to the shortest, all but
    the best ones that fit the limit without a queue.
    """
    core = s.core[0]
    if core.yielding == 0 and not is_oversubscribed(s):
        return
    shortest = shortest_active(s)
    core.yielding = 0
    room = core.demand_limit
    for k in range(core.active):
        inst = s.instance[s.active[k]]
        inst.yields = 1 if may_yield_to(s, s.active[k], shortest) else 0
        core.yielding += inst.yields
        if inst.yields == 0:
            room -= inst.demand
    while core.yielding > 0:
        best = codes.NONE
        for k in range(core.active):
            instance = s.active[k]
            if s.instance[instance].yields > 0 and (best < 0 or s.instance[instance].rank < s.instance[best].rank):
                best = instance
        room -= s.instance[best].demand
        if room < 0.0:
            break
        s.instance[best].yields = 0
        core.yielding -= 1


@part
def must_yield(s: State, instance: int) -> bool:
    return bool(s.instance[instance].yields > 0 and s.core[0].yielding_share < s.tuning[0].most_yielding_share)


# --- gates: launches of other processes wait while there are jobs of higher priority than theirs
#
# A gate is closed until a certain time, which the core extends while such jobs exist. So the gate opens by itself if
# the core ends. A job that can launch nothing, because its inputs or its weights are missing, closes gates only for a
# while: a producer may take a slot and never write it, and weights may wait for memory that never becomes free.


LEASE_NS = 20_000_000  # a closed gate opens this long after the core's last update
# The core's loop stays awake this many times as long while there are gates, because a loop that must wake up closes
# them late. At 250 requests a second on an H200, up to 9 of the 22 slowest requests beside a script found it asleep.
LINGERS = 5
# From the arrival of an instance's latest request. Inputs are usually written within a millisecond. 100 ms is a guess;
# the optimum was not measured.
WAITS_NS = 100_000_000


@part
def keep_closed(s: State, k: int, now: int) -> None:
    """Closes a gate, or keeps it closed."""
    gate = s.gate[k]
    if gate.closed_until_ns < now + LEASE_NS // 2:
        if gate.closed_until_ns == 0:
            gate.closed_since_ns = now
            gate.closes += 1
        gate.closed_until_ns = now + LEASE_NS
        store_at(gate.word, np.uint64(gate.closed_until_ns))


@part
def close_gates(s: State, priority: int, now: int) -> None:
    """Closes the gates of lower priority for a request that has come. The other processes' last kernels can then end
    while the request's inputs are written.
    """
    if s.core[0].gates == 0:
        return
    for k in range(s.gate.shape[0]):
        if s.gate[k].word != ZERO and priority > s.gate[k].priority:
            keep_closed(s, k, now)


@part
def closes_gates(s: State, instance: int, now: int) -> bool:
    """Whether gates are closed for this instance: its segments can be, or soon may be, on the GPU."""
    inst = s.instance[instance]
    if now < inst.latest_ns + WAITS_NS or inst.flight_at >= 0:
        return True
    return bool(inst.state != codes.READY_WAIT and weights_resident(s, inst.model))


@part
def update_gates(s: State, now: int) -> None:
    """Closes and opens the gates of other processes."""
    if s.core[0].gates == 0:
        return
    top = -codes.NEVER
    for k in range(s.core[0].active):
        if closes_gates(s, s.active[k], now):
            top = max(top, s.instance[s.active[k]].priority)
    for k in range(s.core[0].ready):
        if closes_gates(s, s.ready[k], now):
            top = max(top, s.instance[s.ready[k]].priority)
    for k in range(s.core[0].held):
        if s.instance[s.held[k]].state == codes.READY_WAIT and closes_gates(s, s.held[k], now):
            top = max(top, s.instance[s.held[k]].priority)
    for k in range(s.gate.shape[0]):
        gate = s.gate[k]
        if gate.word == ZERO:
            continue
        if top > gate.priority:
            keep_closed(s, k, now)
        elif gate.closed_until_ns != 0:
            gate.closed_ns += now - gate.closed_since_ns
            gate.closed_until_ns = 0
            store_at(gate.word, ZERO)
