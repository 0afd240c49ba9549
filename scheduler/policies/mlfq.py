"""MLFQ (as in XSched, OSDI'25): jobs sink to lower queues as they run, so short jobs pass without known lengths.

The first queue holds jobs that have run for up to 0.5 ms, each further queue jobs with up to four times as much. Within
a queue, jobs go in order of arrival. A job rises by one queue per 100 ms of waiting. XSched moves queues of commands by
the time they ran; here a job is one batch of requests.
"""

import math

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

FIRST_NS = 0.5e6
AGEING_NS = 100e6
STEP = 2.0**56


@policy(name="mlfq", active=2, max_in_flight=1)
def rank(job: Job) -> float:
    had = max((job.total_ns - job.remaining_ns) / FIRST_NS, 0.25)
    queue = math.ceil(math.log2(had) / 2.0) - math.floor((job.now_ns - job.arrival_ns) / AGEING_NS)
    return max(queue, 0.0) * STEP + job.arrival_ns
