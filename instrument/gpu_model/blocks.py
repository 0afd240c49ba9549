"""Blocks on an SM: they start, draw their work from the pools, and end. Compiled."""

from __future__ import annotations

import numpy as np
from numba import types

from paellapy.instrument.gpu_model import tables
from paellapy.instrument.gpu_model.tables import INF, State, heap_pop, heap_push, tree_first, tree_rebuild, tree_set
from paellapy.instrument.numba_ext.link import address_of, call_with, part, reachable
from paellapy.instrument.records import WARP_SHIFT

# --- shared rates: memory traffic, fp32 and tensor flops, given to SMs and divided over their blocks. Compiled --------
# A pool gives each SM with demand the same rate, min(total / demanding SMs, one SM's limit), and an SM divides its rate
# over its blocks by warps. So a pool has one clock, which counts the work that every demanding SM has received; on that
# clock an SM's next completion only moves when its own blocks change. One tournament tree over the SMs per pool and a
# small heap per SM therefore give processor sharing of the whole GPU at O(log) per block, for any load.


@part
def pool_rekey(s: State, r: int, sm: int) -> None:
    """Updates the SM's share to the pool's clock, then sets the clock value at which its next block is served."""
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    if s.pool_n[r, sm] == 0:
        tree_set(s.tree[r], sm, INF)
    else:
        left = (s.heap[base] - s.pool[r, sm, tables.P_SERVED]) * s.pool[r, sm, tables.P_WEIGHT]
        tree_set(s.tree[r], sm, s.clock[r, tables.C_CLOCK] + max(left, 0.0))


@part
def pool_sync(s: State, r: int, sm: int) -> None:
    if s.pool_n[r, sm] > 0:
        gained = s.clock[r, tables.C_CLOCK] - s.pool[r, sm, tables.P_CLOCK]
        s.pool[r, sm, tables.P_SERVED] += gained / s.pool[r, sm, tables.P_WEIGHT]
    else:
        s.pool[r, sm, tables.P_SERVED] = 0.0
        s.pool[r, sm, tables.P_WEIGHT] = 0.0
    s.pool[r, sm, tables.P_CLOCK] = s.clock[r, tables.C_CLOCK]


@part
def pool_activate(s: State, r: int, change: int) -> None:
    s.clock[r, tables.C_ACTIVE] += change
    active = s.clock[r, tables.C_ACTIVE]
    if active > 0:
        s.clock[r, tables.C_RATE] = min(s.clock[r, tables.C_TOTAL] / active, s.clock[r, tables.C_PER_SM])
    else:
        s.clock[r, tables.C_CLOCK] = 0.0  # no SM uses a time on this clock: restart it, so that it keeps its precision


@part
def pool_add(s: State, r: int, sm: int, slot: int, amount: float, weight: int) -> None:
    pool_sync(s, r, sm)
    n = s.pool_n[r, sm]
    if n == 0:
        pool_activate(s, r, 1)
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    heap_push(s.heap, s.heap_id, base, n, s.pool[r, sm, tables.P_SERVED] + amount / weight, slot)
    s.pool_n[r, sm] = n + 1
    s.pool[r, sm, tables.P_WEIGHT] += weight
    pool_rekey(s, r, sm)


@part
def pool_due(s: State, r: int) -> float:
    if s.clock[r, tables.C_ACTIVE] == 0.0:
        return INF
    due: float = s.gpu[0].clocks_at_ns + (s.tree[r, 1] - s.clock[r, tables.C_CLOCK]) / s.clock[r, tables.C_RATE]
    return due


# --- streams, hardware queues, events and copies of the SM model: which command may go next, and when. Compiled -------


@part
def set_timer(s: State, at: float, identity: int) -> None:
    gpu = s.gpu[0]
    heap_push(s.timed, s.timed_id, 0, gpu.timed, at, identity)
    gpu.timed += 1


@part
def look_at(s: State, queue: int) -> None:
    gpu = s.gpu[0]
    if s.queue[queue, tables.Q_TODO] == 0:
        s.queue[queue, tables.Q_TODO] = 1
        s.todo[(gpu.todo_head + gpu.todo) % s.todo.shape[0]] = queue
        gpu.todo += 1


@part
def finish_work(s: State, handle: int) -> None:
    """Ends a launch or copy, so that its stream may continue."""
    gpu = s.gpu[0]
    command = s.command[handle & (s.command.shape[0] - 1)]
    command.finish_ns = gpu.now_ns
    gpu.pending -= 1
    stream = command.stream
    s.stream[stream, tables.S_BUSY] = 0
    s.stream_t[stream] = gpu.now_ns
    command.status = tables.REPORTED
    if command.report != 0:
        command.status = tables.DONE
        command.done_link = -1
        if gpu.unreported == 0:
            gpu.done_head = handle
        else:
            s.command[gpu.done_tail & (s.command.shape[0] - 1)].done_link = handle
        gpu.done_tail = handle
        gpu.unreported += 1
    look_at(s, s.stream[stream, tables.S_QUEUE])


@part
def ready_ns(s: State, i: int) -> float:
    """When the command at the head of its queue may go, now that its stream is free."""
    gpu = s.gpu[0]
    stream = s.command[i].stream
    last: float = s.stream_t[stream]
    submit: float = s.command[i].submit_ns
    if s.command[i].kind != tables.LAUNCH:
        return max(submit, last)
    same_graph = s.command[i].graph != 0 and s.command[i].graph == s.stream[stream, tables.S_GRAPH]
    gap: float = gpu.graph_gap_ns if same_graph else gpu.kernel_gap_ns
    launch: float = gpu.launch_ns
    return max(submit + launch, last + gap)


@part
def fire(s: State, event: int) -> None:
    """Fires an event, so that the queues waiting for it may continue."""
    s.event[event, tables.E_FIRED] = 1
    waiter = s.event[event, tables.E_WAITERS]
    while waiter >= 0:
        s.queue[waiter, tables.Q_WAITS] = 0
        look_at(s, waiter)
        waiter = s.queue[waiter, tables.Q_NEXT_WAITER]


@part
def advance_queue(s: State, queue: int) -> None:
    """Releases the queue's heads as long as they may go: a queue is first in, first out, over all its streams."""
    gpu = s.gpu[0]
    while s.queue[queue, tables.Q_HEAD] >= 0 and s.queue[queue, tables.Q_WAITS] == 0:
        handle = s.queue[queue, tables.Q_HEAD]
        i = handle & (s.command.shape[0] - 1)
        stream = s.command[i].stream
        if s.stream[stream, tables.S_BUSY] != 0:
            return
        at = ready_ns(s, i)
        if at > gpu.now_ns:
            if s.queue[queue, tables.Q_TIMER] == 0:
                s.queue[queue, tables.Q_TIMER] = 1
                set_timer(s, at, s.slot.shape[0] + queue)
            return
        kind = s.command[i].kind
        event = s.command[i].event
        if kind == tables.WAIT and s.event[event, tables.E_FIRED] == 0:
            s.queue[queue, tables.Q_WAITS] = 1
            s.queue[queue, tables.Q_NEXT_WAITER] = s.event[event, tables.E_WAITERS]
            s.event[event, tables.E_WAITERS] = queue
            return
        s.queue[queue, tables.Q_HEAD] = s.command[i].link
        if s.queue[queue, tables.Q_HEAD] < 0:
            s.queue[queue, tables.Q_TAIL] = -1
        s.command[i].start_ns = gpu.now_ns
        if kind == tables.LAUNCH:
            s.command[i].status = tables.ISSUED
            s.stream[stream, tables.S_BUSY] = 1
            s.stream[stream, tables.S_CURRENT] = handle
            s.stream[stream, tables.S_GRAPH] = s.command[i].graph
            key = gpu.now_ns - s.command[i].priority * tables.PRIORITY_NS
            heap_push(s.ready, s.ready_id, 0, gpu.ready, key, handle)
            gpu.ready += 1
        elif kind == tables.COPY:
            s.command[i].status = tables.ISSUED
            s.stream[stream, tables.S_BUSY] = 1
            s.stream[stream, tables.S_CURRENT] = handle
            s.stream[stream, tables.S_GRAPH] = 0
            engine = s.command[i].engine
            s.command[i].start_ns = max(gpu.now_ns, s.engine[engine])
            s.engine[engine] = s.command[i].start_ns + s.command[i].latency_ns
            set_timer(s, s.engine[engine], s.slot.shape[0] + s.queue.shape[0] + stream)
        else:
            s.command[i].status = tables.REPORTED
            s.command[i].finish_ns = gpu.now_ns
            gpu.pending -= 1
            s.stream_t[stream] = gpu.now_ns
            if kind == tables.RECORD:
                fire(s, event)


@part
def drain_todo(s: State) -> None:
    gpu = s.gpu[0]
    while gpu.todo > 0:
        queue = s.todo[gpu.todo_head]
        gpu.todo_head = (gpu.todo_head + 1) % s.todo.shape[0]
        gpu.todo -= 1
        s.queue[queue, tables.Q_TODO] = 0
        advance_queue(s, queue)


@part
def link_new(s: State) -> None:
    """Appends the commands written since the last call to their queues."""
    gpu = s.gpu[0]
    while gpu.linked < gpu.next:
        handle = gpu.linked
        gpu.linked += 1
        gpu.pending += 1
        command = s.command[handle & (s.command.shape[0] - 1)]
        command.link = -1
        queue = s.stream[command.stream, tables.S_QUEUE]
        tail = s.queue[queue, tables.Q_TAIL]
        if tail < 0:
            s.queue[queue, tables.Q_HEAD] = handle
        else:
            s.command[tail & (s.command.shape[0] - 1)].link = handle
        s.queue[queue, tables.Q_TAIL] = handle
        look_at(s, queue)
    drain_todo(s)


@part
def jitter(seed: int, handle: int, block: int, width: float) -> float:
    """A factor in 1 ± width, from a hash (splitmix64): independent of the order in which blocks are placed."""
    x = np.uint64(seed) ^ (np.uint64(handle) << np.uint64(32)) ^ np.uint64(block)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return 1.0 + width * (np.float64(x >> np.uint64(11)) * 2.0**-52 - 1.0)


@part
def change_warps(s: State, sm: int, warps: int) -> None:
    """Changes the number of resident warps from now on."""
    now = s.gpu[0].now_ns
    before = s.use[sm, tables.U_WARPS]
    if before > 0.0:
        gone = now - s.use[sm, tables.U_SINCE]
        s.use[sm, tables.U_WARP_NS] += before * gone
        s.use[sm, tables.U_BUSY_NS] += gone
    s.use[sm, tables.U_SINCE] = now
    s.use[sm, tables.U_WARPS] = before + warps


@part
def start_block(s: State, handle: int, sm: int) -> None:
    gpu = s.gpu[0]
    command = s.command[handle & (s.command.shape[0] - 1)]
    now = gpu.now_ns
    block = command.placed
    command.placed = block + 1
    s.free[sm, tables.F_BLOCKS] -= 1
    s.free[sm, tables.F_THREADS] -= command.threads
    s.free[sm, tables.F_REGISTERS] -= command.registers
    s.free[sm, tables.F_SHARED] -= command.shared
    slot = s.stack[sm, s.free[sm, tables.F_BLOCKS]]
    s.slot[slot, tables.B_COMMAND] = handle
    s.slot[slot, tables.B_BLOCK] = block
    if block == 0:
        command.start_ns = now
    if block + 1 == command.blocks:
        command.notify_ns = now
    number = command.first + block
    if command.flag > 0:
        number = s.ids[command.ids + block]
        if s.flag[command.flag] >= command.epoch:
            # It looks at the flag, records its number and exits: it appears in no counter and no trace.
            s.ids[command.ids + command.blocks + command.left] = number
            command.left += 1
            s.slot[slot, tables.B_PENDING] = tables.NOT_RUN
            set_timer(s, now + max(command.latency_ns, 1.0), slot)
            return
    if command.counts != 0:
        s.lines[sm].started += np.uint64(1 + (command.warps << WARP_SHIFT))
    change_warps(s, sm, command.warps)
    row = command.trace
    if row >= 0:
        record = s.trace[row + block]
        record.launch = command.launch
        record.kernel = command.kernel
        record.sm = sm
        record.block = number
        record.start_ns = np.int64(np.floor(now))
    duration = s.cost[command.cost + block * command.cost_stride, tables.DURATION]
    if duration >= 0.0:
        s.slot[slot, tables.B_PENDING] = tables.ENDS_BY_TIMER
        if gpu.jitter > 0.0:
            duration *= jitter(gpu.seed, handle, block, gpu.jitter)
    else:
        s.slot[slot, tables.B_PENDING] = 0
        duration = command.latency_ns + s.cost[command.cost + block * command.cost_stride, tables.WAIT_NS]
    set_timer(s, now + max(duration, 1.0), slot)


@part
def slot_timer(s: State, slot: int) -> None:
    """Handles a block's timer: its given duration is over, or it does not run, or its work begins to flow."""
    gpu = s.gpu[0]
    if s.slot[slot, tables.B_PENDING] < 0:
        end_block(s, slot)
        return
    handle = s.slot[slot, tables.B_COMMAND]
    command = s.command[handle & (s.command.shape[0] - 1)]
    block = s.slot[slot, tables.B_BLOCK]
    row = command.cost + block * command.cost_stride
    factor = 1.0
    if gpu.jitter > 0.0:
        factor = jitter(gpu.seed, handle, block, gpu.jitter)
    pending = 0
    for r in range(tables.POOLS):
        amount = s.cost[row, r]
        if amount > 0.0:
            pending += 1
            pool_add(s, r, slot // s.stack.shape[1], slot, amount * factor, command.warps)
    s.slot[slot, tables.B_PENDING] = pending
    if pending == 0:
        end_block(s, slot)


@part
def make_dirty(s: State, sm: int) -> None:
    """Marks an SM whose room differs from the placement tree, for any footprint."""
    gpu = s.gpu[0]
    if s.dirty[1, sm] == 0:
        s.dirty[1, sm] = 1
        s.dirty[0, gpu.dirty] = sm
        gpu.dirty += 1


@part
def end_block(s: State, slot: int) -> None:
    gpu = s.gpu[0]
    handle = s.slot[slot, tables.B_COMMAND]
    command = s.command[handle & (s.command.shape[0] - 1)]
    sm = slot // s.stack.shape[1]
    if s.slot[slot, tables.B_PENDING] != tables.NOT_RUN:
        row = command.trace
        if row >= 0:
            s.trace[row + s.slot[slot, tables.B_BLOCK]].end_ns = np.int64(np.floor(gpu.now_ns))
        if command.counts != 0:
            s.lines[sm].ended += np.uint64(1 + (command.warps << WARP_SHIFT))
        change_warps(s, sm, -command.warps)
    s.stack[sm, s.free[sm, tables.F_BLOCKS]] = slot
    s.free[sm, tables.F_BLOCKS] += 1
    s.free[sm, tables.F_THREADS] += command.threads
    s.free[sm, tables.F_REGISTERS] += command.registers
    s.free[sm, tables.F_SHARED] += command.shared
    make_dirty(s, sm)
    gpu.freed += 1
    if gpu.waiting > 0:
        gpu.place = 1
    command.ended += 1
    if command.ended == command.blocks:
        gpu.active -= 1
        finish_work(s, handle)


@part
def pool_serve(s: State, r: int, sm: int) -> None:
    """Handles the SM's next block, which has received all its work from this pool."""
    pool_sync(s, r, sm)
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    slot = s.heap_id[base]
    s.pool[r, sm, tables.P_SERVED] = s.heap[base]
    heap_pop(s.heap, s.heap_id, base, s.pool_n[r, sm])
    s.pool_n[r, sm] -= 1
    s.pool[r, sm, tables.P_WEIGHT] -= s.command[s.slot[slot, tables.B_COMMAND] & (s.command.shape[0] - 1)].warps
    pool_rekey(s, r, sm)
    if s.pool_n[r, sm] == 0:
        pool_activate(s, r, -1)
    s.slot[slot, tables.B_PENDING] -= 1
    if s.slot[slot, tables.B_PENDING] == 0:
        end_block(s, slot)


# Placement: the SM for a grid's next block, in its partition, in its cluster's GPC, in order of priority. Compiled.
#
# Few models use partitions or clusters, so placement in them is compiled for the first launch that needs it.


@part
def load(s: State, sm: int, threads: int, registers: int, shared: int) -> float:
    """The SM's rank for a block of this footprint: the SM with the most room first; infinite where it does not fit."""
    if (
        s.free[sm, tables.F_BLOCKS] < 1
        or s.free[sm, tables.F_THREADS] < threads
        or s.free[sm, tables.F_REGISTERS] < registers
        or s.free[sm, tables.F_SHARED] < shared
    ):
        return INF
    return -np.float64(s.free[sm, tables.F_THREADS])


@part
def refresh_tree(s: State, threads: int, registers: int, shared: int) -> None:
    """Updates the placement tree for this footprint; if it was the last one too, only dirty SMs have changed."""
    gpu = s.gpu[0]
    if gpu.fp_threads != threads or gpu.fp_registers != registers or gpu.fp_shared != shared:
        gpu.fp_threads, gpu.fp_registers, gpu.fp_shared = threads, registers, shared
        for sm in range(s.free.shape[0]):
            s.tree[tables.PLACE_TREE, s.tree.shape[1] // 2 + sm] = load(s, sm, threads, registers, shared)
        tree_rebuild(s.tree[tables.PLACE_TREE])
        for k in range(gpu.dirty):
            s.dirty[1, s.dirty[0, k]] = 0
    else:
        for k in range(gpu.dirty):
            sm = s.dirty[0, k]
            s.dirty[1, sm] = 0
            tree_set(s.tree[tables.PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    gpu.dirty = 0


@part
def place_one(s: State, handle: int) -> bool:
    """Places the grid's next block on the SM with the most room."""
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    refresh_tree(s, threads, registers, shared)
    if s.tree[tables.PLACE_TREE, 1] == INF:
        return False
    sm = tree_first(s.tree[tables.PLACE_TREE])
    start_block(s, handle, sm)
    tree_set(s.tree[tables.PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    return True


@part
def place_confined(s: State, handle: int) -> bool:
    """Places the grid's next block on the SM of its partition with the most room, the lowest on a tie as in the tree.
    """
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    first = s.partition[command.partition, tables.W_FIRST]
    chosen = -1
    least = INF
    for k in range(first, first + s.partition[command.partition, tables.W_SMS]):
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


@part
def in_partition(s: State, partition: int, sm: int) -> bool:
    after = sm - s.partition[partition, tables.W_FIRST]
    if after < 0:
        after += s.free.shape[0]
    inside: bool = after < s.partition[partition, tables.W_SMS]
    return inside


@part
def room(s: State, sm: int, threads: int, registers: int, shared: int) -> int:
    """The number of further blocks of this footprint that fit on the SM."""
    n: int = min(s.free[sm, tables.F_BLOCKS], s.free[sm, tables.F_THREADS] // threads)
    if registers > 0:
        n = min(n, s.free[sm, tables.F_REGISTERS] // registers)
    if shared > 0:
        n = min(n, s.free[sm, tables.F_SHARED] // shared)
    return n


@part
def place_cluster(s: State, handle: int) -> bool:
    """Places the blocks of the grid's next cluster at once, inside the GPC with the most room for them in its
    partition.
    """
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    partition = command.partition
    most = command.cluster - 1
    best = -1
    for gpc in range(s.gpc.shape[0] - 1):
        fit = 0
        for sm in range(s.gpc[gpc], s.gpc[gpc + 1]):
            if in_partition(s, partition, sm):
                fit += room(s, sm, threads, registers, shared)
        if fit > most:
            most = fit
            best = gpc
    if best < 0:
        return False
    for _ in range(command.cluster):
        chosen = -1
        least = INF
        for sm in range(s.gpc[best], s.gpc[best + 1]):
            rank = load(s, sm, threads, registers, shared)
            if rank < least and in_partition(s, partition, sm):
                least = rank
                chosen = sm
        start_block(s, handle, chosen)
        make_dirty(s, chosen)
    return True


@reachable
def place_within(s: State, handle: int) -> int:
    """Places the grid's next cluster, or its next block in its partition; returns whether there was room."""
    clusters = s.command[handle & (s.command.shape[0] - 1)].cluster > 1
    placed = place_cluster(s, handle) if clusters else place_confined(s, handle)
    return 1 if placed else 0


def attach_within(s: State) -> None:
    """Lets the model place clusters, and blocks in partitions. Call before the first such launch on this state."""
    s.gpu["place_within"][0] = address_of(place_within, State.numba_type, types.int64)


@part
def place(s: State) -> None:
    """Places blocks of the first waiting grid until it has no more, then of the next; one that does not fit delays all.

    A grid that does not fit in its partition delays that partition only: a context has its own front end.
    """
    gpu = s.gpu[0]
    gpu.passes += 1
    k = 0
    while k < gpu.waiting:
        handle = s.waiting[k]
        command = s.command[handle & (s.command.shape[0] - 1)]
        partition = command.partition
        if partition > 0 and s.partition[partition, tables.W_HELD] == gpu.passes:
            k += 1
            continue
        if command.blocked_at == gpu.freed:  # nothing was freed since it did not fit
            placed = False
        elif command.cluster > 1 or partition > 0:
            placed = call_with(gpu.place_within, s, handle) > 0
        else:
            placed = place_one(s, handle)
        if not placed:
            command.blocked_at = gpu.freed
            if partition == 0:
                break
            s.partition[partition, tables.W_HELD] = gpu.passes
            k += 1
            continue
        if command.placed == command.blocks:
            for j in range(k, gpu.waiting - 1):
                s.waiting[j] = s.waiting[j + 1]
            gpu.waiting -= 1
        if gpu.block_issue_ns > 0.0:
            gpu.place_free_ns = gpu.now_ns + gpu.block_issue_ns * command.cluster
            return
    gpu.place = 0


@part
def start_grid(s: State, handle: int) -> None:
    """Adds the grid to those with blocks to place: behind all of its priority and above."""
    gpu = s.gpu[0]
    command = s.command[handle & (s.command.shape[0] - 1)]
    k = gpu.waiting
    while k > 0 and s.command[s.waiting[k - 1] & (s.command.shape[0] - 1)].priority < command.priority:
        s.waiting[k] = s.waiting[k - 1]
        k -= 1
    s.waiting[k] = handle
    gpu.waiting += 1
    gpu.active += 1
    gpu.place = 1
