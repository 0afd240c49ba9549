"""Fair sharing in the core: start-time fair queueing over GPU time, over clients and over what each asks of a model.

A *flow* is one tenant's requests for one model, or those of all clients that are no tenants. Its weight is the model's
share times the tenant's. So shares of models count among models, and shares of tenants among tenants; and a model does
not get more because more clients ask for it.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.jit import part
from paellapy.scheduler.core.codes import GOES
from paellapy.scheduler.core.state import State

LIMIT_KEPT_NS = 2e6  # several segments of others, for which a client with a limit may have had to wait


@part
def flow_of(s: State, c: int) -> int:
    """The row of a client's flows. Most clients are no tenants: theirs lie side by side."""
    return c if s.client[c].tenant else 0


@part
def enter(s: State, m: int, c: int) -> None:
    """A request is accepted. Who was idle starts at the common clock: idleness earns nothing, and debts remain."""
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
    if core.live == 0:  # what additions and subtractions in another order have left over
        core.shares = 0.0
        core.client_shares = 0.0
    if s.model[m].live == 0 and s.residency[0].managed > 0 and s.weights[m].keep == GOES:
        s.residency[0].look = 1


@part
def charge(s: State, lane: int, time_ns: float, gpu_ns: float, began_ns: int) -> None:
    """A segment is done: its model, and the clients of its slots alike, have had its time alone, and their part of the
    GPU's time. A client with a limit may go on once its time alone is down to that part of the time since.
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
    """Whether the client of a lane's oldest request has had what its limit allows; the core comes back when not."""
    core = s.core[0]
    if core.limited == 0:
        return False
    may_ns = s.client[s.lane[lane].client].may_ns
    if s.client[s.lane[lane].client].limit <= 0.0 or may_ns <= now:
        return False
    core.ask_at_ns = min(core.ask_at_ns, np.ceil(may_ns))
    return True


# --- the GPU's time -------------------------------------------------------------------------------------------------
# While several jobs are on the GPU, its time is theirs in proportion to their demand. One clock runs at 1 ÷ the demand
# of all: what it has moved on, times a job's own demand, is the job's part.


@part
def pass_time(s: State, now: int) -> None:
    """Bring the clock up to now, before a job comes onto the GPU or has something done."""
    core = s.core[0]
    if core.flight > 0 and now > core.gpu_at_ns:
        ns = now - core.gpu_at_ns
        core.gpu_ns += ns
        core.gpu_clock_ns += ns / core.gpu_demand
    core.gpu_at_ns = max(core.gpu_at_ns, now)


@part
def enter_gpu(s: State, lane: int, now: int) -> None:
    """Before the lane is counted among those in flight."""
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
    """The lane's part of the time since it was asked last, or since it came."""
    core = s.core[0]
    a = s.lane[lane]
    pass_time(s, now)
    ns = a.gpu_demand * (core.gpu_clock_ns - a.gpu_from_ns)
    a.gpu_from_ns = core.gpu_clock_ns
    return float(ns)


@part
def leave_gpu(s: State, lane: int) -> None:
    s.core[0].gpu_demand -= s.lane[lane].gpu_demand
