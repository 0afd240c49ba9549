"""TGS (NSDI'23): best effort grows while top priority keeps its speed alone. TGS itself measures arrival rates."""

from paellapy.scheduler.core.job import DoneSegment, Gpu, Job, Own
from paellapy.scheduler.policies.policy import policy


def admit(job: Job, own: Own) -> float:
    return 1.0 if job.priority >= own.top else float(own.next_ns)


def done(job: Job, segment: DoneSegment, own: Own) -> None:
    if job.priority >= own.top:
        own.top, own.alone_ns, own.took_ns = job.priority, own.alone_ns + segment.ns, own.took_ns + segment.took_ns
    else:
        own.next_ns = max(own.next_ns, job.now_ns - segment.took_ns) + segment.ns / own.rate


def tick(gpu: Gpu, own: Own) -> None:
    speed, own.alone_ns, own.took_ns = own.alone_ns / max(own.took_ns, 1.0), 0.0, 0.0
    rested, own.ticks = own.ticks == 0.0, (own.ticks + 1.0) % 10.0  # best effort pauses in every tenth tick
    own.best += 0.3 * (speed - own.best) * (rested and speed > 0.0)
    own.speed += 0.3 * ((speed if speed > 0.0 else own.best) - own.speed) * (not rested)
    own.rate = min(max(own.rate * (1.0 if rested else 1.1 if own.speed > 0.97 * own.best else 0.6), 1e-3), 4.0)
    own.next_ns = gpu.now_ns + 5e6 if own.ticks == 0.0 and speed > 0.0 else min(own.next_ns, gpu.now_ns + 5e6)


@policy(
    name="tgs",
    admit=admit,
    done=done,
    tick=tick,
    tick_us=5000,
    may_idle=True,
    max_in_flight=1,
    top_whole=True,
    state={"rate": 0.05, "top": -1e9, "next_ns": 1, "best": 1, "speed": 1, "alone_ns": 0, "took_ns": 0, "ticks": 0},
)
def rank(job: Job) -> float:
    return job.arrival_ns - 2.0**56 * job.priority
