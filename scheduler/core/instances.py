"""Instances in the core: opening one to producers, filling its slots, closing it, answering its requests, freeing it.

Changes to an instance or a model are noted (`touch`, `ask`) and handled in one place (`settle`). So each rule is
written once, and compiled once into the step, which would otherwise be many times as large.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core.atomics import call_write, copy_bytes, load_at, or_at, store_at, usable_cpus
from paellapy.scheduler.core.codes import (
    ABSENT,
    CLOSED,
    CLOSING,
    COPY_BELL,
    COPY_HEAD,
    COPY_TAIL,
    FAIL_MODE,
    FAULTED,
    FILLING,
    FREE,
    GENERATION_MASK,
    GENERATION_SHIFT,
    HELD,
    LATER,
    MODEL_CLOSED,
    NEVER,
    NONE,
    OK,
    OPEN,
    PASSED,
    READY_WAIT,
    RESERVED_MASK,
    RESERVED_SHIFT,
    RUN_MODE,
    RUNNING,
    SLOTTED,
    WANTED,
)
from paellapy.scheduler.core.heaps import heap_down, heap_remove, heap_up, queue_first, queue_remove
from paellapy.scheduler.core.requests import complete, post_done, rank_instance
from paellapy.scheduler.core.rings import ANYTHING, ONE, Bell, address, ask, bit_at, bit_of, reserve, wakes
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.tables import Words
from paellapy.scheduler.core.weights import arena_is_free, may_start

# Slots of instances in the core: which request has which slot, the instance's resulting facts, and how inputs get
# there.


@part
def size_for(s: State, m: int, n: int) -> int:
    """The smallest captured size that holds n requests; the largest if none does."""
    k = 0
    last = s.model[m].n_sizes - 1
    while k < last and (s.size[m, k].batch < n or s.size[m, k].segments == 0):
        k += 1
    return k


@part
def fit(s: State, instance: int) -> None:
    """Selects the size at which the instance runs."""
    a = s.instance[instance]
    a.size = size_for(s, a.model, a.taken)


@part
def fit_to_run(s: State, instance: int) -> None:
    """As `fit`; also marks the size at which the instance would run if it were captured."""
    fit(s, instance)
    a = s.instance[instance]
    k = a.size
    while k > 0 and s.size[a.model, k - 1].batch >= a.taken:
        k -= 1
    if k < a.size and s.size[a.model, k].capture == LATER:
        s.size[a.model, k].capture = WANTED


@part
def count_queued(s: State, m: int, n: int) -> None:
    """Adds n requests to the count of the model's queue."""
    core = s.core[0]
    model = s.model[m]
    model.queued += n
    core.queued += n
    core.queued_jobs += n / s.size[m, model.n_sizes - 1].batch
    if core.queued == 0:
        core.queued_jobs = 0.0  # drops rounding errors


@part
def put(s: State, instance: int, slot: int, row: int) -> None:
    """Puts the request into this slot and updates the instance's facts. NONE: the slot was reserved in vain."""
    a = s.instance[instance]
    a.taken += 1
    s.instance_known[instance, slot >> 6] |= bit_of(slot)
    s.slot[instance, slot] = row
    fit(s, instance)
    if row < 0:
        return
    r = s.request[row]
    r.state, r.instance, r.slot = SLOTTED, instance, slot
    s.slot_client[instance, slot] = r.client
    if a.live == 0 or r.arrival_ns < a.arrival_ns:
        a.client = r.client
    a.latest_ns = max(a.latest_ns, r.arrival_ns) if a.live > 0 else r.arrival_ns
    if a.live == 0:
        a.arrival_ns, a.deadline_ns, a.priority, a.client_start_ns = (
            r.arrival_ns, r.deadline_ns, r.priority, r.client_start_ns)  # fmt: skip
    else:
        a.arrival_ns = min(a.arrival_ns, r.arrival_ns)
        a.deadline_ns = min(a.deadline_ns, r.deadline_ns)
        a.priority = max(a.priority, r.priority)
        a.client_start_ns = min(a.client_start_ns, r.client_start_ns)
    a.live += 1


@part
def look_again(s: State, instance: int) -> None:
    """Recomputes the instance's facts from the remaining requests, after one has left."""
    a = s.instance[instance]
    a.arrival_ns, a.deadline_ns, a.priority, a.client_start_ns = NEVER, NEVER, -NEVER, np.inf
    for k in range(s.slot.shape[1]):
        row = s.slot[instance, k]
        if row >= 0:
            r = s.request[row]
            if r.arrival_ns < a.arrival_ns:
                a.arrival_ns = r.arrival_ns
                a.client = r.client
            a.deadline_ns = min(a.deadline_ns, r.deadline_ns)
            a.priority = max(a.priority, r.priority)
            a.client_start_ns = min(a.client_start_ns, r.client_start_ns)


@part
def copy_inputs(s: State, source: Any, instance: int, slot: int, m: int) -> None:
    for k in range(s.model[m].n_inputs):
        n = s.input_bytes[m, k]
        copy_bytes(s.input_address[instance, k] + np.uint64(slot * n), source, np.uint64(n))
        source += np.uint64(n)


@part
def hand_to_copier(s: State, source: int, instance: int, slot: int, m: int) -> None:
    """Lets the copier copy the inputs and mark the slot ready, as a producer would; the core continues meanwhile."""
    tail = load_at(address(s.copy_ring, COPY_TAIL))
    cell = s.copy[np.int64(tail) & (s.copy.shape[0] - 1)]
    cell.source, cell.instance, cell.slot, cell.model = source, instance, slot, m
    cell.at_ns = read_clock(s, s.clock) if s.call[0].clock != _ZERO else 0
    store_at(address(s.copy_ring, COPY_TAIL), tail + ONE)
    if wakes(address(s.copy_ring, COPY_BELL), False):
        s.clock[2] = 1
        call_write(s.call[0].write, np.int32(s.core[0].copier_fd), s.clock[2:].ctypes.data, np.uint64(8))


@part
def wait_for_copy(s: State, row: int) -> None:
    """Waits for a copy in progress before a request is given up, because its inputs may disappear afterwards."""
    r = s.request[row]
    if r.instance >= 0 and r.source != _ZERO and s.core[0].copier_fd >= 0:
        while load_at(bit_at(s.instance_ready, r.instance, r.slot)) & bit_of(r.slot) == _ZERO:
            pass


@part
def move_in(s: State, instance: int, row: int) -> bool:
    """Gives a queued request the instance's next slot, and copies its inputs there; False if the instance is full."""
    r = s.request[row]
    m = s.instance[instance].model
    slots = s.size[m, s.model[m].n_sizes - 1].batch
    slot = reserve(s.instance_word, s.slot_producer, instance, slots, r.producer)
    if slot < 0:
        return False
    queue_remove(s, s.model[m], row)
    count_queued(s, m, -1)
    if r.state == PASSED:
        s.kept[r.client, m].passed -= 1
    source = r.source
    n = np.int64(0)
    for k in range(s.model[m].n_inputs):
        n += s.input_bytes[m, k]
    if source != _ZERO and s.core[0].copier_fd >= 0 and n >= s.tuning[0].long_copy_bytes:
        hand_to_copier(s, source, instance, slot, m)
    else:
        if source != _ZERO:
            copy_inputs(s, source, instance, slot, m)
        or_at(bit_at(s.instance_ready, instance, slot), bit_of(slot))
    put(s, instance, slot, row)
    return True


_CLOSED = np.uint64(CLOSED)
_MASK = np.uint64(RESERVED_MASK)
_SHIFT = np.uint64(RESERVED_SHIFT)
_GENERATION_SHIFT = np.uint64(GENERATION_SHIFT)
_ZERO = np.uint64(0)
_ALL = np.uint64((1 << 64) - 1)


@part
def touch(s: State, instance: int) -> None:
    """Marks a changed instance, to be settled before the next decision."""
    core = s.core[0]
    a = s.instance[instance]
    if a.touched == 0:
        a.touched = 1
        s.touched[core.touched] = instance
        core.touched += 1
    core.changed = 1


@part
def mark_model_dirty(s: State, m: int) -> None:
    """Marks a model that may have requests for an instance, a free instance for requests, or, while closing, nothing
    left to do.
    """
    core = s.core[0]
    model = s.model[m]
    if model.asking == 0:
        model.asking = 1
        s.asking[core.asking] = m
        core.asking += 1
    core.changed = 1


# --- the heap of instances that wait for their turn, and the set of active instances
# ------------------------------------------


@part
def make_ready(s: State, instance: int, rank: float) -> None:
    """Lets the instance compete with this rank."""
    core = s.core[0]
    a = s.instance[instance]
    a.rank = rank
    keys, ties, at = s.instance["rank"], s.instance["arrival_ns"], s.instance["ready_at"]
    if a.ready_at < 0:
        s.ready[core.ready] = instance
        a.ready_at = core.ready
        core.ready += 1
    i = heap_up(s.ready, at, keys, ties, a.ready_at)
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
    a = s.instance[instance]
    i = a.active_at
    if i >= 0:
        core.active -= 1
        last = s.active[core.active]
        s.active[i] = last
        s.instance[last].active_at = i
        a.active_at = NONE
        core.demand = core.demand - a.demand if core.active > 0 else 0.0


# --- an instance's life
# -------------------------------------------------------------------------------------------------


@part
def fill_instance(s: State, m: int) -> None:
    """Moves the model's queue into its filling instance; opens a free instance if there is no filling one."""
    model = s.model[m]
    instance = model.filling
    if instance < 0:
        idle = model.queued == 0
        if model.free_n == 0 or s.core[0].mode == FAIL_MODE or model.state == ABSENT:
            return
        if idle and model.state == CLOSING:
            return
        model.free_n -= 1
        instance = s.free_instance[m, model.free_n]
        a = s.instance[instance]
        a.state, a.size, a.taken, a.live, a.issued, a.done, a.whole = FILLING, 0, 0, 0, 0, 0, 0
        a.faulty = 0
        a.segments = NONE
        a.started_ns = NEVER
        a.generation = (a.generation + 1) & GENERATION_MASK
        model.filling = instance
        model.warm = 0
        for k in range(s.instance_ready.shape[1]):
            s.instance_ready[instance, k] = s.instance_hold[instance, k] = s.instance_known[instance, k] = _ZERO
        store_at(address(s.instance_word, instance), np.uint64(a.generation) << _GENERATION_SHIFT)
    if model.queued > 0:
        while model.queued > 0 and move_in(s, instance, queue_first(s, model)):
            pass
        touch(s, instance)
    if model.state != CLOSING:  # after the queue is served: waiting requests go first
        slots = s.size[m, model.n_sizes - 1].batch
        store_at(address(s.filling, m), (np.uint64(slots) << np.uint64(32)) | np.uint64(instance + 1))


@part
def all_in(s: State, instance: int) -> bool:
    """Whether every reserved slot is known to the core and written."""
    word = load_at(address(s.instance_word, instance))
    reserved = np.int64((word >> _SHIFT) & _MASK)
    if s.instance[instance].taken != reserved:
        return False
    k = 0
    while reserved > 0:
        wanted = _ALL if reserved >= 64 else (ONE << np.uint64(reserved)) - ONE
        if load_at(s.instance_ready[instance, k:].ctypes.data) != wanted:
            return False
        reserved -= 64
        k += 1
    return True


@part
def all_read(s: State, instance: int) -> bool:
    """Whether all outputs of the instance have been read."""
    bits = _ZERO
    for k in range(s.instance_hold.shape[1]):
        bits |= load_at(s.instance_hold[instance, k:].ctypes.data)
    return bool(bits == _ZERO)


@part
def close_instance(s: State, instance: int) -> bool:
    """Closes the instance to requests; returns whether it is complete. If not, it waits as READY_WAIT among the held
    instances.
    """
    core = s.core[0]
    a = s.instance[instance]
    m = a.model
    store_at(address(s.filling, m), _ZERO)
    or_at(address(s.instance_word, instance), _CLOSED)
    s.model[m].filling = NONE
    a.state = READY_WAIT
    if all_in(s, instance):
        return True
    s.held[core.held] = instance
    core.held += 1
    return False


@part
def set_running(s: State, instance: int) -> None:
    a = s.instance[instance]
    fit_to_run(s, instance)
    a.state = RUNNING
    a.segments = s.size[a.model, a.size].segments


@part
def free_instance(s: State, instance: int) -> None:
    """Returns the instance to its model's free instances."""
    a = s.instance[instance]
    m = a.model
    a.state = FREE
    for k in range(a.taken):
        s.slot_client[instance, k] = 0  # a producer may take a slot and die before it says for whom
    a.taken = a.live = 0
    s.free_instance[m, s.model[m].free_n] = instance
    s.model[m].free_n += 1
    s.model[m].warm = 1


@part
def take_arena(s: State, instance: int, holder: int) -> None:
    """Gives the arena to the instance, or to none (NONE), and updates which instances of the arena compete."""
    b = s.instance[instance].arena
    if b < 0:
        return
    s.arena[b] = holder + 1
    for other in range(s.instance.shape[0]):
        if (
            s.instance[other].arena == b
            and other != instance
            and s.instance[other].state == FILLING
            and s.instance[other].live > 0
        ):
            touch(s, other)


@part
def is_faulty(s: State, instance: int, slot: int) -> bool:
    """Whether the model failed on the values in this slot."""
    return bool(s.instance[instance].faulty and s.instance_fault[instance, slot >> 6] & bit_of(slot) != _ZERO)


@part
def end_instance(s: State, instance: int, now: int) -> None:
    """Answers the requests of an instance whose launches are done. The instance is HELD until all outputs are read."""
    core = s.core[0]
    a = s.instance[instance]
    deactivate(s, instance)
    take_arena(s, instance, NONE)
    if core.hold and a.live > 0:
        # Set before the first completion is visible: from then on, producers clear their bits.
        for k in range(a.taken):
            if s.slot[instance, k] >= 0 and not is_faulty(s, instance, k):
                s.instance_hold[instance, k >> 6] |= bit_of(k)
        a.state = HELD
        s.held[core.held] = instance
        core.held += 1
    core.first = 1
    for k in range(a.taken):
        row = s.slot[instance, k]
        s.slot[instance, k] = NONE
        if row >= 0:
            complete(s, row, FAULTED if is_faulty(s, instance, k) else OK, now)
    a.live = 0


@part
def settle_instance(s: State, instance: int, now: int) -> None:
    """Moves an instance to its proper place: into the heap with its current rank, to its end, or back to be filled."""
    a = s.instance[instance]
    over = False  # whether the instance is no longer needed
    competes = False
    if a.state == FILLING:
        competes = a.live > 0 and may_start(s, instance, now) and arena_is_free(s, instance)
        if a.live == 0 and (a.taken > 0 or s.model[a.model].state == CLOSING):
            over = close_instance(s, instance)
            mark_model_dirty(s, a.model)
    elif a.state == RUNNING:
        if a.live == 0:
            a.segments = a.issued  # the remaining segments are not needed
        if a.done == a.segments:
            end_instance(s, instance, now)
            over = a.state != HELD
        else:
            competes = a.active_at < 0 and a.issued < a.segments
    if competes or a.active_at >= 0:
        a.rank = rank_instance(s, instance, now)
    if competes:
        make_ready(s, instance, a.rank)
    else:
        unready(s, instance)
    if over:
        free_instance(s, instance)
        mark_model_dirty(s, a.model)


@part
def look_at_held(s: State) -> None:
    """Checks the instances that wait for a producer to read outputs or to write inputs."""
    core = s.core[0]
    k = 0
    while k < core.held:
        instance = s.held[k]
        a = s.instance[instance]
        if a.state == HELD:
            over = all_read(s, instance)
        else:
            over = all_in(s, instance)
        if not over:
            k += 1
            continue
        core.held -= 1
        s.held[k] = s.held[core.held]
        if a.state == HELD:
            free_instance(s, instance)
            mark_model_dirty(s, a.model)
        else:
            set_running(s, instance)
            touch(s, instance)


@part
def reading_matters(s: State) -> bool:
    """Whether any request waits for an instance whose outputs are being read. If not, the core may learn of it later.
    """
    core = s.core[0]
    if core.mode != RUN_MODE:
        return bool(core.held > 0)
    for k in range(core.held):
        m = s.model[s.instance[s.held[k]].model]
        if m.state != OPEN or m.queued > 0 or m.filling < 0:
            return True
    return False


@part
def stay_warm(s: State, m: int) -> None:
    """Opens the instance that ran last instead of an empty one, because its memory is in the GPU's cache. On the H200,
    densenet121 with one request at a time took 3 to 4 % longer on two alternating instances than on one. Not where the
    hardware decides: that mode reproduces programs without a scheduler.
    """
    core = s.core[0]
    model = s.model[m]
    instance = model.filling
    if model.warm == 0 or instance < 0 or s.instance[instance].taken > 0:
        return
    if model.state != OPEN or core.mode != RUN_MODE or core.whole_always:
        return
    if (load_at(address(s.instance_word, instance)) >> _SHIFT) & _MASK == _ZERO and close_instance(s, instance):
        free_instance(s, instance)
        top = model.free_n - 1
        s.free_instance[m, top], s.free_instance[m, top - 1] = s.free_instance[m, top - 1], s.free_instance[m, top]


@part
def settle_model(s: State, m: int, now: int) -> None:
    model = s.model[m]
    stay_warm(s, m)
    fill_instance(s, m)
    instance = model.filling
    if model.state == CLOSING and instance >= 0 and s.instance[instance].live == 0:
        touch(s, instance)
    if model.state == CLOSING and model.live == 0 and model.free_n == model.n_instances:
        model.state = ABSENT
        post_done(s, NONE, m, MODEL_CLOSED, now)


@part
def settle(s: State, now: int) -> None:
    core = s.core[0]
    while core.touched + core.asking > 0:
        if core.touched > 0:
            core.touched -= 1
            instance = s.touched[core.touched]
            s.instance[instance].touched = 0
            settle_instance(s, instance, now)
        else:
            core.asking -= 1
            m = s.asking[core.asking]
            s.model[m].asking = 0
            settle_model(s, m, now)


# A thread that copies long inputs into slots, so that the core's thread can keep deciding meanwhile.
#
# A request that finds no open instance leaves its inputs in place, and the core gives it a slot later. Copying an image
# then takes 40 µs, and a batch of images takes milliseconds; in the core's thread, no segment could be launched in that
# time.


_COPIER_ZERO, _ONE = np.uint64(0), np.uint64(1)
_LOOKS = 20_000  # reads of an empty ring before the copier sleeps: about 50 µs
_MANY_CPUS = 8  # with this many CPUs, one may spin while there are requests, since waking up takes time


@compiled
def copy_until(
    s: State, stop: Words, scratch: NDArray[np.int64], bell: int, read: int, core: int, awake: bool
) -> None:  # fmt: skip
    """Copies inputs from the ring until `stop[0]` is set. It sleeps by reading `bell`; `core` is the core's bell.

    `awake`: never sleep while there are requests. `scratch` is 4 int64.
    """
    looks = 0
    while load_at(stop.ctypes.data) == _COPIER_ZERO:
        head = load_at(address(s.copy_ring, COPY_HEAD))
        if head != load_at(address(s.copy_ring, COPY_TAIL)):
            cell = s.copy[np.int64(head) & (s.copy.shape[0] - 1)]
            copy_inputs(s, cell.source, cell.instance, cell.slot, cell.model)
            or_at(bit_at(s.instance_ready, cell.instance, cell.slot), bit_of(cell.slot))
            if cell.at_ns > 0:
                took = read_clock(s, scratch[2:]) - cell.at_ns
                s.core[0].longest_copy_ns = max(s.core[0].longest_copy_ns, float(took))
            store_at(address(s.copy_ring, COPY_HEAD), head + _ONE)
            if wakes(s.bell.ctypes.data, True):
                scratch[1] = 1
                call_write(s.call[0].write, np.int32(core), scratch[1:].ctypes.data, np.uint64(8))
            looks = 0
            continue
        looks += 1
        if looks < _LOOKS:
            continue
        if awake and looks == _LOOKS and load_at(s.core["live"].ctypes.data) != _COPIER_ZERO:
            looks = 0
            continue
        if looks == _LOOKS:  # announce the sleep, and look once more
            ask(address(s.copy_ring, COPY_BELL), ANYTHING)
            continue
        call_write(np.uint64(read), np.int32(bell), scratch.ctypes.data, np.uint64(8))  # read() has the same signature
        store_at(address(s.copy_ring, COPY_BELL), _COPIER_ZERO)
        looks = 0


class Copier:
    """The copier's thread. It belongs to the core's process, and ends after the core's loop."""

    def __init__(self, state: State, bell: Bell, awake: bool | None = None) -> None:
        """`bell` wakes the core's loop. `awake`: sleep only without requests; the default with many CPUs."""
        self._state, self._bell = state, bell
        self._awake = usable_cpus() >= _MANY_CPUS if awake is None else awake
        self._stop = np.zeros(8, np.uint64)
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paellapy-copier", daemon=True)
        self._thread.start()
        state.core["copier_fd"][0] = self._fd

    def _run(self) -> None:
        read = ctypes.cast(ctypes.CDLL(None).read, ctypes.c_void_p).value or 0
        copy_until(self._state, self._stop, np.zeros(4, np.int64), self._fd, read, self._bell.fd, self._awake)

    def close(self) -> None:
        self._state.core["copier_fd"][0] = NONE
        self._stop[0] = 1
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
