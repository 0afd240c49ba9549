"""Fair sharing in the core: start-time fair queueing of GPU time, over clients and over flows.

A *flow* is one tenant's requests for one model, or the requests of all clients that are not tenants. Its weight is the
model's share times the tenant's share. So shares of models count among models, and shares of tenants among tenants; a
model does not get more because more clients request it, nor because its inputs have many lengths.

Within a queue, requests have start tags: a client's next tag is its last one plus the request's time alone ÷ its share.
The clock of tags is the largest tag that has started, not GPU time: where jobs share the GPU or a batch, tags would run
ahead of GPU time, and a client that comes later would go before all others until its tags had caught up.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State

LIMIT_KEPT_NS = 2e6  # several segments of other clients, for which a client with a limit may have had to wait


@part
def flow_of(s: State, c: int) -> int:
    """The row of a client's flows. All clients that are not tenants share one row."""
    return c if s.client[c].tenant else 0


@part
def count_accepted(s: State, m: int, c: int) -> None:
    """Accepts a request. An idle flow starts at the common clock: it gains nothing by idling, and keeps its debts."""
    core = s.core[0]
    client = s.client[c]
    flow = s.flow[flow_of(s, c), s.model[m].flow]
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
def count_ended(s: State, m: int, c: int) -> None:
    core = s.core[0]
    client = s.client[c]
    flow = s.flow[flow_of(s, c), s.model[m].flow]
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
    if s.model[m].live == 0 and s.residency[0].managed > 0 and s.weights[m].keep == codes.TRANSIENT:
        s.residency[0].pending = 1


@part
def charge(s: State, instance: int, time_ns: float, gpu_ns: float, began_ns: int) -> None:
    """Charges a completed segment: its model, and the clients of its slots in equal parts, are charged its time alone
    and its part of the GPU's time. Shares count the GPU's time; a client with a limit may continue once its time alone
    is within the limit's fraction of the elapsed time.
    """
    core = s.core[0]
    inst = s.instance[instance]
    m = inst.model
    core.served_ns += time_ns
    s.model[m].used_ns += time_ns
    s.model[m].gpu_ns += gpu_ns
    if core.shares > 0.0:
        core.virtual_ns += gpu_ns / core.shares
    each, each_gpu = time_ns / inst.taken, gpu_ns / inst.taken
    for k in range(inst.taken):
        c = s.slot_client[instance, k]
        client = s.client[c]
        client.used_ns += each
        client.gpu_ns += each_gpu
        client.virtual_ns += each_gpu / client.share
        flow = s.flow[flow_of(s, c), s.model[m].flow]
        flow.virtual_ns += each_gpu / max(flow.share, 1e-9)
        if client.limit > 0.0:
            client.resume_ns = max(client.resume_ns, began_ns - LIMIT_KEPT_NS) + each / client.limit
    if core.client_shares > 0.0:
        core.client_virtual_ns += gpu_ns / core.client_shares


@part
def over_limit(s: State, instance: int, now: int) -> bool:
    """Whether all clients of an instance's requests have used up their limits; if so, notes when the first may
    continue.
    """
    core = s.core[0]
    if core.limited == 0:
        return False
    first_ns = np.inf
    for k in range(s.instance[instance].taken):
        if s.slot[instance, k] >= 0:
            client = s.client[s.slot_client[instance, k]]
            if client.limit <= 0.0 or client.resume_ns <= now:
                return False
            first_ns = min(first_ns, client.resume_ns)
    core.admit_at_ns = min(core.admit_at_ns, np.ceil(first_ns))
    return True


# --- the GPU's time -------------------------------------------------------------------------------------------------
# While several jobs are on the GPU, its time is divided in proportion to their demand. One clock runs at 1 ÷ the total
# demand: its advance times a job's demand is the job's part.


@part
def advance_gpu_clock(s: State, now: int) -> None:
    """Advances the clock to now, before a job comes onto the GPU or completes a segment."""
    core = s.core[0]
    if core.flight > 0 and now > core.gpu_at_ns:
        ns = now - core.gpu_at_ns
        core.gpu_ns += ns
        core.gpu_clock_ns += ns / core.gpu_demand
    core.gpu_at_ns = max(core.gpu_at_ns, now)


@part
def enter_gpu(s: State, instance: int, now: int) -> None:
    """Call this before the instance is counted among those in flight."""
    core = s.core[0]
    inst = s.instance[instance]
    advance_gpu_clock(s, now)
    if core.flight == 0:
        core.gpu_clock_ns = core.gpu_demand = 0.0
    inst.gpu_demand = max(inst.demand, 1e-3)
    inst.gpu_from_ns = core.gpu_clock_ns
    core.gpu_demand += inst.gpu_demand


@part
def take_gpu_time(s: State, instance: int, now: int) -> float:
    """The instance's part of the GPU's time since the last call, or since it came onto the GPU."""
    core = s.core[0]
    inst = s.instance[instance]
    advance_gpu_clock(s, now)
    ns = inst.gpu_demand * (core.gpu_clock_ns - inst.gpu_from_ns)
    inst.gpu_from_ns = core.gpu_clock_ns
    return float(ns)


@part
def leave_gpu(s: State, instance: int) -> None:
    s.core[0].gpu_demand -= s.instance[instance].gpu_demand
