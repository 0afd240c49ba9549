"""Earliest deadline first; a job without deadline or target is due after four times its time alone."""

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

SLOWDOWN = 4.0


@policy(name="edf")
def rank(job: Job) -> float:
    if job.deadline_ns >= NEVER:
        return job.arrival_ns + SLOWDOWN * job.total_ns
    return job.deadline_ns
