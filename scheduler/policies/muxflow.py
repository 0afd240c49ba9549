"""MuxFlow (2023): offline work gets the fraction of the GPU that online work (the highest priority seen) recently left.

MuxFlow gives offline work a part of the SMs, protects memory, contains errors, and matches models by predicted speed.
Here offline work gets a part of the time, averaged every 10 ms and at least a tenth, and models are not matched.
"""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy


def admit(job: Job, own: Own) -> float:
    return 1.0 if job.priority >= own.top else float(own.next_ns)


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.used_ns = job.priority, own.used_ns + segment.ns
    else:
        own.next_ns = max(own.next_ns, job.now_ns - segment.took_ns) + segment.ns / max(1.0 - own.online, 0.1)


def tick(own: Own) -> None:
    own.online, own.used_ns = 0.7 * own.online + 0.3 * min(own.used_ns / 10e6, 1.0), 0.0


@policy(name="muxflow", admit=admit, done=done, tick=tick, tick_us=10_000, may_idle=True, max_in_flight=1,
        top_whole=True, state={"top": -1e9, "next_ns": 1.0, "online": 0.5, "used_ns": 0.0})  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns - 2.0**56 * job.priority
