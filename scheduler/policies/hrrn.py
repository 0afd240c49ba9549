"""Highest response ratio next: shortest remaining time per request, divided by a factor that grows with waiting time.

A job that has just arrived ranks as under `srpt`. A job that has waited as long as it takes counts with half its time,
so slowdowns stay close together and no job starves.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


def order(job: Job) -> float:
    return job.arrival_ns


@policy(name="hrrn", order=order)
def rank(job: Job) -> float:
    waited = (job.now_ns - job.arrival_ns) / job.total_ns
    return job.remaining_ns / job.batch / (1.0 + waited)
