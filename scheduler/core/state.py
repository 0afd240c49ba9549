"""The dispatcher's whole state: flat NumPy tables that front ends, the compiled core and the loops share.

Nothing here is a Python object, so the tables can live in shared memory, where front ends of other processes find
them (`over`). Three parties touch them:

* **the installer** (the engine, or `core_models.install`) fills a model's rows while the model is ABSENT, then posts
  OPEN_MODEL on the submission ring; from then on only the core writes them;
* **front ends** own request rows (`front_rows`): they take a free row, post SUBMIT or CANCEL on their own submission
  ring, and get the row back with its one entry in their own completion ring. They may also reserve a slot of the
  model's filling lane and write inputs straight into it. Front end 0 is the engine's own process;
* **the copier** (`copier.Copier`), where there is one, copies long inputs into slots for the core;
* **the core** (`core.step`) owns everything else.

Words that two parties touch at once, and so only through `atomics`: `lane_word`, `lane_ready`, `lane_hold`,
`slot_front`, `filling`, `wake`, `copy_ring`, the rings' heads, tails and sequence numbers, and the completion words
that launches write. A front end may die between any two of its instructions: whose a reserved slot is follows from one
word, what it has written and read are bits that can be set for it, and `core_reclaim.reclaim` takes back all it had.

A request's way, the direct one: claim a cell of `submit` → `reserve` a slot → publish the cell → write the inputs →
`mark_ready`. The staged one, when no lane is open: publish with lane −1 and the address of the inputs (items of all
inputs one after the other); the core copies them into a slot once there is one, or has the copier do it. Then, both:
the lane gets its turn, closes, is launched in segments, and one DONE entry per request appears in `done`. Where `HOLD`
is on, the lane's output slots stay untouched until every bit of its `lane_hold` has been cleared with `release`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[Any]
Words = NDArray[np.uint64]

NEVER = 1 << 62  # a time that does not come: no deadline, no target
NONE = -1  # no row
OWN_ROWS = 64  # of the engine's own process, where front ends are processes beside it
RECENT = 4096  # latencies kept per model
TAP_SIZE = 1 << 14  # completions kept for those who watch the requests of other processes

# --- what the numbers mean -----------------------------------------------------------------------------------------

ABSENT, OPEN, CLOSING = range(3)  # model.state; a CLOSING model finishes what it accepted and refuses the rest

# lane.state. FREE: nobody's. FILLING: front ends and the core put requests into it. READY_WAIT: its turn came and it is
# closed, but a front end is still writing inputs. RUNNING: segments are, or will be, on the GPU. HELD: done, outputs
# are being read.
FREE, FILLING, READY_WAIT, RUNNING, HELD = range(5)

# request.state. UNUSED: the row belongs to a front end. QUEUED: no slot yet. SLOTTED: in a lane. One that is cancelled
# or expires leaves its slot empty (NONE) behind; its lane runs on for the others.
UNUSED, QUEUED, SLOTTED = range(3)

# done.status
OK, CANCELLED, EXPIRED, QUEUE_FULL, DRAINING, FAILED, NO_MODEL, MODEL_CLOSED = range(8)
STATUS = ("ok", "cancelled", "expired", "queue full", "draining", "failed", "no such model", "model closed")

# submit.kind
SUBMIT, CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, FAIL = range(6)

VIRTUAL, CUDA = range(2)  # g[BACKEND]

# State.g, the core's own numbers
(BACKEND, MODE, ERROR, MAX_ACTIVE, LOOK_AHEAD, WHOLE_ALWAYS, WHOLE_IDLE, HOLD, REFRESH,
 SEQUENCE, LIVE, QUEUED_N, READY_N, ACTIVE_N, FLIGHT_N, HELD_N, DUE_N, OUT_N, REFRESH_AT,
 STEPS, LAUNCHES, SEGMENTS_DONE, DECISIONS, BAD_RANKS, DONE_OK, DONE_OTHER, PREEMPTIONS, WHOLE_LAUNCHES,
 CHANGED, POSTED, TOUCHED_N, ASKING_N, LEAVING_N, TIMELESS, FIRST, TURN,
 TAPPED, TAP_TAIL, COPIER, TOP_PRIORITY, STANDING, WINDOW_N, CONFINED_LAUNCHES) = range(43)  # fmt: skip
G_SIZE = 43
RUN_MODE, DRAIN_MODE, FAIL_MODE = range(3)  # g[MODE]

# State.t, floats: the fair-queueing clocks, what the GPU gives when several jobs share it, where the loop's own time
# goes; the jobs that queued requests will make (in full batches), the jobs that have been waiting of late, how often
# some were to stand back for a short one, the longest that the driver took over a launch, when there is something to
# do next although nothing happens, and the longest until inputs were copied that were handed to the copier (its own)
(VIRTUAL_NS, SHARES, CLIENT_VIRTUAL_NS, CLIENT_SHARES, LAST_NS, BUSY_NS, SERVED_NS, GAIN,
 DEMAND, DEMAND_LIMIT, LAUNCH_NS, QUEUED_JOBS, WAITING, SHORT_OFTEN, LONGEST_LAUNCH_NS,
 ROOM_AT, LONGEST_COPY_NS) = range(17)  # fmt: skip
T_SIZE = 17

# State.fn: addresses of compiled functions; 0: none
F_RANK, F_ADMIT, F_ORDER, F_GRAPH_LAUNCH, F_WRITE, F_CLOCK, F_COPY = range(7)
FN_SIZE = 8

# Windows of SMs: at most so many; and so many of them for a lane to choose from
WINDOWS, CHOICES = 64, 4

# State.stream: pools of streams, one for each priority that models have on the GPU. The first QUEUES of a pool are
# handed out, as many as the GPU has hardware queues; the next belong to lanes, each to its own; then each window of SMs
# has as many again.
POOLS, QUEUES, OWN_STREAMS = 8, 32, 128
OF_WINDOWS = QUEUES + OWN_STREAMS
POOL_STREAMS = OF_WINDOWS + WINDOWS * QUEUES

# State.copy_ring: rows as in State.ring; the bell says that the copier sleeps
COPY_TAIL, COPY_HEAD, COPY_BELL = range(3)

# State.ring: heads and tails, each on its own cache line (row, column 0)
SUBMIT_TAIL, SUBMIT_HEAD, DONE_TAIL, DONE_HEAD = range(4)

# State.lane_word: closed | generation | reserved | the front end that reserved the last of them
FRONT_MASK = 0xFFFF
RESERVED_MASK = 0xFFFF
RESERVED_SHIFT = 16
RESERVED_ONE = 1 << RESERVED_SHIFT
GENERATION_SHIFT = 32
GENERATION_MASK = 0x7FFF_FFFF
CLOSED = 1 << 63
# State.slot_front: generation << GENERATION_SHIFT | front end

MASK_WORDS = 8  # of a lane's bit masks: one cache line
MOST_SLOTS = 64 * MASK_WORDS

# --- tables --------------------------------------------------------------------------------------------------------

MODEL = np.dtype(
    [
        # written by the installer
        ("state", "i8"),
        ("priority", "i8"),  # larger goes first; a request may carry its own
        ("share", "f8"),  # of GPU time, relative to other models'
        ("target_ns", "i8"),  # latency aimed at: ranks, never expires; NEVER: none
        ("queue_limit", "i8"),  # requests without a slot beyond this are refused
        ("generation", "u8"),  # of the row: what was meant for the model it held before is refused
        ("n_sizes", "i8"),
        ("n_lanes", "i8"),
        ("n_inputs", "i8"),
        # written by the core
        ("free_n", "i8"),  # lanes on the stack free_lane[m]
        ("filling", "i8"),  # the core's own copy of State.filling[m]
        ("warm", "i8"),  # the lane on top of the stack has run since the filling one was opened
        ("root", "i8"),  # heap of queued requests that came out of order
        ("first", "i8"),  # list of those that came in order: each behind the one before
        ("last", "i8"),
        ("queued", "i8"),
        ("live", "i8"),  # accepted and not completed
        ("virtual_ns", "f8"),  # fair-queueing time: GPU time received ÷ share
        ("used_ns", "f8"),  # GPU time received, as time alone
        ("completed", "i8"),
        ("asking", "i8"),  # 1: listed in State.asking
    ],
    align=True,
)

SIZE = np.dtype(  # [model, size], batch ascending
    [
        ("batch", "i8"),
        ("segments", "i8"),
        ("total_ns", "f8"),
        ("demand", "f8"),  # part of the GPU that one such batch keeps busy: 1 / demand of them fill it
    ],
    align=True,
)

SEGMENT = np.dtype(  # [model, size, segment]
    [
        ("time_ns", "f8"),  # alone on the GPU
        ("tail_ns", "f8"),  # this segment and all after it
        ("blocks", "i8"),  # resident at once: the largest kernel's, as far as the GPU holds them
        ("warps", "i8"),
        ("registers", "i8"),
        ("shared_bytes", "i8"),
        ("kernels", "i8"),  # issued by the front end of the GPU
    ],
    align=True,
)

LANE = np.dtype(
    [
        ("model", "i8"),  # written by the installer; NONE: no lane
        ("state", "i8"),
        ("size", "i8"),  # index into the model's sizes, once closed; before, the one that would fit
        ("taken", "i8"),  # slots the core knows requests for
        ("live", "i8"),  # of those, requests not yet completed
        ("segments", "i8"),  # of the size it runs at; 1 when launched whole
        ("issued", "i8"),
        ("done", "i8"),
        ("draining", "i8"),  # 1: its newest segment is about to leave room, or to end
        ("whole", "i8"),
        ("rank", "f8"),
        ("demand", "f8"),  # as counted in t[DEMAND] while it is active
        ("back", "i8"),  # 1: stands back for a short one, if it is active
        ("ready_at", "i8"),  # index in State.ready, or NONE
        ("active_at", "i8"),  # in State.active
        ("flight_at", "i8"),  # in State.flight
        ("arrival_ns", "i8"),  # of the oldest live request
        ("latest_ns", "i8"),  # when the last of its requests came
        ("deadline_ns", "i8"),  # earliest of the live requests'; NEVER: none
        ("priority", "i8"),  # highest of the live requests'
        ("client", "i8"),  # of the oldest
        ("client_start_ns", "f8"),
        ("started_ns", "i8"),  # first launch
        ("generation", "i8"),
        ("touched", "i8"),  # 1: listed in State.touched
        ("pool", "i8"),  # of streams; by the installer
        ("stream_at", "i8"),  # the stream it has while it is in flight
        ("window", "i8"),  # of SMs, that its latest launch is confined to while it is in flight; NONE: it has them all
    ],
    align=True,
)

# [lane, size, segment] and, for the whole program as one launch, [lane, size]. `handle` is what the backend launches
# (a CUDA graph exec); when done it writes a number other than 0 to the u64 at `word`, which the core reads
# and clears. Segments of one lane complete in order.
# `draining` is the address of a word that is set once all blocks of a segment's last kernel are on the SMs; 0: none is.
LAUNCH = np.dtype([("handle", "u8"), ("word", "u8"), ("draining", "u8")], align=True)

# Inputs on their way into a slot, by the copier.
COPY = np.dtype([("source", "u8"), ("lane", "i8"), ("slot", "i8"), ("model", "i8"), ("at_ns", "i8")], align=True)

REQUEST = np.dtype(
    [
        ("serial", "u8"),  # the front end's unique number, so that a late CANCEL cannot hit the row's next request
        ("tag", "u8"),  # the front end's own, returned untouched
        ("state", "i8"),
        ("model", "i8"),
        ("lane", "i8"),
        ("slot", "i8"),
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("client_start_ns", "f8"),  # fair-queueing start tag
        ("order", "f8"),  # key in its model's queue, then `sequence`
        ("sequence", "i8"),
        ("source", "u8"),  # staged inputs; 0: none to copy
        ("left", "i8"),  # leftist heap of its model; in the list, the one before
        ("right", "i8"),  # in the list, the one behind
        ("up", "i8"),
        ("height", "i8"),  # 0: in the list
        ("due_at", "i8"),  # index in the deadline heap, or NONE
        ("leaving", "i8"),  # 1: listed in State.leaving
        ("front", "i8"),  # whose it is
    ],
    align=True,
)

CLIENT = np.dtype(
    [("share", "f8"), ("virtual_ns", "f8"), ("used_ns", "f8"), ("tag_ns", "f8"), ("live", "i8")],  # tag: the next start
    align=True,
)

SUBMISSION = np.dtype(
    [
        ("sequence", "u8"),  # of the cell: position + 1 when published, position + capacity when taken
        ("kind", "i8"),
        ("request", "i8"),  # row
        ("serial", "u8"),
        ("tag", "u8"),
        ("model", "i8"),
        ("lane", "i8"),  # slot reserved by the front end; NONE: staged
        ("slot", "i8"),
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("source", "u8"),
        ("generation", "u8"),  # of the model's row as the front end knows it; 0: whichever it is
    ],
    align=True,
)

COMPLETION = np.dtype(
    [
        ("request", "i8"),  # row; NONE: about a model (MODEL_CLOSED)
        ("serial", "u8"),
        ("tag", "u8"),
        ("model", "i8"),
        ("lane", "i8"),  # where the outputs are; NONE: it never had a slot
        ("slot", "i8"),
        ("batch", "i8"),  # requests that ran together
        ("size", "i8"),  # index of the captured size they ran at
        ("status", "i8"),
        ("error", "i8"),  # the backend's, with FAILED
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("started_ns", "i8"),  # first launch; NEVER: it was not launched
        ("finish_ns", "i8"),
        ("first", "i8"),  # 1: the first entry of its batch, so that each batch is counted once
    ],
    align=True,
)

# What VIRTUAL backends launch: the loop runs entries 0 … g[OUT_N] − 1 and sets g[OUT_N] to 0.
OUT = np.dtype([("lane", "i8"), ("size", "i8"), ("segment", "i8"), ("word", "u8"), ("handle", "u8")], align=True)
WHOLE = -1  # out.segment: the whole program

# What a policy sees of a job: one lane's requests, or one request for `order`. Times as floats: ranks are.
JOB = np.dtype(
    [
        ("now_ns", "f8"),
        ("arrival_ns", "f8"),  # of its oldest request
        ("deadline_ns", "f8"),  # earliest deadline, or arrival + target where it has none; NEVER or more without either
        ("target_ns", "f8"),  # NEVER: none
        ("priority", "f8"),
        ("remaining_ns", "f8"),  # time alone of what has not completed
        ("total_ns", "f8"),
        ("batch", "f8"),
        ("started", "f8"),  # 1: some of it was launched
        ("share", "f8"),  # of the model
        ("deficit_ns", "f8"),  # GPU time the model is owed under fair sharing; negative: it had more than that
        ("client", "f8"),
        ("client_deficit_ns", "f8"),
        ("client_start_ns", "f8"),  # fair-queueing start tag: orders the requests of backlogged clients fairly
        ("occupancy", "f8"),  # fullest of the GPU's resources, 0 … 1 and beyond when oversubscribed
        ("model", "f8"),
    ],
    align=True,
)

# Sums over launched segments. `resident`: each lane's oldest launched segment; `pending`: those queued behind it.
# `issue` is in kernels per second. Row 0 of State.gpu; policies see it as `gpu`.
GPU = np.dtype(
    [
        (f"{kind}_{what}", "f8")
        for kind in ("capacity", "resident", "pending")
        for what in ("blocks", "warps", "registers", "shared_bytes", "issue")
    ]
    + [
        ("active_jobs", "f8"),
        ("active_priority", "f8"),  # highest among active jobs; kept only for policies with `admit`
        ("waiting_jobs", "f8"),
        ("max_active", "f8"),
        ("occupancy", "f8"),  # fullest resource, resident ÷ capacity
    ],
    align=True,
)


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

    g: NDArray[np.int64]
    t: NDArray[np.float64]
    fn: Words
    gpu: Table  # GPU[1]
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
    tap: Table  # COMPLETION: the latest of all front ends, while g[TAPPED]
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
        "g": ((G_SIZE,), ints),
        "t": ((T_SIZE,), np.float64),
        "fn": ((FN_SIZE,), words),
        "gpu": ((1,), GPU),
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
    """Empty tables; `core_models.install` adds models, `core.attach_policy` the policy. `memory` is zero.

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
    state.g[MAX_ACTIVE] = 8
    state.g[LOOK_AHEAD] = 2
    state.g[WHOLE_IDLE] = 1
    state.g[REFRESH] = 3
    state.g[COPIER] = NONE
    state.t[GAIN] = 1.0
    state.t[DEMAND_LIMIT] = np.inf
    return state
