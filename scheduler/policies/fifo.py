"""First come, first served."""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


@policy(name="fifo")
def rank(job: Job) -> float:
    return job.arrival_ns
