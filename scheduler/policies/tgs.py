"""TGS (NSDI'23): best effort's rate grows while top priority is as fast as ever. TGS counts arrivals, this stretch."""

from paellapy.scheduler.core.job import DoneSegment, Job, Own
from paellapy.scheduler.policies.policy import policy


def admit(job: Job, own: Own) -> float:
    return 1.0 if job.priority >= own.top else float(own.next_ns)


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.alone_ns, own.took_ns = job.priority, own.alone_ns + segment.ns, own.took_ns + segment.took_ns
    else:
        own.next_ns = max(own.next_ns, job.now_ns - segment.took_ns) + segment.ns / own.rate


def tick(own: Own) -> None:
    speed = own.alone_ns / own.took_ns if own.took_ns > 0.0 else own.best
    own.best, own.alone_ns, own.took_ns = max(own.best, speed), 0.0, 0.0
    slower = 1.0 - speed / own.best
    own.trouble = 1.0 if slower > 0.03 else own.trouble  # from then on the rate grows by little
    grown = own.rate + 0.002 if own.trouble > 0.0 else own.rate * 1.5
    own.rate = min(max(own.rate / 10.0 if slower >= 0.09 else own.rate / 1.5 if slower > 0.03 else grown, 1e-3), 4.0)


@policy(name="tgs", admit=admit, done=done, tick=tick, tick_us=5000, may_idle=True, state={"rate": 0.05,
        "top": -1e9, "next_ns": 1.0, "best": 1e-3, "alone_ns": 0.0, "took_ns": 0.0, "trouble": 0.0})  # fmt: skip
def rank(job: Job) -> float:
    return job.arrival_ns - 2.0**56 * job.priority
