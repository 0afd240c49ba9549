"""REEF (OSDI'22): real-time jobs run at once; best effort fills the room beside them if it ends before they do.

Real time is the highest priority that is active. REEF also stops running best-effort kernels within microseconds; a
policy cannot, so real time waits for the best-effort segment in flight. REEF composes kernels; here the unit is a
segment: it runs if its largest kernel fits beside the work on the GPU, and takes no longer than the remaining real-time
work.
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
