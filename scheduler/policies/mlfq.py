"""MLFQ (as in XSched, OSDI'25): jobs sink to lower queues as they are served, so short ones pass without being known.

The first queue is for jobs that have had up to 0.5 ms, each further one for four times as much; within a queue it goes
by arrival. A job that has waited 100 ms for each queue rises again. XSched moves queues of commands by the time they
ran; here a job is one batch of requests.
"""

import math

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

FIRST_NS = 0.5e6
AGEING_NS = 100e6
STEP = 2.0**56


@policy(name="mlfq", active=2, look_ahead=1)
def rank(job: Job) -> float:
    had = max((job.total_ns - job.remaining_ns) / FIRST_NS, 0.25)
    queue = math.ceil(math.log2(had) / 2.0) - math.floor((job.now_ns - job.arrival_ns) / AGEING_NS)
    return max(queue, 0.0) * STEP + job.arrival_ns
