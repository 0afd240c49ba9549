"""How many jobs share the GPU, and which jobs stand back where sharing would slow a short job.

Jobs share the GPU until their total demand reaches `demand_limit` GPUs: a burst ends soonest for most jobs if few share
the GPU. A persistent queue is different: then total throughput matters more than the speed of each job, and throughput
still grows with the number of jobs, as long as each leaves most of the GPU idle. On the H200, 6, 12 and 24 small jobs
at once reached 0.72, 0.94 and 1.01 of the throughput of 48. So the limit grows while a queue persists, for jobs of the
largest batch size: a batch that is not full gains more by waiting.

In such a crowd a short job would be as slow as without a scheduler. So jobs that take several times as long, and rank
behind it, stand back between their segments, the worst rank first, down to the limit without a queue. The exception is
a load with a short job most of the time: holding back the others all the time would only cost throughput.
"""

from __future__ import annotations

from paellapy.instrument.jit import part
from paellapy.scheduler.core.codes import NONE
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.windows import can_be_confined


@part
def watch_queue(s: State, now: int) -> None:
    """Averages the number of waiting jobs, and how often lanes stood back, over about `queue_memory_ns`."""
    part = min(1.0, (now - s.core[0].last_ns) / s.tuning[0].queue_memory_ns)
    s.core[0].waiting_jobs += part * (s.core[0].ready + s.core[0].queued_jobs - s.core[0].waiting_jobs)
    s.core[0].short_often += part * ((1.0 if s.core[0].standing_back > 0 else 0.0) - s.core[0].short_often)


@part
def has_room(s: State, lane: int) -> bool:
    """Whether a lane may be active beside the active lanes, by their total demand."""
    m = s.lane[lane].model
    tuning = s.tuning[0]
    demand = s.size[m, s.lane[lane].size].demand
    limit, most, growth = s.core[0].demand_limit, tuning.most_demand, 0.0
    full = s.lane[lane].taken == s.size[m, s.model[m].n_sizes - 1].batch
    if can_be_confined(s, lane):
        most = tuning.most_confined_demand
        if full:
            limit *= tuning.confined_factor
    if full:
        growth = min(s.core[0].waiting_jobs / tuning.long_queue_jobs, tuning.most_growth) * max(0.0, 1.0 - demand)
    return bool(s.core[0].demand + demand <= min(max(most, limit), limit * (1.0 + growth)))


@part
def is_crowded(s: State) -> bool:
    return bool(s.core[0].demand > s.tuning[0].crowd_factor * s.core[0].demand_limit)


@part
def is_quiet(s: State, lane: int) -> bool:
    """Whether a lane is alone on the GPU; or short, and one of the few that have all SMs before further jobs go to
    windows. Such a lane is launched in one piece: every segment costs time, and no waiting job would gain by holding it
    back.
    """
    core = s.core[0]
    if core.ready > 0 or core.queued > 0 or core.barred > 0:
        return False
    if core.active == 1 and core.flight == 0:
        return True
    few = s.core[0].active <= s.tuning[0].roomy_jobs
    short = s.lane[lane].segments <= s.tuning[0].short_job_segments
    return bool(few and short and can_be_confined(s, lane))


@part
def in_one_piece(s: State, lane: int) -> bool:
    """Whether a queue persists and the job is short. Then jobs take turns anyway, and each segment costs the GPU a node
    and the host a launch. Not in a crowd that may have to stand back.
    """
    if s.core[0].waiting_jobs < s.tuning[0].steady_queue_jobs or s.lane[lane].segments > s.tuning[0].short_job_segments:
        return False
    return bool(s.core[0].short_often >= s.tuning[0].often_share or not is_crowded(s))


@part
def look_ahead(s: State) -> int:
    """Segments of one job on the GPU at a time: one in a crowd, where there is always other work and launched segments
    cannot stand back. Where no job stands back, one would only make the host launch the next segment late.
    """
    return 1 if is_crowded(s) and s.core[0].short_often < s.tuning[0].often_share else int(s.core[0].look_ahead)


@part
def length_ns(s: State, lane: int) -> float:
    a = s.lane[lane]
    return float(s.size[a.model, a.size].total_ns)


@part
def find_shortest(s: State) -> int:
    """The shortest active lane of a crowd; NONE if there is no crowd."""
    found = NONE
    if is_crowded(s):
        for k in range(s.core[0].active):
            if found < 0 or length_ns(s, s.active[k]) < length_ns(s, found):
                found = s.active[k]
    return int(found)


@part
def gives_way(s: State, lane: int, shortest: int) -> bool:
    """Whether a lane may have to stand back for the shortest."""
    if shortest < 0 or length_ns(s, lane) < s.tuning[0].much_longer * length_ns(s, shortest):
        return False
    return bool(s.lane[lane].rank > s.lane[shortest].rank)


@part
def choose_who_stands_back(s: State) -> None:
    """Marks the active lanes that launch nothing for now: of the lanes that give way to the shortest, all but the best
    ones that fit under the limit without a queue.
    """
    core = s.core[0]
    if core.standing_back == 0 and not is_crowded(s):
        return
    shortest = find_shortest(s)
    core.standing_back = 0
    room = core.demand_limit
    for k in range(core.active):
        a = s.lane[s.active[k]]
        a.back = 1 if gives_way(s, s.active[k], shortest) else 0
        core.standing_back += a.back
        if a.back == 0:
            room -= a.demand
    while core.standing_back > 0:
        best = NONE
        for k in range(core.active):
            lane = s.active[k]
            if s.lane[lane].back > 0 and (best < 0 or s.lane[lane].rank < s.lane[best].rank):
                best = lane
        room -= s.lane[best].demand
        if room < 0.0:
            break
        s.lane[best].back = 0
        core.standing_back -= 1


@part
def stands_back(s: State, lane: int) -> bool:
    return bool(s.lane[lane].back > 0 and s.core[0].short_often < s.tuning[0].often_share)
