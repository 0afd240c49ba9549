"""The SM model's tables: their columns, and the state they make up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.heaps import Floats, Ints

INF = np.inf
MEMORY, FP32, TENSOR = 0, 1, 2
POOLS = 3
# One step of priority, as time: grids wait for the front end in order of time less this. 19 hours outlast any run, and
# leave 0.06 ns of resolution at CUDA's largest priority.
PRIORITY_NS = 2.0**46
PLACE_TREE = 3  # the fourth tree: SMs by load, for the footprint being placed

# State.g
(NEXT, LINKED, PENDING, READY_N, ACTIVE, WAITING_N, TIMED_N, PLACE, DIRTY_N, TODO_HEAD, TODO_N, DONE_HEAD, DONE_TAIL,
 UNREPORTED, FREED, BACKFILL, GRID_LIMIT, SEED, BLOCK_EVENTS, FP_THREADS, FP_REGISTERS, FP_SHARED, PASS,
 ) = range(23)  # fmt: skip
G_SIZE = 23

# State.t
NOW, CLOCKS_AT, FRONT_FREE, PLACE_FREE, LAUNCH_NS, KERNEL_GAP, GRAPH_GAP, GRID_ISSUE, BLOCK_ISSUE, JITTER = range(10)
T_SIZE = 10

# State.ci: a command's integers; State.cf: its times
(KIND, STREAM, PRIORITY, LINK, STATUS, BLOCKS, PLACED, ENDED, WARPS, THREADS, REGISTERS, SHARED, CLUSTER, COST,
 COST_STRIDE, TRACE, LAUNCH_ID, KERNEL, FIRST, EVENT, GRAPH, REPORT, DONE_LINK, BLOCKED_AT, ENGINE, WINDOW, FLAG,
 EPOCH, IDS, LEFT,
 ) = range(30)  # fmt: skip
CI_SIZE = 30
SUBMIT, LATENCY, START, NOTIFY, FINISH = range(5)
CF_SIZE = 5
LAUNCH, COPY, RECORD, WAIT = range(4)
QUEUED, ISSUED, DONE, REPORTED = range(4)

# State.cost: a block's work, or its duration where that is >= 0
DURATION, WAIT_NS = 3, 4
COST_COLUMNS = 5

# State.stream, State.stream_t, State.queue, State.event
S_QUEUE, S_PRIORITY, S_BUSY, S_GRAPH, S_CURRENT = range(5)
Q_HEAD, Q_TAIL, Q_TIMER, Q_WAITS, Q_NEXT_WAITER, Q_TODO = range(6)
E_RECORDED, E_FIRED, E_WAITERS = range(3)

# State.free and State.slot
F_THREADS, F_REGISTERS, F_SHARED, F_BLOCKS = range(4)
B_COMMAND, B_BLOCK, B_PENDING = range(3)
ENDS_BY_TIMER, NOT_RUN = -1, -2  # instead of a number of pending pools

# State.window: so many SMs from the first on, around the end (number 0: all), and the last PASS of `place` that found
# no room there
W_FIRST, W_SMS, W_HELD = range(3)

# State.use: of one SM, since the model was made
U_WARPS, U_SINCE, U_WARP_NS, U_BUSY_NS = range(4)

# State.pool: of one SM in one pool
P_SERVED, P_CLOCK, P_WEIGHT = range(3)
# State.clock: of one pool
C_CLOCK, C_TOTAL, C_PER_SM, C_RATE, C_ACTIVE = range(5)

# What `run` returns
IDLE, REACHED, STOPPED = range(3)


class State(NamedTuple):
    """All of the model's state. Commands sit at `handle & (rows - 1)`: rows are a power of two and reused in order."""

    g: Ints
    t: Floats
    ci: Ints
    cf: Floats
    cost: Floats
    stream: Ints
    stream_t: Floats  # when the stream's last work was done
    queue: Ints
    todo: Ints  # ring of queues to look at
    event: Ints
    engine: Floats  # when each copy engine is free
    ready: Floats  # heap of grids waiting for the front end
    ready_id: Ints
    waiting: Ints  # grids with blocks to place, first to place first
    timed: Floats  # heap of timers: slots, then queues, then streams (copies)
    timed_id: Ints
    free: Ints  # per SM
    gpc: Ints  # first SM of each GPC, and the number of SMs
    window: Ints  # ranges of SMs; a command's WINDOW says to which its blocks are confined
    flag: Ints  # words that launches look at when a block starts; 0 is nobody's
    ids: Ints  # of a launch under a flag: its blocks' numbers, then room for those of the LEFT blocks that did not run
    stack: Ints  # free slots of each SM
    slot: Ints
    dirty: Ints  # list of SMs changed behind the placement tree's back since it was last looked at, and their flags
    pool: Floats
    pool_n: Ints
    heap: Floats
    heap_id: Ints
    clock: Floats
    tree: Floats
    trace: NDArray[Any]  # BLOCK
    lines: NDArray[Any]  # SM_LINE
    use: Floats  # per SM: resident warps, since when, and their integrals over time
