"""The simulated GPU's tables at the level of segments: running work, its resources, the load, and the results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paellapy.instrument.device.heaps import Floats, Ints
from paellapy.instrument.table_set import TableSet, table, table_set
from paellapy.scheduler.core.admission import ALLOWANCE, ASKED
from paellapy.scheduler.core.codes import NONE, SUBMIT
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION, Table, Words

SLOTS, MEMORY, ISSUE, COMPUTE = range(4)
BATCH = 256
# The last entries of Fluid.report: the gain in throughput when several jobs share the GPU, the actual ÷ the predicted
# time of answers, and the number of live requests.
GAIN, FACTOR, LIVE = -3, -2, -1
MODELS_PRIORITY = -(1 << 31)  # stands for a request without its own priority

SIM = np.dtype(  # [1]
    [
        ("now_ns", "f8"),
        ("core_free_ns", "f8"),  # when the core, which launches one graph after the other, can decide again
        ("horizon_ns", "f8"),  # closed-loop clients send requests until then
        ("launch_ns", "f8"),  # the host's time for each launch
        ("segment_gap_ns", "f8"),  # between two graphs of a stream
        ("resume_ns", "f8"),  # latency of a launch, for a lane that ran out of work
        ("bin_ns", "f8"),
        ("running", "i8"),  # number of lanes in Fluid.run
        ("next_arrival", "i8"),
        ("records", "i8"),
        ("free", "i8"),  # number of request rows in Fluid.free
        ("timers", "i8"),
        ("events", "i8"),  # completed segments
        ("news", "i8"),  # 1: there is an event for the core
        ("queues", "i8"),  # number of hardware queues; 0: one for every job
        ("launched", "i8"),
        # actual and predicted times of answers, with more weight on newer ones, for a GPU behind a router
        ("actual_ns", "f8"),
        ("predicted_ns", "f8"),
        ("orders", "i8"),  # the core's orders about weights that were carried out
        ("line", "i8"),  # number of models in Fluid.line
        ("copied", "i8"),  # copied chunks of the first of them
        ("chunk_at_ns", "f8"),  # when the next chunk arrives
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
        ("source", "i4"),  # closed-loop client that sent it, or NONE
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("started_ns", "i8"),
        ("finish_ns", "i8"),
        ("predicted_ns", "f8"),  # its time as predicted by its router; otherwise 0
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
    """The GPU resources of the programs: see the same fields of `Fluid`."""

    use: Floats
    work: Floats
    busy: Floats
    copy: Floats
    kernels: Floats


@table_set
class Fluid(TableSet):
    """The simulated GPU, its load, and the results."""

    sim: Table = table(SIM, 1)
    # fraction of each resource at rate 1; the last row is for the whole program
    use: Floats = table(np.float64, "models", "sizes", "launches", 4)
    work: Floats = table(np.float64, "models", "sizes", "launches")  # time alone
    # fraction of its time for which a program wants the GPU, if measured; otherwise 0
    busy: Floats = table(np.float64, "models", "sizes")
    copy: Floats = table(np.float64, "models")  # time to copy a request's inputs into a lane
    kernels: Floats = table(np.float64, "models", "sizes")  # number of kernels of a whole program
    run: Ints = table(np.int64, "lanes")  # lanes with launched work
    segment: Ints = table(np.int64, "lanes")  # the running segment, or WHOLE
    behind: Ints = table(np.int64, "lanes")  # launches queued behind it
    left: Floats = table(np.float64, "lanes")  # remaining work
    delay: Floats = table(np.float64, "lanes")  # until the launch reaches the GPU
    rate: Floats = table(np.float64, "lanes")
    strict: Floats = table(np.float64, "lanes")  # the same under strict priorities
    order: Ints = table(np.int64, "lanes")  # number of its launch, in order
    waits: Ints = table(np.int64, "lanes")  # 1: it waits for others in its hardware queue
    idle: Ints = table(np.int64, "lanes")  # 1: the lane has started and has run out of work
    opened: Floats = table(np.float64, "lanes")  # when it last began to take requests
    generation: Ints = table(np.int64, "lanes")  # the lane's generation at that time
    arrivals: Table = table(ARRIVAL, "arrivals")  # by time
    clients: Table = table(LOOP_CLIENT, "clients")  # each has one request at a time
    timer: Floats = table(np.float64, "timers")  # heap of the times at which closed-loop clients return
    timer_id: Ints = table(np.int64, "timers")
    free: Ints = table(np.int64, "requests")  # free request rows
    records: Table = table(RECORD, "records")
    asked: Table = table(ASKED, 1)  # scratch: the arriving request, for admission
    message: Table = table(SUBMISSION, 1)  # scratch: the arriving request, for the core
    taken: Table = table(COMPLETION, BATCH)  # scratch
    allowance: Table = table(ALLOWANCE, "models")  # without rows, every request is let in
    # for routers: by model, when a new request would be done; then GAIN, FACTOR and LIVE
    report: Floats = table(np.float64, "reported")
    line: Ints = table(np.int64, "models")  # models whose weights arrive over the link, one after the other
    chunk_word: Words = table(np.uint64, "models", "chunks")  # set when a chunk of weights has arrived
    bins: Floats = table(np.float64, "bins", 4)  # time × occupancy of slots, memory and issue, and time × running jobs


def new_fluid(state: State, program: Programs, arrivals: Table, clients: Table, bins: int) -> Fluid:
    """An idle GPU with a load. The caller sets times and rows; `bins` must be even."""
    lanes, rows = len(state.lane), len(state.request)
    ints = np.int64
    sim = np.zeros(1, SIM)
    sim["news"] = 1  # the models are not opened yet
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
    """Doubles the room for records."""
    return f._replace(records=np.concatenate([f.records, np.zeros_like(f.records)]))
