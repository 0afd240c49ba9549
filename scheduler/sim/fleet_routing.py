"""Routers of a simulated cluster: they assign each request of a period to a GPU, by the reports of that period.

`predicted` keeps, for every router and model, a tree of the GPUs' estimates, so that a choice takes log(GPUs) steps. A
router knows the requests that it has sent since the last report, and assumes that the other routers have sent as many.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.heaps import tree_first, tree_rebuild, tree_set
from paellapy.instrument.jit import compiled, part
from paellapy.scheduler.core.atomics import call_advance
from paellapy.scheduler.core.codes import NEVER, NONE
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.sim.fleet_state import INBOX, PREDICTED, ROUND_ROBIN, TWO_CHOICES, Fleet
from paellapy.scheduler.sim.fluid import MORE_RECORDS
from paellapy.scheduler.sim.fluid_state import FACTOR, GAIN, LIVE


@part
def draw(f: Fleet, n: int) -> int:
    """A random number below n (xorshift)."""
    x = f.fleet[0].random
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    f.fleet[0].random = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(n)))


@part
def estimate(f: Fleet, router: int, gpu: int, model: int) -> float:
    """When a request sent now would be done, in ns from now."""
    if f.up[gpu] == 0 or f.row[gpu, model] == NONE or f.arrived[gpu] >= INBOX:
        return np.inf
    added = f.added_ns[router, gpu] * f.fleet[0].routers
    factor = f.report[gpu, f.report.shape[1] + FACTOR]
    return float((f.report[gpu, f.row[gpu, model]] + added) * factor)


@part
def load_of(f: Fleet, router: int, gpu: int) -> float:
    """The number of requests at a GPU, as far as the router knows."""
    if f.arrived[gpu] >= INBOX:
        return np.inf
    return float(f.report[gpu, f.report.shape[1] + LIVE] + f.sent[router, gpu] * f.fleet[0].routers)


@part
def choose(f: Fleet, router: int, model: int) -> int:
    """The chosen GPU, or NONE."""
    hosts = f.hosts[model]
    if hosts == 0:
        return NONE
    routing = f.fleet[0].routing
    if routing == ROUND_ROBIN:
        f.turn[model] += 1
        return int(f.host[model, f.turn[model] % hosts])
    if routing == TWO_CHOICES:
        one, other = f.host[model, draw(f, hosts)], f.host[model, draw(f, hosts)]
        return int(one if load_of(f, router, one) <= load_of(f, router, other) else other)
    keys = f.tree[router, model]
    gpu = tree_first(keys)
    return int(NONE if keys[1] == np.inf else gpu)


@part
def key_of(f: Fleet, router: int, gpu: int, model: int) -> float:
    """The key that the router minimizes; infinite for a GPU without the model."""
    if f.fleet[0].routing == PREDICTED:
        return estimate(f, router, gpu, model)
    return load_of(f, router, gpu) if f.up[gpu] == 1 and f.row[gpu, model] != NONE else np.inf


@part
def send(f: Fleet, asked: Table, i: int, router: int, gpu: int) -> None:
    a = asked[i]
    m = a.model
    row = f.row[gpu, m]
    entry = f.inbox[gpu, f.arrived[gpu]]
    entry.time_ns, entry.deadline_ns, entry.model, entry.priority, entry.client = a.time_ns, NEVER, row, 0, 0
    entry.predicted_ns = f.report[gpu, row] + f.added_ns[router, gpu] * f.fleet[0].routers
    f.arrived[gpu] += 1
    a.gpu, a.record = gpu, f.records[gpu]
    a.sent += 1
    f.records[gpu] += 1
    f.added_ns[router, gpu] += f.step_ns[gpu, m] / f.report[gpu, f.report.shape[1] + GAIN]
    f.sent[router, gpu] += 1
    if f.fleet[0].routing < TWO_CHOICES:
        for other in range(f.row.shape[1]):
            if f.row[gpu, other] != NONE:
                tree_set(f.tree[router, other], gpu, key_of(f, router, gpu, other))


@compiled
def route(f: Fleet, asked: Table, first: int, last: int) -> None:
    """Routes the requests of a period in order of time. All reports must be new."""
    gpus, models = f.row.shape
    f.added_ns[:] = 0.0
    f.sent[:] = 0
    f.arrived[:] = 0
    if f.fleet[0].routing < TWO_CHOICES:
        for router in range(f.fleet[0].routers):
            for m in range(models):
                keys = f.tree[router, m]
                for gpu in range(gpus):
                    keys[keys.shape[0] // 2 + gpu] = key_of(f, router, gpu, m)
                tree_rebuild(keys)
    for i in range(first, last):
        router = 0 if f.fleet[0].routers == 1 else draw(f, f.fleet[0].routers)
        gpu = choose(f, router, asked[i].model)
        if gpu == NONE or f.arrived[gpu] >= INBOX:
            f.fleet[0].unplaced += 1
            asked[i].gpu = NONE
            continue
        send(f, asked, i, router, gpu)


@compiled
def advance_some(f: Fleet, function: int, first: int, last: int, end: float) -> int:
    """Advances GPUs first … last - 1 to `end`; returns the GPU that needs room for records, or NONE if all are done."""
    for gpu in range(first, last):
        if f.up[gpu] == 1:
            if call_advance(np.uint64(function), f.fluid_at[gpu], f.state_at[gpu], end) == MORE_RECORDS:
                return gpu
            for k in range(f.arrived[gpu]):  # requests left in the inbox are lost
                f.inbox[gpu, k].time_ns = NEVER
    return int(NONE)
