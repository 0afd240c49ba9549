"""Paella (SOSP'23): shortest remaining time per request first, with a bound on unfairness.

A model that is owed more GPU time than the threshold goes first, the largest debt first. Paella counts launches; this
policy counts GPU time, by shares. Clients of one model take turns by fair queueing.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import Policy, policy

THRESHOLD_MS = 10.0


def order(job: Job) -> float:
    return job.client_start_ns


@policy(name="paella", order=order)
def rank(job: Job) -> float:
    if job.deficit_ns > THRESHOLD_MS * 1e6:
        return -job.deficit_ns
    return job.remaining_ns / job.batch


def with_threshold(threshold_ms: float) -> Policy:
    """Paella with another bound: 0 gives fair sharing, a large bound gives plain SRPT."""
    threshold_ns = threshold_ms * 1e6

    def bounded(job: Job) -> float:
        if job.deficit_ns > threshold_ns:
            return -job.deficit_ns
        return job.remaining_ns / job.batch

    return policy(name=f"paella({threshold_ms:g} ms)", order=order)(bounded)
