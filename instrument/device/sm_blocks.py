"""Blocks on an SM: they start, draw on the pools what their work takes, and end. Compiled."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.heaps import heap_pop
from paellapy.instrument.device.jit import part
from paellapy.instrument.device.sm_layout import (
    B_BLOCK,
    B_COMMAND,
    B_PENDING,
    BLOCKS,
    COST,
    COST_STRIDE,
    DURATION,
    ENDED,
    ENDS_BY_TIMER,
    EPOCH,
    F_BLOCKS,
    F_REGISTERS,
    F_SHARED,
    F_THREADS,
    FIRST,
    FLAG,
    IDS,
    KERNEL,
    LATENCY,
    LAUNCH_ID,
    LEFT,
    NOT_RUN,
    NOTIFY,
    P_SERVED,
    P_WEIGHT,
    PLACED,
    POOLS,
    REGISTERS,
    SHARED,
    START,
    THREADS,
    TRACE,
    U_BUSY_NS,
    U_SINCE,
    U_WARP_NS,
    U_WARPS,
    WAIT_NS,
    WARPS,
    State,
)
from paellapy.instrument.device.sm_pools import pool_activate, pool_add, pool_rekey, pool_sync
from paellapy.instrument.device.sm_streams import finish_work, set_timer
from paellapy.instrument.records import WARP_SHIFT


@part
def jitter(seed: int, handle: int, block: int, width: float) -> float:
    """A factor in 1 ± width, from a hash (splitmix64): the same whatever the order in which blocks are placed."""
    x = np.uint64(seed) ^ (np.uint64(handle) << np.uint64(32)) ^ np.uint64(block)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return 1.0 + width * (np.float64(x >> np.uint64(11)) * 2.0**-52 - 1.0)


@part
def change_warps(s: State, sm: int, warps: int) -> None:
    """So many warps more are resident from now on, or less."""
    now = s.gpu[0].now_ns
    before = s.use[sm, U_WARPS]
    if before > 0.0:
        gone = now - s.use[sm, U_SINCE]
        s.use[sm, U_WARP_NS] += before * gone
        s.use[sm, U_BUSY_NS] += gone
    s.use[sm, U_SINCE] = now
    s.use[sm, U_WARPS] = before + warps


@part
def start_block(s: State, handle: int, sm: int) -> None:
    gpu = s.gpu[0]
    i = handle & (s.ci.shape[0] - 1)
    now = gpu.now_ns
    block = s.ci[i, PLACED]
    s.ci[i, PLACED] = block + 1
    s.free[sm, F_BLOCKS] -= 1
    s.free[sm, F_THREADS] -= s.ci[i, THREADS]
    s.free[sm, F_REGISTERS] -= s.ci[i, REGISTERS]
    s.free[sm, F_SHARED] -= s.ci[i, SHARED]
    slot = s.stack[sm, s.free[sm, F_BLOCKS]]
    s.slot[slot, B_COMMAND] = handle
    s.slot[slot, B_BLOCK] = block
    if block == 0:
        s.cf[i, START] = now
    if block + 1 == s.ci[i, BLOCKS]:
        s.cf[i, NOTIFY] = now
    number = s.ci[i, FIRST] + block
    if s.ci[i, FLAG] > 0:
        number = s.ids[s.ci[i, IDS] + block]
        if s.flag[s.ci[i, FLAG]] >= s.ci[i, EPOCH]:
            # It looks at the flag, notes its number and exits: no counter and no trace has it.
            s.ids[s.ci[i, IDS] + s.ci[i, BLOCKS] + s.ci[i, LEFT]] = number
            s.ci[i, LEFT] += 1
            s.slot[slot, B_PENDING] = NOT_RUN
            set_timer(s, now + max(s.cf[i, LATENCY], 1.0), slot)
            return
    s.lines[sm].started += np.uint64(1 + (s.ci[i, WARPS] << WARP_SHIFT))
    change_warps(s, sm, s.ci[i, WARPS])
    row = s.ci[i, TRACE]
    if row >= 0:
        record = s.trace[row + block]
        record.launch = s.ci[i, LAUNCH_ID]
        record.kernel = s.ci[i, KERNEL]
        record.sm = sm
        record.block = number
        record.start_ns = np.int64(np.floor(now))
    duration = s.cost[s.ci[i, COST] + block * s.ci[i, COST_STRIDE], DURATION]
    if duration >= 0.0:
        s.slot[slot, B_PENDING] = ENDS_BY_TIMER
        if gpu.jitter > 0.0:
            duration *= jitter(gpu.seed, handle, block, gpu.jitter)
    else:
        s.slot[slot, B_PENDING] = 0
        duration = s.cf[i, LATENCY] + s.cost[s.ci[i, COST] + block * s.ci[i, COST_STRIDE], WAIT_NS]
    set_timer(s, now + max(duration, 1.0), slot)


@part
def slot_timer(s: State, slot: int) -> None:
    """A block's timer ran out: its recorded duration is over, or it does not run, or its work begins to flow."""
    gpu = s.gpu[0]
    if s.slot[slot, B_PENDING] < 0:
        end_block(s, slot)
        return
    handle = s.slot[slot, B_COMMAND]
    i = handle & (s.ci.shape[0] - 1)
    block = s.slot[slot, B_BLOCK]
    row = s.ci[i, COST] + block * s.ci[i, COST_STRIDE]
    factor = 1.0
    if gpu.jitter > 0.0:
        factor = jitter(gpu.seed, handle, block, gpu.jitter)
    pending = 0
    for r in range(POOLS):
        amount = s.cost[row, r]
        if amount > 0.0:
            pending += 1
            pool_add(s, r, slot // s.stack.shape[1], slot, amount * factor, s.ci[i, WARPS])
    s.slot[slot, B_PENDING] = pending
    if pending == 0:
        end_block(s, slot)


@part
def make_dirty(s: State, sm: int) -> None:
    """The SM has more or less room than the placement tree says, whatever footprint that is for."""
    gpu = s.gpu[0]
    if s.dirty[1, sm] == 0:
        s.dirty[1, sm] = 1
        s.dirty[0, gpu.dirty] = sm
        gpu.dirty += 1


@part
def end_block(s: State, slot: int) -> None:
    gpu = s.gpu[0]
    handle = s.slot[slot, B_COMMAND]
    i = handle & (s.ci.shape[0] - 1)
    sm = slot // s.stack.shape[1]
    if s.slot[slot, B_PENDING] != NOT_RUN:
        row = s.ci[i, TRACE]
        if row >= 0:
            s.trace[row + s.slot[slot, B_BLOCK]].end_ns = np.int64(np.floor(gpu.now_ns))
        s.lines[sm].ended += np.uint64(1 + (s.ci[i, WARPS] << WARP_SHIFT))
        change_warps(s, sm, -s.ci[i, WARPS])
    s.stack[sm, s.free[sm, F_BLOCKS]] = slot
    s.free[sm, F_BLOCKS] += 1
    s.free[sm, F_THREADS] += s.ci[i, THREADS]
    s.free[sm, F_REGISTERS] += s.ci[i, REGISTERS]
    s.free[sm, F_SHARED] += s.ci[i, SHARED]
    make_dirty(s, sm)
    gpu.freed += 1
    gpu.block_events += 1
    if gpu.waiting > 0:
        gpu.place = 1
    s.ci[i, ENDED] += 1
    if s.ci[i, ENDED] == s.ci[i, BLOCKS]:
        gpu.active -= 1
        finish_work(s, handle)


@part
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
