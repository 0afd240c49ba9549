"""Simulated time at the level of segments: a compiled fluid model of the GPU, with the dispatcher core in its loop.

Each lane's oldest launched segment progresses at a rate up to 1 (its time alone), computed by `fluid_rates`. The host
is modelled too: the core launches one graph after the other, and makes no decisions during a launch.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import compiled, part, reachable
from paellapy.instrument.jit_call import call_with
from paellapy.scheduler.core.atomics import store_at
from paellapy.scheduler.core.codes import NEVER, WHOLE
from paellapy.scheduler.core.predict import predict
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_link import copy_chunks, take_orders
from paellapy.scheduler.sim.fluid_rates import least_ns, next_in_queue, share
from paellapy.scheduler.sim.fluid_state import FACTOR, GAIN, LIVE, Fluid
from paellapy.scheduler.sim.load import load, next_for_core, next_load, occupy, record_some

DONE, MORE_RECORDS = range(2)  # results of `run_fluid`
# Steps in a row in which a policy may launch nothing while the GPU is idle and no request comes. A policy whose `admit`
# always asks for more time, or whose `tick` never opens its gate, would run for ever.
MOST_IN_VAIN = 1 << 18


@part
def start(f: Fluid, s: State, lane: int, segment: int, delay: float) -> None:
    a = s.lane[lane]
    m, size = a.model, a.size
    f.segment[lane] = segment
    k = f.work.shape[2] - 1 if segment == WHOLE else segment
    f.left[lane] = f.work[m, size, k]
    f.delay[lane] = delay


@part
def note(f: Fluid, s: State, ns: float) -> None:
    """Adds an interval to the occupancy over time."""
    sim = f.sim[0]
    use = (0.0, 0.0, 0.0)
    last = f.work.shape[2] - 1
    for k in range(sim.running):
        lane = f.run[k]
        seg = last if f.segment[lane] == WHOLE else f.segment[lane]
        u = f.use[s.lane[lane].model, s.lane[lane].size, seg]
        r = f.rate[lane]
        use = (use[0] + u[0] * r, use[1] + u[1] * r, use[2] + u[2] * r)
    # Where the demand of a whole program was measured, the shares of its segments are estimates, and may sum to more
    # than 1.
    occupy(f, sim.now_ns, ns, min(use[0], 1.0), min(use[1], 1.0), min(use[2], 1.0), sim.running)


@part
def next_event(f: Fluid) -> float:
    """When the GPU, its link, or the load has its next event."""
    sim = f.sim[0]
    at = np.inf
    for k in range(sim.running):
        lane = f.run[k]
        if f.delay[lane] > 0.0:
            at = min(at, f.delay[lane])
        elif f.rate[lane] > 0.0:
            at = min(at, f.left[lane] / f.rate[lane])
    return float(min(at + sim.now_ns, next_load(f), sim.chunk_at_ns))


@part
def progress(f: Fluid, s: State, until: float) -> None:
    """Lets the GPU run until a time: completion words are written, and queued launches start."""
    sim = f.sim[0]
    ns = until - sim.now_ns
    note(f, s, ns)
    sim.now_ns = until
    copy_chunks(f, s)
    k = 0
    while k < sim.running:
        lane = f.run[k]
        if f.delay[lane] > 0.0:
            f.delay[lane] = max(0.0, f.delay[lane] - ns)
            if f.delay[lane] < least_ns(f):
                f.delay[lane] = 0.0
            k += 1
            continue
        f.left[lane] -= ns * f.rate[lane]
        if f.left[lane] > least_ns(f):
            k += 1
            continue
        sim.events += 1
        sim.news = 1
        size = s.lane[lane].size
        if f.segment[lane] == WHOLE:
            store_at(s.whole[lane, size].word, np.uint64(1))
        else:
            store_at(s.launch[lane, size, f.segment[lane]].word, np.uint64(1))
        if f.behind[lane] > 0:
            f.behind[lane] -= 1
            # Between two graphs of a stream the lane uses no resources, so others may.
            start(f, s, lane, f.segment[lane] + 1, sim.segment_gap_ns)
            k += 1
        else:
            f.idle[lane] = 1
            sim.running -= 1
            f.run[k] = f.run[sim.running]


@part
def note_opened(f: Fluid, s: State, lane: int) -> None:
    a = s.lane[lane]
    if f.generation[lane] != a.generation:
        f.generation[lane] = a.generation
        f.opened[lane] = f.sim[0].now_ns


@part
def hand_over(f: Fluid, s: State, lane: int) -> float:
    """How long a lane's first launch waits for the inputs of requests that came before the lane was opened. These are
    copied from then on, one after the other; inputs of later requests were copied on arrival.
    """
    a = s.lane[lane]
    note_opened(f, s, lane)
    copy = f.copy[a.model]
    if copy == 0.0:
        return 0.0
    ns = 0.0
    for k in range(a.taken):
        row = s.slot[lane, k]
        if row >= 0 and s.request[row].arrival_ns < f.opened[lane]:
            ns += copy
    return max(0.0, f.opened[lane] + s.tuning[0].hand_over_ns + ns - f.sim[0].now_ns) if ns > 0.0 else 0.0


@part
def launch(f: Fluid, s: State) -> None:
    """Carries out the core's launches one after the other, each taking the host's time."""
    core = s.core[0]
    sim = f.sim[0]
    sim.core_free_ns = max(sim.core_free_ns, sim.now_ns)
    for k in range(core.out):
        out = s.out[k]
        lane = out.lane
        sim.core_free_ns += sim.launch_ns
        first = out.segment <= 0
        if first:
            f.idle[lane] = 1
        if not first and f.idle[lane] == 0:
            f.behind[lane] += 1
            continue
        # A program's time alone includes the latency of its first launch; a lane that ran out of work pays it again.
        delay = sim.core_free_ns - sim.now_ns - sim.launch_ns
        delay += hand_over(f, s, lane) if first else sim.resume_ns
        f.idle[lane] = 0
        f.order[lane] = sim.launched
        sim.launched += 1
        f.run[sim.running] = lane
        sim.running += 1
        start(f, s, lane, out.segment, delay)
    core.out = 0


@part
def is_stuck(f: Fluid, s: State) -> bool:
    """Whether requests wait although the GPU is idle and nothing else will happen: only the policy can go on."""
    idle = f.sim[0].running == 0 and s.core[0].out == 0 and f.sim[0].chunk_at_ns == np.inf
    return bool(idle and s.core[0].live > 0 and next_load(f) == np.inf)


@part
def run_until(f: Fluid, s: State, end: float) -> int:
    """Runs until a time, or until no more requests come and nothing runs; MORE_RECORDS: call again with more records.
    """
    core = s.core[0]
    sim = f.sim[0]
    in_vain = 0
    while True:
        if not load(f, s):
            return MORE_RECORDS
        if sim.news and sim.core_free_ns <= sim.now_ns:
            sim.news = 0
            call_with(s.call[0].step, s, int(sim.now_ns))
            in_vain = in_vain + 1 if is_stuck(f, s) else 0
            if in_vain > MOST_IN_VAIN:
                return DONE
            while record_some(f, s) == f.taken.shape[0]:
                pass
            if core.out > 0:
                launch(f, s)
            take_orders(f, s)
            for m in range(f.copy.shape[0]):
                if s.model[m].filling >= 0:
                    note_opened(f, s, s.model[m].filling)
        share(f, s)
        at = min(next_event(f), sim.now_ns + next_in_queue(f, s))
        if sim.news:
            at = min(at, sim.core_free_ns)
        else:
            soonest = next_for_core(s)
            if soonest <= at:
                at = soonest
                sim.news = 1
        if at >= end:
            if end < np.inf:
                progress(f, s, max(end, sim.now_ns))
            return DONE
        progress(f, s, max(at, sim.now_ns))


@compiled
def run_fluid(f: Fluid, s: State) -> int:
    """Runs until no more requests come and nothing is running; MORE_RECORDS: call again with more records."""
    return run_until(f, s, np.inf)


@reachable
def advance(f: Fluid, s: State, end: float) -> int:
    """Runs until a time, with the arrivals until then. A GPU of a cluster then reports to routers when a new request of
    each model would be done, and how many requests are live.
    """
    answer = run_until(f, s, end)
    if answer == DONE:
        f.sim[0].next_arrival = 0
    now = int(f.sim[0].now_ns)
    for m in range(s.model.shape[0]):
        f.report[m] = predict(s, m, s.model[m].priority, NEVER, now) - now
    n = f.report.shape[0]
    f.report[n + GAIN] = max(s.core[0].gain, 1.0)
    f.report[n + FACTOR] = f.sim[0].actual_ns / max(f.sim[0].predicted_ns, 1.0)
    f.report[n + LIVE] = s.core[0].live
    return answer
