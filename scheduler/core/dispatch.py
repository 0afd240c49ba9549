"""Dispatch in the core: chooses lanes, launches segments, and detects their completion.

Lanes that may launch are *active*, at most `core.max_active` of them; the others wait in a heap by rank. A better lane
replaces the worst active one that still has segments to launch; segments that are already launched keep running. Ranks
may depend on the time and on other jobs: the heap's top is ranked afresh whenever it is read, and other lanes in turn.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.heaps import heap_pop, heap_push
from paellapy.instrument.device.jit import part
from paellapy.scheduler.core.ahead import began_ns, leaves_room, note_room
from paellapy.scheduler.core.atomics import call_asking, call_launch, call_telling, load_at, store_at
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import FILLING, NEVER, NONE, OF_WINDOWS, OWN_STREAMS, QUEUES, VIRTUAL, WHOLE
from paellapy.scheduler.core.crowd import (
    choose_who_stands_back,
    find_shortest,
    gives_way,
    has_room,
    in_one_piece,
    is_quiet,
    look_ahead,
    stands_back,
)
from paellapy.scheduler.core.job import READS_TOP
from paellapy.scheduler.core.lanes import (
    ask,
    close_lane,
    deactivate,
    make_ready,
    set_running,
    settle,
    take_berth,
    touch,
    unready,
)
from paellapy.scheduler.core.requests import fill_lane_job, fill_segment, rank_lane
from paellapy.scheduler.core.shares import charge, enter_gpu, leave_gpu, over_limit, part_of_time
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.weights import all_here, has_weights
from paellapy.scheduler.core.windows import choose_handle, leave_window

_ZERO = np.uint64(0)

# --- occupancy: resources of launched segments ----------------------------------------------------------------------


@part
def account(s: State, lane: int, segment: int, resident: float, pending: float) -> None:
    """Adds a segment's footprint, times these factors, to the resident and the pending resources."""
    a = s.lane[lane]
    m, size = a.model, a.size
    gpu = s.gpu[0]
    if a.whole:
        # At any moment one of its kernels runs, so the first segment's footprint stands for all.
        segment = 0
    f = s.segment[m, size, segment]
    issue = f.kernels / max(f.time_ns, 1.0) * 1e9
    gpu.resident_blocks += resident * f.blocks
    gpu.resident_warps += resident * f.warps
    gpu.resident_registers += resident * f.registers
    gpu.resident_shared_bytes += resident * f.shared_bytes
    gpu.resident_issue += resident * issue
    gpu.pending_blocks += pending * f.blocks
    gpu.pending_warps += pending * f.warps
    gpu.pending_registers += pending * f.registers
    gpu.pending_shared_bytes += pending * f.shared_bytes
    gpu.pending_issue += pending * issue


@part
def measure(s: State) -> None:
    """Computes the fullest resource, and where the jobs are."""
    core = s.core[0]
    gpu = s.gpu[0]
    if core.flight == 0:  # an empty GPU holds nothing: drop rounding errors
        gpu.resident_issue = gpu.pending_issue = 0.0
    gpu.occupancy = max(
        max(gpu.resident_blocks / gpu.capacity_blocks, gpu.resident_warps / gpu.capacity_warps),
        max(gpu.resident_registers / gpu.capacity_registers, gpu.resident_shared_bytes / gpu.capacity_shared_bytes),
        gpu.resident_issue / gpu.capacity_issue,
    )
    gpu.active_jobs = core.active
    gpu.waiting_jobs = core.ready
    gpu.max_active = core.max_active


# --- launching -----------------------------------------------------------------------------------------------------


@part
def take_stream(s: State, lane: int) -> None:
    """Gives the lane a stream that no other job in flight uses, if possible, because jobs on one stream wait for each
    other. The stream belongs to the job's window, or to all SMs. A job keeps its stream while any of its launches is in
    flight. Where the hardware decides (`core.whole_always`), every lane has its own stream, as in programs without a
    scheduler.
    """
    a = s.lane[lane]
    at = QUEUES + lane % OWN_STREAMS
    if not s.core[0].whole_always:
        at = 0
        for k in range(QUEUES):
            if s.stream_jobs[k] < s.stream_jobs[at]:
                at = k
            if s.stream_jobs[at] == 0:
                break
    s.stream_jobs[at] += 1
    window = a.window
    a.stream_at = at if window < 0 else OF_WINDOWS + window * QUEUES + at


@part
def queue_of(stream: int) -> int:
    """The index under which the jobs on a stream are counted."""
    return (stream - OF_WINDOWS) % QUEUES if stream >= OF_WINDOWS else stream


@part
def leave_stream(s: State, lane: int) -> None:
    a = s.lane[lane]
    s.stream_jobs[queue_of(a.stream_at)] -= 1
    a.stream_at = NONE
    leave_window(s, lane)


@part
def wanted_sms(s: State, lane: int, now: int) -> float:
    """The part of the SMs that the policy wants for the lane's next launch; 0: the policy does not say."""
    if s.call[0].place == _ZERO:
        return 0.0
    fill_lane_job(s, lane, now)
    sms = call_asking(s.call[0].place, s.job.ctypes.data, s.call[0].place_2, s.call[0].place_3)
    return float(sms) if sms > 0.0 else 1.0


@part
def launch(s: State, lane: int, now: int) -> bool:
    """Launches the lane's next segment, or the whole program; False when the backend refuses."""
    core = s.core[0]
    a = s.lane[lane]
    k = a.issued
    if a.issued == a.done:
        enter_gpu(s, lane, now)
        s.flight[core.flight] = lane
        a.flight_at = core.flight
        core.flight += 1
        account(s, lane, k, 1.0, 0.0)
    else:
        account(s, lane, k, 0.0, 1.0)
    began = max(now, a.latest_ns)  # some requests may have arrived after the clock was read
    if k == 0:
        a.started_ns = began
    a.issued = k + 1
    a.draining = 0
    s.segment_ns[lane, k, 0] = began
    if not a.whole and s.launch[lane, a.size, k].draining != _ZERO:
        store_at(s.launch[lane, a.size, k].draining, _ZERO)
    core.launches += 1
    core.whole_launches += a.whole
    what = s.whole[lane, a.size] if a.whole else s.launch[lane, a.size, k]
    handle = choose_handle(s, lane, k, what.handle, wanted_sms(s, lane, now))
    if a.stream_at < 0:
        take_stream(s, lane)
    if core.backend == VIRTUAL:
        out = s.out[core.out]
        out.lane, out.size, out.segment = lane, a.size, WHOLE if a.whole else k
        out.word, out.handle = what.word, handle
        core.out += 1
        return True
    called = read_clock(s, s.clock)
    error = call_launch(s.call[0].graph_launch, handle, s.stream[a.pool, a.stream_at])
    took = read_clock(s, s.clock) - called
    core.launch_ns += took
    core.longest_launch_ns = max(core.longest_launch_ns, float(took))
    if error != 0:
        core.error = error
    return bool(error == 0)


@part
def feed(s: State, lane: int, now: int) -> bool:
    """Launches as many segments of an active lane as it may have ahead."""
    core = s.core[0]
    a = s.lane[lane]
    if a.issued == 0:
        # A program in one piece could not be held back for jobs of higher priority, which may come at any moment.
        first = a.priority >= core.top_priority
        alone = core.whole_idle == 1 and is_quiet(s, lane)
        unequalled = core.top_whole == 1 and core.least_priority < core.top_priority
        if core.whole_always or (first and (alone or unequalled or in_one_piece(s, lane)) and all_here(s, a.model)):
            a.whole = 1
            a.segments = 1
    while a.issued < a.segments and a.issued - a.done < look_ahead(s) + a.draining and has_weights(s, lane):
        if not launch(s, lane, now):
            return False
    note_room(s, lane)
    return True


# --- choosing ------------------------------------------------------------------------------------------------------


@part
def refresh(s: State, n: int, now: int) -> None:
    """Ranks the heap's top and n other lanes afresh, so that a rank that depends on the time does not get old."""
    core = s.core[0]
    if core.timeless:
        return
    for k in range(min(n + 1, core.ready)):
        i = 0
        if k > 0:
            core.refresh_at += 1
            if core.refresh_at >= core.ready:
                core.refresh_at = 0
            i = core.refresh_at
        make_ready(s, s.ready[i], rank_lane(s, s.ready[i], now))


@part
def activate(s: State, lane: int) -> bool:
    """Starts the lane's turn; False if it must wait for its inputs."""
    core = s.core[0]
    a = s.lane[lane]
    unready(s, lane)
    core.decisions += 1
    if a.state == FILLING:
        complete = close_lane(s, lane)
        take_berth(s, lane, lane)
        ask(s, a.model)
        if s.residency[0].managed > 0:
            s.weights[a.model].served += 1
        if not complete:
            return False
        set_running(s, lane)
    s.active[core.active] = lane
    a.active_at = core.active
    core.active += 1
    a.back = 0
    a.demand = s.size[a.model, a.size].demand
    core.demand += a.demand
    return True


@part
def worst(s: State, now: int) -> int:
    """The active lane of the highest last known rank, among lanes with segments left to launch."""
    core = s.core[0]
    found = NONE
    for k in range(core.active):
        lane = s.active[k]
        a = s.lane[lane]
        if a.issued < a.segments and (found < 0 or a.rank > s.lane[found].rank):
            found = lane
    if found >= 0 and not core.timeless:
        s.lane[found].rank = rank_lane(s, found, now)
    return found


@part
def look_at_top(s: State) -> None:
    """Finds the highest priority among active jobs, and, for policies that read it, their resources on the GPU."""
    top = -NEVER
    for k in range(s.core[0].active):
        top = max(top, s.lane[s.active[k]].priority)
    gpu = s.gpu[0]
    gpu.active_priority = top
    if s.core[0].facts & READS_TOP:
        of_top = gpu.top
        of_top.ns = of_top.blocks = of_top.compute = of_top.memory = gpu.lower_ns = 0.0
        for k in range(s.core[0].flight):
            lane = s.flight[k]
            a = s.lane[lane]
            ns = 0.0
            for j in range(a.done, a.issued):
                ns += s.segment[a.model, a.size, j].time_ns
            if a.whole:  # the expected remainder
                ns = max(0.0, s.size[a.model, a.size].total_ns - (s.gpu[0].now_ns - s.segment_ns[lane, 0, 0]))
            if a.priority >= top:
                f = s.segment[a.model, a.size, a.done]
                of_top.ns += ns
                of_top.blocks += f.blocks
                of_top.compute += f.compute
                of_top.memory += f.memory
            else:
                gpu.lower_ns += ns


@part
def admitted(s: State, lane: int, now: int) -> bool:
    """Whether the policy, and the client's limit, let the lane launch now. An idle GPU takes it in any case, unless the
    policy may leave the GPU idle: other policies only order work, and waste no time.
    """
    if over_limit(s, lane, now):
        return False
    others = s.core[0].active - (1 if s.lane[lane].active_at >= 0 else 0)
    if s.call[0].admit == _ZERO or (s.core[0].may_idle == 0 and s.core[0].flight == 0 and others == 0):
        return True
    measure(s)
    look_at_top(s)
    fill_lane_job(s, lane, now)
    answer = call_asking(s.call[0].admit, s.job.ctypes.data, s.call[0].admit_2, s.call[0].admit_3)
    if np.isnan(answer):
        s.core[0].bad_ranks += 1
        return False
    if answer == 0.0:
        return False
    if answer == 1.0 or answer <= now:
        return True
    s.core[0].ask_at_ns = min(s.core[0].ask_at_ns, np.ceil(answer))
    return False


@part
def best_admitted(s: State, lane: int, full: bool, most: float, now: int) -> int:
    """The best waiting lane that is admitted, asked in order of rank; NONE if there is none. If the active set is full,
    only ranks below `most` count.
    """
    if admitted(s, lane, now):
        return lane
    # The children of a refused lane in the heap come next, so each lane that is read is also asked.
    n = push_behind(s, 0, 0)
    while n > 0:
        at = s.next_at[0]
        lane = int(s.ready[at])
        if full and s.lane[lane].rank >= most:
            return NONE
        if (full or s.core[0].active == 0 or has_room(s, lane)) and admitted(s, lane, now):
            return lane
        heap_pop(s.next_rank, s.next_at, 0, n)
        n = push_behind(s, at, n - 1)
    return NONE


@part
def push_behind(s: State, at: int, n: int) -> int:
    """Adds the children of a place in the heap of waiting lanes to the scratch heap of n places; returns its new size.
    """
    for k in range(2 * at + 1, min(2 * at + 3, s.core[0].ready)):
        heap_push(s.next_rank, s.next_at, 0, n, s.lane[s.ready[k]].rank, k)
        n += 1
    return n


@part
def next_turn(s: State, n: int, swaps: int, now: int) -> int:
    """The lane whose turn comes next, with a place made for it in the active set; NONE if no change is needed."""
    core = s.core[0]
    settle(s, now)
    if core.ready == 0:
        return NONE
    full = core.active >= core.max_active
    # Programs launched in one piece cannot be held back any more.
    if full and (core.whole_always or core.preemptions >= swaps):
        return NONE
    refresh(s, n, now)
    lane = int(s.ready[0])
    if not full and core.active > 0:
        full = not has_room(s, lane)
        if full and (core.whole_always or core.preemptions >= swaps):
            return NONE
    other = NONE
    most = np.inf
    if full:
        other = worst(s, now)
        if other < 0 or s.lane[lane].rank >= s.lane[other].rank:
            return NONE
        most = s.lane[other].rank
    lane = best_admitted(s, lane, full, most, now)
    if lane < 0:
        return NONE
    if other >= 0:
        deactivate(s, other)
        touch(s, other)
        core.preemptions += 1
    return lane


@part
def goes_on(s: State, lane: int, now: int) -> bool:
    """Whether an active lane stays: a policy with `admit`, or a limit, may stop it between segments."""
    a = s.lane[lane]
    asked = s.call[0].admit != _ZERO or s.core[0].limited > 0
    if not asked or a.issued == 0 or a.issued >= a.segments or admitted(s, lane, now):
        return True
    deactivate(s, lane)
    make_ready(s, lane, a.rank)
    return False


@part
def choose(s: State, now: int) -> bool:
    """Fills the active set with the best waiting lanes and launches their segments; False if the backend fails."""
    core = s.core[0]
    n = core.refresh
    swaps = core.preemptions + core.max_active
    k = NONE
    core.ask_at_ns = np.inf
    while k < core.active:
        if k < 0:  # first new lanes, each fed at once, so that the next one is judged by the remaining room
            lane = next_turn(s, n, swaps, now)
            if lane < 0:
                k = 0
                choose_who_stands_back(s)
                continue
            n = 0
            if not activate(s, lane) or gives_way(s, lane, find_shortest(s)):
                continue
        else:
            lane = s.active[k]
            if not goes_on(s, lane, now):  # another lane may have stood back for it
                k = 0
                choose_who_stands_back(s)
                continue
            k += 1
            if stands_back(s, lane):
                continue
        if not feed(s, lane, now):
            return False
    core.changed = 0
    core.room_at_ns = min(core.room_at_ns, core.ask_at_ns)
    return True


# --- completing ----------------------------------------------------------------------------------------------------


@part
def tell_done(s: State, lane: int, segment: int, now: int) -> None:
    """Calls a policy's `done` with the job's current state and the segment's duration."""
    a = s.lane[lane]
    fact = s.done_segment[0]
    fill_segment(s, fact, a.model, a.size, segment)
    if a.whole:
        fact.ns = s.size[a.model, a.size].total_ns
    fact.took_ns = now - began_ns(s, lane, segment)
    fact.number = segment
    fill_lane_job(s, lane, now)
    call_telling(s.call[0].done, s.call[0].done_1, s.call[0].done_2, s.call[0].done_3)
    s.core[0].changed = 1


@part
def tick(s: State, now: int) -> None:
    """Calls a policy's `tick` every tick_ns while there is work."""
    if s.call[0].tick == _ZERO:
        return
    if s.core[0].live == 0:
        s.core[0].tick_at_ns = 0.0
        return
    if s.core[0].tick_at_ns == 0.0:
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
    elif now >= s.core[0].tick_at_ns:
        measure(s)
        look_at_top(s)
        call_telling(s.call[0].tick, s.call[0].tick_1, s.call[0].tick_2, _ZERO)
        s.core[0].tick_at_ns = now + s.core[0].tick_ns
        s.core[0].changed = 1
    s.core[0].room_at_ns = min(s.core[0].room_at_ns, s.core[0].tick_at_ns)


@part
def segment_done(s: State, lane: int, now: int) -> None:
    core = s.core[0]
    a = s.lane[lane]
    m = a.model
    s.segment_ns[lane, a.done, 1] = now
    account(s, lane, a.done, -1.0, 0.0)
    alone_ns = s.size[m, a.size].total_ns if a.whole else s.segment[m, a.size, a.done].time_ns
    charge(s, lane, alone_ns, part_of_time(s, lane, now), began_ns(s, lane, a.done))
    a.done += 1
    core.segments_done += 1
    if s.call[0].done != _ZERO:
        tell_done(s, lane, a.done - 1, now)
    touch(s, lane)
    if a.issued > a.done:
        account(s, lane, a.done, 1.0, -1.0)
        return
    leave_stream(s, lane)
    leave_gpu(s, lane)
    core.flight -= 1
    last = s.flight[core.flight]
    s.flight[a.flight_at] = last
    s.lane[last].flight_at = a.flight_at
    a.flight_at = NONE


@part
def poll(s: State, now: int) -> None:
    """Reads the completion words of the lanes in flight: each lane's oldest launch."""
    core = s.core[0]
    core.room_at_ns = core.ask_at_ns if core.ready > 0 else np.inf
    k = 0
    while k < core.flight:
        lane = s.flight[k]
        a = s.lane[lane]
        word = s.whole[lane, a.size].word if a.whole else s.launch[lane, a.size, a.done].word
        if load_at(word) == _ZERO:
            if leaves_room(s, lane, now):
                a.draining = core.changed = 1
            else:
                note_room(s, lane)
            k += 1
        else:  # look at k again: the lane may have more completions, or another lane may have moved there
            store_at(word, _ZERO)
            segment_done(s, lane, now)
