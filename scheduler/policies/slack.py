"""Targets first: shortest remaining time per request among the jobs that can still make it, the others after them."""

from scheduler.policy import Job, policy

HOPELESS = 2.0**56  # above any remaining time in ns


def order(job: Job) -> float:
    return job.deadline_ns


@policy(name="slack", order=order)
def rank(job: Job) -> float:
    slack_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    if slack_ns < 0.0:
        return HOPELESS + job.arrival_ns
    return job.remaining_ns / job.batch
