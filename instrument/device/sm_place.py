"""Placement: the SM for a grid's next block, in its window, in its cluster's GPC, in order of priority. Compiled.

Few models use windows or clusters, so placement in them is compiled for the first launch that needs it.
"""

from __future__ import annotations

import numpy as np
from numba import types

from paellapy.instrument.device.heaps import tree_first, tree_rebuild, tree_set
from paellapy.instrument.device.sm_blocks import make_dirty, start_block
from paellapy.instrument.device.sm_layout import (
    F_BLOCKS,
    F_REGISTERS,
    F_SHARED,
    F_THREADS,
    INF,
    PLACE_TREE,
    W_FIRST,
    W_HELD,
    W_SMS,
    State,
)
from paellapy.instrument.jit import address_of, part, reachable
from paellapy.instrument.jit_call import call_with


@part
def load(s: State, sm: int, threads: int, registers: int, shared: int) -> float:
    """The SM's rank for a block of this footprint: the SM with the most room first; infinite where it does not fit."""
    if (
        s.free[sm, F_BLOCKS] < 1
        or s.free[sm, F_THREADS] < threads
        or s.free[sm, F_REGISTERS] < registers
        or s.free[sm, F_SHARED] < shared
    ):
        return INF
    return -np.float64(s.free[sm, F_THREADS])


@part
def refresh_tree(s: State, threads: int, registers: int, shared: int) -> None:
    """Updates the placement tree for this footprint; if it was the last one too, only dirty SMs have changed."""
    gpu = s.gpu[0]
    if gpu.fp_threads != threads or gpu.fp_registers != registers or gpu.fp_shared != shared:
        gpu.fp_threads, gpu.fp_registers, gpu.fp_shared = threads, registers, shared
        for sm in range(s.free.shape[0]):
            s.tree[PLACE_TREE, s.tree.shape[1] // 2 + sm] = load(s, sm, threads, registers, shared)
        tree_rebuild(s.tree[PLACE_TREE])
        for k in range(gpu.dirty):
            s.dirty[1, s.dirty[0, k]] = 0
    else:
        for k in range(gpu.dirty):
            sm = s.dirty[0, k]
            s.dirty[1, sm] = 0
            tree_set(s.tree[PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    gpu.dirty = 0


@part
def place_one(s: State, handle: int) -> bool:
    """Places the grid's next block on the SM with the most room."""
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    refresh_tree(s, threads, registers, shared)
    if s.tree[PLACE_TREE, 1] == INF:
        return False
    sm = tree_first(s.tree[PLACE_TREE])
    start_block(s, handle, sm)
    tree_set(s.tree[PLACE_TREE], sm, load(s, sm, threads, registers, shared))
    return True


@part
def place_confined(s: State, handle: int) -> bool:
    """Places the grid's next block on the SM of its window with the most room, the lowest on a tie as in the tree."""
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    first = s.window[command.window, W_FIRST]
    chosen = -1
    least = INF
    for k in range(first, first + s.window[command.window, W_SMS]):
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
def in_window(s: State, window: int, sm: int) -> bool:
    after = sm - s.window[window, W_FIRST]
    if after < 0:
        after += s.free.shape[0]
    inside: bool = after < s.window[window, W_SMS]
    return inside


@part
def room(s: State, sm: int, threads: int, registers: int, shared: int) -> int:
    """The number of further blocks of this footprint that fit on the SM."""
    n: int = min(s.free[sm, F_BLOCKS], s.free[sm, F_THREADS] // threads)
    if registers > 0:
        n = min(n, s.free[sm, F_REGISTERS] // registers)
    if shared > 0:
        n = min(n, s.free[sm, F_SHARED] // shared)
    return n


@part
def place_cluster(s: State, handle: int) -> bool:
    """Places the blocks of the grid's next cluster at once, inside the GPC with the most room for them in its window.
    """
    command = s.command[handle & (s.command.shape[0] - 1)]
    threads, registers, shared = command.threads, command.registers, command.shared
    window = command.window
    most = command.cluster - 1
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
    for _ in range(command.cluster):
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


@reachable
def place_within(s: State, handle: int) -> int:
    """Places the grid's next cluster, or its next block in its window; returns whether there was room."""
    clusters = s.command[handle & (s.command.shape[0] - 1)].cluster > 1
    placed = place_cluster(s, handle) if clusters else place_confined(s, handle)
    return 1 if placed else 0


def attach_within(s: State) -> None:
    """Lets the model place clusters, and blocks in windows. Call before the first such launch on this state."""
    s.gpu["place_within"][0] = address_of(place_within, State.numba_type, types.int64)


@part
def place(s: State) -> None:
    """Places blocks: of the first waiting grid until it has no more or does not fit; with backfill, then of the next.

    Without backfill, a grid that does not fit in its window delays that window only: a context has its own front end.
    """
    gpu = s.gpu[0]
    gpu.passes += 1
    k = 0
    while k < gpu.waiting:
        handle = s.waiting[k]
        command = s.command[handle & (s.command.shape[0] - 1)]
        window = command.window
        if window > 0 and s.window[window, W_HELD] == gpu.passes:
            k += 1
            continue
        if command.blocked_at == gpu.freed:  # nothing was freed since it did not fit
            placed = False
        elif command.cluster > 1 or window > 0:
            placed = call_with(gpu.place_within, s, handle) > 0
        else:
            placed = place_one(s, handle)
        if not placed:
            command.blocked_at = gpu.freed
            if gpu.backfill == 0:
                if window == 0:
                    break
                s.window[window, W_HELD] = gpu.passes
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
