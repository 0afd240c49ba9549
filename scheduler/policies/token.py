"""Token (KubeShare, HPDC'20; Gemini, TCC'21): one model at a time, each with a guaranteed `request` and a hard `limit`.

Both are parts of the GPU's time, given as params of the model. Who is furthest below its request goes first; who is at
its limit waits, although the GPU idles. Here a turn is a segment, whose time is known, where Gemini hands out quotas of
100 to 250 ms and predicts bursts; and a model that was idle has saved nothing up, where theirs may burst for a window.
"""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy


def admit(job: Job, own: Own) -> float:
    return float(own.may_ns[job.model])


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    since_ns = job.now_ns - segment.took_ns
    own.may_ns[job.model] = max(own.may_ns[job.model], since_ns) + segment.ns / job.params.limit
    own.due_ns[job.model] = max(own.due_ns[job.model], since_ns) + segment.ns / job.params.request


@policy(name="token", admit=admit, done=done, per_model={"may_ns": 1.0, "due_ns": 0.0},
        params={"request": 0.01, "limit": 1.0}, may_idle=True, active=1)  # fmt: skip
def rank(job: Job, own: Own) -> float:
    return float(own.due_ns[job.model])
