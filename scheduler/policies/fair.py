"""Fair (Salus FAIR, MLSys'20; CFS): one job at a time, of the model with the least GPU time relative to its share.

Shares are those of the models (`share`), and count GPU time, not iterations as in Salus. Clients of one model are
served in turn. A model does not save up time while it has no requests.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


def order(job: Job) -> float:
    return job.client_start_ns


@policy(name="fair", order=order, active=1)
def rank(job: Job) -> float:
    return -job.deficit_ns / job.share
