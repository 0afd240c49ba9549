"""Highest response ratio next: shortest remaining time per request, sooner the longer a job has waited for its length.

Like `srpt` for those that have just come; but one that has waited as long as it takes counts half its time, so
slowdowns stay close together and nothing starves.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


def order(job: Job) -> float:
    return job.arrival_ns


@policy(name="hrrn", order=order)
def rank(job: Job) -> float:
    waited = (job.now_ns - job.arrival_ns) / job.total_ns
    return job.remaining_ns / job.batch / (1.0 + waited)
