"""Fair sharing in the core: start-time fair queueing of GPU time, over clients and over flows.

A *flow* is one tenant's requests for one model, or the requests of all clients that are not tenants. Its weight is the
model's share times the tenant's share. So shares of models count among models, and shares of tenants among tenants; a
model does not get more because more clients request it.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.codes import GOES
from paellapy.scheduler.core.state import State

LIMIT_KEPT_NS = 2e6  # several segments of other clients, for which a client with a limit may have had to wait


@part
def flow_of(s: State, c: int) -> int:
    """The row of a client's flows. All clients that are not tenants share one row."""
    return c if s.client[c].tenant else 0


@part
def enter(s: State, m: int, c: int) -> None:
    """Accepts a request. An idle flow starts at the common clock: it gains nothing by idling, and keeps its debts."""
    core = s.core[0]
    client = s.client[c]
    flow = s.flow[flow_of(s, c), m]
    if flow.live == 0:
        flow.share = s.model[m].share * (client.share if client.tenant else 1.0)
        core.shares += flow.share
        flow.virtual_ns = max(flow.virtual_ns, core.virtual_ns)
    flow.live += 1
    s.model[m].live += 1
    if client.live == 0:
        core.client_shares += client.share
        client.virtual_ns = max(client.virtual_ns, core.client_virtual_ns)
    client.live += 1
    core.live += 1


@part
def leave(s: State, m: int, c: int) -> None:
    core = s.core[0]
    client = s.client[c]
    flow = s.flow[flow_of(s, c), m]
    core.live -= 1
    s.model[m].live -= 1
    flow.live -= 1
    if flow.live == 0:
        core.shares -= flow.share
    client.live -= 1
    if client.live == 0:
        core.client_shares -= client.share
    if core.live == 0:  # drop rounding errors
        core.shares = 0.0
        core.client_shares = 0.0
    if s.model[m].live == 0 and s.residency[0].managed > 0 and s.weights[m].keep == GOES:
        s.residency[0].look = 1


@part
def charge(s: State, lane: int, time_ns: float, gpu_ns: float, began_ns: int) -> None:
    """Charges a completed segment: its model, and the clients of its slots in equal parts, are charged its time alone
    and its part of the GPU's time. A client with a limit may continue once its time alone is within the limit's
    fraction of the elapsed time.
    """
    core = s.core[0]
    a = s.lane[lane]
    m = a.model
    core.served_ns += time_ns
    s.model[m].used_ns += time_ns
    s.model[m].gpu_ns += gpu_ns
    if core.shares > 0.0:
        core.virtual_ns += time_ns / core.shares
    each, each_gpu = time_ns / a.taken, gpu_ns / a.taken
    for k in range(a.taken):
        c = s.slot_client[lane, k]
        client = s.client[c]
        client.used_ns += each
        client.gpu_ns += each_gpu
        client.virtual_ns += each / client.share
        flow = s.flow[flow_of(s, c), m]
        flow.virtual_ns += each / max(flow.share, 1e-9)
        if client.limit > 0.0:
            client.may_ns = max(client.may_ns, began_ns - LIMIT_KEPT_NS) + each / client.limit
    if core.client_shares > 0.0:
        core.client_virtual_ns += time_ns / core.client_shares


@part
def over_limit(s: State, lane: int, now: int) -> bool:
    """Whether all clients of a lane's requests have used up their limits; if so, notes when the first may continue."""
    core = s.core[0]
    if core.limited == 0:
        return False
    first_ns = np.inf
    for k in range(s.lane[lane].taken):
        if s.slot[lane, k] >= 0:
            client = s.client[s.slot_client[lane, k]]
            if client.limit <= 0.0 or client.may_ns <= now:
                return False
            first_ns = min(first_ns, client.may_ns)
    core.ask_at_ns = min(core.ask_at_ns, np.ceil(first_ns))
    return True


# --- the GPU's time -------------------------------------------------------------------------------------------------
# While several jobs are on the GPU, its time is divided in proportion to their demand. One clock runs at 1 ÷ the total
# demand: its advance times a job's demand is the job's part.


@part
def pass_time(s: State, now: int) -> None:
    """Advances the clock to now, before a job comes onto the GPU or completes a segment."""
    core = s.core[0]
    if core.flight > 0 and now > core.gpu_at_ns:
        ns = now - core.gpu_at_ns
        core.gpu_ns += ns
        core.gpu_clock_ns += ns / core.gpu_demand
    core.gpu_at_ns = max(core.gpu_at_ns, now)


@part
def enter_gpu(s: State, lane: int, now: int) -> None:
    """Call this before the lane is counted among those in flight."""
    core = s.core[0]
    a = s.lane[lane]
    pass_time(s, now)
    if core.flight == 0:
        core.gpu_clock_ns = core.gpu_demand = 0.0
    a.gpu_demand = max(a.demand, 1e-3)
    a.gpu_from_ns = core.gpu_clock_ns
    core.gpu_demand += a.gpu_demand


@part
def part_of_time(s: State, lane: int, now: int) -> float:
    """The lane's part of the GPU's time since the last call, or since it came onto the GPU."""
    core = s.core[0]
    a = s.lane[lane]
    pass_time(s, now)
    ns = a.gpu_demand * (core.gpu_clock_ns - a.gpu_from_ns)
    a.gpu_from_ns = core.gpu_clock_ns
    return float(ns)


@part
def leave_gpu(s: State, lane: int) -> None:
    s.core[0].gpu_demand -= s.lane[lane].gpu_demand
