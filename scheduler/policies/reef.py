"""REEF (OSDI'22): real time at once; best effort pads it with blocks that find a place beside it and end before it.

Real time is the highest priority that is active. REEF also stops best-effort kernels that run, within microseconds: a
policy cannot, so real time waits for the best-effort segment in flight. Padding is by segment, where REEF composes
kernels: a segment goes if its largest kernel fits beside what is on the GPU, and it takes no longer than what is left
of real time.
"""

from paellapy.scheduler.core.job import Gpu, Job
from paellapy.scheduler.policies.policy import policy

STEP = 2.0**56


def admit(job: Job, gpu: Gpu) -> bool:
    if job.priority >= gpu.active_priority:
        return True
    fits = gpu.occupancy + job.segment.occupancy <= 1.0
    return fits and gpu.lower_ns + job.segment.ns <= gpu.top.ns


@policy(name="reef", admit=admit, look_ahead=1, top_whole=True)
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
