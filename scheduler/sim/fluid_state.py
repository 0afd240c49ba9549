"""The simulated GPU's tables at the grain of segments: what runs, what it takes, the load, and what came of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paellapy.instrument.device.heaps import Floats, Ints
from paellapy.instrument.device.table_set import TableSet, table, table_set
from paellapy.scheduler.core.admission import ALLOWANCE, ASKED
from paellapy.scheduler.core.codes import NONE, SUBMIT
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION, Table, Words

SLOTS, MEMORY, ISSUE, COMPUTE = range(4)
BATCH = 256
# The end of Fluid.report: what the GPU gives when several jobs share it, what answers took against what was predicted,
# requests that wait or run.
GAIN, FACTOR, LIVE = -3, -2, -1
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
        # what answers took against what was predicted, newer ones more: of a GPU that a router sends requests to
        ("actual_ns", "f8"),
        ("predicted_ns", "f8"),
        ("orders", "i8"),  # of the core's about weights, that were carried out
        ("line", "i8"),  # models in Fluid.line
        ("copied", "i8"),  # chunks of the first of them
        ("chunk_at_ns", "f8"),  # when the next is there
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
        ("predicted_ns", "f8"),  # how long it was to take, by the router that sent it; else 0
    ],
    align=True,
)
ARRIVAL = np.dtype(
    [
        ("time_ns", "i8"),
        ("deadline_ns", "i8"),
        ("model", "i4"),
        ("priority", "i4"),
        ("client", "i4"),
        ("predicted_ns", "f8"),
    ],
    align=True,
)
LOOP_CLIENT = np.dtype([("think_ns", "i8"), ("model", "i4"), ("priority", "i4"), ("client", "i4")], align=True)


class Programs(NamedTuple):
    """What the programs take of the GPU: see the same fields of `Fluid`."""

    use: Floats
    work: Floats
    busy: Floats
    copy: Floats
    kernels: Floats


@table_set
class Fluid(TableSet):
    """The simulated GPU, its load, and what came of it."""

    sim: Table = table(SIM, 1)
    # share of each resource at rate 1; the last row is the whole program's
    use: Floats = table(np.float64, "models", "sizes", "launches", 4)
    work: Floats = table(np.float64, "models", "sizes", "launches")  # time alone
    # part of its time that a program wants the GPU, where that was measured; else 0
    busy: Floats = table(np.float64, "models", "sizes")
    copy: Floats = table(np.float64, "models")  # time it takes to copy a request's inputs into a lane
    kernels: Floats = table(np.float64, "models", "sizes")  # of a whole program
    run: Ints = table(np.int64, "lanes")  # lanes with something launched
    segment: Ints = table(np.int64, "lanes")  # what runs, or WHOLE
    behind: Ints = table(np.int64, "lanes")  # launches queued behind it
    left: Floats = table(np.float64, "lanes")  # work
    delay: Floats = table(np.float64, "lanes")  # until the launch reaches the GPU
    rate: Floats = table(np.float64, "lanes")
    strict: Floats = table(np.float64, "lanes")  # the same if priorities were all that counts
    order: Ints = table(np.int64, "lanes")  # its launch was the so-manieth
    waits: Ints = table(np.int64, "lanes")  # 1: it waits for others in its hardware queue
    idle: Ints = table(np.int64, "lanes")  # 1: the lane has been started and has run dry
    opened: Floats = table(np.float64, "lanes")  # when it last began to take requests
    generation: Ints = table(np.int64, "lanes")  # the lane's own, at that time
    arrivals: Table = table(ARRIVAL, "arrivals")  # by time
    clients: Table = table(LOOP_CLIENT, "clients")  # each has one request at a time
    timer: Floats = table(np.float64, "timers")  # heap: when loop clients come back
    timer_id: Ints = table(np.int64, "timers")
    free: Ints = table(np.int64, "requests")  # request rows
    records: Table = table(RECORD, "records")
    asked: Table = table(ASKED, 1)  # scratch: the request that comes now, for admission,
    message: Table = table(SUBMISSION, 1)  # and for the core
    taken: Table = table(COMPLETION, BATCH)  # scratch
    allowance: Table = table(ALLOWANCE, "models")  # without rows everything is let in
    report: Floats = table(np.float64, "reported")  # for routers: by model, when a new request would be done; the rest
    line: Ints = table(np.int64, "models")  # whose weights come over the link, one after the other
    chunk_word: Words = table(np.uint64, "models", "chunks")  # set when a chunk of weights has come
    bins: Floats = table(np.float64, "bins", 4)  # time × occupancy of slots, memory and issue, and time × jobs running


def new_fluid(state: State, program: Programs, arrivals: Table, clients: Table, bins: int) -> Fluid:
    """An idle GPU and a load for it. Times and rows are the caller's to set; `bins` is an even number."""
    lanes, rows = len(state.lane), len(state.request)
    ints = np.int64
    sim = np.zeros(1, SIM)
    sim["news"] = 1  # the models are yet to be opened
    sim["actual_ns"] = sim["predicted_ns"] = 1.0
    message = np.zeros(1, SUBMISSION)
    message["kind"], message["lane"], message["slot"] = SUBMIT, NONE, NONE
    sim["chunk_at_ns"] = np.inf
    chunk_word = np.zeros((len(state.model), max(1, int(state.weights["chunks"].max()))), np.uint64)
    state.weights["word"] = [row.ctypes.data for row in chunk_word]
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
        strict=np.zeros(lanes),
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
        asked=np.zeros(1, ASKED),
        message=message,
        taken=np.zeros(BATCH, COMPLETION),
        allowance=np.zeros(0, ALLOWANCE),
        report=np.zeros(0),
        line=np.zeros(len(state.model), ints),
        chunk_word=chunk_word,
        bins=np.zeros((bins, 4)),
    )


def more_records(f: Fluid) -> Fluid:
    """Room for twice as many."""
    return f._replace(records=np.concatenate([f.records, np.zeros_like(f.records)]))
