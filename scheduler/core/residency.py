"""Which weights are on the GPU: a budget, the model that comes next over the link, and the models that leave for it.

The core decides, and one mover carries out its orders in sequence (`State.move`). An eviction is done before the
weights that need its memory are brought, so the GPU never holds more than the budget. Weights in use, or about to be
used, are never evicted; nor are weights for a model of lower priority. Among the others, the weights with the lowest
value per byte leave: by recent demand, the time to bring them back and priority, unless the policy has its own
`victim`. For memory that is taken permanently, as instances are, lower priorities leave first. A model that has waited
for several times its reload time also gets memory from busy models: these finish their running jobs, and start no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numba
import numpy as np

from paellapy.instrument.numba_ext.link import address_of, part, reachable
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.abort import abort
from paellapy.scheduler.core.atomics import ONE, ZERO, call_asking, load_at, store_at
from paellapy.scheduler.core.instances import mark_instance_dirty
from paellapy.scheduler.core.requests import rank_instance
from paellapy.scheduler.core.rings import address, write_event
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import (
    copy_ns,
    first_waiting,
    holder,
    in_use,
    recent_demand,
    start_ns,
    waiting_requests,
)

_WORD = np.uint64(8)
STEPS = 64  # of priority, up and down, that count in the value of a model
MOST_LOADING = 2  # models at a time: the next one is mapped while the chunks of one are copied


# --- orders ----------------------------------------------------------------------------------------------------------


@part
def post_order(s: State, kind: int, m: int) -> None:
    """Posts an order for the mover, behind all earlier orders."""
    tail = load_at(address(s.move_ring, codes.MOVE_TAIL))
    cell = s.move[np.int64(tail) & (s.move.shape[0] - 1)]
    cell.kind, cell.model = kind, m
    store_at(address(s.moved, m), ZERO)
    store_at(address(s.move_ring, codes.MOVE_TAIL), tail + ONE)
    if s.residency[0].mover_fd >= 0:
        write_event(s, s.residency[0].mover_fd, s.clock[2:])


@part
def load(s: State, m: int, now: int) -> None:
    residency, weights = s.residency[0], s.weights[m]
    residency.held_bytes += weights.bytes
    residency.loading += 1
    weights.location = codes.LOADING
    weights.arrived = weights.served = weights.prefetch = weights.stopped = 0
    weights.ordered_ns = now
    weights.begin_ns = max(float(now), residency.link_free_ns) + s.tuning[0].map_ns
    residency.link_free_ns = weights.begin_ns + copy_ns(s, m, weights.bytes)
    for k in range(weights.chunks):
        store_at(weights.word + _WORD * np.uint64(k), ZERO)
    post_order(s, codes.LOAD, m)


@part
def evict(s: State, m: int) -> None:
    residency, weights = s.residency[0], s.weights[m]
    residency.held_bytes -= weights.bytes
    residency.evicting += 1
    weights.location = codes.EVICTING
    weights.arrived = weights.stopped = weights.evict_requested = weights.victim = 0
    mark_instances_dirty(s, m)
    post_order(s, codes.EVICT, m)


@part
def mark_instances_dirty(s: State, m: int) -> None:
    """Marks the instances that need these weights, since some may now compete or no longer compete."""
    for user in (m, int(s.weights[m].also - 1)):
        for k in range(s.model[user].n_instances if user >= 0 else 0):
            if s.instance[s.model_instance[user, k]].state == codes.FILLING:
                mark_instance_dirty(s, s.model_instance[user, k])


# --- eviction -------------------------------------------------------------------------------------------------------


@part
def value_on_gpu(s: State, m: int, now: int) -> float:
    """The value of keeping a model on the GPU; the lowest is evicted first. Each step of priority doubles it."""
    weights, seen = s.weights[m], s.owner[0]
    seen.now_ns, seen.bytes, seen.priority, seen.share = now, weights.bytes, s.model[m].priority, s.model[m].share
    seen.demand = recent_demand(s, m, now)
    seen.used_ns, seen.came_ns = weights.used_ns, weights.came_ns
    seen.reload_ns, seen.model = copy_ns(s, m, weights.bytes), m
    callback = s.call[0].victim
    if callback.function == ZERO:
        step = 2.0 ** max(-STEPS, min(s.model[m].priority, STEPS))
        return float(step * seen.demand * seen.reload_ns / max(seen.bytes, 1.0))
    found = call_asking(callback.function, callback.first, callback.second, callback.third)
    if np.isnan(found):
        s.core[0].bad_ranks += 1
        return -np.inf
    return float(found)


@part
def is_evictable(s: State, m: int, priority: int) -> bool:
    """Whether a model may ever leave for one of this priority. A TRANSIENT one without requests leaves for any."""
    weights = s.weights[m]
    if weights.location != codes.RESIDENT or weights.keep == codes.PINNED or weights.victim or weights.locked:
        return False
    goes = weights.keep == codes.TRANSIENT and waiting_requests(s, m) == 0
    return bool(goes or s.model[m].priority <= priority)


@part
def is_evictable_now(s: State, m: int, priority: int) -> bool:
    """Whether it may leave now: no job of it runs or waits, unless it is stopped or they have lower priority."""
    if not is_evictable(s, m, priority) or in_use(s, m):
        return False
    return bool(waiting_requests(s, m) == 0 or s.weights[m].stopped > 0 or s.model[m].priority < priority)


@part
def next_victim(s: State, priority: int, at_once: bool, now: int) -> int:
    """The model that should leave first for one of this priority, of those that can leave now or of the others; NONE if
    none may. Models whose weights failed to leave come last. For permanent memory (NEVER) a lower priority comes first.
    Among equals, the least recently used one.
    """
    found = codes.NONE
    lowest = least = stuck = np.inf
    for m in range(s.model.shape[0]):
        if at_once != is_evictable_now(s, m, priority):
            continue
        # A model that was brought for requests which still wait serves them first.
        waits = s.weights[m].served == 0 and waiting_requests(s, m) > 0
        if not at_once and (not is_evictable(s, m, priority) or s.weights[m].stopped > 0 or waits):
            continue
        value, failed = value_on_gpu(s, m, now), float(s.weights[m].stuck)
        own = float(s.model[m].priority) if priority == codes.NEVER else 0.0
        first = failed < stuck or (failed == stuck and own < lowest)
        same = failed == stuck and own == lowest
        if first or (same and value < least):
            found, lowest, least, stuck = m, own, value, failed
        elif same and value == least and s.weights[m].used_ns < s.weights[found].used_ns:
            found = m
    return int(found)


@part
def choose_victims(s: State, need: int, priority: int, now: int) -> int:
    """Marks as many models that could leave now as are needed, the cheapest first; returns the bytes still missing."""
    marked = 0
    while marked < need:
        m = next_victim(s, priority, True, now)
        if m < 0:
            return int(need - marked)
        s.weights[m].victim = 1
        marked += s.weights[m].bytes
    for m in range(s.model.shape[0]):  # a large model may have made smaller ones unnecessary
        if s.weights[m].victim and marked - s.weights[m].bytes >= need:
            s.weights[m].victim = 0
            marked -= s.weights[m].bytes
    return 0


@part
def stop_busy_models(s: State, short: int, priority: int, now: int) -> None:
    """Stops busy models from starting jobs, until enough memory will be free once they are done."""
    for m in range(s.model.shape[0]):
        if (
            s.weights[m].location == codes.RESIDENT
            and s.weights[m].stopped > 0
            and not is_evictable_now(s, m, priority)
        ):
            short -= s.weights[m].bytes
    while short > 0:
        m = next_victim(s, priority, False, now)
        if m < 0:
            return
        s.weights[m].stopped = 1
        mark_instances_dirty(s, m)
        short -= s.weights[m].bytes


@part
def make_room(s: State, nbytes: int, priority: int, since: float, patience: float, now: int) -> bool:
    """Whether this many bytes are free, or will be once the orders made here are done; if not, nothing is ordered."""
    need = s.residency[0].held_bytes + nbytes - s.residency[0].budget_bytes
    if need <= 0:
        return True
    short = choose_victims(s, need, priority, now)
    for m in range(s.model.shape[0]):
        if s.weights[m].victim:
            s.weights[m].victim = 0
            if short == 0:
                evict(s, m)
    if short > 0:
        if now >= since + patience:
            stop_busy_models(s, short, priority, now)
        else:
            s.core[0].wake_at_ns = min(s.core[0].wake_at_ns, np.ceil(since + patience))
    return short == 0


# --- bringing ------------------------------------------------------------------------------------------------------


@part
def next_to_load(s: State, now: int) -> int:
    """The model whose requests the policy ranks first, among models whose weights are not on the GPU; NONE if there is
    none. A model without requests that was prefetched comes last, until it has waited for long.
    """
    found = codes.NONE
    least = np.inf
    for m in range(s.model.shape[0]):
        if s.model[m].state == codes.ABSENT or s.weights[m].location != codes.OFF_GPU:
            continue
        instance = first_waiting(s, m)
        rank = np.inf
        if waiting_requests(s, m) == 0:
            if s.weights[m].prefetch == 0:
                continue
            if now >= s.weights[m].ordered_ns + patience_ns(s, m):
                rank = -np.inf
        elif instance >= 0:
            rank = rank_instance(s, instance, now)
        first = found < 0 or rank < least
        if first or (rank == least and waiting_requests(s, m) > 0 and waiting_requests(s, found) == 0):
            found, least = m, rank
    return int(found)


@part
def waiting_since_ns(s: State, m: int) -> float:
    """Since when the model's oldest request waits, or since when it was prefetched; NEVER if neither."""
    instance = first_waiting(s, m)
    if instance >= 0:
        return float(s.instance[instance].arrival_ns)
    return float(s.weights[m].ordered_ns if waiting_requests(s, m) == 0 and s.weights[m].prefetch else codes.NEVER)


@part
def patience_ns(s: State, m: int) -> float:
    """How long a model waits before it gets memory from busy models."""
    return float(s.tuning[0].patience * copy_ns(s, m, s.weights[m].bytes))


@part
def grant_load(s: State, now: int) -> None:
    """Grants room for the weights of a model that is being loaded, once the models that leave for it have left."""
    residency = s.residency[0]
    if residency.load_bytes == 0 or residency.load_granted:
        return
    if residency.load_since_ns == 0.0:
        residency.load_since_ns = max(float(now), 1.0)
    room = make_room(s, residency.load_bytes, residency.load_priority, residency.load_since_ns, 0.0, now)
    if room and residency.evicting == 0:
        residency.held_bytes += residency.load_bytes
        residency.load_granted = 1


@part
def evict_on_request(s: State) -> bool:
    """Evicts models that were ordered to leave; returns whether some still cannot."""
    left = False
    for m in range(s.model.shape[0]):
        weights = s.weights[m]
        if weights.location == codes.RESIDENT and weights.evict_requested > 0 and weights.stopped == 0:
            weights.stopped = 1
            mark_instances_dirty(s, m)
        goes = weights.evict_requested > 0 or (
            weights.keep == codes.TRANSIENT and weights.prefetch == 0 and s.model[m].live == 0
        )
        if s.model[m].state != codes.ABSENT and weights.location == codes.RESIDENT and goes:
            if in_use(s, m) or weights.locked > 0:
                left = True
            else:
                evict(s, m)
    return left


@part
def choose_moves(s: State, now: int) -> None:
    """Orders all moves that are possible now; `look` stays set while more remain."""
    residency = s.residency[0]
    residency.pending = 1 if evict_on_request(s) else 0
    grant_load(s, now)
    if residency.load_bytes > 0 and not residency.load_granted:
        residency.pending = 1
        return
    while residency.loading < MOST_LOADING:
        m = next_to_load(s, now)
        if m < 0:
            break
        since, patience = waiting_since_ns(s, m), patience_ns(s, m)
        if not make_room(s, s.weights[m].bytes, s.model[m].priority, since, patience, now):
            residency.pending = 1
            return
        load(s, m, now)
    if next_to_load(s, now) >= 0:
        residency.pending = 1
    else:
        resume_stopped(s)


@part
def resume_stopped(s: State) -> None:
    """Lets stopped models start jobs again, because no model waits for their memory."""
    for m in range(s.model.shape[0]):
        if s.weights[m].stopped > 0 and s.weights[m].evict_requested == 0:
            s.weights[m].stopped = 0
            mark_instances_dirty(s, m)


@reachable
def order_moves(s: State, now: int) -> int:
    """Orders the next moves, once all waiting requests are known; returns whether to reconcile instances again."""
    if s.residency[0].managed == 0 or s.residency[0].pending == 0 or s.core[0].mode == codes.FAIL_MODE:
        return 0
    choose_moves(s, now)
    return 1 if s.core[0].dirty_instances > 0 else 0


# --- progress of the mover and the link: chunks that have arrived, weights that have left, orders that failed


@part
def fail_load(s: State, m: int, now: int) -> None:
    """Ends the requests that wait for weights which cannot be brought."""
    s.residency[0].held_bytes -= s.weights[m].bytes
    s.residency[0].loading -= 1
    s.residency[0].failed += 1
    s.weights[m].location, s.weights[m].arrived, s.weights[m].evict_requested = codes.OFF_GPU, 0, 0
    for row in range(s.request.shape[0]):
        if s.request[row].state != codes.UNUSED and holder(s, s.request[row].model) == m:
            abort(s, row, codes.NO_WEIGHTS, now)


@part
def finish_eviction(s: State, m: int) -> None:
    """Counts weights that have left."""
    residency, weights = s.residency[0], s.weights[m]
    residency.evicting -= 1
    residency.evicted += 1
    residency.evicted_bytes += weights.bytes
    residency.pending = 1
    weights.evicted += 1
    weights.location, weights.evict_requested = codes.OFF_GPU, 0


@part
def undo_eviction(s: State, m: int) -> None:
    """Keeps weights that could not leave. The mover refuses the weights that were ordered to take their place, and a
    load that waits for memory is refused here: otherwise the same eviction would be ordered again and again.
    """
    residency, weights = s.residency[0], s.weights[m]
    residency.evicting -= 1
    residency.held_bytes += weights.bytes
    residency.failed += 1
    residency.pending = 1
    if residency.load_bytes > 0 and residency.load_granted == 0:
        residency.load_granted = codes.NONE
    weights.stuck += 1
    weights.location, weights.evict_requested = codes.RESIDENT, 0
    if weights.keep == codes.TRANSIENT:
        weights.prefetch = 1  # it stays until its memory is needed, or until it is ordered to leave
    mark_instances_dirty(s, m)
    residency.stuck_before = np.int64(load_at(address(s.move_ring, codes.MOVE_TAIL)))
    store_at(address(s.moved, m), ZERO)


@part
def poll_chunks(s: State, m: int, now: int) -> None:
    """Notes chunks that have arrived, so that segments may start."""
    residency, weights = s.residency[0], s.weights[m]
    before = weights.arrived
    while weights.arrived < weights.chunks and load_at(weights.word + _WORD * np.uint64(weights.arrived)) != ZERO:
        weights.arrived += 1
    if weights.arrived > before:
        s.core[0].changed = 1
        late = now - copy_ns(s, m, min(weights.arrived * weights.chunk_bytes, weights.bytes)) - weights.begin_ns
        weights.begin_ns += late
        residency.link_free_ns += late
    if weights.arrived == weights.chunks:
        weights.location, weights.came_ns = codes.RESIDENT, now
        residency.loading -= 1
        residency.brought += 1
        residency.brought_bytes += weights.bytes
        residency.reload_ns += now - weights.ordered_ns
        weights.brought += 1
        weights.reload_ns += now - weights.ordered_ns
        residency.pending = 1
        mark_instances_dirty(s, m)
        return
    for k in range(s.model[m].n_instances):
        instance = s.model_instance[m, k]
        inst = s.instance[instance]
        if inst.state == codes.FILLING and inst.live > 0 and inst.ready_at < 0 and s.core[0].whole_always == 0:
            at = start_ns(s, m, inst.size, now)
            if at <= now:
                mark_instance_dirty(s, instance)
            else:
                s.core[0].wake_at_ns = min(s.core[0].wake_at_ns, at)


@reachable
def poll_moves(s: State, now: int) -> int:
    """Handles the moves since the last step; returns whether more may be ordered now."""
    residency = s.residency[0]
    if residency.managed == 0 or s.core[0].mode == codes.FAIL_MODE:
        return 0
    if residency.loading + residency.evicting > 0:
        for m in range(s.model.shape[0]):
            location = s.weights[m].location
            if location == codes.LOADING:
                if load_at(address(s.moved, m)) == np.uint64(codes.MOVE_FAILED):
                    fail_load(s, m, now)
                else:
                    poll_chunks(s, m, now)
            elif location == codes.EVICTING:
                if load_at(address(s.moved, m)) == np.uint64(codes.MOVE_FAILED):
                    undo_eviction(s, m)
                elif load_at(address(s.moved, m)) == np.uint64(codes.EVICTED):
                    finish_eviction(s, m)
    if residency.loading == 0:
        residency.link_free_ns = min(residency.link_free_ns, float(now))
    return int(residency.pending)


# --- from outside the core: setting the budget, giving orders, and reading the account


LOCATIONS = ("host", "loading", "resident", "leaving")  # weights.location as text


def attach_moves(state: State) -> None:
    """Lets the core move weights. Most engines keep all weights on the GPU, and need not compile these functions."""
    for each in (poll_moves, order_moves):
        state.residency[each.__name__][0] = address_of(each, State.numba_type, numba.types.int64)


def set_weight_budget(state: State, budget_bytes: int) -> None:
    """Limits the weights on the GPU to this number of bytes, from the next step on."""
    attach_moves(state)
    r = state.residency[0]
    r["managed"], r["budget_bytes"] = 1, budget_bytes
    r["ns_per_byte"] = 1.0 / float(state.tuning["link_gbps"][0])


def needed_bytes(weights: Iterable[tuple[int, int, int]]) -> int:
    """The least memory with which every model can run, from each model's priority, bytes of weights, and `keep`.

    All pinned weights must fit. So must, for each priority, its largest model beside all weights of higher priority,
    which are never evicted for it; transient weights leave by themselves.

    >>> needed_bytes([(0, 50, codes.AUTO), (0, 40, codes.AUTO)])
    50
    >>> needed_bytes([(0, 50, codes.AUTO), (1, 40, codes.AUTO), (1, 9, codes.PINNED)])
    99
    """
    found = [each for each in weights if each[1] > 0]
    most = 0
    for own in {priority for priority, _, keep in found if keep != codes.PINNED}:
        above = sum(nbytes for priority, nbytes, keep in found if priority > own and keep == codes.AUTO)
        most = max(most, above + max(n for priority, n, keep in found if priority == own and keep != codes.PINNED))
    return sum(nbytes for _, nbytes, keep in found if keep == codes.PINNED) + most


def weights_state(state: State, row: int) -> str:
    """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
    weights = state.weights[row]
    said = LOCATIONS[int(weights["location"])] if state.residency["managed"][0] else "resident"
    if said == "loading":
        return f"loading {100 * int(weights['arrived']) // max(1, int(weights['chunks']))} %"
    return "disk" if said == "host" and weights["ns_per_byte"] > 0 else said


def want_weights(state: State, row: int) -> bool:
    """Orders a model's weights to be loaded although no request waits for them; returns whether they were off the GPU.

    May be called from any thread; the core's loop may have to be woken.
    """
    if not state.residency["managed"][0] or state.weights["location"][row] != codes.OFF_GPU:
        return False
    if not state.weights["prefetch"][row]:
        state.weights["ordered_ns"][row], state.weights["prefetch"][row] = time.monotonic_ns(), 1
    state.residency["pending"][0] = 1
    return True


def value_in_host_memory(state: State, row: int) -> float:
    """The value of a model's weights in host memory, per byte: recent requests, doubled for each step of priority."""
    weights, past = state.weights[row], float(state.tuning["demand_memory_ns"][0])
    recent = float(weights["demand"]) * math.exp(-max(0.0, time.monotonic_ns() - float(weights["demand_ns"])) / past)
    return recent * 2.0 ** max(-STEPS, min(int(state.model["priority"][row]), STEPS))


def hit_rate(state: State) -> float:
    """The fraction of requests that found their model's weights on the GPU; 1 before the first request."""
    hits, misses = (int(state.weights[name].sum()) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else 1.0


def reserve_arena(state: State, arena: int) -> None:
    """Reserves the arena: no instance gets it from now on (State.arena may still name one). Call between two steps."""
    state.arena_kept[arena] = 1
    _mark_arena_dirty(state, arena)


def release_arena(state: State, arena: int) -> None:
    """Opens the arena to instances again. Call between two steps."""
    state.arena_kept[arena] = 0
    _mark_arena_dirty(state, arena)


def _mark_arena_dirty(state: State, arena: int) -> None:
    """Marks the instances of the arena, to be reconciled before the next decision."""
    instance, core = state.instance, state.core
    waits = (
        (instance["arena"] == arena)
        & (instance["state"] == codes.FILLING)
        & (instance["live"] > 0)
        & (instance["dirty"] == 0)
    )
    for row in np.flatnonzero(waits):
        instance["dirty"][row] = 1
        state.dirty_instances[core["dirty_instances"][0]] = row
        core["dirty_instances"][0] += 1
    core["changed"][0] = 1
