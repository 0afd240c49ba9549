"""Weights that come and go, as instances see them: whether they are on the GPU, and when they will be.

A program may start before all of its weights have arrived: chunks come in the order in which programs need them, and
each segment has the number of chunks it needs. An instance gets its turn when the remaining chunks will arrive about
when its segments need them. Much earlier, the instance would keep others from the GPU; later, it would waste the
arrival time.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State


@part
def holder(s: State, m: int) -> int:
    """The model that holds the weights of this one: itself, or another one with the same weights."""
    return int(s.weights[m].of - 1) if s.weights[m].of > 0 else m


@part
def copy_ns(s: State, m: int, nbytes: float) -> float:
    """The time to copy this number of bytes of a model's weights."""
    weights = s.weights[m]
    return float(nbytes * (weights.ns_per_byte if weights.ns_per_byte > 0.0 else s.residency[0].ns_per_byte))


@part
def missing_bytes(s: State, m: int) -> int:
    """Bytes of a model's weights that are not on the GPU."""
    weights = s.weights[holder(s, m)]
    if s.residency[0].managed == 0 or weights.location == codes.RESIDENT:
        return 0
    return int(
        weights.bytes - min(weights.arrived * weights.chunk_bytes, weights.bytes)
        if weights.location == codes.LOADING
        else weights.bytes
    )


@part
def arrival_ns(s: State, m: int, chunks: int, now: float) -> float:
    """When the first `chunks` of a model's weights are on the GPU, if its copy is in progress or comes next."""
    weights = s.weights[m]
    begin = (
        weights.begin_ns
        if weights.location == codes.LOADING
        else max(now, s.residency[0].link_free_ns) + s.tuning[0].map_ns
    )
    return float(max(now, begin + copy_ns(s, m, min(chunks * weights.chunk_bytes, weights.bytes))))


@part
def unblocked_ns(s: State, m: int, size: int, segment: int, now: float, stretch: float, lead_ns: float) -> float:
    """When a program can continue from a segment without waiting for weights; `now` if it can at once. Its segments
    take `stretch` times their time alone, and the first one `lead_ns` more.
    """
    weights = s.weights[holder(s, m)]
    found = now
    if s.residency[0].managed == 0 or weights.location == codes.RESIDENT:
        return float(found)
    have = weights.arrived if weights.location == codes.LOADING else 0
    tail = s.segment[m, size, segment].tail_ns
    for k in range(segment, s.size[m, size].segments):
        f = s.segment[m, size, k]
        if f.chunks > have:
            have = f.chunks
            before = stretch * (tail - f.tail_ns) + (lead_ns if k > segment else 0.0)
            # An integer, so that simulated time reaches it exactly.
            found = max(found, np.ceil(arrival_ns(s, holder(s, m), f.chunks, now) - before))
    return float(found)


@part
def ready_ns(s: State, m: int, size: int, segment: int, now: float) -> float:
    """When a program could continue from a segment without waiting for weights; `now` if it can at once."""
    return float(unblocked_ns(s, m, size, segment, now, 1.0, 0.0))


@part
def start_ns(s: State, m: int, size: int, now: float) -> float:
    """When a program should start while its weights arrive. It starts early rather than late: it may have to wait
    between segments, but ends soon after its last weights have arrived.
    """
    return float(unblocked_ns(s, m, size, 0, now, s.tuning[0].cold_stretch, s.tuning[0].cold_lead_ns))


@part
def may_start(s: State, instance: int, now: int) -> bool:
    """Whether the weights are there, or arrive soon enough for the instance to run without waiting."""
    if s.residency[0].managed == 0:
        return True
    inst = s.instance[instance]
    weights = s.weights[holder(s, inst.model)]
    if weights.location == codes.RESIDENT:
        return bool(weights.stopped == 0)
    s.residency[0].pending = 1
    if weights.location != codes.LOADING or s.core[0].whole_always:
        return False
    return bool(start_ns(s, inst.model, inst.size, now) <= now)


@part
def next_weights_resident(s: State, instance: int) -> bool:
    """Whether the weights for the instance's next launch are on the GPU."""
    if s.residency[0].managed == 0:
        return True
    inst = s.instance[instance]
    weights = s.weights[holder(s, inst.model)]
    if weights.location == codes.LOADING and not inst.whole:
        return bool(s.segment[inst.model, inst.size, inst.issued].chunks <= weights.arrived)
    return bool(weights.location == codes.RESIDENT)


@part
def weights_resident(s: State, m: int) -> bool:
    """Whether all weights are on the GPU, which a program in one piece needs."""
    return bool(s.residency[0].managed == 0 or s.weights[holder(s, m)].location == codes.RESIDENT)


@part
def arena_is_free(s: State, instance: int) -> bool:
    """Whether no other instance runs in the instance's arena."""
    arena = s.instance[instance].arena
    return bool(arena < 0 or s.arena[arena] == instance + 1 or (s.arena[arena] == 0 and s.arena_kept[arena] == 0))


@part
def runs(s: State, m: int) -> bool:
    """Whether a job of the model runs, or is about to."""
    for k in range(s.model[m].n_instances):
        state = s.instance[s.model_instance[m, k]].state
        if state in (codes.READY_WAIT, codes.RUNNING):
            return True
    return False


@part
def in_use(s: State, m: int) -> bool:
    """Whether a job that needs the weights which this model holds runs, or is about to."""
    also = s.weights[m].also
    return bool(runs(s, m) or (also > 0 and runs(s, int(also - 1))))


@part
def recent_demand(s: State, m: int, now: float) -> float:
    """The number of the model's recent requests, with decreasing weight."""
    weights = s.weights[m]
    return float(weights.demand * np.exp(-max(0.0, now - weights.demand_ns) / s.tuning[0].demand_memory_ns))


@part
def count_demand(s: State, m: int, now: int) -> None:
    """Counts an accepted request of the model."""
    if s.residency[0].managed == 0:
        return
    m = holder(s, m)
    weights = s.weights[m]
    weights.demand = recent_demand(s, m, now) + 1.0
    weights.demand_ns = weights.used_ns = now
    if weights.location == codes.RESIDENT:
        weights.hits += 1
    else:
        weights.misses += 1


@part
def waiting_requests(s: State, m: int) -> int:
    """The requests that need the weights which the model holds now: those that are held back do not."""
    found = s.model[m].live - s.model[m].held_back
    also = s.weights[m].also
    if also > 0:
        found += s.model[also - 1].live - s.model[also - 1].held_back
    return int(found)


@part
def first_waiting(s: State, m: int) -> int:
    """An instance that waits for the weights which the model holds; NONE if there is none."""
    instance = s.model[m].filling
    if instance >= 0 and s.instance[instance].live > 0:
        return int(instance)
    also = s.weights[m].also
    instance = s.model[also - 1].filling if also > 0 else codes.NONE
    return int(instance) if instance >= 0 and s.instance[instance].live > 0 else codes.NONE


@part
def moves_under_way(s: State) -> bool:
    """Whether the core has to look again soon, even if no request is live."""
    residency = s.residency[0]
    return bool(
        residency.managed > 0
        and (residency.loading + residency.evicting > 0 or (residency.load_bytes > 0 and residency.load_granted == 0))
    )
