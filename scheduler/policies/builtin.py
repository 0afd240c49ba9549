"""Our own policies, and the baselines that stand for a GPU without a scheduler."""

from __future__ import annotations

import math

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import Gpu, Job, Owner
from paellapy.scheduler.policies.policy import Policy, policy

EVERYTHING = 1 << 30
PRIORITY_STEP = 2.0**56  # above any arrival in ns, and small enough that a double still tells arrivals apart
PAELLA_NS = 10e6  # how much GPU time paella lets a model be owed
EDF_SLOWDOWN = 4.0
SLACK_URGENT = 0.5  # factor on the time of a job without slack; a job with much slack has 1.5
SLACK_HOPELESS = 4.0
SLACK_AGEING = 0.02  # rank gained, in ns, for every ns that a job is late
PACED_MARGIN = 0.1  # part of the time it is given by which a paced job goes early; a guess


def by_arrival(job: Job) -> float:
    return job.arrival_ns


def by_client(job: Job) -> float:
    return job.client_start_ns


def by_deadline(job: Job) -> float:
    return job.deadline_ns


@policy
def fifo(job: Job) -> float:
    """First come, first served."""
    return job.arrival_ns


@policy(active=1, whole=True)
def serial(job: Job) -> float:
    """One job at a time, in order of arrival: a baseline that stands for one CUDA stream."""
    return job.arrival_ns


@policy(active=EVERYTHING, whole=True)
def streams(job: Job) -> float:
    """A baseline that stands for CUDA streams: all jobs at once, as whole programs, ordered by the hardware."""
    return job.arrival_ns


@policy
def edf(job: Job) -> float:
    """Earliest deadline first; a job without deadline or target is due after four times its time alone."""
    if job.deadline_ns >= NEVER:
        return job.arrival_ns + EDF_SLOWDOWN * job.total_ns
    return job.deadline_ns


@policy(order=by_arrival)
def srpt(job: Job) -> float:
    """Shortest remaining processing time first: the lowest mean latency. Long jobs may starve; `paella` bounds that.

    A batch answers several requests at once, so its time counts per request (Smith's rule). Ranked by time alone, small
    batches would always leave before full ones, and batches would never form.
    """
    return job.remaining_ns / job.batch


@policy(order=by_arrival)
def hrrn(job: Job) -> float:
    """Shortest remaining time per request, divided by the response ratio: 1 + waiting ÷ length.

    A job that has just arrived ranks as under `srpt`; one that has waited as long as it takes counts with half its
    time. The textbook's highest response ratio next looks at the ratio alone, so that long jobs do not starve. Here the
    remaining time counts too: under overload long jobs wait as long as under `srpt`; `paella` and `fair` bound that.
    """
    waited = (job.now_ns - job.arrival_ns) / job.total_ns
    return job.remaining_ns / job.batch / (1.0 + waited)


@policy(order=by_deadline, params={"paced": 0.0})
def slack(job: Job) -> float:
    """Targets first: shortest remaining time per request, with less weight on a job's time the less slack it has.

    A job that can no longer meet its deadline ranks behind those that can, as if it took four times as long, and moves
    up the later it is: late answers are still wanted, and no job waits for ever.

    A job with the parameter `paced` is one of a chain, such as the steps of a text: if it is done early, the next one
    comes early, and the GPU has no time left for others. So it has only an idle GPU until it must begin, and then goes
    first.
    """
    time_ns = job.remaining_ns / job.batch
    slack_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    if job.params.paced > 0.0 and job.deadline_ns < NEVER:
        spare_ns = slack_ns - PACED_MARGIN * (job.deadline_ns - job.arrival_ns)
        return spare_ns if spare_ns < 0.0 else math.inf
    if slack_ns < 0.0:
        return SLACK_HOPELESS * time_ns - SLACK_AGEING * (job.now_ns - job.deadline_ns)
    return time_ns * (SLACK_URGENT + slack_ns / (slack_ns + job.remaining_ns))


def not_beside_higher(job: Job, gpu: Gpu) -> bool:
    return job.priority >= gpu.active_priority


@policy(admit=not_beside_higher, max_in_flight=1, top_whole=True)
def priority(job: Job) -> float:
    """Higher priorities first, in order of arrival among equals; lower priorities wait while a higher one is active.

    On an H200, best-effort segments that ran beside a high-priority model more than doubled its p99. Held back, one
    best-effort job adds 5–7 % to it, and two add 9–19 %. With one more segment of each queued behind the running one,
    the figures are 6–13 % and 24–31 %, for 1–2 % more best-effort throughput.
    """
    return job.arrival_ns - PRIORITY_STEP * job.priority


@policy(order=by_client, active=1)
def fair(job: Job) -> float:
    """Fair (Salus FAIR, MLSys'20; CFS): one job at a time, of the model with the least GPU time relative to its share.

    Shares are those of the models (`share`), and count GPU time, not iterations as in Salus. Clients of one model are
    served in turn. A model does not save up time while it has no requests.
    """
    return -job.deficit_ns / job.share


@policy(order=by_client)
def paella(job: Job) -> float:
    """Paella (SOSP'23): shortest remaining time per request first, with a bound on unfairness.

    A model that is owed more GPU time than 10 ms goes first, the largest debt first. Paella counts launches; this
    policy counts GPU time, by shares. Clients of one model take turns by fair queueing.
    """
    if job.deficit_ns > PAELLA_NS:
        return -job.deficit_ns
    return job.remaining_ns / job.batch


def paella_with(threshold_ms: float) -> Policy:
    """Paella with another bound: 0 gives fair sharing, a large bound gives plain SRPT."""
    threshold_ns = threshold_ms * 1e6

    def bounded(job: Job) -> float:
        if job.deficit_ns > threshold_ns:
            return -job.deficit_ns
        return job.remaining_ns / job.batch

    return policy(name=f"paella({threshold_ms:g} ms)", order=by_client)(bounded)


def least_recently_used(model: Owner) -> float:
    return model.used_ns


@policy(order=by_client, victim=least_recently_used)
def lru(job: Job) -> float:
    """Paella's order of jobs; if not all weights fit on the GPU, the least recently used weights are evicted.

    Other policies weigh recent demand and the time to bring weights back. This policy serves as a baseline for them.
    """
    if job.deficit_ns > PAELLA_NS:
        return -job.deficit_ns
    return job.remaining_ns / job.batch
