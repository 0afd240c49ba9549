"""The simulated GPU's tables at the grain of segments: what runs, what it takes, the load, and what came of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paellapy.instrument.device.heaps import Floats, Ints
from paellapy.scheduler.core.admission import ALLOWANCE
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, Table

SLOTS, MEMORY, ISSUE = range(3)
BATCH = 256
MODELS_PRIORITY = -(1 << 31)  # a request without a priority of its own

SIM = np.dtype(  # [1]
    [
        ("now_ns", "f8"),
        ("core_free_ns", "f8"),  # when the core, which launches one graph after the other, can decide again
        ("horizon_ns", "f8"),  # closed-loop clients ask until then
        ("launch_ns", "f8"),  # the host's, for each launch
        ("segment_gap_ns", "f8"),  # between two graphs of a stream
        ("resume_ns", "f8"),  # a launch's way to the GPU, for a lane that ran dry
        ("bin_ns", "f8"),
        ("running", "i8"),  # lanes in Fluid.run
        ("next_arrival", "i8"),
        ("records", "i8"),
        ("free", "i8"),  # request rows in Fluid.free
        ("timers", "i8"),
        ("events", "i8"),  # segments done
        ("news", "i8"),  # 1: something for the core to see
        ("queues", "i8"),  # of the hardware; 0: one for every job
        ("launched", "i8"),
    ],
    align=True,
)
RECORD = np.dtype(
    [
        ("model", "i4"),
        ("client", "i4"),
        ("priority", "i4"),
        ("batch", "i4"),
        ("status", "i4"),
        ("source", "i4"),  # closed-loop client it came from, or NONE
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("started_ns", "i8"),
        ("finish_ns", "i8"),
    ],
    align=True,
)
ARRIVAL = np.dtype(
    [("time_ns", "i8"), ("deadline_ns", "i8"), ("model", "i4"), ("priority", "i4"), ("client", "i4")], align=True
)
LOOP_CLIENT = np.dtype([("think_ns", "i8"), ("model", "i4"), ("priority", "i4"), ("client", "i4")], align=True)


class Programs(NamedTuple):
    """What the programs take of the GPU: see the same fields of `Fluid`."""

    use: Floats
    work: Floats
    busy: Floats
    copy: Floats
    kernels: Floats


class Fluid(NamedTuple):
    """The simulated GPU, its load, and what came of it. L lanes, M models, B sizes, S segments."""

    sim: Table  # SIM[1]
    use: Floats  # [M, B, S + 1, 3] share of each resource at rate 1; the last row is the whole program's
    work: Floats  # [M, B, S + 1] time alone
    busy: Floats  # [M, B] part of its time that a program wants the GPU, where that was measured; else 0
    copy: Floats  # [M] time it takes to copy a request's inputs into a lane
    kernels: Floats  # [M, B] of a whole program
    run: Ints  # [L] lanes with something launched
    segment: Ints  # [L] what runs, or WHOLE
    behind: Ints  # [L] launches queued behind it
    left: Floats  # [L] work
    delay: Floats  # [L] until the launch reaches the GPU
    rate: Floats  # [L]
    order: Ints  # [L] its launch was the so-manieth
    waits: Ints  # [L] 1: it waits for others in its hardware queue
    idle: Ints  # [L] 1: the lane has been started and has run dry
    opened: Floats  # [L] when it last began to take requests
    generation: Ints  # [L] the lane's own, at that time
    arrivals: Table  # ARRIVAL, by time
    clients: Table  # LOOP_CLIENT: each has one request at a time
    timer: Floats  # heap: when loop clients come back
    timer_id: Ints
    free: Ints  # request rows
    records: Table  # RECORD
    taken: Table  # COMPLETION, scratch
    allowance: Table  # ALLOWANCE[M]; without rows everything is let in
    bins: Floats  # [bins, 4] time × occupancy of slots, memory and issue, and time × jobs running


def new_fluid(state: State, program: Programs, arrivals: Table, clients: Table, bins: int) -> Fluid:
    """An idle GPU and a load for it. Times and rows are the caller's to set; `bins` is an even number."""
    lanes, rows = len(state.lane), len(state.request)
    ints = np.int64
    sim = np.zeros(1, SIM)
    sim["news"] = 1  # the models are yet to be opened
    return Fluid(
        sim=sim,
        use=program.use,
        work=program.work,
        busy=program.busy,
        copy=program.copy,
        kernels=program.kernels,
        run=np.zeros(lanes, ints),
        segment=np.zeros(lanes, ints),
        behind=np.zeros(lanes, ints),
        left=np.zeros(lanes),
        delay=np.zeros(lanes),
        rate=np.zeros(lanes),
        order=np.zeros(lanes, ints),
        waits=np.zeros(lanes, ints),
        idle=np.ones(lanes, ints),
        opened=np.zeros(lanes),
        generation=np.zeros(lanes, ints),
        arrivals=arrivals,
        clients=clients,
        timer=np.zeros(len(clients) + 1),
        timer_id=np.zeros(len(clients) + 1, ints),
        free=np.arange(rows, dtype=ints),
        records=np.zeros(max(1024, len(arrivals)), RECORD),
        taken=np.zeros(BATCH, COMPLETION),
        allowance=np.zeros(0, ALLOWANCE),
        bins=np.zeros((bins, 4)),
    )


def more_records(f: Fluid) -> Fluid:
    """Room for twice as many."""
    return f._replace(records=np.concatenate([f.records, np.zeros_like(f.records)]))
