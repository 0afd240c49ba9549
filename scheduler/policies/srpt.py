"""Shortest remaining processing time first: the least mean latency. Long jobs may starve; `paella` bounds that."""

from scheduler.policy import Job, policy


def order(job: Job) -> float:
    return job.arrival_ns


@policy(name="srpt", order=order)
def rank(job: Job) -> float:
    return job.remaining_ns
