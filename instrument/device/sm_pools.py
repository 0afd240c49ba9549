"""Shared rates: memory traffic, fp32 and tensor flops, given to SMs and divided over their blocks. Compiled.

A pool gives each SM with demand the same rate, min(total / demanding SMs, one SM's limit), and an SM divides its rate
over its blocks by warps. So a pool has one clock, which counts the work that every demanding SM has received; on that
clock an SM's next completion only moves when its own blocks change. One tournament tree over the SMs per pool and a
small heap per SM therefore give processor sharing of the whole GPU at O(log) per block, for any load.
"""

from __future__ import annotations

from paellapy.instrument.device.heaps import heap_push, tree_set
from paellapy.instrument.device.sm_layout import (
    C_ACTIVE,
    C_CLOCK,
    C_PER_SM,
    C_RATE,
    C_TOTAL,
    INF,
    P_CLOCK,
    P_SERVED,
    P_WEIGHT,
    State,
)
from paellapy.instrument.jit import part


@part
def pool_rekey(s: State, r: int, sm: int) -> None:
    """Updates the SM's share to the pool's clock, then sets the clock value at which its next block is served."""
    base = (r * s.free.shape[0] + sm) * s.stack.shape[1]
    if s.pool_n[r, sm] == 0:
        tree_set(s.tree[r], sm, INF)
    else:
        left = (s.heap[base] - s.pool[r, sm, P_SERVED]) * s.pool[r, sm, P_WEIGHT]
        tree_set(s.tree[r], sm, s.clock[r, C_CLOCK] + max(left, 0.0))


@part
def pool_sync(s: State, r: int, sm: int) -> None:
    if s.pool_n[r, sm] > 0:
        gained = s.clock[r, C_CLOCK] - s.pool[r, sm, P_CLOCK]
        s.pool[r, sm, P_SERVED] += gained / s.pool[r, sm, P_WEIGHT]
    else:
        s.pool[r, sm, P_SERVED] = 0.0
        s.pool[r, sm, P_WEIGHT] = 0.0
    s.pool[r, sm, P_CLOCK] = s.clock[r, C_CLOCK]


@part
def pool_activate(s: State, r: int, change: int) -> None:
    s.clock[r, C_ACTIVE] += change
    active = s.clock[r, C_ACTIVE]
    if active > 0:
        s.clock[r, C_RATE] = min(s.clock[r, C_TOTAL] / active, s.clock[r, C_PER_SM])
    else:
        s.clock[r, C_CLOCK] = 0.0  # no SM uses a time on this clock: restart it, so that it keeps its precision


@part
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


@part
def pool_due(s: State, r: int) -> float:
    if s.clock[r, C_ACTIVE] == 0.0:
        return INF
    due: float = s.gpu[0].clocks_at_ns + (s.tree[r, 1] - s.clock[r, C_CLOCK]) / s.clock[r, C_RATE]
    return due
