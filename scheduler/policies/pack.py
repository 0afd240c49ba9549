"""Pack (Salus PACK, MLSys'20): as many jobs at once as fit, in order of arrival.

Salus packs by memory, which an engine reserves when it loads a model. Here jobs fit as long as the blocks of their next
segments find room on the SMs. A job that does not fit lets smaller ones pass.
"""

from paellapy.scheduler.core.job import Gpu, Job
from paellapy.scheduler.policies.policy import policy

EVERYTHING = 1 << 30


def admit(job: Job, gpu: Gpu) -> bool:
    return gpu.occupancy + job.segment.blocks / gpu.capacity_blocks <= 1.0


@policy(name="pack", admit=admit, active=EVERYTHING)
def rank(job: Job) -> float:
    return job.arrival_ns
