"""Blocks on an SM: they start, draw their work from the pools, and end. Compiled."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.heaps import heap_pop
from paellapy.instrument.device.sm_layout import (
    B_BLOCK,
    B_COMMAND,
    B_PENDING,
    DURATION,
    ENDS_BY_TIMER,
    F_BLOCKS,
    F_REGISTERS,
    F_SHARED,
    F_THREADS,
    NOT_RUN,
    P_SERVED,
    P_WEIGHT,
    POOLS,
    U_BUSY_NS,
    U_SINCE,
    U_WARP_NS,
    U_WARPS,
    WAIT_NS,
    State,
)
from paellapy.instrument.device.sm_pools import pool_activate, pool_add, pool_rekey, pool_sync
from paellapy.instrument.device.sm_streams import finish_work, set_timer
from paellapy.instrument.jit import part
from paellapy.instrument.records import WARP_SHIFT


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
    command = s.command[handle & (s.command.shape[0] - 1)]
    now = gpu.now_ns
    block = command.placed
    command.placed = block + 1
    s.free[sm, F_BLOCKS] -= 1
    s.free[sm, F_THREADS] -= command.threads
    s.free[sm, F_REGISTERS] -= command.registers
    s.free[sm, F_SHARED] -= command.shared
    slot = s.stack[sm, s.free[sm, F_BLOCKS]]
    s.slot[slot, B_COMMAND] = handle
    s.slot[slot, B_BLOCK] = block
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
            s.slot[slot, B_PENDING] = NOT_RUN
            set_timer(s, now + max(command.latency_ns, 1.0), slot)
            return
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
    duration = s.cost[command.cost + block * command.cost_stride, DURATION]
    if duration >= 0.0:
        s.slot[slot, B_PENDING] = ENDS_BY_TIMER
        if gpu.jitter > 0.0:
            duration *= jitter(gpu.seed, handle, block, gpu.jitter)
    else:
        s.slot[slot, B_PENDING] = 0
        duration = command.latency_ns + s.cost[command.cost + block * command.cost_stride, WAIT_NS]
    set_timer(s, now + max(duration, 1.0), slot)


@part
def slot_timer(s: State, slot: int) -> None:
    """Handles a block's timer: its given duration is over, or it does not run, or its work begins to flow."""
    gpu = s.gpu[0]
    if s.slot[slot, B_PENDING] < 0:
        end_block(s, slot)
        return
    handle = s.slot[slot, B_COMMAND]
    command = s.command[handle & (s.command.shape[0] - 1)]
    block = s.slot[slot, B_BLOCK]
    row = command.cost + block * command.cost_stride
    factor = 1.0
    if gpu.jitter > 0.0:
        factor = jitter(gpu.seed, handle, block, gpu.jitter)
    pending = 0
    for r in range(POOLS):
        amount = s.cost[row, r]
        if amount > 0.0:
            pending += 1
            pool_add(s, r, slot // s.stack.shape[1], slot, amount * factor, command.warps)
    s.slot[slot, B_PENDING] = pending
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
    handle = s.slot[slot, B_COMMAND]
    command = s.command[handle & (s.command.shape[0] - 1)]
    sm = slot // s.stack.shape[1]
    if s.slot[slot, B_PENDING] != NOT_RUN:
        row = command.trace
        if row >= 0:
            s.trace[row + s.slot[slot, B_BLOCK]].end_ns = np.int64(np.floor(gpu.now_ns))
        s.lines[sm].ended += np.uint64(1 + (command.warps << WARP_SHIFT))
        change_warps(s, sm, -command.warps)
    s.stack[sm, s.free[sm, F_BLOCKS]] = slot
    s.free[sm, F_BLOCKS] += 1
    s.free[sm, F_THREADS] += command.threads
    s.free[sm, F_REGISTERS] += command.registers
    s.free[sm, F_SHARED] += command.shared
    make_dirty(s, sm)
    gpu.freed += 1
    gpu.block_events += 1
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
    s.pool[r, sm, P_SERVED] = s.heap[base]
    heap_pop(s.heap, s.heap_id, base, s.pool_n[r, sm])
    s.pool_n[r, sm] -= 1
    s.pool[r, sm, P_WEIGHT] -= s.command[s.slot[slot, B_COMMAND] & (s.command.shape[0] - 1)].warps
    pool_rekey(s, r, sm)
    if s.pool_n[r, sm] == 0:
        pool_activate(s, r, -1)
    s.slot[slot, B_PENDING] -= 1
    if s.slot[slot, B_PENDING] == 0:
        end_block(s, slot)
