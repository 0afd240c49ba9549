"""Orion (EuroSys'24): best effort runs beside high priority only where the two use different resources of the GPU.

High priority is always admitted. A best-effort segment runs beside it if one of the two is bound by compute and the
other by memory, both fit together, and the best-effort work in flight stays under 160 µs (Orion: 2.5 % of the
high-priority latency). Orion decides for each kernel; here the unit is a segment. A segment without a measured profile
is held back.
"""

from paellapy.scheduler.core.job import Gpu, Job
from paellapy.scheduler.policies.policy import policy

MOST_NS = 160e3
STEP = 2.0**56


def admit(job: Job, gpu: Gpu) -> bool:
    if job.priority >= gpu.active_priority:
        return True
    if gpu.lower_ns + job.segment.ns > MOST_NS:
        return False
    together = max(gpu.top.compute + job.segment.compute, gpu.top.memory + job.segment.memory)
    unlike = (gpu.top.compute - gpu.top.memory) * (job.segment.compute - job.segment.memory) < 0.0
    return unlike and together <= 1.0 and gpu.top.blocks + job.segment.blocks <= gpu.capacity_blocks


@policy(name="orion", admit=admit, max_in_flight=1)
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
