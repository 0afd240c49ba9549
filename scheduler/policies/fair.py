"""Fair (Salus FAIR, MLSys'20; CFS): one job at a time, of the model that has had least of the GPU for its share.

Shares are those of the models (`share`), and count GPU time, not iterations as in Salus. Requests of one model's
clients are served in turn. Time that a model did not ask for is not saved up.
"""

from paellapy.scheduler.core.job import Job
from paellapy.scheduler.policies.policy import policy


def order(job: Job) -> float:
    return job.client_start_ns


@policy(name="fair", order=order, active=1)
def rank(job: Job) -> float:
    return -job.deficit_ns / job.share
