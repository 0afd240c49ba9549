"""LAX (HPCA'21; in XSched, OSDI'25): least laxity first, the time a job could still wait and make its deadline.

Jobs that cannot make it any more come after all others, the least late first; jobs without deadline or target last. LAX
predicts what is left of a job from its kernels' rates; here the time alone of its segments says it.
"""

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

HOPELESS = 2.0**56


@policy(name="lax", look_ahead=1)
def rank(job: Job) -> float:
    if job.deadline_ns >= NEVER:
        return 2.0 * HOPELESS + job.arrival_ns
    laxity_ns = job.deadline_ns - job.now_ns - job.remaining_ns
    return laxity_ns if laxity_ns >= 0.0 else HOPELESS - laxity_ns
