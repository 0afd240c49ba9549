"""The dispatcher's whole state: flat NumPy tables that front ends, the compiled core and the loops share.

Nothing here is a Python object, so the tables can live in shared memory, where front ends of other processes find
them (`over`). Three parties touch them:

* **the installer** (the engine, or `models.install`) fills a model's rows while the model is ABSENT, then posts
  OPEN_MODEL on the submission ring; from then on only the core writes them;
* **front ends** own request rows (`front_rows`): they take a free row, post SUBMIT or CANCEL on their own submission
  ring, and get the row back with its one entry in their own completion ring. They may also reserve a slot of the
  model's filling lane and write inputs straight into it. Front end 0 is the engine's own process;
* **the copier** (`copier.Copier`), where there is one, copies long inputs into slots for the core;
* **the core** (`step.step`) owns everything else.

Words that two parties touch at once, and so only through `atomics`: `lane_word`, `lane_ready`, `lane_hold`,
`slot_front`, `filling`, `wake`, `copy_ring`, the rings' heads, tails and sequence numbers, and the completion words
that launches write. A front end may die between any two of its instructions: whose a reserved slot is follows from one
word, what it has written and read are bits that can be set for it, and `reclaim.reclaim` takes back all it had.

A request's way, the direct one: claim a cell of `submit` → `reserve` a slot → publish the cell → write the inputs →
`mark_ready`. The staged one, when no lane is open: publish with lane −1 and the address of the inputs (items of all
inputs one after the other); the core copies them into a slot once there is one, or has the copier do it. Then, both:
the lane gets its turn, closes, is launched in segments, and one DONE entry per request appears in `done`. Where
`core.hold` is set, the lane's output slots stay untouched until every bit of its `lane_hold` has been cleared with
`release`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.codes import (
    CHOICES,
    CLOSED,
    FRONT_MASK,
    MASK_WORDS,
    MOST_SLOTS,
    NONE,
    OF_WINDOWS,
    OWN_ROWS,
    POOL_STREAMS,
    POOLS,
    RECENT,
    STATUS,
    TAP_SIZE,
    WINDOWS,
)
from paellapy.scheduler.core.job import GPU, JOB
from paellapy.scheduler.core.tables import (
    CALLS,
    CLIENT,
    COMPLETION,
    COPY,
    CORE,
    LANE,
    LAUNCH,
    MODEL,
    OUT,
    REQUEST,
    SEGMENT,
    SIZE,
    SUBMISSION,
    Table,
    Words,
)
from paellapy.scheduler.core.tuning import MEASURED_ON, TUNING, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large the tables are. Memory is touched only where used."""

    models: int = 64
    lanes: int = 512  # of all models together
    lanes_per_model: int = 32
    sizes: int = 8  # captured batch sizes per model
    batch: int = 64  # largest batch
    segments: int = 256  # per program
    requests: int = 8192  # accepted or waiting for their completion to be read
    clients: int = 256  # fair shares are kept per client number, modulo this
    inputs: int = 8  # per model
    fronts: int = 1  # front ends: this process, and processes beside it that share the tables' memory


class State(NamedTuple):
    """See the module's text. First dimensions: models M, lanes L, requests R; sizes B, segments S, slots P."""

    core: Table  # CORE[1]
    call: Table  # CALLS[1]
    gpu: Table  # GPU[1]
    tuning: Table  # TUNING[1], written before the core runs
    model: Table  # MODEL[M]
    size: Table  # SIZE[M, B]
    segment: Table  # SEGMENT[M, B, S]
    model_lane: NDArray[np.int64]  # [M, K] lanes of a model, by the installer
    free_lane: NDArray[np.int64]  # [M, K] stack
    input_bytes: NDArray[np.int64]  # [M, inputs] of one item, by the installer
    filling: Words  # [M, 8] column 0: the lane open to front ends + 1, with its slots << 32; 0: none. Atomic
    lane: Table  # LANE[L]
    lane_word: Words  # [L, 8] column 0: see CLOSED … FRONT_MASK. Atomic
    lane_ready: Words  # [L, 8] a bit for every slot whose inputs are written. Atomic
    lane_hold: Words  # [L, 8] a bit for every slot whose outputs are still to be read. Atomic
    lane_known: Words  # [L, 8] a bit for every slot the core has heard of
    slot: NDArray[np.int64]  # [L, P] request row, or NONE: empty or its request is completed
    slot_front: Words  # [L, P] who reserved it; of the last one, the lane's word says it. Atomic
    slot_client: NDArray[np.int64]  # [L, P] who pays for it
    input_address: Words  # [L, inputs] of slot 0, by the installer; slot k is k · input_bytes further
    launch: Table  # LAUNCH[L, B, S], by the installer
    whole: Table  # LAUNCH[L, B], by the installer
    stream: Words  # [POOLS, POOL_STREAMS] what the backend launches on, by the installer
    stream_jobs: NDArray[np.int64]  # [OF_WINDOWS] lanes in flight on each, in whichever pool and window: by queue
    confined: Words  # [L, B, S + 1, CHOICES] handles of the same in each of the lane's windows, the whole last; 0: none
    lane_window: NDArray[np.int64]  # [L, CHOICES] which windows these are, by the installer; NONE: no more
    overlap: NDArray[np.int64]  # [WINDOWS, WINDOWS] SMs that two of them share, by the installer
    window_load: NDArray[np.int64]  # [WINDOWS] for each lane in flight that is confined, the SMs its window shares
    segment_ns: NDArray[np.int64]  # [L, S, 2] launch and end of each segment of the lane's latest run; whole: segment 0
    word: Words  # [L, S + 1] completion words for backends that have no pinned memory of their own
    request: Table  # REQUEST[R]
    client: Table  # CLIENT
    ready: NDArray[np.int64]  # [L] heap of lanes that wait for their turn, least rank first
    active: NDArray[np.int64]  # [L] lanes whose turn it is
    flight: NDArray[np.int64]  # [L] lanes with launched, uncompleted segments
    held: NDArray[np.int64]  # [L] lanes that wait for a front end: HELD and READY_WAIT
    touched: NDArray[np.int64]  # [L] lanes to be settled within this step
    asking: NDArray[np.int64]  # [M] models that may want a lane opened, or closed for good, within this step
    leaving: NDArray[np.int64]  # [R] requests cancelled within this step
    due: NDArray[np.int64]  # [R] heap of requests with a deadline, earliest first
    submit: Table  # [F, …] SUBMISSION rings, capacity a power of two
    done: Table  # [F, …] COMPLETION rings, capacity a power of two, at least rows + M: they never overflow
    ring: Words  # [F, 4, 8] heads and tails. Atomic
    copy: Table  # COPY ring, with a cell for every request row: it never overflows
    copy_ring: Words  # [3, 8] Atomic
    wake: Words  # [F, 8] column 0: 1: the front end wants to be woken by the next completion. Atomic
    wake_fd: NDArray[np.int64]  # [F, 2] eventfd of each front end, or -1; and the tail it was last woken for
    bell: Words  # [8] column 0: the core's loop sleeps, or is about to. Atomic
    client_key: Words  # [C] whose client number it is: a hash of the name; 0: nobody's. Atomic
    outcome: NDArray[np.int64]  # [M, STATUS + 1] requests by how they ended; last, the sum of OK ones' batch sizes
    recent_ns: NDArray[np.int64]  # [M, RECENT, 2] latency and wait of the latest OK requests
    tap: Table  # COMPLETION: the latest of all front ends, while core.tapped
    out: Table  # OUT
    job: Table  # JOB[2]: the core's scratch; readers bring their own
    clock: NDArray[np.int64]  # [8] scratch of the core's thread


def _power_of_two(n: int) -> int:
    return 1 << max(1, n - 1).bit_length()


def front_rows(limits: Limits, front: int) -> range:
    """The request rows that belong to a front end. Beside others, the engine's own process needs but a few.

    >>> [len(front_rows(Limits(requests=1000, fronts=3), k)) for k in range(3)]
    [64, 468, 468]
    """
    if limits.fronts == 1:
        return range(limits.requests)
    own = min(OWN_ROWS, limits.requests // limits.fronts)
    each = (limits.requests - own) // (limits.fronts - 1)
    return range(own) if front == 0 else range(own + (front - 1) * each, own + front * each)


def _layout(n: Limits) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of every table."""
    ints, words = np.int64, np.uint64
    rows = max(len(front_rows(n, front)) for front in range(n.fronts))
    return {
        "core": ((1,), CORE),
        "call": ((1,), CALLS),
        "gpu": ((1,), GPU),
        "tuning": ((1,), TUNING),
        "model": ((n.models,), MODEL),
        "size": ((n.models, n.sizes), SIZE),
        "segment": ((n.models, n.sizes, n.segments), SEGMENT),
        "model_lane": ((n.models, n.lanes_per_model), ints),
        "free_lane": ((n.models, n.lanes_per_model), ints),
        "input_bytes": ((n.models, n.inputs), ints),
        "filling": ((n.models, 8), words),
        "lane": ((n.lanes,), LANE),
        "lane_word": ((n.lanes, 8), words),
        "lane_ready": ((n.lanes, MASK_WORDS), words),
        "lane_hold": ((n.lanes, MASK_WORDS), words),
        "lane_known": ((n.lanes, MASK_WORDS), words),
        "slot": ((n.lanes, n.batch), ints),
        "slot_front": ((n.lanes, n.batch), words),
        "slot_client": ((n.lanes, n.batch), ints),
        "input_address": ((n.lanes, n.inputs), words),
        "launch": ((n.lanes, n.sizes, n.segments), LAUNCH),
        "whole": ((n.lanes, n.sizes), LAUNCH),
        "stream": ((POOLS, POOL_STREAMS), words),
        "stream_jobs": ((OF_WINDOWS,), ints),
        "confined": ((n.lanes, n.sizes, n.segments + 1, CHOICES), words),
        "lane_window": ((n.lanes, CHOICES), ints),
        "overlap": ((WINDOWS, WINDOWS), ints),
        "window_load": ((WINDOWS,), ints),
        "segment_ns": ((n.lanes, n.segments, 2), ints),
        "word": ((n.lanes, n.segments + 1), words),
        "request": ((n.requests,), REQUEST),
        "client": ((n.clients,), CLIENT),
        "ready": ((n.lanes,), ints),
        "active": ((n.lanes,), ints),
        "flight": ((n.lanes,), ints),
        "held": ((n.lanes,), ints),
        "touched": ((n.lanes,), ints),
        "asking": ((n.models,), ints),
        "leaving": ((n.requests,), ints),
        "due": ((n.requests,), ints),
        "submit": ((n.fronts, _power_of_two(2 * rows)), SUBMISSION),
        "done": ((n.fronts, _power_of_two(rows + n.models)), COMPLETION),
        "ring": ((n.fronts, 4, 8), words),
        "copy": ((_power_of_two(n.requests),), COPY),
        "copy_ring": ((3, 8), words),
        "wake": ((n.fronts, 8), words),
        "wake_fd": ((n.fronts, 2), ints),
        "bell": ((8,), words),
        "client_key": ((n.clients,), words),
        "outcome": ((n.models, len(STATUS) + 1), ints),
        "recent_ns": ((n.models, RECENT, 2), ints),
        "tap": ((TAP_SIZE if n.fronts > 1 else 1,), COMPLETION),
        "out": ((n.lanes * (n.segments + 1),), OUT),
        "job": ((2,), JOB),
        "clock": ((8,), ints),
    }


def state_bytes(limits: Limits) -> int:
    """How much memory the tables take."""
    return sum(_aligned(math.prod(shape) * np.dtype(kind).itemsize) for shape, kind in _layout(limits).values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64  # no two tables on one cache line


def over(limits: Limits, memory: NDArray[np.uint8]) -> State:
    """The tables in memory that is there already: another process's, or fresh and zero (then `new_state` fills it)."""
    tables, at = {}, 0
    for name, (shape, kind) in _layout(limits).items():
        nbytes = math.prod(shape) * np.dtype(kind).itemsize
        tables[name] = memory[at : at + nbytes].view(kind).reshape(shape)
        at += _aligned(nbytes)
    return State(**tables)


def new_state(limits: Limits | None = None, memory: NDArray[np.uint8] | None = None) -> State:
    """Empty tables; `install.install` adds models, `policies.attach` the policy. `memory` is zero.

    >>> new_state(Limits(models=2, lanes=4)).lane.shape
    (4,)
    """
    n = limits or Limits()
    if n.batch > MOST_SLOTS or n.fronts > FRONT_MASK:
        raise ValueError(f"batches of up to {MOST_SLOTS} and {FRONT_MASK} front ends, not {n.batch} and {n.fronts}")
    if memory is None:
        raw = np.zeros(state_bytes(n) + 64, np.uint8)  # touched only where used
        memory = raw[-raw.ctypes.data % 64 :][: state_bytes(n)]
    state = over(n, memory)
    for name in ("model_lane", "free_lane", "slot", "ready", "active", "flight", "held", "touched", "asking", "leaving",
                 "due"):  # fmt: skip
        getattr(state, name)[...] = NONE
    state.lane_word[...] = CLOSED
    state.submit["sequence"] = np.arange(state.submit.shape[1], dtype=np.uint64)
    state.wake[:, 0] = 1
    state.wake_fd[:, 0] = -1
    for column in ("model", "ready_at", "active_at", "flight_at", "stream_at", "window"):
        state.lane[column] = NONE
    state.lane_window[...] = NONE
    for column in ("lane", "slot", "left", "right", "up", "due_at"):
        state.request[column] = NONE
    for column in ("root", "first", "last"):
        state.model[column] = NONE
    state.model["filling"] = NONE
    state.client["share"] = 1.0
    state.tuning[:] = Tuning.for_part(MEASURED_ON).row()
    core = state.core[0]
    core["max_active"], core["look_ahead"], core["whole_idle"], core["refresh"] = 8, 2, 1, 3
    core["copier_fd"], core["gain"], core["demand_limit"] = NONE, 1.0, np.inf
    return state
