"""The compiled core of the SM model: what happens next, and when. No Python objects; time is float64 nanoseconds."""

from __future__ import annotations

from pathlib import Path

from paellapy.instrument.device.heaps import Floats, Ints, heap_pop, tree_first
from paellapy.instrument.device.jit import compiled, part
from paellapy.instrument.device.sm_blocks import pool_serve, slot_timer
from paellapy.instrument.device.sm_layout import (
    ACTIVE,
    C_ACTIVE,
    C_CLOCK,
    C_RATE,
    CLOCKS_AT,
    DONE_HEAD,
    DONE_LINK,
    FRONT_FREE,
    GRAPH,
    GRID_ISSUE,
    GRID_LIMIT,
    IDLE,
    INF,
    NOW,
    PLACE,
    PLACE_FREE,
    POOLS,
    Q_TIMER,
    REACHED,
    READY_N,
    REPORTED,
    S_CURRENT,
    STATUS,
    STOPPED,
    SUBMIT,
    TIMED_N,
    UNREPORTED,
    State,
)
from paellapy.instrument.device.sm_place import place, start_grid
from paellapy.instrument.device.sm_pools import pool_due
from paellapy.instrument.device.sm_program import Commands
from paellapy.instrument.device.sm_streams import drain_todo, finish_work, link_new, look_at


@part
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


@part
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


@part
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
def submit_again(ci: Ints, cf: Floats, commands: Commands, last_graph: int, at: float, handle: int) -> int:
    """Commands as they once were, from `handle` on; how many numbers of graphs they take after `last_graph`."""
    ints, floats, kernels, graphs = commands
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


# The files of all code and constants that are folded into what is compiled here.
PARTS = tuple(Path(__file__).with_name(f"{m}.py") for m in (
    "heaps", "sm_blocks", "sm_core", "sm_layout", "sm_place", "sm_pools", "sm_program", "sm_streams"
))  # fmt: skip
