"""Policies after published systems. Each says how it differs from the paper."""

from __future__ import annotations

import math

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import DoneSegment, Gpu, Job, Own
from paellapy.scheduler.policies.policy import policy

EVERYTHING = 1 << 30
STEP = 2.0**56  # above any arrival in ns: ranks by priority, then by arrival


def from_its_time(job: Job, own: Own) -> float:
    return float(own.next_ns[job.model])


def top_or_from_time(job: Job, own: Own) -> float:
    return 1.0 if job.priority >= own.top else float(own.next_ns)


# --- limits and shares of the GPU's time ------------------------------------------------------------------------------


def antman_done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.params.performance < 1.0:
        began_ns = max(own.next_ns[job.model], job.now_ns - segment.took_ns)
        own.next_ns[job.model] = began_ns + segment.ns / job.params.performance


@policy(admit=from_its_time, done=antman_done, per_model={"next_ns": 1.0}, params={"performance": 1.0}, may_idle=True,
        max_in_flight=1)  # fmt: skip
def antman(job: Job) -> float:
    """AntMan (OSDI'20): opportunistic models are slowed down by idle time after each segment; others run unhindered.

    `performance` (a param of the model, 0 to 1) is the fraction of time that a model may run; 1 stands for a
    resource-guaranteed model. AntMan's local coordinator adapts this fraction, and a memory cap, while it watches the
    guaranteed job; here the fraction is constant.
    """
    return job.arrival_ns - STEP * job.priority


TOKEN_KEPT_NS = 2e6  # several segments of other models, for which it may have had to wait


def token_done(job: Job, segment: DoneSegment, own: Own) -> None:
    since_ns = job.now_ns - segment.took_ns - TOKEN_KEPT_NS
    own.next_ns[job.model] = max(own.next_ns[job.model], since_ns) + segment.ns / job.params.limit
    own.due_ns[job.model] = max(own.due_ns[job.model], since_ns) + segment.ns / job.params.request


@policy(admit=from_its_time, done=token_done, per_model={"next_ns": 1.0, "due_ns": 0.0},
        params={"request": 0.01, "limit": 1.0}, may_idle=True, active=1)  # fmt: skip
def token(job: Job, own: Own) -> float:
    """Token (KubeShare, HPDC'20; Gemini, TCC'21): one model at a time, each with a guaranteed `request` and a `limit`.

    Both are fractions of the GPU's time, given as params of the model. The model furthest below its request goes first;
    a model at its limit waits, even if the GPU is idle. Here a turn is a segment of known duration; Gemini hands out
    quotas of 100 to 250 ms and predicts bursts. A model keeps unused time for 2 ms; in Gemini for a window of seconds.
    """
    return float(own.due_ns[job.model])


def quota_done(job: Job, segment: DoneSegment, own: Own) -> None:
    m = job.model
    share, began_ns, past_ns = job.params.share, job.now_ns - segment.took_ns, job.now_ns - own.since_ns[m]
    if began_ns > own.next_ns[m] + 20e6:  # the model was idle for a while, which says nothing about its rate
        own.used_ns[m], own.since_ns[m], past_ns = 0.0, began_ns, 0.0
    own.used_ns[m] += segment.ns
    if past_ns >= 20e6:
        own.extra[m] = min(max(own.extra[m] + 0.5 * (share - own.used_ns[m] / past_ns), -0.5 * share), 1.0 - share)
        own.used_ns[m], own.since_ns[m] = 0.0, job.now_ns
    own.next_ns[m] = max(own.next_ns[m], began_ns) + segment.ns / max(share + own.extra[m], 1e-3)


@policy(admit=from_its_time, done=quota_done, params={"share": 1.0}, may_idle=True, max_in_flight=1,
        per_model={"next_ns": 1.0, "used_ns": 0.0, "since_ns": 0.0, "extra": 0.0})  # fmt: skip
def quota(job: Job) -> float:
    """Quota (GaiaGPU, 2018): a token bucket per model, whose fill rate is adjusted until the model uses its `share`.

    The share is a fraction of the GPU's time, a param of the model. GaiaGPU fills buckets of blocks every 120 ms by
    NVML figures. Here buckets hold time, usage is exact, the rate is corrected every 20 ms, and shares are not elastic.
    """
    return job.arrival_ns


# --- best effort beside high priority ---------------------------------------------------------------------------------


TGS_GAP_NS = 10e3  # shorter gaps between production's jobs stay free


def tgs_admit(job: Job, gpu: Gpu, own: Own) -> float:
    if job.priority >= own.top:
        return 1.0
    if job.priority >= gpu.active_priority:
        return float(own.quiet_ns)
    return float(own.next_ns) if gpu.occupancy + job.segment.occupancy <= 1.0 else 0.0


def tgs_done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.alone_ns, own.took_ns = job.priority, own.alone_ns + segment.ns, own.took_ns + segment.took_ns
        own.quiet_ns = job.now_ns + TGS_GAP_NS
    else:
        own.next_ns = max(own.next_ns, job.now_ns - segment.took_ns) + segment.ns / own.rate


def tgs_tick(gpu: Gpu, own: Own) -> None:
    speed, own.alone_ns, own.took_ns = own.alone_ns / max(own.took_ns, 1.0), 0.0, 0.0
    rested, own.ticks = own.ticks == 0.0, (own.ticks + 1.0) % 10.0  # best effort pauses in every tenth tick
    own.best += 0.3 * (speed - own.best) * (rested and speed > 0.0)
    own.speed += 0.3 * ((speed if speed > 0.0 else own.best) - own.speed) * (not rested)
    own.rate = min(max(own.rate * (1.0 if rested else 1.1 if own.speed > 0.97 * own.best else 0.6), 1e-3), 4.0)
    own.next_ns = gpu.now_ns + 5e6 if own.ticks == 0.0 and speed > 0.0 else min(own.next_ns, gpu.now_ns + 5e6)


@policy(admit=tgs_admit, done=tgs_done, tick=tgs_tick, tick_us=5000, may_idle=True, max_in_flight=1, top_whole=True,
        state={"rate": 0.05, "top": -1e9, "next_ns": 1, "quiet_ns": 1, "best": 1, "speed": 1, "alone_ns": 0,
               "took_ns": 0, "ticks": 0})
def tgs(job: Job) -> float:
    """TGS (NSDI'23): best effort gets the time that production leaves, and beside it a rate that adapts.

    Production is the highest priority seen. The rate grows while production keeps its speed of the ticks in which best
    effort pauses, and falls otherwise. TGS limits the rate at which kernels are sent, also on an idle GPU, and measures
    the rate of production's kernels. Here idle time is free, except for gaps below 10 µs, and a segment runs beside
    production only if it fits.
    """
    return job.arrival_ns - STEP * job.priority


ORION_MOST_NS = 160e3


def orion_admit(job: Job, gpu: Gpu) -> bool:
    if job.priority >= gpu.active_priority:
        return True
    if gpu.lower_ns + job.segment.ns > ORION_MOST_NS:
        return False
    together = max(gpu.top.compute + job.segment.compute, gpu.top.memory + job.segment.memory)
    unlike = (gpu.top.compute - gpu.top.memory) * (job.segment.compute - job.segment.memory) < 0.0
    return unlike and together <= 1.0 and gpu.top.blocks + job.segment.blocks <= gpu.capacity_blocks


@policy(admit=orion_admit, max_in_flight=1)
def orion(job: Job) -> float:
    """Orion (EuroSys'24): best effort runs beside high priority only where the two use different resources of the GPU.

    High priority is always admitted. A best-effort segment runs beside it if one of the two is bound by compute and the
    other by memory, both fit together, and the best-effort work in flight stays under 160 µs (Orion: 2.5 % of the
    high-priority latency). Orion decides for each kernel; here the unit is a segment. A segment without a measured
    profile is held back. Best-effort jobs whose segments alternate between the two can fall into step while they wait,
    and get less than under `priority`.
    """
    return job.arrival_ns - STEP * job.priority


REEF_IN_FLIGHT_NS, REEF_QUIET_NS = 115e3, 50e6


def reef_admit(job: Job, gpu: Gpu, own: Own) -> bool:
    if job.priority > 0.0:
        own.real_time_ns = job.now_ns
        return True
    if gpu.active_priority > job.priority:
        fits = gpu.occupancy + job.segment.occupancy <= 1.0
        return fits and gpu.lower_ns + job.segment.ns <= gpu.top.ns
    follows = gpu.top.ns > 0.0 and gpu.top.ns + job.segment.ns > REEF_IN_FLIGHT_NS
    return not follows or gpu.now_ns > own.real_time_ns + REEF_QUIET_NS


@policy(admit=reef_admit, may_idle=True, state={"real_time_ns": -1e18}, max_in_flight=1, top_whole=True)
def reef(job: Job) -> float:
    """REEF (OSDI'22): real-time jobs run at once; best effort fills the room beside them if it ends before they do.

    Real time is any priority above 0. REEF stops running best-effort kernels within microseconds. A policy cannot, so
    real time waits for the best-effort segments in flight. As REEF bounds its device queues, this policy bounds these
    segments: while real time comes, they take at most 115 µs, unless one segment alone takes longer. REEF composes
    kernels; here a segment runs beside real time if its largest kernel fits and if it ends before real time does.
    """
    return job.arrival_ns - STEP * job.priority


TALLY_IDLE_NS = 100e3


def tally_admit(job: Job, gpu: Gpu, own: Own) -> float:
    if job.priority < gpu.active_priority:
        return 0.0
    return 1.0 if job.priority >= own.top else float(own.quiet_ns)


def tally_done(job: Job, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.quiet_ns = job.priority, job.now_ns + TALLY_IDLE_NS


@policy(admit=tally_admit, done=tally_done, state={"top": -1e9, "quiet_ns": 1.0}, may_idle=True, max_in_flight=1,
        top_whole=True)  # fmt: skip
def tally(job: Job) -> float:
    """Tally (ASPLOS'25): best effort runs once high priority has been idle for 100 µs, in short pieces.

    High priority is the highest priority seen. Tally slices kernels so that a piece ends within a chosen turnaround
    time. Here the pieces are the segments into which a model was cut when it was loaded (`quantum_us`), and their
    length is the turnaround time.
    """
    return job.arrival_ns - STEP * job.priority


def muxflow_done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.used_ns = job.priority, own.used_ns + segment.ns
    else:
        own.next_ns = max(own.next_ns, job.now_ns - segment.took_ns) + segment.ns / max(1.0 - own.online, 0.1)


def muxflow_tick(own: Own) -> None:
    own.online, own.used_ns = 0.7 * own.online + 0.3 * min(own.used_ns / 10e6, 1.0), 0.0


@policy(admit=top_or_from_time, done=muxflow_done, tick=muxflow_tick, tick_us=10_000, may_idle=True, max_in_flight=1,
        top_whole=True, state={"top": -1e9, "next_ns": 1.0, "online": 0.5, "used_ns": 0.0})  # fmt: skip
def muxflow(job: Job) -> float:
    """MuxFlow (2023): offline work gets the part of the GPU that online work (the highest priority seen) recently left.

    MuxFlow gives offline work a part of the SMs, protects memory, contains errors, and matches models by predicted
    speed. Here offline work gets a part of the time, averaged every 10 ms and at least a tenth, and models are not
    matched.
    """
    return job.arrival_ns - STEP * job.priority


# --- orders -----------------------------------------------------------------------------------------------------------

LAX_HOPELESS = 2.0**56
MLFQ_FIRST_NS = 0.5e6
MLFQ_AGEING_NS = 100e6


@policy(max_in_flight=1)
def lax(job: Job) -> float:
    """LAX (HPCA'21; in XSched, OSDI'25): least laxity first, the time a job can still wait and meet its deadline.

    Jobs that can no longer meet their deadlines come after all others, the least late first; jobs without deadline or
    target come last. LAX predicts the remaining time of a job from the rates of its kernels; here it is the time alone
    of the remaining segments.
    """
    if job.deadline_ns >= NEVER:
        return 2.0 * LAX_HOPELESS + job.arrival_ns
    laxity_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    return laxity_ns if laxity_ns >= 0.0 else LAX_HOPELESS - laxity_ns


@policy(active=2, max_in_flight=1)
def mlfq(job: Job) -> float:
    """MLFQ (as in XSched, OSDI'25): jobs sink to lower queues as they run, so short jobs pass without known lengths.

    The first queue holds jobs that have run for up to 0.5 ms, each further queue jobs with up to four times as much.
    Within a queue, jobs go in order of arrival. A job rises by one queue per 100 ms of waiting. XSched moves queues of
    commands by the time they ran; here a job is one batch of requests.
    """
    had = max((job.total_ns - job.remaining_ns) / MLFQ_FIRST_NS, 0.25)
    queue = math.ceil(math.log2(had) / 2.0) - math.floor((job.now_ns - job.arrival_ns) / MLFQ_AGEING_NS)
    return max(queue, 0.0) * STEP + job.arrival_ns


def pack_admit(job: Job, gpu: Gpu) -> bool:
    return gpu.occupancy + job.segment.blocks / gpu.capacity_blocks <= 1.0


@policy(admit=pack_admit, active=EVERYTHING)
def pack(job: Job) -> float:
    """Pack (Salus PACK, MLSys'20): as many jobs at once as fit, in order of arrival.

    Salus packs by memory, which an engine reserves when it loads a model. Here jobs fit as long as the blocks of their
    next segments find room on the SMs. A job that does not fit lets smaller ones pass.
    """
    return job.arrival_ns
