"""Simulated time at the grain of segments: a compiled fluid model of the GPU, with the dispatcher core in its loop.

Each lane's oldest launched segment progresses at a rate up to 1 (its time alone). Segments that run together share:

* *slots* (blocks, warps, registers and shared memory: the fullest) and *memory bandwidth* in proportion to demand, as
  block scheduler and memory system serve whoever asks more, more: all slow down by the total demand, once above 1;
* *kernel issue* max-min fairly, because the front end takes turns between streams: who issues little is not held back.

Where it was measured how much of the GPU a program keeps busy, that is better than these estimates: chains of short
kernels use a resource now and then, not a part of it all the time, and wait for each other whenever they want it at
once. Programs that want it independently of each other, parts u of the time, keep it busy 1 - Π(1 - u) of the time
together. In trial runs on an H200 (not kept) 6, 8, 10, 12, 16 and 24 of Paella's CNNs at once did 3.6, 4.3, 4.7, 5.0,
5.3 and 5.5 times what one does; with u = 0.18 this says 3.9, 4.4, 4.8, 5.0, 5.3 and 5.5.

Where jobs keep to windows of SMs they want less of what others have, the less the more they are: a rule with one
number, chosen so that 24 of them do 1.19 times what they do without, as on the H200.

Streams share the hardware's queues, if their number is given: where the hardware decides, a job waits for those that
were launched before it into its queue. Not for the last of them: with two of a queue's jobs at a time the sweep of
Paella's CNNs comes out as on the H200, with one or three it does not (side runs, not kept); why is not known.

The host is modelled too: the core launches one graph after the other, and decides nothing while it does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.device.heaps import Floats, Ints, heap_pop, heap_push
from instrument.device.jit import compiled, inlined
from scheduler.atomics import store_at
from scheduler.core import step
from scheduler.core_admission import WINDOW, leaves, lets_in
from scheduler.core_rings import RING_FULL, post, take_done
from scheduler.core_windows import ROOMY
from scheduler.loop import notice_edits
from scheduler.state import (
    COMPLETION,
    DUE_N,
    NEVER,
    NONE,
    OUT_N,
    QUEUE_FULL,
    SUBMIT,
    WHOLE,
    WHOLE_ALWAYS,
    WINDOW_N,
    State,
    Table,
)

# F.g
# NEWS: something for the core to see; QUEUES: of the hardware, 0: as many as there are streams; LAUNCHED: so far
RUN_N, NEXT_ARRIVAL, RECORDS, FREE_N, TIMERS, EVENTS, NEWS, QUEUES, LAUNCHED = range(9)
# F.t
NOW, CORE_FREE, HORIZON, LAUNCH_NS, SEGMENT_GAP_NS, RESUME_NS, BIN_NS = range(7)
SLOTS, MEMORY, ISSUE = range(3)
MOST_BUSY = 0.995  # at 1 nothing else would ever run
APART = 0.011  # with windows of SMs jobs are in each other's way so much less, for each that runs beyond ROOMY
AT_ONCE = 2  # jobs of one hardware queue
DONE, MORE_RECORDS = range(2)  # what `run_fluid` returns
BATCH = 256
MODELS_PRIORITY = -(1 << 31)  # a request without a priority of its own

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


class Fluid(NamedTuple):
    """The simulated GPU, its load, and what came of it. L lanes, M models, B sizes, S segments."""

    g: Ints
    t: Floats
    use: Floats  # [M, B, S + 1, 3] share of each resource at rate 1; the last row is the whole program's
    work: Floats  # [M, B, S + 1] time alone
    busy: Floats  # [M, B] part of its time that a program wants the GPU, where that was measured; else 0
    run: Ints  # [L] lanes with something launched
    segment: Ints  # [L] what runs, or WHOLE
    behind: Ints  # [L] launches queued behind it
    left: Floats  # [L] work
    delay: Floats  # [L] until the launch reaches the GPU
    rate: Floats  # [L]
    order: Ints  # [L] its launch was the so-manieth
    waits: Ints  # [L] 1: it waits for others in its hardware queue
    idle: Ints  # [L] 1: the lane has been started and has run dry
    arrivals: Table  # ARRIVAL, by time
    clients: Table  # LOOP_CLIENT: each has one request at a time
    timer: Floats  # heap: when loop clients come back
    timer_id: Ints
    free: Ints  # request rows
    records: Table  # RECORD
    taken: Table  # COMPLETION, scratch
    window: Table  # WINDOW[M]; without rows everything is let in
    bins: Floats  # [bins, 4] time × occupancy of slots, memory and issue, and time × jobs running


@inlined
def start(f: Fluid, s: State, lane: int, segment: int, delay: float) -> None:
    m, size = s.lane[lane].model, s.lane[lane].size
    f.segment[lane] = segment
    k = f.work.shape[2] - 1 if segment == WHOLE else segment
    f.left[lane] = f.work[m, size, k]
    f.delay[lane] = delay


@inlined
def line_up(f: Fluid, s: State) -> None:
    """Who waits in a hardware queue."""
    if f.g[QUEUES] == 0 or not s.g[WHOLE_ALWAYS]:
        return
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        before = 0
        for other in f.run[: f.g[RUN_N]]:
            same = (s.lane[other].stream_at - s.lane[lane].stream_at) % f.g[QUEUES] == 0
            before += same and f.order[other] < f.order[lane]
        f.waits[lane] = 1 if before >= AT_ONCE else 0


@inlined
def runs(f: Fluid, lane: int) -> bool:
    return bool(f.delay[lane] <= 0.0 and f.waits[lane] == 0)


@inlined
def share(f: Fluid, s: State) -> None:
    """Everybody's rate, from what all want."""
    line_up(f, s)
    slots = 0.0
    memory = 0.0
    issue = 0.0
    last = f.work.shape[2] - 1
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        if runs(f, lane):
            seg = last if f.segment[lane] == WHOLE else f.segment[lane]
            slots += f.use[s.lane[lane].model, s.lane[lane].size, seg, SLOTS]
            memory += f.use[s.lane[lane].model, s.lane[lane].size, seg, MEMORY]
            issue += f.use[s.lane[lane].model, s.lane[lane].size, seg, ISSUE]
    common = 1.0 / max(1.0, slots, memory)
    level = 1.0 if issue * common <= 1.0 else issue_level(f, s, common)
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        f.rate[lane] = 0.0
        if runs(f, lane):
            seg = last if f.segment[lane] == WHOLE else f.segment[lane]
            want = f.use[s.lane[lane].model, s.lane[lane].size, seg, ISSUE] * common
            f.rate[lane] = common if want <= level else common * level / want
    share_measured(f, s)


@inlined
def issue_level(f: Fluid, s: State, common: float) -> float:
    """Max-min: the level at which those above it fill what the others leave. Who waits has no part in it."""
    last = f.work.shape[2] - 1
    level = 0.0
    while True:  # upwards, from below every fair part: each round but the last settles at least one
        below = 0.0
        above = 0
        for k in range(f.g[RUN_N]):
            lane = f.run[k]
            if runs(f, lane):
                seg = last if f.segment[lane] == WHOLE else f.segment[lane]
                want = f.use[s.lane[lane].model, s.lane[lane].size, seg, ISSUE] * common
                if want > level:
                    above += 1
                else:
                    below += want
        if above == 0:
            return level
        higher = (1.0 - below) / above
        if higher <= level * (1.0 + 1e-9):
            return level
        level = higher


@inlined
def share_measured(f: Fluid, s: State) -> None:
    """Rates of programs whose part of the GPU was measured: all together keep it busy as if they did not know of each
    other, and each gets its part of that by what it wants.
    """
    idle = 1.0
    wants = 0.0
    last = f.work.shape[2] - 1
    apart = 1.0
    if s.g[WINDOW_N] > 0:
        apart += APART * max(0, f.g[RUN_N] - ROOMY)
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        if runs(f, lane):
            m, size = s.lane[lane].model, s.lane[lane].size
            busy = f.busy[m, size] / apart
            if busy == 0.0:
                seg = last if f.segment[lane] == WHOLE else f.segment[lane]
                use = f.use[m, size, seg]
                busy = min(max(use[SLOTS], use[MEMORY], use[ISSUE]), MOST_BUSY)
            idle *= 1.0 - busy
            wants -= np.log1p(-busy)
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        busy = f.busy[s.lane[lane].model, s.lane[lane].size] / apart
        if runs(f, lane) and busy > 0.0:
            f.rate[lane] = min(1.0, -np.log1p(-busy) / wants * (1.0 - idle) / busy)


@inlined
def occupy(f: Fluid, since: float, ns: float, slots: float, memory: float, issue: float, jobs: int) -> None:
    """Add an interval to the bins. Where it goes beyond the last, two become one: they cover the whole run."""
    n = f.bins.shape[0]
    end = since + ns
    while end > n * f.t[BIN_NS]:
        for b in range(n):
            for c in range(4):
                f.bins[b, c] = f.bins[2 * b, c] + f.bins[2 * b + 1, c] if 2 * b + 1 < n else 0.0
        f.t[BIN_NS] *= 2.0
    at = since
    b = min(int(at / f.t[BIN_NS]), n - 1)
    while at < end:
        until = end if b == n - 1 else min(end, (b + 1) * f.t[BIN_NS])
        part = max(until - at, 0.0)
        f.bins[b, 0] += slots * part
        f.bins[b, 1] += memory * part
        f.bins[b, 2] += issue * part
        f.bins[b, 3] += jobs * part
        at = until
        b += 1


@inlined
def note(f: Fluid, s: State, ns: float) -> None:
    """Add an interval to the occupancy over time."""
    use = (0.0, 0.0, 0.0)
    last = f.work.shape[2] - 1
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        seg = last if f.segment[lane] == WHOLE else f.segment[lane]
        u = f.use[s.lane[lane].model, s.lane[lane].size, seg]
        r = f.rate[lane]
        use = (use[0] + u[0] * r, use[1] + u[1] * r, use[2] + u[2] * r)
    # Where what a whole program keeps busy was measured, its segments' parts are estimates, and may add up to more.
    occupy(f, f.t[NOW], ns, min(use[0], 1.0), min(use[1], 1.0), min(use[2], 1.0), f.g[RUN_N])


@inlined
def next_event(f: Fluid) -> float:
    """When the GPU, or the load, does something next."""
    at = np.inf
    for k in range(f.g[RUN_N]):
        lane = f.run[k]
        if f.delay[lane] > 0.0:
            at = min(at, f.delay[lane])
        elif f.rate[lane] > 0.0:
            at = min(at, f.left[lane] / f.rate[lane])
    at += f.t[NOW]
    if f.g[NEXT_ARRIVAL] < f.arrivals.shape[0]:
        at = min(at, np.float64(f.arrivals[f.g[NEXT_ARRIVAL]].time_ns))
    if f.g[TIMERS] > 0:
        at = min(at, f.timer[0])
    return float(at)


@inlined
def progress(f: Fluid, s: State, until: float) -> None:
    """Let the GPU run; completion words are written, and what was queued behind starts."""
    ns = until - f.t[NOW]
    note(f, s, ns)
    f.t[NOW] = until
    k = 0
    while k < f.g[RUN_N]:
        lane = f.run[k]
        if f.delay[lane] > 0.0:
            f.delay[lane] = max(0.0, f.delay[lane] - ns)
            if f.delay[lane] < 1e-3:
                f.delay[lane] = 0.0
            k += 1
            continue
        f.left[lane] -= ns * f.rate[lane]
        if f.left[lane] > 1e-3:
            k += 1
            continue
        f.g[EVENTS] += 1
        f.g[NEWS] = 1
        size = s.lane[lane].size
        if f.segment[lane] == WHOLE:
            store_at(s.whole[lane, size].word, np.uint64(1))
        else:
            store_at(s.launch[lane, size, f.segment[lane]].word, np.uint64(1))
        if f.behind[lane] > 0:
            f.behind[lane] -= 1
            # Between two graphs of a stream the lane uses nothing: others may.
            start(f, s, lane, f.segment[lane] + 1, f.t[SEGMENT_GAP_NS])
            k += 1
        else:
            f.idle[lane] = 1
            f.g[RUN_N] -= 1
            f.run[k] = f.run[f.g[RUN_N]]


@inlined
def limit_ns(s: State, m: int, arrival: int, deadline: int) -> float:
    """How long a request may take: until its deadline, or as long as its model aims at."""
    return float(deadline - arrival if deadline < NEVER else s.model[m].target_ns)


@inlined
def arrive(f: Fluid, s: State, m: int, client: int, priority: int, deadline: int, at: int, source: int) -> None:
    """One request, recorded and submitted; refused where the tables are full."""
    n = f.g[RECORDS]
    record = f.records[n]
    record.model, record.client, record.priority, record.source = m, client, priority, source
    record.arrival_ns, record.deadline_ns, record.started_ns, record.finish_ns = at, deadline, NEVER, at
    record.batch = 0
    record.status = QUEUE_FULL
    f.g[RECORDS] += 1
    if f.g[FREE_N] == 0:
        back(f, source, at)
        return
    limit = limit_ns(s, m, at, deadline)
    asks = f.window.shape[0] > 0 and limit < NEVER
    if asks and not lets_in(s, f.window, m, m, priority, deadline, at, limit, at):
        back(f, source, at)
        return
    row = f.free[f.g[FREE_N] - 1]
    answer = post(
        s.ring[0], s.submit[0], s.filling, s.lane_word, s.slot_front, SUBMIT, row, n, n, m, client, priority, at,
        deadline, 0, False,
    )  # fmt: skip
    if answer == RING_FULL:
        if asks:
            f.window[m].in_flight -= 1
        back(f, source, at)
    else:
        f.g[FREE_N] -= 1
        f.g[NEWS] = 1


@inlined
def back(f: Fluid, source: int, at: int) -> None:
    """A closed-loop client thinks, then asks again."""
    if source >= 0:
        again = at + max(f.clients[source].think_ns, 1)
        if again < f.t[HORIZON]:
            heap_push(f.timer, f.timer_id, 0, f.g[TIMERS], np.float64(again), source)
            f.g[TIMERS] += 1


@inlined
def load(f: Fluid, s: State) -> bool:
    """Submit all that is due; False when the records are full."""
    now = f.t[NOW]
    while f.g[NEXT_ARRIVAL] < f.arrivals.shape[0] and f.arrivals[f.g[NEXT_ARRIVAL]].time_ns <= now:
        if f.g[RECORDS] == f.records.shape[0]:
            return False
        a = f.arrivals[f.g[NEXT_ARRIVAL]]
        f.g[NEXT_ARRIVAL] += 1
        arrive(f, s, a.model, a.client, a.priority, a.deadline_ns, a.time_ns, NONE)
    while f.g[TIMERS] > 0 and f.timer[0] <= now:
        if f.g[RECORDS] == f.records.shape[0]:
            return False
        who = f.timer_id[0]
        at = int(f.timer[0])
        heap_pop(f.timer, f.timer_id, 0, f.g[TIMERS])
        f.g[TIMERS] -= 1
        c = f.clients[who]
        arrive(f, s, c.model, c.client, c.priority, NEVER, at, who)
    return True


@inlined
def launch(f: Fluid, s: State) -> None:
    """Carry out what the core launched: one after the other, each taking the host's time."""
    f.t[CORE_FREE] = max(f.t[CORE_FREE], f.t[NOW])
    for k in range(s.g[OUT_N]):
        out = s.out[k]
        lane = out.lane
        f.t[CORE_FREE] += f.t[LAUNCH_NS]
        first = out.segment <= 0
        if first:
            f.idle[lane] = 1
        if not first and f.idle[lane] == 0:
            f.behind[lane] += 1
            continue
        # A program's time alone holds its first launch's way to the GPU; one that ran dry pays it again.
        delay = f.t[CORE_FREE] - f.t[NOW] - f.t[LAUNCH_NS] + (0.0 if first else f.t[RESUME_NS])
        f.idle[lane] = 0
        f.order[lane] = f.g[LAUNCHED]
        f.g[LAUNCHED] += 1
        f.run[f.g[RUN_N]] = lane
        f.g[RUN_N] += 1
        start(f, s, lane, out.segment, delay)
    s.g[OUT_N] = 0


@inlined
def collect(f: Fluid, s: State) -> None:
    """Completions into the records; rows become free, closed-loop clients come back."""
    while True:
        n = take_done(s.ring[0], s.done[0], f.taken)
        for k in range(n):
            entry = f.taken[k]
            record = f.records[np.int64(entry.tag)]
            record.batch, record.status = entry.batch, entry.status
            record.started_ns, record.finish_ns = entry.started_ns, entry.finish_ns
            limit = limit_ns(s, record.model, record.arrival_ns, record.deadline_ns)
            if f.window.shape[0] > 0 and limit < NEVER:
                leaves(f.window, record.model, record.arrival_ns, entry.finish_ns, limit, entry.status)
            f.free[f.g[FREE_N]] = entry.request
            f.g[FREE_N] += 1
            back(f, record.source, entry.finish_ns)
        if n < f.taken.shape[0]:
            break


@compiled
def run_fluid(f: Fluid, s: State) -> int:
    """Until nothing is left to come and nothing runs; MORE_RECORDS: call again with more of them."""
    while True:
        if not load(f, s):
            return MORE_RECORDS
        if f.g[NEWS] and f.t[CORE_FREE] <= f.t[NOW]:
            f.g[NEWS] = 0
            step(s, int(f.t[NOW]))
            collect(f, s)
            if s.g[OUT_N] > 0:
                launch(f, s)
        share(f, s)
        at = next_event(f)
        if f.g[NEWS]:
            at = min(at, f.t[CORE_FREE])
        elif s.g[DUE_N] > 0 and s.request[s.due[0]].deadline_ns <= at:
            at = np.float64(s.request[s.due[0]].deadline_ns)
            f.g[NEWS] = 1
        if at == np.inf:
            return DONE
        progress(f, s, max(at, f.t[NOW]))


def new_fluid(
    state: State, program: Programs, arrivals: Table, clients: Table, bins: int
) -> Fluid:
    """An idle GPU and a load for it. Times and rows are the caller's to set; `bins` is an even number."""
    lanes, rows = len(state.lane), len(state.request)
    ints = np.int64
    return Fluid(
        g=np.array([0, 0, 0, 0, 0, 0, 1, 0, 0], ints),  # the models are yet to be opened: news
        t=np.zeros(8),
        use=program.use,
        work=program.work,
        busy=program.busy,
        run=np.zeros(lanes, ints),
        segment=np.zeros(lanes, ints),
        behind=np.zeros(lanes, ints),
        left=np.zeros(lanes),
        delay=np.zeros(lanes),
        rate=np.zeros(lanes),
        order=np.zeros(lanes, ints),
        waits=np.zeros(lanes, ints),
        idle=np.ones(lanes, ints),
        arrivals=arrivals,
        clients=clients,
        timer=np.zeros(len(clients) + 1),
        timer_id=np.zeros(len(clients) + 1, ints),
        free=np.arange(rows, dtype=ints),
        records=np.zeros(max(1024, len(arrivals)), RECORD),
        taken=np.zeros(BATCH, COMPLETION),
        window=np.zeros(0, WINDOW),
        bins=np.zeros((bins, 4)),
    )


notice_edits(run_fluid)
