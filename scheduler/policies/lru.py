"""Paella's order of jobs; if not all weights fit on the GPU, the least recently used weights are evicted.

Other policies weigh recent demand and the time to bring weights back. This policy serves as a baseline for them.
"""

from paellapy.scheduler.core.job import Job, Owner
from paellapy.scheduler.policies.paella import THRESHOLD_MS, order
from paellapy.scheduler.policies.policy import policy


def victim(model: Owner) -> float:
    return model.used_ns


@policy(name="lru", order=order, victim=victim)
def rank(job: Job) -> float:
    if job.deficit_ns > THRESHOLD_MS * 1e6:
        return -job.deficit_ns
    return job.remaining_ns / job.batch
