"""AntMan (OSDI'20): opportunistic models are slowed down by idle time after each segment; others run unhindered.

`performance` (a param of the model, 0 to 1) is the fraction of time that a model may run; 1 stands for a
resource-guaranteed model. AntMan's local coordinator adapts this fraction, and a memory cap, while it watches the
guaranteed job; here the fraction is constant.
"""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy

STEP = 2.0**56


def admit(job: Job, own: Own) -> float:
    return float(own.rests_ns[job.model])


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.params.performance < 1.0:
        began_ns = max(own.rests_ns[job.model], job.now_ns - segment.took_ns)
        own.rests_ns[job.model] = began_ns + segment.ns / job.params.performance


@policy(name="antman", admit=admit, done=done, per_model={"rests_ns": 1.0}, params={"performance": 1.0},
        may_idle=True, max_in_flight=1)  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
