"""A baseline that stands for CUDA streams: all jobs at once, as whole programs, ordered by the hardware."""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

EVERYTHING = 1 << 30


@policy(name="streams", active=EVERYTHING, whole=True)
def rank(job: Job) -> float:
    return job.arrival_ns
