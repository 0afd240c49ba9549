"""The load of a simulated GPU and its results, for both GPU models: arrivals, closed loops, records, occupancy.

The fluid model calls these functions in its own compiled loop; the block model calls the entry points at the end.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.heaps import heap_pop, heap_push
from paellapy.instrument.jit import compiled, part
from paellapy.scheduler.core.admission import LET_IN, leaves, lets_in
from paellapy.scheduler.core.codes import NEVER, NONE, QUEUE_FULL
from paellapy.scheduler.core.rings import publish, take_into
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_state import Fluid

LEARN = 0.05  # weight of the newest answer in a router's averages


@part
def limit_ns(s: State, m: int, arrival: int, deadline: int) -> float:
    """The time limit of a request: until its deadline, or its model's target."""
    return float(deadline - arrival if deadline < NEVER else s.model[m].target_ns)


@part
def arrive(f: Fluid, s: State, m: int, client: int, priority: int, deadline: int, at: int, source: int) -> None:
    """Records and submits one request; refuses it if the tables are full."""
    sim = f.sim[0]
    n = sim.records
    record = f.records[n]
    record.model, record.client, record.priority, record.source = m, client, priority, source
    record.arrival_ns, record.deadline_ns, record.started_ns, record.finish_ns = at, deadline, NEVER, at
    record.batch = 0
    record.predicted_ns = 0.0
    record.status = QUEUE_FULL
    sim.records += 1
    if sim.free == 0:
        back(f, source, at)
        return
    limit = limit_ns(s, m, at, deadline)
    asks = f.allowance.shape[0] > 0 and limit < NEVER
    if asks:
        asked = f.asked[0]
        asked.model, asked.priority, asked.deadline_ns, asked.limit_ns = m, priority, deadline, limit
        asked.entered_ns = asked.now_ns = at
        if lets_in(s, f.allowance, m, asked) != LET_IN:
            back(f, source, at)
            return
    message = f.message[0]
    message.request, message.serial, message.tag, message.model = f.free[sim.free - 1], n, n, m
    message.client, message.priority, message.arrival_ns, message.deadline_ns = client, priority, at, deadline
    if publish(s, 0, f.message.ctypes.data):
        sim.free -= 1
        sim.news = 1
    else:
        if asks:
            f.allowance[m].in_flight -= 1
        back(f, source, at)


@part
def back(f: Fluid, source: int, at: int) -> None:
    """Lets a closed-loop client think, then send its next request."""
    sim = f.sim[0]
    if source >= 0:
        again = at + max(f.clients[source].think_ns, 1)
        if again < sim.horizon_ns:
            heap_push(f.timer, f.timer_id, 0, sim.timers, np.float64(again), source)
            sim.timers += 1


@part
def load(f: Fluid, s: State) -> bool:
    """Submits all requests that are due; False when the records are full."""
    sim = f.sim[0]
    now = sim.now_ns
    while sim.next_arrival < f.arrivals.shape[0] and f.arrivals[sim.next_arrival].time_ns <= now:
        if sim.records == f.records.shape[0]:
            return False
        a = f.arrivals[sim.next_arrival]
        sim.next_arrival += 1
        arrive(f, s, a.model, a.client, a.priority, a.deadline_ns, a.time_ns, NONE)
        f.records[sim.records - 1].predicted_ns = a.predicted_ns
    while sim.timers > 0 and f.timer[0] <= now:
        if sim.records == f.records.shape[0]:
            return False
        who = f.timer_id[0]
        at = int(f.timer[0])
        heap_pop(f.timer, f.timer_id, 0, sim.timers)
        sim.timers -= 1
        c = f.clients[who]
        arrive(f, s, c.model, c.client, c.priority, NEVER, at, who)
    return True


@part
def next_load(f: Fluid) -> float:
    """When the next request comes, or a closed-loop client returns."""
    sim = f.sim[0]
    at = np.inf
    if sim.next_arrival < f.arrivals.shape[0]:
        at = np.float64(f.arrivals[sim.next_arrival].time_ns)
    if sim.timers > 0:
        at = min(at, f.timer[0])
    return float(at)


@part
def next_for_core(s: State) -> float:
    """When a deadline passes, or the core has room for another job."""
    at = s.core[0].room_at_ns
    if s.core[0].due > 0:
        at = min(at, np.float64(s.request[s.due[0]].deadline_ns))
    return float(at)


@part
def record_some(f: Fluid, s: State) -> int:
    """Moves some completions into the records and returns their number: rows become free, closed-loop clients return.
    """
    sim = f.sim[0]
    n = take_into(s, 0, f.taken.ctypes.data, f.taken.shape[0])
    for k in range(n):
        entry = f.taken[k]
        record = f.records[np.int64(entry.tag)]
        record.batch, record.status = entry.batch, entry.status
        record.started_ns, record.finish_ns = entry.started_ns, entry.finish_ns
        if record.predicted_ns > 0.0:
            sim.actual_ns += LEARN * (entry.finish_ns - record.arrival_ns - sim.actual_ns)
            sim.predicted_ns += LEARN * (record.predicted_ns - sim.predicted_ns)
        limit = limit_ns(s, record.model, record.arrival_ns, record.deadline_ns)
        if f.allowance.shape[0] > 0 and limit < NEVER:
            leaves(s, f.allowance, record.model, record.arrival_ns, entry.finish_ns, limit, entry.status)
        f.free[sim.free] = entry.request
        sim.free += 1
        back(f, record.source, entry.finish_ns)
    return int(n)


@part
def occupy(f: Fluid, since: float, ns: float, slots: float, memory: float, issue: float, jobs: int) -> None:
    """Adds an interval to the bins. Beyond the last bin, pairs are merged, so that bins cover the whole run."""
    sim = f.sim[0]
    n = f.bins.shape[0]
    end = since + ns
    while end > n * sim.bin_ns:
        for b in range(n):
            for c in range(4):
                f.bins[b, c] = f.bins[2 * b, c] + f.bins[2 * b + 1, c] if 2 * b + 1 < n else 0.0
        sim.bin_ns *= 2.0
    at = since
    b = min(int(at / sim.bin_ns), n - 1)
    while at < end:
        until = end if b == n - 1 else min(end, (b + 1) * sim.bin_ns)
        part = max(until - at, 0.0)
        f.bins[b, 0] += slots * part
        f.bins[b, 1] += memory * part
        f.bins[b, 2] += issue * part
        f.bins[b, 3] += jobs * part
        at = until
        b += 1


# Entry points for a loop in Python.


@compiled
def load_until(f: Fluid, s: State, now: float) -> bool:
    """Submits all requests that are due by now; False when the records are full."""
    f.sim[0].now_ns = now
    return load(f, s)


@compiled
def next_news(f: Fluid, s: State) -> float:
    """When there is something for the core to do, regardless of the GPU."""
    return float(min(next_load(f), next_for_core(s)))


@compiled
def record_batch(f: Fluid, s: State) -> int:
    """As `record_some`; the completions stay in `f.taken` until the next call."""
    return record_some(f, s)


@compiled
def note_warps(f: Fluid, since: float, ns: float, share: float, jobs: int) -> None:
    """Adds an interval to the occupancy over time, in which this share of the warps was resident."""
    occupy(f, since, ns, share, 0.0, 0.0, jobs)

