"""Tally (ASPLOS'25): best effort runs once high priority has been idle for 100 µs, in short pieces.

High priority is the highest priority seen. Tally slices kernels so that a piece ends within a chosen turnaround time.
Here the pieces are the segments into which a model was cut when it was loaded (`quantum_us`), and their length is the
turnaround time.
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


@policy(name="tally", admit=admit, done=done, state={"top": -1e9, "quiet_ns": 1.0}, may_idle=True, max_in_flight=1,
        top_whole=True)  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
