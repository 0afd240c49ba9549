"""Token (KubeShare, HPDC'20; Gemini, TCC'21): one model at a time, each with a guaranteed `request` and a hard `limit`.

Both are fractions of the GPU's time, given as params of the model. The model furthest below its request goes first; a
model at its limit waits, even if the GPU is idle. Here a turn is a segment of known duration; Gemini hands out quotas
of 100 to 250 ms and predicts bursts. A model keeps unused time for 2 ms; in Gemini for a window of seconds.
"""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy

KEPT_NS = 2e6  # several segments of other models, for which it may have had to wait


def admit(job: Job, own: Own) -> float:
    return float(own.may_ns[job.model])


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    since_ns = job.now_ns - segment.took_ns - KEPT_NS
    own.may_ns[job.model] = max(own.may_ns[job.model], since_ns) + segment.ns / job.params.limit
    own.due_ns[job.model] = max(own.due_ns[job.model], since_ns) + segment.ns / job.params.request


@policy(name="token", admit=admit, done=done, per_model={"may_ns": 1.0, "due_ns": 0.0},
        params={"request": 0.01, "limit": 1.0}, may_idle=True, active=1)  # fmt: skip
def rank(job: Job, own: Own) -> float:
    return float(own.due_ns[job.model])
