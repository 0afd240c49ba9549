"""Tally (ASPLOS'25): best effort runs once high priority has been idle for 100 µs, in pieces, so that turnaround is
short.

High priority is the highest seen. Tally slices kernels so that a piece ends within a chosen turnaround; here the
pieces are the segments that a model was cut into when it was loaded (`quantum_us`), and turnaround is theirs.
"""

from paellapy.scheduler.core.job import DoneSegment, Gpu, Job, Own
from paellapy.scheduler.policies.policy import policy

IDLE_NS = 100e3
STEP = 2.0**56


def admit(job: Job, gpu: Gpu, own: Own) -> float:
    if job.priority < gpu.active_priority:
        return 0.0
    return 1.0 if job.priority >= own.top else float(own.quiet_ns)


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.quiet_ns = job.priority, job.now_ns + IDLE_NS


@policy(name="tally", admit=admit, done=done, state={"top": -1e9, "quiet_ns": 1.0}, may_idle=True, look_ahead=1,
        top_whole=True)  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
