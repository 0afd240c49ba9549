"""Targets first: shortest remaining time per request, sooner the less slack a job has.

A job that cannot make its deadline any more stands back for those that can, as if it took four times as long, and
counts for more the later it is: late answers are still wanted, and nothing waits for ever.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

URGENT = 0.5  # how much a job without any slack counts of its time, where one with a lot counts 1.5
HOPELESS = 4.0
AGEING = 0.02  # ns of rank for every ns it is late


def order(job: Job) -> float:
    return job.deadline_ns


@policy(name="slack", order=order)
def rank(job: Job) -> float:
    time_ns = job.remaining_ns / job.batch
    slack_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    if slack_ns < 0.0:
        return HOPELESS * time_ns - AGEING * (job.now_ns - job.deadline_ns)
    return time_ns * (URGENT + slack_ns / (slack_ns + job.remaining_ns))
