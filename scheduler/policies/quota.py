"""Quota (GaiaGPU, 2018): a token bucket per model, whose fill rate is adjusted until the model uses its `share`.

The share is a fraction of the GPU's time, a param of the model. GaiaGPU fills buckets of blocks every 120 ms by NVML
figures. Here buckets hold time, usage is exact, the rate is corrected every 20 ms, and shares are not elastic.
"""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy


def admit(job: Job, own: Own) -> float:
    return float(own.full_ns[job.model])


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    m = job.model
    share, began_ns, past_ns = job.params.share, job.now_ns - segment.took_ns, job.now_ns - own.since_ns[m]
    if began_ns > own.full_ns[m] + 20e6:  # the model was idle for a while, which says nothing about its rate
        own.used_ns[m], own.since_ns[m], past_ns = 0.0, began_ns, 0.0
    own.used_ns[m] += segment.ns
    if past_ns >= 20e6:
        own.extra[m] = min(max(own.extra[m] + 0.5 * (share - own.used_ns[m] / past_ns), -0.5 * share), 1.0 - share)
        own.used_ns[m], own.since_ns[m] = 0.0, job.now_ns
    own.full_ns[m] = max(own.full_ns[m], began_ns) + segment.ns / max(share + own.extra[m], 1e-3)


@policy(name="quota", admit=admit, done=done, params={"share": 1.0}, may_idle=True, max_in_flight=1,
        per_model={"full_ns": 1.0, "used_ns": 0.0, "since_ns": 0.0, "extra": 0.0})  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns
