"""Shortest remaining processing time first: the lowest mean latency. Long jobs may starve; `paella` bounds that.

A batch answers several requests at once, so its time counts per request (Smith's rule). Ranked by time alone, instances
with few requests would always leave before full ones, and batches would never form.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


def order(job: Job) -> float:
    return job.arrival_ns


@policy(name="srpt", order=order)
def rank(job: Job) -> float:
    return job.remaining_ns / job.batch
