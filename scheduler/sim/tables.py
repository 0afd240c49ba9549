"""The tables of a simulated GPU: running work, its resources, the load, and the results.

Both models of the GPU submit the load and record the results by the functions here. The segment model calls them in its
own compiled loop; the block model, whose loop is in Python, calls the entry points at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paellapy.instrument.gpu_model.tables import Floats, Ints, heap_pop, heap_push
from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.instrument.numba_ext.tables import TableSet, table, table_set
from paellapy.scheduler.core.admission import ADMISSION_LIMIT, ADMISSION_REQUEST, ADMITTED, end_admitted, try_admit
from paellapy.scheduler.core.codes import NEVER, NONE, QUEUE_FULL, SUBMIT
from paellapy.scheduler.core.rings import publish, take_completions
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION, Table, Words

SLOTS, MEMORY, ISSUE, COMPUTE = range(4)
BATCH = 256
# The last entries of SimGpu.report: the gain in throughput when several jobs share the GPU, the actual ÷ the predicted
# time of answers, and the number of live requests.
GAIN, FACTOR, LIVE = -3, -2, -1
LEARN = 0.05  # weight of the newest answer in a router's averages
MODELS_PRIORITY = -NEVER  # stands for a request without its own priority
STEP = -2  # the source of a request that is a step of a language model

SIM = np.dtype(  # [1]
    [
        ("now_ns", "f8"),
        ("core_free_ns", "f8"),  # when the core, which launches one graph after the other, can decide again
        ("horizon_ns", "f8"),  # closed-loop clients send requests until then
        ("launch_ns", "f8"),  # the host's time for each launch
        ("segment_gap_ns", "f8"),  # between two graphs of a stream
        ("resume_ns", "f8"),  # latency of a launch, for an instance that ran out of work
        ("bin_ns", "f8"),
        ("running", "i8"),  # number of instances in SimGpu.run
        ("next_arrival", "i8"),
        ("records", "i8"),
        ("free", "i8"),  # number of request rows in SimGpu.free
        ("timers", "i8"),
        ("events", "i8"),  # completed segments
        ("steps", "i8"),  # steps of language models that have ended since the loop was called
        ("news", "i8"),  # 1: there is an event for the core
        ("queues", "i8"),  # number of hardware queues; 0: one for every job
        ("launched", "i8"),
        # actual and predicted times of answers, with more weight on newer ones, for a GPU behind a router
        ("actual_ns", "f8"),
        ("predicted_ns", "f8"),
        ("orders", "i8"),  # the core's orders about weights that were carried out
        ("line", "i8"),  # number of models in SimGpu.line
        ("copied", "i8"),  # copied chunks of the first of them
        ("chunk_at_ns", "f8"),  # when the next chunk arrives
    ],
    align=True,
)
RECORD = np.dtype(
    [
        ("model", "i4"),
        ("client", "i4"),
        ("priority", "i8"),
        ("batch", "i4"),
        ("status", "i4"),
        ("source", "i4"),  # closed-loop client that sent it, STEP, or NONE
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
        ("priority", "i8"),
        ("client", "i4"),
        ("predicted_ns", "f8"),
    ],
    align=True,
)
LOOP_CLIENT = np.dtype([("think_ns", "i8"), ("model", "i4"), ("priority", "i8"), ("client", "i4")], align=True)


class Programs(NamedTuple):
    """The GPU resources of the programs: see the same fields of `SimGpu`."""

    use: Floats
    work: Floats
    busy: Floats
    copy: Floats
    kernels: Floats


@table_set
class SimGpu(TableSet):
    """The simulated GPU, its load, and the results."""

    sim: Table = table(SIM, 1)
    # fraction of each resource at rate 1; the last row is for the whole program
    use: Floats = table(np.float64, "models", "sizes", "launches", 4)
    work: Floats = table(np.float64, "models", "sizes", "launches")  # time alone
    # fraction of its time for which a program wants the GPU, if measured; otherwise 0
    busy: Floats = table(np.float64, "models", "sizes")
    copy: Floats = table(np.float64, "models")  # time to copy a request's inputs into an instance
    kernels: Floats = table(np.float64, "models", "sizes")  # number of kernels of a whole program
    run: Ints = table(np.int64, "instances")  # instances with launched work
    segment: Ints = table(np.int64, "instances")  # the running segment, or WHOLE
    behind: Ints = table(np.int64, "instances")  # launches queued behind it
    left: Floats = table(np.float64, "instances")  # remaining work
    delay: Floats = table(np.float64, "instances")  # until the launch reaches the GPU
    rate: Floats = table(np.float64, "instances")
    strict: Floats = table(np.float64, "instances")  # the same under strict priorities
    order: Ints = table(np.int64, "instances")  # number of its launch, in order
    waits: Ints = table(np.int64, "instances")  # 1: it waits for others in its hardware queue
    idle: Ints = table(np.int64, "instances")  # 1: the instance has started and has run out of work
    opened: Floats = table(np.float64, "instances")  # when it last began to take requests
    generation: Ints = table(np.int64, "instances")  # the instance's generation at that time
    arrivals: Table = table(ARRIVAL, "arrivals")  # by time
    clients: Table = table(LOOP_CLIENT, "clients")  # each has one request at a time
    timer: Floats = table(np.float64, "timers")  # heap of the times at which closed-loop clients return
    timer_id: Ints = table(np.int64, "timers")
    free: Ints = table(np.int64, "requests")  # free request rows
    records: Table = table(RECORD, "records")
    asked: Table = table(ADMISSION_REQUEST, 1)  # scratch: the arriving request, for admission
    message: Table = table(SUBMISSION, 1)  # scratch: the arriving request, for the core
    taken: Table = table(COMPLETION, BATCH)  # scratch
    admission: Table = table(ADMISSION_LIMIT, "models")  # without rows, every request is let in
    # for routers: by model, when a new request would be done; then GAIN, FACTOR and LIVE
    report: Floats = table(np.float64, "reported")
    line: Ints = table(np.int64, "models")  # models whose weights arrive over the link, one after the other
    chunk_word: Words = table(np.uint64, "models", "chunks")  # set when a chunk of weights has arrived
    bins: Floats = table(np.float64, "bins", 4)  # time × occupancy of slots, memory and issue, and time × running jobs


def new_sim_gpu(state: State, program: Programs, arrivals: Table, clients: Table, bins: int) -> SimGpu:
    """An idle GPU with a load. The caller sets times and rows; `bins` must be even."""
    rows, timers = len(state.request), len(clients) + 1
    chunks = max(1, int(state.weights["chunks"].max()))
    found = SimGpu.zeros(
        {"instances": len(state.instance), "timers": timers, "models": len(state.model), "chunks": chunks,
         "bins": bins, "reported": 0},
        **program._asdict(), arrivals=arrivals, clients=clients, free=np.arange(rows, dtype=np.int64),
        records=np.zeros(max(1024, len(arrivals)), RECORD), admission=np.zeros(0, ADMISSION_LIMIT),
    )  # fmt: skip
    sim, message = found.sim, found.message
    sim["news"] = 1  # the models are not opened yet
    sim["actual_ns"] = sim["predicted_ns"] = 1.0
    sim["chunk_at_ns"] = np.inf
    found.idle[:] = 1
    message["kind"], message["instance"], message["slot"] = SUBMIT, NONE, NONE
    state.weights["word"] = [row.ctypes.data for row in found.chunk_word]
    return found


def more_records(f: SimGpu) -> SimGpu:
    """Doubles the room for records."""
    return f._replace(records=np.concatenate([f.records, np.zeros_like(f.records)]))


@part
def limit_ns(s: State, m: int, arrival: int, deadline: int) -> float:
    """The time limit of a request: until its deadline, or its model's target."""
    return float(deadline - arrival if deadline < NEVER else s.model[m].target_ns)


@part
def arrive(f: SimGpu, s: State, m: int, client: int, priority: int, deadline: int, at: int, source: int) -> None:
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
    asks = f.admission.shape[0] > 0 and limit < NEVER
    if asks:
        asked = f.asked[0]
        asked.model, asked.priority, asked.deadline_ns, asked.limit_ns = m, priority, deadline, limit
        asked.entered_ns = asked.now_ns = at
        if try_admit(s, f.admission, m, asked) != ADMITTED:
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
            f.admission[m].in_flight -= 1
        back(f, source, at)


@part
def back(f: SimGpu, source: int, at: int) -> None:
    """Lets a closed-loop client think, then send its next request."""
    sim = f.sim[0]
    if source >= 0:
        again = at + max(f.clients[source].think_ns, 1)
        if again < sim.horizon_ns:
            heap_push(f.timer, f.timer_id, 0, sim.timers, np.float64(again), source)
            sim.timers += 1


@part
def load(f: SimGpu, s: State) -> bool:
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
def next_load(f: SimGpu) -> float:
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
    at = s.core[0].wake_at_ns
    if s.core[0].due > 0:
        at = min(at, np.float64(s.request[s.due[0]].deadline_ns))
    return float(at)


@part
def record_some(f: SimGpu, s: State) -> int:
    """Moves some completions into the records and returns their number: rows become free, closed-loop clients return.
    """
    sim = f.sim[0]
    n = take_completions(s, 0, f.taken.ctypes.data, f.taken.shape[0])
    for k in range(n):
        entry = f.taken[k]
        record = f.records[np.int64(entry.tag)]
        record.batch, record.status = entry.batch, entry.status
        record.started_ns, record.finish_ns = entry.started_ns, entry.finish_ns
        if record.predicted_ns > 0.0:
            sim.actual_ns += LEARN * (entry.finish_ns - record.arrival_ns - sim.actual_ns)
            sim.predicted_ns += LEARN * (record.predicted_ns - sim.predicted_ns)
        limit = limit_ns(s, record.model, record.arrival_ns, record.deadline_ns)
        if f.admission.shape[0] > 0 and limit < NEVER:
            end_admitted(s, f.admission, record.model, record.arrival_ns, entry.finish_ns, limit, entry.status)
        f.free[sim.free] = entry.request
        sim.free += 1
        if record.source == STEP:
            sim.steps += 1
        back(f, record.source, entry.finish_ns)
    return int(n)


@part
def occupy(f: SimGpu, since: float, ns: float, slots: float, memory: float, issue: float, jobs: int) -> None:
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


# -- entry points for a loop in Python


@compiled
def begin_step(f: SimGpu, s: State, m: int, items: int, arrival: int) -> int:
    """Submits a step of a language model as one batch of `items` texts; returns the number of the step's record.

    The table of records must have room for it.
    """
    message = f.message[0]
    message.items = items
    arrive(f, s, m, 0, s.model[m].priority, NEVER, arrival, STEP)
    message.items = 0
    return int(f.sim[0].records - 1)


@compiled
def load_until(f: SimGpu, s: State, now: float) -> bool:
    """Submits all requests that are due by now; False when the records are full."""
    f.sim[0].now_ns = now
    return load(f, s)


@compiled
def next_news(f: SimGpu, s: State) -> float:
    """When there is something for the core to do, regardless of the GPU."""
    return float(min(next_load(f), next_for_core(s)))


@compiled
def record_batch(f: SimGpu, s: State) -> int:
    """As `record_some`; the completions stay in `f.taken` until the next call."""
    return record_some(f, s)


@compiled
def note_warps(f: SimGpu, since: float, ns: float, share: float, jobs: int) -> None:
    """Adds an interval to the occupancy over time, in which this share of the warps was resident."""
    occupy(f, since, ns, share, 0.0, 0.0, jobs)
