"""One job at a time, in order of arrival: a baseline that stands for one CUDA stream."""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


@policy(name="serial", active=1, whole=True)
def rank(job: Job) -> float:
    return job.arrival_ns
