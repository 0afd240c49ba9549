"""First come, first served."""

from paellapy.scheduler.policies.policy import Job, policy


@policy(name="fifo")
def rank(job: Job) -> float:
    return job.arrival_ns
