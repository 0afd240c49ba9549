"""Instances in the core: opening one to producers, filling its slots, closing it, answering its requests, freeing it.

A changed instance or model is marked dirty (`mark_instance_dirty`, `mark_model_dirty`), and `reconcile` then moves all
dirty ones to their places. So each rule is written once, and compiled once into the step, which would otherwise be many
times as large.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ALL, ONE, ZERO, load_at, or_at, store_at
from paellapy.scheduler.core.concurrency import note_overtaking
from paellapy.scheduler.core.copier import copy_inputs, hand_to_copier
from paellapy.scheduler.core.heaps import heap_down, heap_remove, heap_up, queue_first, queue_remove
from paellapy.scheduler.core.job import READS_TERMS
from paellapy.scheduler.core.requests import complete, due_ns, post_completion, rank_instance, slots_of
from paellapy.scheduler.core.rings import address, bit_at, bit_of, reserve, reserved_slots
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import arena_is_free, may_start

_CLOSED = np.uint64(codes.CLOSED)
_GENERATION_SHIFT = np.uint64(codes.GENERATION_SHIFT)


# --- slots: which request has which slot, and the instance's resulting facts


@part
def size_for(s: State, m: int, n: int) -> int:
    """The smallest captured size that holds n requests; the largest if none does."""
    k = 0
    last = s.model[m].n_sizes - 1
    while k < last and (s.size[m, k].batch < n or s.size[m, k].segments == 0):
        k += 1
    return k


@part
def choose_size(s: State, instance: int) -> None:
    """Selects the size at which the instance runs."""
    inst = s.instance[instance]
    inst.size = size_for(s, inst.model, inst.items)


@part
def choose_size_to_run(s: State, instance: int) -> None:
    """As `choose_size`; also marks the size at which the instance would run if it were captured."""
    choose_size(s, instance)
    inst = s.instance[instance]
    k = inst.size
    while k > 0 and s.size[inst.model, k - 1].batch >= inst.items:
        k -= 1
    if k < inst.size and s.size[inst.model, k].capture == codes.LATER:
        s.size[inst.model, k].capture = codes.WANTED


@part
def count_queued(s: State, m: int, n: int) -> None:
    """Adds n requests to the count of the model's queue."""
    core = s.core[0]
    model = s.model[m]
    model.queued += n
    core.queued += n
    core.queued_jobs += n / slots_of(s, m)
    if core.queued == 0:
        core.queued_jobs = 0.0  # drops rounding errors


@part
def remove_queued(s: State, row: int) -> None:
    """Removes a request from its model's queue."""
    request = s.request[row]
    queue_remove(s, s.model[request.model], row)
    count_queued(s, request.model, -1)
    if request.released > 0:
        request.released = 0
        s.held_back[request.client, request.model].released -= 1


@part
def fill_slot(s: State, instance: int, slot: int, row: int) -> None:
    """Puts the request into this slot and updates the instance's facts. NONE: the slot was reserved in vain."""
    inst = s.instance[instance]
    inst.taken += 1
    inst.items += s.request[row].items if row >= 0 else 1
    s.instance_known[instance, slot >> 6] |= bit_of(slot)
    s.slot[instance, slot] = row
    choose_size(s, instance)
    if row < 0:
        return
    request = s.request[row]
    request.state, request.instance, request.slot = codes.SLOTTED, instance, slot
    s.slot_client[instance, slot] = request.client
    if inst.live == 0:
        clear_facts(s, instance)
        inst.latest_ns = request.arrival_ns
    inst.latest_ns = max(inst.latest_ns, request.arrival_ns)
    add_facts(s, instance, row)
    inst.live += 1


@part
def clear_facts(s: State, instance: int) -> None:
    """The facts of an instance without requests."""
    inst = s.instance[instance]
    inst.arrival_ns = inst.deadline_ns = codes.NEVER
    inst.priority, inst.client_start_ns = -codes.NEVER, np.inf


@part
def add_facts(s: State, instance: int, row: int) -> None:
    """Adds a request to the instance's facts."""
    inst, request = s.instance[instance], s.request[row]
    if request.arrival_ns < inst.arrival_ns:
        inst.arrival_ns, inst.client = request.arrival_ns, request.client
    inst.deadline_ns = min(inst.deadline_ns, request.deadline_ns)
    inst.priority = max(inst.priority, request.priority)
    inst.client_start_ns = min(inst.client_start_ns, request.client_start_ns)


@part
def recompute_facts(s: State, instance: int) -> None:
    """Recomputes the instance's facts from the remaining requests, after one has left."""
    clear_facts(s, instance)
    for k in range(s.slot.shape[1]):
        if s.slot[instance, k] >= 0:
            add_facts(s, instance, s.slot[instance, k])


@part
def inherit_terms(s: State, instance: int, row: int) -> None:
    """Lets a full instance that waits inherit the deadline and the priority of the first request behind it, which
    cannot go before the instance has its turn. The instance returns them then.
    """
    inst, request = s.instance[instance], s.request[row]
    due = due_ns(s, inst.model, request.arrival_ns, request.deadline_ns)
    earlier = due < due_ns(s, inst.model, inst.arrival_ns, inst.deadline_ns)
    if earlier or request.priority > inst.priority:
        inst.deadline_ns = due if earlier else inst.deadline_ns
        inst.priority = max(inst.priority, request.priority)
        inst.inherits = 1
        mark_instance_dirty(s, instance)


@part
def return_terms(s: State, instance: int, now: int) -> bool:
    """Returns what an instance has inherited, when it has its turn; False if it had inherited nothing."""
    inst = s.instance[instance]
    if inst.inherits == 0:
        return False
    inst.inherits = 0
    recompute_facts(s, instance)
    inst.rank = rank_instance(s, instance, now)
    return True


@part
def give_slot(s: State, instance: int, row: int) -> bool:
    """Gives a queued request the instance's next slot, and copies its inputs there; False if the instance is full."""
    request = s.request[row]
    m = s.instance[instance].model
    slots = slots_of(s, m)
    slot = reserve(s.instance_word, s.slot_producer, instance, slots, request.producer)
    if slot < 0:
        return False
    remove_queued(s, row)
    source = request.source
    n = np.int64(0)
    for k in range(s.model[m].n_inputs):
        n += s.input_bytes[m, k]
    if source != ZERO and s.core[0].copier_fd >= 0 and n >= s.tuning[0].long_copy_bytes:
        hand_to_copier(s, source, instance, slot, m)
    else:
        if source != ZERO:
            copy_inputs(s, source, instance, slot, m)
        or_at(bit_at(s.instance_ready, instance, slot), bit_of(slot))
    fill_slot(s, instance, slot, row)
    return True


# --- marks


@part
def mark_instance_dirty(s: State, instance: int) -> None:
    """Marks a changed instance, to be reconciled before the next decision."""
    core = s.core[0]
    inst = s.instance[instance]
    if inst.dirty == 0:
        inst.dirty = 1
        s.dirty_instances[core.dirty_instances] = instance
        core.dirty_instances += 1
    core.changed = 1


@part
def mark_model_dirty(s: State, m: int) -> None:
    """Marks a model that may have requests for an instance, a free instance for requests, or, while closing, nothing
    left to do.
    """
    core = s.core[0]
    model = s.model[m]
    if model.dirty == 0:
        model.dirty = 1
        s.dirty_models[core.dirty_models] = m
        core.dirty_models += 1
    core.changed = 1


# --- the heap of waiting instances, and the set of active instances


@part
def make_ready(s: State, instance: int, rank: float) -> None:
    """Lets the instance compete with this rank."""
    core = s.core[0]
    inst = s.instance[instance]
    inst.rank = rank
    keys, ties, at = s.instance["rank"], s.instance["arrival_ns"], s.instance["ready_at"]
    if inst.ready_at < 0:
        s.ready[core.ready] = instance
        inst.ready_at = core.ready
        core.ready += 1
    i = heap_up(s.ready, at, keys, ties, inst.ready_at)
    heap_down(s.ready, core.ready, at, keys, ties, i)


@part
def unready(s: State, instance: int) -> None:
    core = s.core[0]
    if s.instance[instance].ready_at >= 0:
        heap_remove(s.ready, core.ready, s.instance["ready_at"], s.instance["rank"], s.instance["arrival_ns"], instance)
        core.ready -= 1


@part
def deactivate(s: State, instance: int) -> None:
    core = s.core[0]
    inst = s.instance[instance]
    i = inst.active_at
    if i >= 0:
        core.active -= 1
        last = s.active[core.active]
        s.active[i] = last
        s.instance[last].active_at = i
        inst.active_at = codes.NONE
        core.demand = core.demand - inst.demand if core.active > 0 else 0.0


# --- an instance's life


@part
def fill_instance(s: State, m: int) -> None:
    """Moves the model's queue into its filling instance; opens a free instance if there is no filling one."""
    model = s.model[m]
    instance = model.filling
    if instance < 0:
        idle = model.queued == 0
        if model.free_n == 0 or s.core[0].mode == codes.FAIL_MODE or model.state == codes.ABSENT:
            return
        if idle and model.state == codes.CLOSING:
            return
        model.free_n -= 1
        instance = s.free_instance[m, model.free_n]
        inst = s.instance[instance]
        inst.state = codes.FILLING
        inst.size = inst.taken = inst.items = inst.live = inst.issued = inst.done = inst.whole = inst.faulty = 0
        inst.segments = codes.NONE
        inst.started_ns = codes.NEVER
        inst.inherits = 0
        inst.generation = (inst.generation + 1) & codes.GENERATION_MASK
        model.filling = instance
        model.warm = 0
        for k in range(s.instance_ready.shape[1]):
            s.instance_ready[instance, k] = s.instance_hold[instance, k] = s.instance_known[instance, k] = ZERO
        store_at(address(s.instance_word, instance), np.uint64(inst.generation) << _GENERATION_SHIFT)
    if model.queued > 0:
        while model.queued > 0 and give_slot(s, instance, queue_first(s, model)):
            pass
        mark_instance_dirty(s, instance)
        if model.queued > 0 and s.core[0].facts & READS_TERMS and s.instance[instance].live > 0:
            inherit_terms(s, instance, queue_first(s, model))
    if model.state != codes.CLOSING:  # after the queue is served: waiting requests go first
        slots = slots_of(s, m)
        store_at(address(s.filling, m), (np.uint64(slots) << np.uint64(32)) | np.uint64(instance + 1))


@part
def inputs_written(s: State, instance: int) -> bool:
    """Whether every reserved slot is known to the core and written."""
    reserved = reserved_slots(s, instance)
    if s.instance[instance].taken != reserved:
        return False
    k = 0
    while reserved > 0:
        wanted = ALL if reserved >= 64 else (ONE << np.uint64(reserved)) - ONE
        if load_at(s.instance_ready[instance, k:].ctypes.data) != wanted:
            return False
        reserved -= 64
        k += 1
    return True


@part
def outputs_read(s: State, instance: int) -> bool:
    """Whether all outputs of the instance have been read."""
    bits = ZERO
    for k in range(s.instance_hold.shape[1]):
        bits |= load_at(s.instance_hold[instance, k:].ctypes.data)
    return bool(bits == ZERO)


@part
def close_instance(s: State, instance: int) -> bool:
    """Closes the instance to requests; returns whether it is complete. If not, it waits as READY_WAIT among the held
    instances.
    """
    core = s.core[0]
    inst = s.instance[instance]
    m = inst.model
    store_at(address(s.filling, m), ZERO)
    or_at(address(s.instance_word, instance), _CLOSED)
    s.model[m].filling = codes.NONE
    inst.state = codes.READY_WAIT
    if inputs_written(s, instance):
        return True
    s.held[core.held] = instance
    core.held += 1
    return False


@part
def set_running(s: State, instance: int) -> None:
    inst = s.instance[instance]
    choose_size_to_run(s, instance)
    inst.state = codes.RUNNING
    inst.segments = s.size[inst.model, inst.size].segments


@part
def free_instance(s: State, instance: int) -> None:
    """Returns the instance to its model's free instances."""
    inst = s.instance[instance]
    m = inst.model
    inst.state = codes.FREE
    for k in range(inst.taken):
        s.slot_client[instance, k] = 0  # a producer may take a slot and die before it says for whom
    inst.taken = inst.items = inst.live = 0
    s.free_instance[m, s.model[m].free_n] = instance
    s.model[m].free_n += 1
    s.model[m].warm = 1


@part
def set_arena_holder(s: State, instance: int, holder: int) -> None:
    """Gives the arena to the instance, or to none (NONE), and updates which instances of the arena compete."""
    arena = s.instance[instance].arena
    if arena < 0:
        return
    s.arena[arena] = holder + 1
    for other in range(s.instance.shape[0]):
        if (
            s.instance[other].arena == arena
            and other != instance
            and s.instance[other].state == codes.FILLING
            and s.instance[other].live > 0
        ):
            mark_instance_dirty(s, other)


@part
def is_faulty(s: State, instance: int, slot: int) -> bool:
    """Whether the model failed on the values in this slot."""
    return bool(s.instance[instance].faulty and s.instance_fault[instance, slot >> 6] & bit_of(slot) != ZERO)


@part
def end_instance(s: State, instance: int, now: int) -> None:
    """Answers the requests of an instance whose launches are done. The instance is HELD until all outputs are read."""
    core = s.core[0]
    inst = s.instance[instance]
    deactivate(s, instance)
    set_arena_holder(s, instance, codes.NONE)
    if core.hold and inst.live > 0:
        # Set before the first completion is visible: from then on, producers clear their bits.
        for k in range(inst.taken):
            if s.slot[instance, k] >= 0 and not is_faulty(s, instance, k):
                s.instance_hold[instance, k >> 6] |= bit_of(k)
        inst.state = codes.HELD
        s.held[core.held] = instance
        core.held += 1
    core.first_of_batch = 1
    for k in range(inst.taken):
        row = s.slot[instance, k]
        s.slot[instance, k] = codes.NONE
        if row >= 0:
            complete(s, row, codes.FAULTED if is_faulty(s, instance, k) else codes.OK, now)
    inst.live = 0


@part
def reconcile_instance(s: State, instance: int, now: int) -> None:
    """Moves an instance to its proper place: into the heap with its current rank, to its end, or back to be filled."""
    inst = s.instance[instance]
    over = False  # whether the instance is no longer needed
    competes = False
    if inst.state == codes.FILLING:
        competes = inst.live > 0 and may_start(s, instance, now) and arena_is_free(s, instance)
        if inst.live == 0 and (inst.taken > 0 or s.model[inst.model].state == codes.CLOSING):
            over = close_instance(s, instance)
            mark_model_dirty(s, inst.model)
    elif inst.state == codes.RUNNING:
        if inst.live == 0:
            inst.segments = inst.issued  # the remaining segments are not needed
        if inst.done == inst.segments:
            end_instance(s, instance, now)
            over = inst.state != codes.HELD
        else:
            competes = inst.active_at < 0 and inst.issued < inst.segments
    if competes or inst.active_at >= 0:
        inst.rank = rank_instance(s, instance, now)
    if competes:
        if inst.state == codes.FILLING and inst.ready_at < 0:
            note_overtaking(s, instance, now)
        make_ready(s, instance, inst.rank)
    else:
        unready(s, instance)
    if over:
        free_instance(s, instance)
        mark_model_dirty(s, inst.model)


@part
def poll_held(s: State) -> None:
    """Checks the instances that wait for a producer to read outputs or to write inputs."""
    core = s.core[0]
    k = 0
    while k < core.held:
        instance = s.held[k]
        inst = s.instance[instance]
        if inst.state == codes.HELD:
            over = outputs_read(s, instance)
        else:
            over = inputs_written(s, instance)
        if not over:
            k += 1
            continue
        core.held -= 1
        s.held[k] = s.held[core.held]
        if inst.state == codes.HELD:
            free_instance(s, instance)
            mark_model_dirty(s, inst.model)
        else:
            set_running(s, instance)
            mark_instance_dirty(s, instance)


@part
def awaits_reads(s: State) -> bool:
    """Whether a request waits for an instance whose outputs are being read. If not, the core may learn of it later."""
    core = s.core[0]
    if core.mode != codes.RUN_MODE:
        return bool(core.held > 0)
    for k in range(core.held):
        m = s.model[s.instance[s.held[k]].model]
        if m.state != codes.OPEN or m.queued > 0 or m.filling < 0:
            return True
    return False


@part
def prefer_warm_instance(s: State, m: int) -> None:
    """Opens the instance that ran last instead of an empty one, because its memory is in the GPU's cache. On the H200,
    densenet121 with one request at a time took 3 to 4 % longer on two alternating instances than on one. Not where the
    hardware decides: that mode reproduces programs without a scheduler.
    """
    core = s.core[0]
    model = s.model[m]
    instance = model.filling
    if model.warm == 0 or instance < 0 or s.instance[instance].taken > 0:
        return
    if model.state != codes.OPEN or core.mode != codes.RUN_MODE or core.whole_always:
        return
    if reserved_slots(s, instance) == 0 and close_instance(s, instance):
        free_instance(s, instance)
        top = model.free_n - 1
        s.free_instance[m, top], s.free_instance[m, top - 1] = s.free_instance[m, top - 1], s.free_instance[m, top]


@part
def reconcile_model(s: State, m: int, now: int) -> None:
    model = s.model[m]
    prefer_warm_instance(s, m)
    fill_instance(s, m)
    instance = model.filling
    if model.state == codes.CLOSING and instance >= 0 and s.instance[instance].live == 0:
        mark_instance_dirty(s, instance)
    if model.state == codes.CLOSING and model.live == 0 and model.free_n == model.n_instances:
        model.state = codes.ABSENT
        post_completion(s, codes.NONE, m, codes.MODEL_CLOSED, now)


@part
def reconcile(s: State, now: int) -> None:
    core = s.core[0]
    while core.dirty_instances + core.dirty_models > 0:
        if core.dirty_instances > 0:
            core.dirty_instances -= 1
            instance = s.dirty_instances[core.dirty_instances]
            s.instance[instance].dirty = 0
            reconcile_instance(s, instance, now)
        else:
            core.dirty_models -= 1
            m = s.dirty_models[core.dirty_models]
            s.model[m].dirty = 0
            reconcile_model(s, m, now)
