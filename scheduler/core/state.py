"""The dispatcher's whole state: flat NumPy tables that producers, the compiled core and the loops share.

Nothing here is a Python object, so the tables can live in shared memory, where producers of other processes find them
(`view_state`). The following parties use them:

* **the installer** (the engine, or `profiles.install`) fills a model's rows while the model is ABSENT, then posts
  OPEN_MODEL on the submission ring; from then on only the core writes to them;
* **producers** own request rows (`producer_rows`): they take a free row, post SUBMIT or CANCEL on their own submission
  ring, and get the row back with its one entry in their own completion ring. They may also reserve a slot of the
  model's filling instance and write inputs straight into it. Producer 0 is the engine's own process;
* **the copier** (`copier.Copier`), where there is one, copies long inputs into slots for the core;
* **the mover** (`engine.weight_cache.WeightMover`), where weights come and go, carries out the core's orders on `move`;
* **the core** (`step.step`) owns everything else.

Some words are written by one party while another reads them, and are therefore accessed only through `atomics`:
`instance_word`, `instance_ready`, `instance_hold`, `slot_producer`, `filling`, `wake`, `copy_ring`, `move_ring`,
`moved`, the rings' heads, tails and sequence numbers, and the words that launches and copies of weights write. A
producer may die between any two of its instructions. The owner of a reserved slot follows from one word; writing and
reading are recorded in bits that can be set on a producer's behalf; and `abort.reclaim` takes back everything it had.

A request takes one of two ways. The direct one: claim a slot → `post` the request → write the inputs → mark the slot as
ready. The staged one, when no instance is open: `post` with instance −1 and the address of the inputs (items of all
inputs one after the other); the core copies them into a slot once there is one, or has the copier do it. In both cases
the instance then gets its turn, closes, is launched in segments, and one DONE entry per request appears in `done`.
Where `core.hold` is set, the instance's output slots stay untouched until every bit of its `instance_hold` has been
cleared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import part
from paellapy.instrument.numba_ext.tables import TableSet, found_at, table, table_set
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_clock
from paellapy.scheduler.core.errors import LimitsError
from paellapy.scheduler.core.job import DONE, GPU, JOB, OWN_NAMES, OWN_PER_MODEL, OWNER, PARAM, PARAMS, PER_MODEL
from paellapy.scheduler.core.tables import (
    CALLS,
    CLIENT,
    COMPLETION,
    COPY,
    CORE,
    FLOW,
    GATE,
    HELD_BACK,
    INSTANCE,
    LAUNCH,
    MODEL,
    MOVE,
    OUT,
    REQUEST,
    RESIDENCY,
    SEGMENT,
    SIZE,
    SUBMISSION,
    WEIGHTS,
    Table,
    Words,
)
from paellapy.scheduler.core.tuning import MEASURED_ON, TUNING, Tuning

REFRESH = 3  # waiting instances, besides the first, that are ranked again with each decision

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
INT, WORD = np.int64, np.uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes of the tables. Memory is used only where it is written."""

    models: int = 64
    instances: int = 512  # of all models together
    instances_per_model: int = 32
    sizes: int = 8  # captured batch sizes per model
    batch: int = 64  # largest batch
    segments: int = 256  # per program
    requests: int = 8192  # accepted or waiting for their completion to be read
    clients: int = 256  # fair shares are kept per client number, modulo this
    inputs: int = 8  # per model
    producers: int = 1  # producers: this process, and processes beside it that share the tables' memory

    @property
    def launches(self) -> int:
        """Launches of a program: its segments one by one, then the whole program in one piece."""
        return self.segments + 1

    @property
    def out_cells(self) -> int:
        return self.instances * self.launches

    # Capacities of rings are powers of two. A completion ring never overflows: it has a cell for every request row of
    # its producer, and for every model.

    @property
    def submit_cells(self) -> int:
        return _power_of_two(2 * self._most_rows)

    @property
    def done_cells(self) -> int:
        return _power_of_two(self._most_rows + self.models)

    @property
    def copy_cells(self) -> int:
        return _power_of_two(self.requests)

    @property
    def move_cells(self) -> int:
        return _power_of_two(2 * self.models)

    @property
    def log_cells(self) -> int:
        return codes.LOG_SIZE if self.producers > 1 else 1

    @property
    def _most_rows(self) -> int:
        return max(len(producer_rows(self, producer)) for producer in range(self.producers))


@table_set
class State(TableSet):
    """All tables of the core; see the module's docstring. A dimension given by a name is that attribute of `Limits`."""

    core: Table = table(CORE, 1)
    call: Table = table(CALLS, 1)
    gpu: Table = table(GPU, 1)
    tuning: Table = table(TUNING, 1)  # written before the core runs
    model: Table = table(MODEL, "models")
    size: Table = table(SIZE, "models", "sizes")
    segment: Table = table(SEGMENT, "models", "sizes", "segments")
    model_instance: Ints = table(INT, "models", "instances_per_model")  # instances of a model, by the installer
    free_instance: Ints = table(INT, "models", "instances_per_model")  # stack
    input_bytes: Ints = table(INT, "models", "inputs")  # of one item, by the installer
    # column 0: the instance open to producers + 1, with its slots << 32; 0: none. Atomic
    filling: Words = table(WORD, "models", 8)
    instance: Table = table(INSTANCE, "instances")
    instance_word: Words = table(WORD, "instances", 8)  # column 0: see CLOSED … PRODUCER_MASK. Atomic
    # a bit for every slot whose inputs are written. Atomic
    instance_ready: Words = table(WORD, "instances", codes.MASK_WORDS)
    # a bit for every slot whose outputs are not read yet. Atomic
    instance_hold: Words = table(WORD, "instances", codes.MASK_WORDS)
    instance_known: Words = table(WORD, "instances", codes.MASK_WORDS)  # a bit for every slot the core has heard of
    # a bit for every slot on whose values the model failed; set by the backend, where the instance is `faulty`
    instance_fault: Words = table(WORD, "instances", codes.MASK_WORDS)
    slot: Ints = table(INT, "instances", "batch")  # request row, or NONE: empty, or its request is completed
    # who reserved it; of the last slot, instance_word says it. Atomic
    slot_producer: Words = table(WORD, "instances", "batch")
    slot_client: Ints = table(INT, "instances", "batch")  # the client that is charged for it; first by the producer
    # address of slot 0, by the installer; slot k is k · input_bytes further
    input_address: Words = table(WORD, "instances", "inputs")
    launch: Table = table(LAUNCH, "instances", "sizes", "segments")  # by the installer
    whole: Table = table(LAUNCH, "instances", "sizes")  # by the installer
    stream: Words = table(WORD, codes.POOLS, codes.POOL_STREAMS)  # streams for the backend's launches, by the installer
    # instances in flight on each stream, over all pools and partitions: by queue
    stream_jobs: Ints = table(INT, codes.OF_PARTITIONS)
    # handles of the same launches in each of the instance's partitions, the whole program last; 0: none
    confined: Words = table(WORD, "instances", "sizes", "launches", codes.CHOICES)
    # the numbers of these partitions, by the installer; NONE: no more
    instance_partition: Ints = table(INT, "instances", codes.CHOICES)
    overlap: Ints = table(INT, codes.PARTITIONS, codes.PARTITIONS)  # SMs that two partitions share, by the installer
    # for each confined instance in flight, the SMs that its partition shares
    partition_load: Ints = table(INT, codes.PARTITIONS)
    # launch and end of each segment of the instance's latest run; segment 0 stands for a whole program
    segment_ns: Ints = table(INT, "instances", "segments", 2)
    # completion words for backends that have no pinned memory of their own
    word: Words = table(WORD, "instances", "launches")
    request: Table = table(REQUEST, "requests")
    client: Table = table(CLIENT, "clients")
    flow: Table = table(FLOW, "clients", "models")
    held_back: Table = table(HELD_BACK, "clients", "models")
    tenant_name: NDArray[np.uint8] = table(np.uint8, "clients", codes.TENANT_NAME)  # UTF-8, then zeros
    ready: Ints = table(INT, "instances")  # heap of instances that wait for their turn, least rank first
    next_rank: Floats = table(np.float64, "instances")  # scratch heap: which places of `ready` come next by rank
    next_at: Ints = table(INT, "instances")
    active: Ints = table(INT, "instances")  # instances whose turn it is
    flight: Ints = table(INT, "instances")  # instances with launched, uncompleted segments
    held: Ints = table(INT, "instances")  # instances that wait for a producer: HELD and READY_WAIT
    dirty_instances: Ints = table(INT, "instances")  # instances to be reconciled within this step
    # models that may want an instance opened, or closed for good, within this step
    dirty_models: Ints = table(INT, "models")
    cancelled: Ints = table(INT, "requests")  # requests cancelled within this step
    held_queues: Ints = table(INT, "requests")  # client << 32 | model of queues of requests that are HELD_BACK
    # instances that `admit` refused while a turn was chosen, before their first launch
    refused: Ints = table(INT, "instances")
    due: Ints = table(INT, "requests")  # heap of requests with a deadline, earliest first
    submit: Table = table(SUBMISSION, "producers", "submit_cells")  # SUBMISSION rings, capacity a power of two
    # COMPLETION rings, capacity a power of two, at least rows + M: they never overflow
    done: Table = table(COMPLETION, "producers", "done_cells")
    ring: Words = table(WORD, "producers", 4, 8)  # heads and tails. Atomic
    copy: Table = table(COPY, "copy_cells")  # COPY ring, with a cell for every request row: it never overflows
    copy_ring: Words = table(WORD, 3, 8)  # Atomic
    # column 0: 1 if the producer wants to be woken by the next completion. Atomic
    wake: Words = table(WORD, "producers", 8)
    # eventfd of each producer, or -1; and the tail for which it was last woken
    wake_fd: Ints = table(INT, "producers", 2)
    bell: Words = table(WORD, 8)  # column 0: the core's loop sleeps, or is about to. Atomic
    client_key: Words = table(WORD, "clients")  # owner of each client number: a hash of the name; 0: none. Atomic
    # requests by outcome; the last column is the sum of the batch sizes of OK requests
    outcome: Ints = table(INT, "models", len(codes.STATUS) + 1)
    recent_ns: Ints = table(INT, "models", codes.RECENT, 2)  # latency and wait of the latest OK requests
    # the latest completions of all producers, while core.logs_completions
    completion_log: Table = table(COMPLETION, "log_cells")
    out: Table = table(OUT, "out_cells")
    job: Table = table(JOB, 2)  # the core's scratch; readers have their own
    done_segment: Table = table(DONE, 1)  # also scratch
    # the policy's numbers: first those kept once, then PER_MODEL rows of each other; then the first values of the
    # latter
    own: Floats = table(np.float64, OWN_NAMES + OWN_PER_MODEL * PER_MODEL)
    own_first: Floats = table(np.float64, OWN_PER_MODEL)
    model_params: Table = table(PARAM, "models", PARAMS)  # parameters of each model, by the installer
    # parameters that the policy reads, with the defaults for models without them
    policy_params: Table = table(PARAM, PARAMS)
    param: Floats = table(np.float64, "models", PARAMS)  # their values for each model
    gate: Table = table(GATE, codes.GATES)  # written by the engine, while core.gates; then by the core
    clock: Ints = table(INT, 8)  # scratch of the core's thread
    arena: Ints = table(INT, "instances")  # the instance that has it, + 1; 0: none
    arena_kept: Ints = table(INT, "instances")  # 1: no instance gets it, since a model that runs there is being loaded
    residency: Table = table(RESIDENCY, 1)
    weights: Table = table(WEIGHTS, "models")
    owner: Table = table(OWNER, 1)  # scratch: a model as `victim` sees it
    move: Table = table(MOVE, "move_cells")  # MOVE ring: no model has more than two orders at a time
    move_ring: Words = table(WORD, 2, 8)  # Atomic
    moved: Words = table(WORD, "models", 8)  # column 0: GONE or BROKEN, by the mover. Atomic


state_at = found_at(State)  # for compiled code: the state at this `address`


def _power_of_two(n: int) -> int:
    return 1 << max(1, n - 1).bit_length()


def producer_rows(limits: Limits, producer: int) -> range:
    """The request rows of a producer. If there are others, the engine's own process needs only a few.

    >>> [len(producer_rows(Limits(requests=1000, producers=3), k)) for k in range(3)]
    [64, 468, 468]
    """
    if limits.producers == 1:
        return range(limits.requests)
    own = min(codes.OWN_ROWS, limits.requests // limits.producers)
    each = (limits.requests - own) // (limits.producers - 1)
    return range(own) if producer == 0 else range(own + (producer - 1) * each, own + producer * each)


def _shapes(limits: Limits) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Every table's name, shape and type."""
    for each in fields(State):
        dimensions = each.metadata["dimensions"]
        shape = tuple(getattr(limits, n) if isinstance(n, str) else n for n in dimensions)
        yield each.name, shape, each.metadata["dtype"]


def state_bytes(limits: Limits) -> int:
    """The memory that the tables take."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for _, shape, dtype in _shapes(limits))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64  # no two tables share a cache line


def view_state(limits: Limits, memory: NDArray[np.uint8]) -> State:
    """The tables in given memory: another process's, or fresh and zeroed (`new_state` then fills it)."""
    tables, at = {}, 0
    for name, shape, dtype in _shapes(limits):
        nbytes = math.prod(shape) * dtype.itemsize
        tables[name] = memory[at : at + nbytes].view(dtype).reshape(shape)
        at += _aligned(nbytes)
    return State(**tables)


def new_state(limits: Limits | None = None, memory: NDArray[np.uint8] | None = None) -> State:
    """Empty tables; `profiles.install` adds models, `attach_policy` the policy. `memory` must be zeroed.

    >>> new_state(Limits(models=2, instances=4)).instance.shape
    (4,)
    """
    n = limits or Limits()
    for name, given, most in (
        ("batch", n.batch, codes.MOST_SLOTS), ("producers", n.producers, codes.PRODUCER_MASK),
    ):  # fmt: skip
        if given > most:
            raise LimitsError(f"{name}={given}: it must be at most {most}", field=name, given=given, limit=most)
    if memory is None:
        raw = np.zeros(state_bytes(n) + 64, np.uint8)  # uses memory only where it is written
        memory = raw[-raw.ctypes.data % 64 :][: state_bytes(n)]
    state = view_state(n, memory)
    for name in ("model_instance", "free_instance", "slot", "ready", "active", "flight", "held", "dirty_instances",
                 "dirty_models", "cancelled", "due"):  # fmt: skip
        getattr(state, name)[...] = codes.NONE
    state.instance_word[...] = codes.CLOSED
    state.submit["sequence"] = np.arange(state.submit.shape[1], dtype=np.uint64)
    state.wake[:, 0] = 1
    state.wake_fd[:, 0] = -1
    for column in ("model", "ready_at", "active_at", "flight_at", "stream_at", "partition", "arena"):
        state.instance[column] = codes.NONE
    state.instance_partition[...] = codes.NONE
    for column in ("instance", "slot", "left", "right", "up", "due_at"):
        state.request[column] = codes.NONE
    for column in ("root", "first", "last"):
        state.model[column] = state.held_back[column] = codes.NONE
    state.model["filling"] = codes.NONE
    state.client["share"] = 1.0
    state.tuning[:] = Tuning.for_part(MEASURED_ON).row()
    core = state.core[0]
    core["max_active"], core["max_in_flight"], core["whole_idle"], core["refresh"] = 8, 2, 1, REFRESH
    core["longest_whole_ns"] = np.inf
    core["copier_fd"], core["gain"], core["demand_limit"] = codes.NONE, 1.0, np.inf
    state.residency["mover_fd"] = codes.NONE
    return state


# --- the core's clock: clock_gettime, called by its address, which is 0 where a loop has its own time (simulation)


CLOCK_MONOTONIC = 1


@part
def monotonic_ns(clock: int, scratch: NDArray[np.int64]) -> int:
    """CLOCK_MONOTONIC in ns, by the address of clock_gettime."""
    call_clock(clock, np.int32(CLOCK_MONOTONIC), scratch.ctypes.data)
    return int(scratch[0] * 1_000_000_000 + scratch[1])


@part
def read_clock(s: State, scratch: NDArray[np.int64]) -> int:
    return monotonic_ns(s.call[0].clock, scratch)
