"""The compiled core of the SM model: queues, front end, block placement, and shared rates. No Python objects.

Time is float64 nanoseconds. A block that is described by its work draws on up to three *pools*: memory traffic, fp32
and tensor flops. A pool gives each SM with demand the same rate, min(total / demanding SMs, one SM's limit), and an SM
divides its rate over its blocks by warps. So a pool has one clock, which counts what every demanding SM has received;
on that clock an SM's next completion only moves when its own blocks change. One tournament tree over the SMs per pool
and a small heap per SM therefore give processor sharing of the whole GPU at O(log) per block, whatever the load.

Everything compiled that changes together is in this one file: the on-disk cache notices edits per file only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.device.heaps import (
    Floats,
    Ints,
    compiled,
    heap_pop,
    heap_push,
    inlined,
    tree_first,
    tree_rebuild,
    tree_set,
)
from instrument.records import WARP_SHIFT

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
 COST_STRIDE, TRACE, LAUNCH_ID, KERNEL, FIRST, EVENT, GRAPH, REPORT, DONE_LINK, BLOCKED_AT, ENGINE, WINDOW,
 ) = range(26)  # fmt: skip
CI_SIZE = 26
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
ENDS_BY_TIMER = -1

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


# --- pools ---------------------------------------------------------------------------------------------------------


@inlined
def pool_rekey(s: State, r: int, sm: int) -> None:
    """Bring the SM's share up to the pool's clock; then say at which clock its next block is served."""
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    if s.pool_n[r, sm] == 0:
        tree_set(s.tree[r], sm, INF)
    else:
        left = (s.heap[base] - s.pool[r, sm, P_SERVED]) * s.pool[r, sm, P_WEIGHT]
        tree_set(s.tree[r], sm, s.clock[r, C_CLOCK] + max(left, 0.0))


@inlined
def pool_sync(s: State, r: int, sm: int) -> None:
    if s.pool_n[r, sm] > 0:
        gained = s.clock[r, C_CLOCK] - s.pool[r, sm, P_CLOCK]
        s.pool[r, sm, P_SERVED] += gained / s.pool[r, sm, P_WEIGHT]
    else:
        s.pool[r, sm, P_SERVED] = 0.0
        s.pool[r, sm, P_WEIGHT] = 0.0
    s.pool[r, sm, P_CLOCK] = s.clock[r, C_CLOCK]


@inlined
def pool_activate(s: State, r: int, change: int) -> None:
    s.clock[r, C_ACTIVE] += change
    active = s.clock[r, C_ACTIVE]
    if active > 0:
        s.clock[r, C_RATE] = min(s.clock[r, C_TOTAL] / active, s.clock[r, C_PER_SM])
    else:
        s.clock[r, C_CLOCK] = 0.0  # nobody holds a time on this clock: restart it, so that it keeps its precision


@inlined
def pool_add(s: State, r: int, sm: int, slot: int, amount: float, weight: int) -> None:
    pool_sync(s, r, sm)
    n = s.pool_n[r, sm]
    if n == 0:
        pool_activate(s, r, 1)
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    heap_push(s.heap, s.heap_id, base, n, s.pool[r, sm, P_SERVED] + amount / weight, slot)
    s.pool_n[r, sm] = n + 1
    s.pool[r, sm, P_WEIGHT] += weight
    pool_rekey(s, r, sm)


@inlined
def pool_serve(s: State, r: int, sm: int) -> None:
    """The SM's next block has all it wanted from this pool."""
    pool_sync(s, r, sm)
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    slot = s.heap_id[base]
    s.pool[r, sm, P_SERVED] = s.heap[base]
    heap_pop(s.heap, s.heap_id, base, s.pool_n[r, sm])
    s.pool_n[r, sm] -= 1
    s.pool[r, sm, P_WEIGHT] -= s.ci[s.slot[slot, B_COMMAND] & (s.ci.shape[0] - 1), WARPS]
    pool_rekey(s, r, sm)
    if s.pool_n[r, sm] == 0:
        pool_activate(s, r, -1)
    s.slot[slot, B_PENDING] -= 1
    if s.slot[slot, B_PENDING] == 0:
        end_block(s, slot)


# --- blocks --------------------------------------------------------------------------------------------------------


@inlined
def jitter(seed: int, handle: int, block: int, width: float) -> float:
    """A factor in 1 ± width, from a hash (splitmix64): the same whatever the order in which blocks are placed."""
    x = np.uint64(seed) ^ (np.uint64(handle) << np.uint64(32)) ^ np.uint64(block)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return 1.0 + width * (np.float64(x >> np.uint64(11)) * 2.0**-52 - 1.0)


@inlined
def set_timer(s: State, at: float, identity: int) -> None:
    heap_push(s.timed, s.timed_id, 0, s.g[TIMED_N], at, identity)
    s.g[TIMED_N] += 1


@inlined
def change_warps(s: State, sm: int, warps: int) -> None:
    """So many warps more are resident from now on, or less."""
    now = s.t[NOW]
    before = s.use[sm, U_WARPS]
    if before > 0.0:
        gone = now - s.use[sm, U_SINCE]
        s.use[sm, U_WARP_NS] += before * gone
        s.use[sm, U_BUSY_NS] += gone
    s.use[sm, U_SINCE] = now
    s.use[sm, U_WARPS] = before + warps


@inlined
def start_block(s: State, handle: int, sm: int) -> None:
    i = handle & (s.ci.shape[0] - 1)
    now = s.t[NOW]
    block = s.ci[i, PLACED]
    s.ci[i, PLACED] = block + 1
    s.free[sm, F_BLOCKS] -= 1
    s.free[sm, F_THREADS] -= s.ci[i, THREADS]
    s.free[sm, F_REGISTERS] -= s.ci[i, REGISTERS]
    s.free[sm, F_SHARED] -= s.ci[i, SHARED]
    slot = s.stack[sm, s.free[sm, F_BLOCKS]]
    s.slot[slot, B_COMMAND] = handle
    s.slot[slot, B_BLOCK] = block
    s.lines[sm].started += np.uint64(1 + (s.ci[i, WARPS] << WARP_SHIFT))
    change_warps(s, sm, s.ci[i, WARPS])
    if block == 0:
        s.cf[i, START] = now
    if block + 1 == s.ci[i, BLOCKS]:
        s.cf[i, NOTIFY] = now
    row = s.ci[i, TRACE]
    if row >= 0:
        record = s.trace[row + block]
        record.launch = s.ci[i, LAUNCH_ID]
        record.kernel = s.ci[i, KERNEL]
        record.sm = sm
        record.block = s.ci[i, FIRST] + block
        record.start_ns = np.int64(np.floor(now))
    duration = s.cost[s.ci[i, COST] + block * s.ci[i, COST_STRIDE], DURATION]
    if duration >= 0.0:
        s.slot[slot, B_PENDING] = ENDS_BY_TIMER
        if s.t[JITTER] > 0.0:
            duration *= jitter(s.g[SEED], handle, block, s.t[JITTER])
    else:
        s.slot[slot, B_PENDING] = 0
        duration = s.cf[i, LATENCY] + s.cost[s.ci[i, COST] + block * s.ci[i, COST_STRIDE], WAIT_NS]
    set_timer(s, now + max(duration, 1.0), slot)


@inlined
def slot_timer(s: State, slot: int) -> None:
    """A block's timer ran out: its recorded duration is over, or its latency is and its work begins to flow."""
    if s.slot[slot, B_PENDING] == ENDS_BY_TIMER:
        end_block(s, slot)
        return
    handle = s.slot[slot, B_COMMAND]
    i = handle & (s.ci.shape[0] - 1)
    block = s.slot[slot, B_BLOCK]
    row = s.ci[i, COST] + block * s.ci[i, COST_STRIDE]
    factor = 1.0
    if s.t[JITTER] > 0.0:
        factor = jitter(s.g[SEED], handle, block, s.t[JITTER])
    pending = 0
    for r in range(POOLS):
        amount = s.cost[row, r]
        if amount > 0.0:
            pending += 1
            pool_add(s, r, slot // s.stack.shape[1], slot, amount * factor, s.ci[i, WARPS])
    s.slot[slot, B_PENDING] = pending
    if pending == 0:
        end_block(s, slot)


@inlined
def make_dirty(s: State, sm: int) -> None:
    """The SM has more or less room than the placement tree says, whatever footprint that is for."""
    if s.dirty[1, sm] == 0:
        s.dirty[1, sm] = 1
        s.dirty[0, s.g[DIRTY_N]] = sm
        s.g[DIRTY_N] += 1


@inlined
def end_block(s: State, slot: int) -> None:
    handle = s.slot[slot, B_COMMAND]
    i = handle & (s.ci.shape[0] - 1)
    sm = slot // s.stack.shape[1]
    row = s.ci[i, TRACE]
    if row >= 0:
        s.trace[row + s.slot[slot, B_BLOCK]].end_ns = np.int64(np.floor(s.t[NOW]))
    s.stack[sm, s.free[sm, F_BLOCKS]] = slot
    s.free[sm, F_BLOCKS] += 1
    s.free[sm, F_THREADS] += s.ci[i, THREADS]
    s.free[sm, F_REGISTERS] += s.ci[i, REGISTERS]
    s.free[sm, F_SHARED] += s.ci[i, SHARED]
    s.lines[sm].ended += np.uint64(1 + (s.ci[i, WARPS] << WARP_SHIFT))
    change_warps(s, sm, -s.ci[i, WARPS])
    make_dirty(s, sm)
    s.g[FREED] += 1
    s.g[BLOCK_EVENTS] += 1
    if s.g[WAITING_N] > 0:
        s.g[PLACE] = 1
    s.ci[i, ENDED] += 1
    if s.ci[i, ENDED] == s.ci[i, BLOCKS]:
        s.g[ACTIVE] -= 1
        finish_work(s, handle)


# --- placement -----------------------------------------------------------------------------------------------------


@inlined
def load(s: State, sm: int, threads: int, registers: int, shared: int) -> float:
    """The SM's rank for a block of this footprint: the one with the most room first; infinite where it does not fit."""
    if (
        s.free[sm, F_BLOCKS] < 1
        or s.free[sm, F_THREADS] < threads
        or s.free[sm, F_REGISTERS] < registers
        or s.free[sm, F_SHARED] < shared
    ):
        return INF
    return -np.float64(s.free[sm, F_THREADS])


@inlined
def refresh_tree(s: State, threads: int, registers: int, shared: int) -> None:
    """Make the placement tree true for this footprint: only dirty SMs have changed if it was the last one too."""
    if s.g[FP_THREADS] != threads or s.g[FP_REGISTERS] != registers or s.g[FP_SHARED] != shared:
        s.g[FP_THREADS], s.g[FP_REGISTERS], s.g[FP_SHARED] = threads, registers, shared
        for sm in range(s.free.shape[0]):
            s.tree[PLACE_TREE, s.tree.shape[1] // 2 + sm] = load(s, sm, threads, registers, shared)
        tree_rebuild(s.tree[PLACE_TREE])
        for k in range(s.g[DIRTY_N]):
            s.dirty[1, s.dirty[0, k]] = 0
    else:
        for k in range(s.g[DIRTY_N]):
            sm = s.dirty[0, k]
            s.dirty[1, sm] = 0
            tree_set(s.tree[PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    s.g[DIRTY_N] = 0


@inlined
def place_one(s: State, handle: int) -> bool:
    """Place the grid's next block on the SM with the most room."""
    i = handle & (s.ci.shape[0] - 1)
    threads, registers, shared = s.ci[i, THREADS], s.ci[i, REGISTERS], s.ci[i, SHARED]
    refresh_tree(s, threads, registers, shared)
    if s.tree[PLACE_TREE, 1] == INF:
        return False
    sm = tree_first(s.tree[PLACE_TREE])
    start_block(s, handle, sm)
    tree_set(s.tree[PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    return True


@inlined
def place_confined(s: State, handle: int) -> bool:
    """Place the grid's next block on the SM of its window with the most room, the lowest on a tie as in the tree."""
    i = handle & (s.ci.shape[0] - 1)
    threads, registers, shared = s.ci[i, THREADS], s.ci[i, REGISTERS], s.ci[i, SHARED]
    first = s.window[s.ci[i, WINDOW], W_FIRST]
    chosen = -1
    least = INF
    for k in range(first, first + s.window[s.ci[i, WINDOW], W_SMS]):
        sm = k if k < s.free.shape[0] else k - s.free.shape[0]
        rank = load(s, sm, threads, registers, shared)
        if rank < least or (rank == least and sm < chosen):
            least = rank
            chosen = sm
    if chosen < 0:
        return False
    start_block(s, handle, chosen)
    make_dirty(s, chosen)
    return True


@inlined
def in_window(s: State, window: int, sm: int) -> bool:
    after = sm - s.window[window, W_FIRST]
    if after < 0:
        after += s.free.shape[0]
    inside: bool = after < s.window[window, W_SMS]
    return inside


@inlined
def room(s: State, sm: int, threads: int, registers: int, shared: int) -> int:
    """How many blocks of this footprint still fit the SM."""
    n: int = min(s.free[sm, F_BLOCKS], s.free[sm, F_THREADS] // threads)
    if registers > 0:
        n = min(n, s.free[sm, F_REGISTERS] // registers)
    if shared > 0:
        n = min(n, s.free[sm, F_SHARED] // shared)
    return n


@inlined
def place_cluster(s: State, handle: int) -> bool:
    """Place the blocks of the grid's next cluster at once, inside the GPC with the most room for them in its window."""
    i = handle & (s.ci.shape[0] - 1)
    threads, registers, shared = s.ci[i, THREADS], s.ci[i, REGISTERS], s.ci[i, SHARED]
    window = s.ci[i, WINDOW]
    most = s.ci[i, CLUSTER] - 1
    best = -1
    for gpc in range(s.gpc.shape[0] - 1):
        fit = 0
        for sm in range(s.gpc[gpc], s.gpc[gpc + 1]):
            if in_window(s, window, sm):
                fit += room(s, sm, threads, registers, shared)
        if fit > most:
            most = fit
            best = gpc
    if best < 0:
        return False
    for _ in range(s.ci[i, CLUSTER]):
        chosen = -1
        least = INF
        for sm in range(s.gpc[best], s.gpc[best + 1]):
            rank = load(s, sm, threads, registers, shared)
            if rank < least and in_window(s, window, sm):
                least = rank
                chosen = sm
        start_block(s, handle, chosen)
        make_dirty(s, chosen)
    return True


@inlined
def place(s: State) -> None:
    """Hand out blocks: the first waiting grid until it has no more or fits nowhere; with backfill, then the next.

    Without, a grid that fits nowhere in its window holds up that window only: a context has a front end of its own.
    """
    s.g[PASS] += 1
    k = 0
    while k < s.g[WAITING_N]:
        handle = s.waiting[k]
        i = handle & (s.ci.shape[0] - 1)
        window = s.ci[i, WINDOW]
        if window > 0 and s.window[window, W_HELD] == s.g[PASS]:
            k += 1
            continue
        if s.ci[i, BLOCKED_AT] == s.g[FREED]:  # nothing was freed since it fitted nowhere
            placed = False
        elif s.ci[i, CLUSTER] > 1:
            placed = place_cluster(s, handle)
        elif window > 0:
            placed = place_confined(s, handle)
        else:
            placed = place_one(s, handle)
        if not placed:
            s.ci[i, BLOCKED_AT] = s.g[FREED]
            if s.g[BACKFILL] == 0:
                if window == 0:
                    break
                s.window[window, W_HELD] = s.g[PASS]
            k += 1
            continue
        if s.ci[i, PLACED] == s.ci[i, BLOCKS]:
            for j in range(k, s.g[WAITING_N] - 1):
                s.waiting[j] = s.waiting[j + 1]
            s.g[WAITING_N] -= 1
        if s.t[BLOCK_ISSUE] > 0.0:
            s.t[PLACE_FREE] = s.t[NOW] + s.t[BLOCK_ISSUE] * s.ci[i, CLUSTER]
            return
    s.g[PLACE] = 0


@inlined
def start_grid(s: State, handle: int) -> None:
    """The grid joins those with blocks to place: behind all of its priority and above."""
    i = handle & (s.ci.shape[0] - 1)
    k = s.g[WAITING_N]
    while k > 0 and s.ci[s.waiting[k - 1] & (s.ci.shape[0] - 1), PRIORITY] < s.ci[i, PRIORITY]:
        s.waiting[k] = s.waiting[k - 1]
        k -= 1
    s.waiting[k] = handle
    s.g[WAITING_N] += 1
    s.g[ACTIVE] += 1
    s.g[PLACE] = 1


# --- streams, hardware queues, events, copies ------------------------------------------------------------------------


@inlined
def look_at(s: State, queue: int) -> None:
    if s.queue[queue, Q_TODO] == 0:
        s.queue[queue, Q_TODO] = 1
        s.todo[(s.g[TODO_HEAD] + s.g[TODO_N]) % s.todo.shape[0]] = queue
        s.g[TODO_N] += 1


@inlined
def finish_work(s: State, handle: int) -> None:
    """A launch or copy is over: its stream may go on."""
    i = handle & (s.ci.shape[0] - 1)
    s.cf[i, FINISH] = s.t[NOW]
    s.g[PENDING] -= 1
    stream = s.ci[i, STREAM]
    s.stream[stream, S_BUSY] = 0
    s.stream_t[stream] = s.t[NOW]
    s.ci[i, STATUS] = REPORTED
    if s.ci[i, REPORT] != 0:
        s.ci[i, STATUS] = DONE
        s.ci[i, DONE_LINK] = -1
        if s.g[UNREPORTED] == 0:
            s.g[DONE_HEAD] = handle
        else:
            s.ci[s.g[DONE_TAIL] & (s.ci.shape[0] - 1), DONE_LINK] = handle
        s.g[DONE_TAIL] = handle
        s.g[UNREPORTED] += 1
    look_at(s, s.stream[stream, S_QUEUE])


@inlined
def ready_ns(s: State, i: int) -> float:
    """When the command at the head of its queue may go, now that its stream is free."""
    stream = s.ci[i, STREAM]
    last: float = s.stream_t[stream]
    submit: float = s.cf[i, SUBMIT]
    if s.ci[i, KIND] != LAUNCH:
        return max(submit, last)
    same_graph = s.ci[i, GRAPH] != 0 and s.ci[i, GRAPH] == s.stream[stream, S_GRAPH]
    gap: float = s.t[GRAPH_GAP] if same_graph else s.t[KERNEL_GAP]
    launch: float = s.t[LAUNCH_NS]
    return max(submit + launch, last + gap)


@inlined
def advance_queue(s: State, queue: int) -> None:
    """Let go of the queue's head as long as it may: a queue is first in, first out, over all streams mapped onto it."""
    while s.queue[queue, Q_HEAD] >= 0 and s.queue[queue, Q_WAITS] == 0:
        handle = s.queue[queue, Q_HEAD]
        i = handle & (s.ci.shape[0] - 1)
        stream = s.ci[i, STREAM]
        if s.stream[stream, S_BUSY] != 0:
            return
        at = ready_ns(s, i)
        if at > s.t[NOW]:
            if s.queue[queue, Q_TIMER] == 0:
                s.queue[queue, Q_TIMER] = 1
                set_timer(s, at, s.slot.shape[0] + queue)
            return
        kind = s.ci[i, KIND]
        event = s.ci[i, EVENT]
        if kind == WAIT and s.event[event, E_FIRED] == 0:
            s.queue[queue, Q_WAITS] = 1
            s.queue[queue, Q_NEXT_WAITER] = s.event[event, E_WAITERS]
            s.event[event, E_WAITERS] = queue
            return
        s.queue[queue, Q_HEAD] = s.ci[i, LINK]
        if s.queue[queue, Q_HEAD] < 0:
            s.queue[queue, Q_TAIL] = -1
        s.cf[i, START] = s.t[NOW]
        if kind == LAUNCH:
            s.ci[i, STATUS] = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = s.ci[i, GRAPH]
            heap_push(s.ready, s.ready_id, 0, s.g[READY_N], s.t[NOW] - s.ci[i, PRIORITY] * PRIORITY_NS, handle)
            s.g[READY_N] += 1
        elif kind == COPY:
            s.ci[i, STATUS] = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = 0
            engine = s.ci[i, ENGINE]
            s.cf[i, START] = max(s.t[NOW], s.engine[engine])
            s.engine[engine] = s.cf[i, START] + s.cf[i, LATENCY]
            set_timer(s, s.engine[engine], s.slot.shape[0] + s.queue.shape[0] + stream)
        else:
            s.ci[i, STATUS] = REPORTED
            s.cf[i, FINISH] = s.t[NOW]
            s.g[PENDING] -= 1
            s.stream_t[stream] = s.t[NOW]
            if kind == RECORD:
                s.event[event, E_FIRED] = 1
                waiter = s.event[event, E_WAITERS]
                while waiter >= 0:
                    s.queue[waiter, Q_WAITS] = 0
                    look_at(s, waiter)
                    waiter = s.queue[waiter, Q_NEXT_WAITER]


@inlined
def drain_todo(s: State) -> None:
    while s.g[TODO_N] > 0:
        queue = s.todo[s.g[TODO_HEAD]]
        s.g[TODO_HEAD] = (s.g[TODO_HEAD] + 1) % s.todo.shape[0]
        s.g[TODO_N] -= 1
        s.queue[queue, Q_TODO] = 0
        advance_queue(s, queue)


@inlined
def link_new(s: State) -> None:
    """Append the commands written since the last call to their queues."""
    while s.g[LINKED] < s.g[NEXT]:
        handle = s.g[LINKED]
        s.g[LINKED] += 1
        s.g[PENDING] += 1
        i = handle & (s.ci.shape[0] - 1)
        s.ci[i, LINK] = -1
        queue = s.stream[s.ci[i, STREAM], S_QUEUE]
        tail = s.queue[queue, Q_TAIL]
        if tail < 0:
            s.queue[queue, Q_HEAD] = handle
        else:
            s.ci[tail & (s.ci.shape[0] - 1), LINK] = handle
        s.queue[queue, Q_TAIL] = handle
        look_at(s, queue)
    drain_todo(s)


# --- time ----------------------------------------------------------------------------------------------------------


@inlined
def pool_due(s: State, r: int) -> float:
    if s.clock[r, C_ACTIVE] == 0.0:
        return INF
    due: float = s.t[CLOCKS_AT] + (s.tree[r, 1] - s.clock[r, C_CLOCK]) / s.clock[r, C_RATE]
    return due


@inlined
def next_time(s: State) -> float:
    at = INF
    if s.g[TIMED_N] > 0:
        at = s.timed[0]
    if s.g[READY_N] > 0 and s.g[ACTIVE] < s.g[GRID_LIMIT]:
        at = min(at, max(s.t[NOW], s.t[FRONT_FREE]))
    if s.g[PLACE] != 0:
        at = min(at, max(s.t[NOW], s.t[PLACE_FREE]))
    for r in range(POOLS):
        at = min(at, pool_due(s, r))
    return at


@inlined
def advance(s: State, at: float) -> None:
    """Move the time and the pools' clocks; a clock whose next completion is due stands exactly there."""
    for r in range(POOLS):
        if s.clock[r, C_ACTIVE] > 0.0:
            key = s.tree[r, 1]
            if pool_due(s, r) <= at:
                s.clock[r, C_CLOCK] = key
            else:
                s.clock[r, C_CLOCK] = min(key, s.clock[r, C_CLOCK] + s.clock[r, C_RATE] * (at - s.t[CLOCKS_AT]))
    s.t[CLOCKS_AT] = at
    s.t[NOW] = at


@inlined
def step(s: State, at: float) -> None:
    """Everything that happens at one time: ends first, so that placement sees all that is free and ready."""
    advance(s, at)
    while s.g[TIMED_N] > 0 and s.timed[0] <= at:
        identity = s.timed_id[0]
        heap_pop(s.timed, s.timed_id, 0, s.g[TIMED_N])
        s.g[TIMED_N] -= 1
        slots = s.slot.shape[0]
        if identity < slots:
            slot_timer(s, identity)
        elif identity < slots + s.queue.shape[0]:
            s.queue[identity - slots, Q_TIMER] = 0
            look_at(s, identity - slots)
        else:
            finish_work(s, s.stream[identity - slots - s.queue.shape[0], S_CURRENT])
    for r in range(POOLS):
        while s.clock[r, C_ACTIVE] > 0.0 and s.tree[r, 1] <= s.clock[r, C_CLOCK]:
            pool_serve(s, r, tree_first(s.tree[r]))
    drain_todo(s)
    while s.g[READY_N] > 0 and s.g[ACTIVE] < s.g[GRID_LIMIT] and s.t[FRONT_FREE] <= at:
        handle = s.ready_id[0]
        heap_pop(s.ready, s.ready_id, 0, s.g[READY_N])
        s.g[READY_N] -= 1
        start_grid(s, handle)
        s.t[FRONT_FREE] = at + s.t[GRID_ISSUE]
    if s.g[PLACE] != 0 and s.t[PLACE_FREE] <= at:
        place(s)


@compiled
def run(s: State, until: float, stop: bool) -> int:
    """Advance to `until`, or until nothing can happen, or (`stop`) until a completion is there to be fetched."""
    link_new(s)
    while True:
        if stop and s.g[UNREPORTED] > 0:
            return STOPPED
        at = next_time(s)
        if at == INF or at > until:
            if until < INF and until > s.t[NOW]:
                s.t[NOW] = until  # the clocks only move with events, so that stopping here and there changes nothing
            return IDLE if at == INF else REACHED
        step(s, at)


@compiled
def next_event(s: State) -> float:
    link_new(s)
    return next_time(s)


@compiled
def submit_again(
    ci: Ints, cf: Floats, ints: Ints, floats: Floats, kernels: Ints, graphs: Ints, last_graph: int, at: float,
    handle: int,
) -> int:  # fmt: skip
    """Commands as they once were, from `handle` on; how many numbers of graphs they take after `last_graph`."""
    for k in range(ints.shape[0]):
        i = (handle + k) & (ci.shape[0] - 1)
        for column in range(ints.shape[1]):
            ci[i, column] = ints[k, column]
        for column in range(floats.shape[1]):
            cf[i, column] = floats[k, column]
        cf[i, SUBMIT] = at
    taken = 0
    for k in range(kernels.shape[0]):
        ci[(handle + kernels[k]) & (ci.shape[0] - 1), GRAPH] = last_graph + 1 + graphs[k]
        taken = max(taken, graphs[k] + 1)
    return taken


@compiled
def fetch_completed(g: Ints, ci: Ints, into: Ints) -> None:
    """Hand over the completions since the last call, in order of time; `into` has room for all of them."""
    handle = g[DONE_HEAD]
    for k in range(g[UNREPORTED]):
        into[k] = handle
        i = handle & (ci.shape[0] - 1)
        ci[i, STATUS] = REPORTED
        handle = ci[i, DONE_LINK]
    g[UNREPORTED] = 0
