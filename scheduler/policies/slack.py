"""Targets first: shortest remaining time per request, with less weight on a job's time the less slack it has.

A job that can no longer meet its deadline ranks behind those that can, as if it took four times as long, and moves up
the later it is: late answers are still wanted, and no job waits for ever.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

URGENT = 0.5  # factor on the time of a job without slack; a job with much slack has 1.5
HOPELESS = 4.0
AGEING = 0.02  # rank gained, in ns, for every ns that a job is late


def order(job: Job) -> float:
    return job.deadline_ns


@policy(name="slack", order=order)
def rank(job: Job) -> float:
    time_ns = job.remaining_ns / job.batch
    slack_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    if slack_ns < 0.0:
        return HOPELESS * time_ns - AGEING * (job.now_ns - job.deadline_ns)
    return time_ns * (URGENT + slack_ns / (slack_ns + job.remaining_ns))
