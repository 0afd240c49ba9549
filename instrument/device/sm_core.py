"""The compiled core of the SM model: the next event, and its time. No Python objects; time is float64 nanoseconds."""

from __future__ import annotations

from typing import Any

from numba import types
from numpy.typing import NDArray

from paellapy.instrument.device.heaps import Ints, heap_pop, tree_first
from paellapy.instrument.device.sm_blocks import pool_serve, slot_timer
from paellapy.instrument.device.sm_layout import (
    C_ACTIVE,
    C_CLOCK,
    C_RATE,
    IDLE,
    INF,
    POOLS,
    Q_TIMER,
    REACHED,
    REPORTED,
    S_CURRENT,
    STOPPED,
    State,
)
from paellapy.instrument.device.sm_place import place, start_grid
from paellapy.instrument.device.sm_pools import pool_due
from paellapy.instrument.device.sm_program import Commands
from paellapy.instrument.device.sm_streams import drain_todo, finish_work, link_new, look_at
from paellapy.instrument.jit import address_of, compiled, part, reachable


@part
def next_time(s: State) -> float:
    gpu = s.gpu[0]
    at = INF
    if gpu.timed > 0:
        at = s.timed[0]
    if gpu.ready > 0 and gpu.active < gpu.grid_limit:
        at = min(at, max(gpu.now_ns, gpu.front_free_ns))
    if gpu.place != 0:
        at = min(at, max(gpu.now_ns, gpu.place_free_ns))
    for r in range(POOLS):
        at = min(at, pool_due(s, r))
    return at


@part
def advance(s: State, at: float) -> None:
    """Advances the time and the pools' clocks; a clock whose next completion is due is set to it exactly."""
    gpu = s.gpu[0]
    for r in range(POOLS):
        if s.clock[r, C_ACTIVE] > 0.0:
            key = s.tree[r, 1]
            if pool_due(s, r) <= at:
                s.clock[r, C_CLOCK] = key
            else:
                s.clock[r, C_CLOCK] = min(key, s.clock[r, C_CLOCK] + s.clock[r, C_RATE] * (at - gpu.clocks_at_ns))
    gpu.clocks_at_ns = at
    gpu.now_ns = at


@part
def step(s: State, at: float) -> None:
    """Handles all events at one time: ends first, so that placement sees everything that is free and ready."""
    gpu = s.gpu[0]
    advance(s, at)
    while gpu.timed > 0 and s.timed[0] <= at:
        identity = s.timed_id[0]
        heap_pop(s.timed, s.timed_id, 0, gpu.timed)
        gpu.timed -= 1
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
    while gpu.ready > 0 and gpu.active < gpu.grid_limit and gpu.front_free_ns <= at:
        handle = s.ready_id[0]
        heap_pop(s.ready, s.ready_id, 0, gpu.ready)
        gpu.ready -= 1
        start_grid(s, handle)
        gpu.front_free_ns = at + gpu.grid_issue_ns
    if gpu.place != 0 and gpu.place_free_ns <= at:
        place(s)


@reachable
def run(s: State, until: float, stop: int) -> int:
    """Advances to `until`, or until nothing can happen, or (`stop`, not 0) until a completion can be fetched."""
    gpu = s.gpu[0]
    link_new(s)
    while True:
        if stop and gpu.unreported > 0:
            return STOPPED
        at = next_time(s)
        if at == INF or at > until:
            gpu.next_ns = at
            if until < INF and until > gpu.now_ns:
                gpu.now_ns = until  # the clocks only move with events, so that stopping in between changes nothing
            return IDLE if at == INF else REACHED
        step(s, at)


def next_event(s: State) -> float:
    """When the next event happens: advances to a time before all events, and so changes nothing."""
    run(s, -INF, 0)
    return float(s.gpu["next_ns"][0])


@compiled
def submit_again(table: NDArray[Any], commands: Commands, last_graph: int, at: float, handle: int) -> int:
    """Submits recorded commands again, from `handle` on; returns how many graph numbers they take after `last_graph`.
    """
    rows, kernels, graphs = commands
    for k in range(rows.shape[0]):
        i = (handle + k) & (table.shape[0] - 1)
        table[i] = rows[k]
        table[i].submit_ns = at
    taken = 0
    for k in range(kernels.shape[0]):
        table[(handle + kernels[k]) & (table.shape[0] - 1)].graph = last_graph + 1 + graphs[k]
        taken = max(taken, graphs[k] + 1)
    return taken


@compiled
def fetch_completed(s: State, into: Ints) -> None:
    """Copies the completions since the last call, in order of time; `into` has room for all of them."""
    gpu = s.gpu[0]
    handle = gpu.done_head
    for k in range(gpu.unreported):
        into[k] = handle
        command = s.command[handle & (s.command.shape[0] - 1)]
        command.status = REPORTED
        handle = command.done_link
    gpu.unreported = 0


def address_of_run() -> int:
    """The address of `run`, for loops: otherwise each would contain a compiled copy of the whole model."""
    return address_of(run, State.numba_type, types.float64, types.int64)
