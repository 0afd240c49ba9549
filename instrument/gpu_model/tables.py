"""The SM model's tables: their columns, the state that they form, and priority queues in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model.parts import Part, Timing
from paellapy.instrument.numba_ext.link import part
from paellapy.instrument.numba_ext.tables import TableSet, table, table_set
from paellapy.instrument.records import BLOCK, SM_LINE

# --- a binary heap, and a tournament tree with changeable keys, for compiled code -------------------------------------

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@part
def heap_push(keys: Floats, ids: Ints, base: int, count: int, key: float, identity: int) -> None:
    """Adds to the heap of `count` entries that starts at `base`; the caller keeps the count. Ties go to the lower id.
    """
    i = count
    while i > 0:
        up = (i - 1) >> 1
        k = keys[base + up]
        if k < key or (k == key and ids[base + up] <= identity):
            break
        keys[base + i] = k
        ids[base + i] = ids[base + up]
        i = up
    keys[base + i] = key
    ids[base + i] = identity


@part
def heap_pop(keys: Floats, ids: Ints, base: int, count: int) -> None:
    """Removes the least of `count` entries, which the caller has read at `base`."""
    last = count - 1
    key = keys[base + last]
    identity = ids[base + last]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= last:
            break
        right = down + 1
        if right < last:
            a = keys[base + down]
            b = keys[base + right]
            if b < a or (b == a and ids[base + right] < ids[base + down]):
                down = right
        k = keys[base + down]
        if key < k or (key == k and identity <= ids[base + down]):
            break
        keys[base + i] = k
        ids[base + i] = ids[base + down]
        i = down
    keys[base + i] = key
    ids[base + i] = identity


@part
def tree_set(keys: Floats, leaf: int, key: float) -> None:
    """Changes one leaf's key; `keys[1]` is then the least of all."""
    node = leaf + keys.shape[0] // 2
    keys[node] = key
    while node > 1:
        node >>= 1
        a = keys[2 * node]
        b = keys[2 * node + 1]
        least = a if a <= b else b
        if keys[node] == least:
            break
        keys[node] = least


@part
def tree_first(keys: Floats) -> int:
    """The leaf with the least key, the lowest leaf on a tie."""
    width: int = keys.shape[0] // 2
    node = 1
    while node < width:
        node *= 2
        if keys[node] > keys[node + 1]:
            node += 1
    return node - width


@part
def tree_rebuild(keys: Floats) -> None:
    """Recomputes the tree after its leaves, the upper half of `keys`, were written directly."""
    for node in range(keys.shape[0] // 2 - 1, 0, -1):
        a = keys[2 * node]
        b = keys[2 * node + 1]
        keys[node] = a if a <= b else b


def new_tree(leaves: int) -> Floats:
    """A tree with room for this many leaves, all at infinity.

    >>> len(new_tree(3))
    8
    """
    return np.full(2 << max(1, leaves - 1).bit_length(), np.inf)


# --- tables -----------------------------------------------------------------------------------------------------------

INF = np.inf
MEMORY, FP32, TENSOR = 0, 1, 2
POOLS = 3
# One step of priority, as time: grids wait for the front end in order of time minus this. 19 hours are longer than any
# run, and leave 0.06 ns of resolution at CUDA's largest priority.
PRIORITY_NS = 2.0**46
PLACE_TREE = 3  # the fourth tree: SMs by load, for the footprint being placed

# [1] The GPU as a whole. Unexplained counts are the lengths of the heaps or lists of the same name in `State`.
GPU = np.dtype(
    [
        ("now_ns", "f8"),
        ("next_ns", "f8"),  # when the next event happens, as `run` last found it
        ("clocks_at_ns", "f8"),  # when the pools' clocks were last advanced
        ("front_free_ns", "f8"),  # when the front end can take the next grid
        ("place_free_ns", "f8"),  # when the next block can be placed
        ("launch_ns", "f8"),  # the following fields are the part's timing
        ("kernel_gap_ns", "f8"),
        ("graph_gap_ns", "f8"),
        ("grid_issue_ns", "f8"),
        ("block_issue_ns", "f8"),
        ("jitter", "f8"),
        ("next", "i8"),  # handle of the next command
        ("linked", "i8"),  # commands below this handle are in their queues
        ("pending", "i8"),  # unfinished commands
        ("ready", "i8"),
        ("active", "i8"),  # number of active grids
        ("waiting", "i8"),
        ("timed", "i8"),
        ("dirty", "i8"),
        ("todo_head", "i8"),
        ("todo", "i8"),
        ("place", "i8"),  # 1: there may be room for blocks that wait
        ("done_head", "i8"),  # list of finished commands that are not reported yet
        ("done_tail", "i8"),
        ("unreported", "i8"),
        ("freed", "i8"),  # number of blocks that have ended
        ("passes", "i8"),  # number of placement passes
        ("grid_limit", "i8"),
        ("seed", "i8"),
        ("fp_threads", "i8"),  # the footprint for which the placement tree is valid
        ("fp_registers", "i8"),
        ("fp_shared", "i8"),
        ("place_within", "u8"),  # address of `place_within`; 0 before the first partition or cluster
    ],
    align=True,
)

# [commands] Work that was put on a stream.
COMMAND = np.dtype(
    [
        ("kind", "i8"),
        ("stream", "i8"),
        ("priority", "i8"),
        ("link", "i8"),  # handle of the next command in its queue
        ("status", "i8"),  # QUEUED to REPORTED
        ("blocks", "i8"),  # of the launch: all blocks, placed blocks, finished blocks
        ("placed", "i8"),
        ("ended", "i8"),
        ("warps", "i8"),  # of a block; threads, registers and shared memory in the SM's allocation units
        ("threads", "i8"),
        ("registers", "i8"),
        ("shared", "i8"),
        ("cluster", "i8"),
        ("cost", "i8"),  # first row in State.cost, and rows from one block to the next
        ("cost_stride", "i8"),
        ("trace", "i8"),  # first row in State.trace; -1: not traced
        ("launch", "i8"),  # number in the trace
        ("kernel", "i8"),
        ("first", "i8"),  # number of the first block in its grid
        ("event", "i8"),
        ("graph", "i8"),
        ("report", "i8"),  # 1: its end is reported
        ("counts", "i8"),  # 1: its blocks are counted in State.lines
        ("done_link", "i8"),  # handle of the next finished command
        ("blocked_at", "i8"),  # value of `freed` when it fitted nowhere
        ("engine", "i8"),  # copy engine
        ("partition", "i8"),
        ("flag", "i8"),  # 0: none
        ("epoch", "i8"),
        ("ids", "i8"),  # first row in State.ids
        ("left", "i8"),  # number of blocks that did not run
        ("submit_ns", "f8"),  # times, in order
        ("latency_ns", "f8"),  # of a block, or of a copy
        ("start_ns", "f8"),
        ("notify_ns", "f8"),
        ("finish_ns", "f8"),
    ],
    align=True,
)
LAUNCH, COPY, RECORD, WAIT = range(4)
QUEUED, ISSUED, DONE, REPORTED = range(4)

_AT_FIRST = {"link": -1, "trace": -1, "done_link": -1, "blocked_at": -1, "ids": -1, "cluster": 1}
_LATER = ("start_ns", "notify_ns", "finish_ns")
_NEW = {name: np.nan if name in _LATER else _AT_FIRST.get(name, 0) for name in COMMAND.names or ()}


def command(facts: dict[str, float]) -> tuple[float, ...]:
    """A row of COMMAND, to be assigned at once, which is five times as fast as field by field."""
    return tuple({**_NEW, **facts}.values())


# State.cost: a block's work, or its duration where that is >= 0
DURATION, WAIT_NS = 3, 4
COST_COLUMNS = 5

# State.stream, State.stream_t, State.queue, State.event
S_QUEUE, S_BUSY, S_GRAPH, S_CURRENT = range(4)
Q_HEAD, Q_TAIL, Q_TIMER, Q_WAITS, Q_NEXT_WAITER, Q_TODO = range(6)
E_RECORDED, E_FIRED, E_WAITERS = range(3)

# State.free and State.slot
F_THREADS, F_REGISTERS, F_SHARED, F_BLOCKS = range(4)
B_COMMAND, B_BLOCK, B_PENDING = range(3)
ENDS_BY_TIMER, NOT_RUN = -1, -2  # instead of a number of pending pools

# State.partition: the first SM and the number of SMs, wrapping around (partition 0: all), and the last PASS of `place`
# that found no room there
W_FIRST, W_SMS, W_HELD = range(3)

# State.use: for one SM, since the model was created
U_WARPS, U_SINCE, U_WARP_NS, U_BUSY_NS = range(4)

# State.pool: for one SM in one pool
P_SERVED, P_CLOCK, P_WEIGHT = range(3)
# State.clock: for one pool
C_CLOCK, C_TOTAL, C_PER_SM, C_RATE, C_ACTIVE = range(5)

# Results of `run`
IDLE, REACHED, STOPPED = range(3)


@table_set
class State(TableSet):
    """All of the model's state. Commands are at `handle & (rows - 1)`: rows are a power of two, and reused in order."""

    gpu: NDArray[Any] = table(GPU, 1)
    command: NDArray[Any] = table(COMMAND, "commands")
    cost: Floats = table(np.float64, "costs", COST_COLUMNS)
    stream: Ints = table(np.int64, "streams", 5)
    stream_t: Floats = table(np.float64, "streams")  # when the stream's latest work was done
    queue: Ints = table(np.int64, "streams", 6)
    todo: Ints = table(np.int64, "queues")  # ring of queues to check
    event: Ints = table(np.int64, "events", 3)
    engine: Floats = table(np.float64, 3)  # when each copy engine is free
    ready: Floats = table(np.float64, "streams")  # heap of grids waiting for the front end
    ready_id: Ints = table(np.int64, "streams")
    waiting: Ints = table(np.int64, "grids")  # grids with blocks to place, in the order of placement
    timed: Floats = table(np.float64, "timers")  # heap of timers: slots, then queues, then streams (copies)
    timed_id: Ints = table(np.int64, "timers")
    free: Ints = table(np.int64, "sms", 4)  # per SM
    gpc: Ints = table(np.int64, "gpcs")  # first SM of each GPC, and the total number of SMs
    # ranges of SMs; a command's partition confines its blocks to one
    partition: Ints = table(np.int64, "partitions", 3)
    flag: Ints = table(np.int64, "flags")  # words that launches read when a block starts; 0 is unused
    # of a launch under a flag: the numbers of its blocks, then room for the numbers of LEFT blocks that did not run
    ids: Ints = table(np.int64, "ids")
    stack: Ints = table(np.int64, "sms", "blocks")  # free slots of each SM
    slot: Ints = table(np.int64, "slots", 3)
    # list of SMs that changed since the placement tree was last used, and their marks
    dirty: Ints = table(np.int64, 2, "sms")
    pool: Floats = table(np.float64, POOLS, "sms", 3)
    pool_n: Ints = table(np.int64, POOLS, "sms")
    heap: Floats = table(np.float64, "heap")
    heap_id: Ints = table(np.int64, "heap")
    clock: Floats = table(np.float64, POOLS, 5)
    tree: Floats = table(np.float64, POOLS + 1, "nodes")
    trace: NDArray[Any] = table(BLOCK, "blocks")
    lines: NDArray[Any] = table(SM_LINE, "sms")
    use: Floats = table(np.float64, "sms", 4)  # per SM: resident warps, since when, and their integrals over time


# --- the state: made for a part, enlarged, and examined when it is stuck ----------------------------------------------

_KINDS = ("launch", "copy", "record", "wait")


def new_state(part: Part, timing: Timing, seed: int, lines: NDArray[Any] | None) -> State:
    sm, n, streams = part.sm, part.sms, 32
    slots = n * sm.blocks
    gpu = np.zeros(1, GPU)
    gpu["grid_limit"], gpu["seed"], gpu["fp_threads"] = part.concurrent_grids, seed, -1
    for name in ("launch_ns", "jitter", "kernel_gap_ns", "graph_gap_ns", "grid_issue_ns", "block_issue_ns"):
        gpu[name] = getattr(timing, name)
    if lines is None:
        lines = np.zeros(n, SM_LINE)
    elif lines.dtype != SM_LINE or lines.shape != (n,):
        raise LaunchError(
            f"lines must be an array of {n} SM_LINE, one for each SM of the {part.title}", field="lines", limit=n
        )
    queue = np.zeros((streams, 6), np.int64)
    queue[:, [Q_HEAD, Q_TAIL]] = -1
    partition = np.zeros((64, 3), np.int64)
    partition[0, W_SMS] = n
    return State(
        gpu=gpu,
        command=np.zeros(1024, COMMAND),
        cost=np.zeros((1024, COST_COLUMNS)),
        stream=np.zeros((streams, 4), np.int64),
        stream_t=np.full(streams, -np.inf),
        queue=queue,
        todo=np.zeros(streams + 1, np.int64),
        event=np.zeros((64, 3), np.int64),
        engine=np.zeros(3),
        ready=np.zeros(streams),
        ready_id=np.zeros(streams, np.int64),
        waiting=np.zeros(part.concurrent_grids + 1, np.int64),
        timed=np.zeros(slots + 2 * streams),
        timed_id=np.zeros(slots + 2 * streams, np.int64),
        free=np.tile(np.array([sm.threads, sm.registers, sm.shared_bytes, sm.blocks], np.int64), (n, 1)),
        gpc=np.concatenate([[0], np.cumsum(part.gpc_sms)]).astype(np.int64),
        partition=partition,
        flag=np.zeros(64, np.int64),
        ids=np.zeros(1024, np.int64),
        # The top of the stack is taken first: slot 0 of an SM before its others.
        stack=np.arange(slots).reshape(n, sm.blocks)[:, ::-1].copy(),
        slot=np.zeros((slots, 3), np.int64),
        dirty=np.zeros((2, n), np.int64),
        pool=np.zeros((POOLS, n, 3)),
        pool_n=np.zeros((POOLS, n), np.int64),
        heap=np.zeros(POOLS * slots),
        heap_id=np.zeros(POOLS * slots, np.int64),
        clock=_clocks(part, timing),
        tree=np.stack([new_tree(n)] * (POOLS + 1)),
        trace=np.zeros(1024, BLOCK),
        lines=lines,
        use=np.zeros((n, 4)),
    )


def _clocks(part: Part, timing: Timing) -> NDArray[np.float64]:
    """The pools' rates per nanosecond: GB/s are bytes per ns, TFLOPS are a thousand flops per ns."""
    clock = np.zeros((POOLS, 5))
    clock[MEMORY, C_TOTAL] = part.bandwidth_gbps * timing.bandwidth_efficiency
    clock[[FP32, TENSOR], C_TOTAL] = np.inf
    clock[[MEMORY, FP32, TENSOR], C_PER_SM] = timing.sm_rates(part)
    return clock


def doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)])


def more_streams(s: State) -> State:
    """Doubles the streams and queues. Timers of streams have the numbers after those of queues, so they are
    renumbered.
    """
    old = len(s.queue)
    count = int(s.gpu["todo"][0])
    todo = np.zeros(2 * old + 1, np.int64)
    todo[:count] = s.todo[(int(s.gpu["todo_head"][0]) + np.arange(count)) % len(s.todo)]
    s.gpu["todo_head"][0] = 0
    timed_id = np.concatenate([s.timed_id, np.zeros(2 * old, np.int64)])
    timed_id[timed_id >= len(s.slot) + old] += old
    queue = doubled(s.queue)
    queue[old:, [Q_HEAD, Q_TAIL]] = -1
    return s._replace(
        stream=doubled(s.stream),
        stream_t=np.concatenate([s.stream_t, np.full(old, -np.inf)]),
        queue=queue,
        todo=todo,
        ready=doubled(s.ready),
        ready_id=doubled(s.ready_id),
        timed=np.concatenate([s.timed, np.zeros(2 * old)]),
        timed_id=timed_id,
    )


def more_commands(s: State, first: int, end: int) -> State:
    """Doubles the rows, and moves commands `first` to `end` to their new places."""
    size = len(s.command)
    handles = np.arange(first, end)
    command = np.zeros(2 * size, COMMAND)
    command[handles & (2 * size - 1)] = s.command[handles & (size - 1)]
    return s._replace(command=command)


def unfinished_launches(s: State, first: int) -> NDArray[np.int64]:
    """Rows of the unfinished launches from handle `first` on, oldest first."""
    rows: NDArray[np.int64] = np.arange(first, int(s.gpu["next"][0])) & (len(s.command) - 1)
    unfinished: NDArray[np.bool_] = (s.command["kind"][rows] == LAUNCH) & (s.command["status"][rows] < DONE)
    return rows[unfinished]


class Waiting(NamedTuple):
    """A command that can never run. `event` is -1 if it waits for earlier work on its stream."""

    stream: int
    kind: str
    handle: int
    event: int = -1
    recorded_on: int = -1  # the stream that will record the event; -1: none

    def __str__(self) -> str:
        cause = "earlier work on its stream"
        if self.event >= 0:
            when = "which is never recorded" if self.recorded_on < 0 else f"recorded later on stream {self.recorded_on}"
            cause = f"event {self.event}, {when}"
        return f"stream {self.stream} ({self.kind} {self.handle}) waits for {cause}"


def who_waits(s: State, first: int) -> list[Waiting]:
    """For a state in which nothing can happen any more: each queue's head, and the event that it waits for."""
    rows = np.arange(first, int(s.gpu["next"][0])) & (len(s.command) - 1)
    records = rows[s.command["kind"][rows] == RECORD]
    waits = []
    for handle in s.queue[s.queue[:, Q_HEAD] >= 0, Q_HEAD].tolist():
        command = s.command[handle & (len(s.command) - 1)]
        event = int(command["event"]) if command["kind"] == WAIT else -1
        by = -1
        if event >= 0 and s.event[event, E_RECORDED]:
            by = int(s.command["stream"][records[s.command["event"][records] == event][0]])
        waits.append(Waiting(int(command["stream"]), _KINDS[command["kind"]], handle, event, by))
    return waits


def check_idle(s: State, part: Part) -> None:
    """Checks that with nothing in flight all resources are free and all counters agree; AssertionError otherwise."""
    sm = part.sm
    assert not any(s.gpu[each][0] for each in ("pending", "active", "waiting", "ready")), "work in flight"
    assert (s.free == (sm.threads, sm.registers, sm.shared_bytes, sm.blocks)).all(), "an SM misses resources"
    assert (s.pool_n == 0).all(), "an idle SM still draws on a pool"
    assert (s.clock[:, C_ACTIVE] == 0).all(), "an idle pool still has an active SM"
    assert (np.sort(s.stack, axis=1).ravel() == np.arange(s.stack.size)).all(), "an SM lost a slot"
    assert (s.lines["started"] == s.lines["ended"]).all(), "a block has started and not ended"
    leaves = s.tree[PLACE_TREE, s.tree.shape[1] // 2 :][: part.sms]
    known = (s.dirty[1] == 0) & (s.gpu["fp_threads"][0] >= 0)
    assert (leaves[known] == -sm.threads).all(), "the placement tree is wrong about an SM it takes for known"
