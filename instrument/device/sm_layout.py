"""The SM model's tables: their columns, and the state that they form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.heaps import Floats, Ints
from paellapy.instrument.records import BLOCK, SM_LINE
from paellapy.instrument.table_set import TableSet, table, table_set

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
        ("backfill", "i8"),
        ("grid_limit", "i8"),
        ("seed", "i8"),
        ("block_events", "i8"),
        ("fp_threads", "i8"),  # the footprint for which the placement tree is valid
        ("fp_registers", "i8"),
        ("fp_shared", "i8"),
        ("place_within", "u8"),  # address of `place_within`; 0 before the first window or cluster
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
        ("done_link", "i8"),  # handle of the next finished command
        ("blocked_at", "i8"),  # value of `freed` when it fitted nowhere
        ("engine", "i8"),  # copy engine
        ("window", "i8"),
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


def command(**facts: float) -> tuple[float, ...]:
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

# State.window: the first SM and the number of SMs, wrapping around (window 0: all), and the last PASS of `place` that
# found no room there
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
    # ranges of SMs; a command's window confines its blocks to one
    window: Ints = table(np.int64, "windows", 3)
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
