"""LAX (HPCA'21; in XSched, OSDI'25): least laxity first, the time a job can still wait and meet its deadline.

Jobs that can no longer meet their deadlines come after all others, the least late first; jobs without deadline or
target come last. LAX predicts the remaining time of a job from the rates of its kernels; here it is the time alone of
the remaining segments.
"""

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

HOPELESS = 2.0**56


@policy(name="lax", max_in_flight=1)
def rank(job: Job) -> float:
    if job.deadline_ns >= NEVER:
        return 2.0 * HOPELESS + job.arrival_ns
    laxity_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    return laxity_ns if laxity_ns >= 0.0 else HOPELESS - laxity_ns
