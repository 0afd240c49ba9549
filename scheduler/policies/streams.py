"""Everything at once, whole programs, and the hardware decides: CUDA streams, the baseline."""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy

EVERYTHING = 1 << 30


@policy(name="streams", active=EVERYTHING, whole=True)
def rank(job: Job) -> float:
    return job.arrival_ns
