"""REEF (OSDI'22): real-time jobs run at once; best effort fills the room beside them if it ends before they do.

Real time is any priority above 0. REEF also stops running best-effort kernels within microseconds; a policy cannot, so
real time waits for the best-effort segments in flight. As REEF bounds its device queues, this bounds them: while real
time comes, they take no longer than IN_FLIGHT_NS, unless one segment alone does. REEF composes kernels; here the unit
is a segment: it runs beside real time if its largest kernel fits, and if it ends before real time does.
"""

from paellapy.scheduler.core.job import Gpu, Job, Own
from paellapy.scheduler.policies.policy import policy

STEP, IN_FLIGHT_NS, QUIET_NS = 2.0**56, 115e3, 50e6


def admit(job: Job, gpu: Gpu, own: Own) -> bool:
    if job.priority > 0.0:
        own.real_time_ns = job.now_ns
        return True
    if gpu.active_priority > job.priority:
        fits = gpu.occupancy + job.segment.occupancy <= 1.0
        return fits and gpu.lower_ns + job.segment.ns <= gpu.top.ns
    follows = gpu.top.ns > 0.0 and gpu.top.ns + job.segment.ns > IN_FLIGHT_NS
    return not follows or gpu.now_ns > own.real_time_ns + QUIET_NS


@policy(name="reef", admit=admit, may_idle=True, state={"real_time_ns": -1e18}, max_in_flight=1, top_whole=True)
def rank(job: Job) -> float:
    return job.arrival_ns - STEP * job.priority
