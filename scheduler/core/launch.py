"""Launching in the core: an instance's next segments go onto the GPU, and the resources that they hold are counted."""

from __future__ import annotations

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ZERO, call_launch, load_at, store_at
from paellapy.scheduler.core.concurrency import (
    choose_handle,
    is_uncontended,
    leave_partition,
    max_in_flight,
    may_launch_whole,
)
from paellapy.scheduler.core.requests import ask_about, fill_instance_job
from paellapy.scheduler.core.shares import enter_gpu
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.weights import next_weights_resident, weights_resident

WHOLE_PART = 0.05  # of the time that a step is given: how long another model's program in one piece may take; a guess

# --- when to launch a job's next segment, if it may have one segment on the GPU: just before that one ends
#
# By then another job may rank better; if none does, the next segment arrives before the GPU runs out of work.
# Instrumented kernels report when they have started their last block. For other kernels, the end is predicted from the
# segment's time alone, and from the slowdown of the segment before it.


@part
def began_ns(s: State, instance: int, segment: int) -> int:
    """When the segment began on the GPU: after its launch and the end of the segment before it."""
    launched = s.segment_ns[instance, segment, 0]
    return int(launched if segment == 0 else max(launched, s.segment_ns[instance, segment - 1, 1]))


@part
def ends_soon_ns(s: State, instance: int) -> float:
    """When the oldest segment in flight is about to end. An integer, so that simulated time reaches it exactly."""
    inst = s.instance[instance]
    tuning = s.tuning[0]
    k = inst.done
    stretch = 1.0
    if k > 0:
        took = s.segment_ns[instance, k - 1, 1] - began_ns(s, instance, k - 1)
        stretch = min(max(took / max(s.segment[inst.model, inst.size, k - 1].time_ns, 1.0), 1.0), tuning.most_stretch)
    return began_ns(s, instance, k) + float(
        int(stretch * s.segment[inst.model, inst.size, k].time_ns - tuning.just_ahead_ns)
    )


@part
def may_launch_ahead(s: State, instance: int) -> bool:
    """Whether an instance in flight has a next segment that could be launched before the current one is done."""
    inst = s.instance[instance]
    one_ahead = s.core[0].max_in_flight == 1 and inst.issued - inst.done == 1
    return bool(one_ahead and not inst.draining and not inst.whole and inst.issued < inst.segments)


@part
def note_next_launch(s: State, instance: int) -> None:
    """Records when the next segment may be launched, so that a simulation or a sleeping loop returns at that time."""
    core = s.core[0]
    inst = s.instance[instance]
    if may_launch_ahead(s, instance) and not s.launch[instance, inst.size, inst.done].draining:
        core.wake_at_ns = min(core.wake_at_ns, ends_soon_ns(s, instance))


@part
def next_is_due(s: State, instance: int, now: int) -> bool:
    """Whether it is time for the next segment of an instance in flight."""
    inst = s.instance[instance]
    if not may_launch_ahead(s, instance):
        return False
    word = s.launch[instance, inst.size, inst.done].draining
    return bool(load_at(word)) if word else ends_soon_ns(s, instance) <= now


@part
def count_resources(s: State, instance: int, segment: int, resident: float, pending: float) -> None:
    """Adds a segment's footprint, times these factors, to the resident and the pending resources."""
    inst = s.instance[instance]
    m, size = inst.model, inst.size
    gpu = s.gpu[0]
    if inst.whole:
        # At any moment one of its kernels runs, so the first segment's footprint stands for all.
        segment = 0
    f = s.segment[m, size, segment]
    issue = f.kernels / max(f.time_ns, 1.0) * 1e9
    gpu.resident_blocks += resident * f.blocks
    gpu.resident_warps += resident * f.warps
    gpu.resident_registers += resident * f.registers
    gpu.resident_shared_bytes += resident * f.shared_bytes
    gpu.resident_issue += resident * issue
    gpu.pending_blocks += pending * f.blocks
    gpu.pending_warps += pending * f.warps
    gpu.pending_registers += pending * f.registers
    gpu.pending_shared_bytes += pending * f.shared_bytes
    gpu.pending_issue += pending * issue


@part
def update_gpu_facts(s: State) -> None:
    """Computes the fullest resource, and where the jobs are."""
    core = s.core[0]
    gpu = s.gpu[0]
    if core.flight == 0:  # an empty GPU holds nothing: drop rounding errors
        gpu.resident_issue = gpu.pending_issue = 0.0
    gpu.occupancy = max(
        max(gpu.resident_blocks / gpu.capacity_blocks, gpu.resident_warps / gpu.capacity_warps),
        max(gpu.resident_registers / gpu.capacity_registers, gpu.resident_shared_bytes / gpu.capacity_shared_bytes),
        gpu.resident_issue / gpu.capacity_issue,
    )
    gpu.active_jobs = core.active
    gpu.waiting_jobs = core.ready + core.awaiting_admit
    gpu.max_active = core.max_active


@part
def take_stream(s: State, instance: int) -> None:
    """Gives the instance a stream that no other job in flight uses, if possible, because jobs on one stream wait for
    each other. The stream belongs to the job's partition, or to all SMs. A job keeps its stream while any of its
    launches is in flight. Where the hardware decides (`core.whole_always`), every instance has its own stream, as in
    programs without a scheduler.
    """
    inst = s.instance[instance]
    at = codes.QUEUES + instance % codes.OWN_STREAMS
    if not s.core[0].whole_always:
        at = 0
        for k in range(codes.QUEUES):
            if s.stream_jobs[k] < s.stream_jobs[at]:
                at = k
            if s.stream_jobs[at] == 0:
                break
    s.stream_jobs[at] += 1
    partition = inst.partition
    inst.stream_at = at if partition < 0 else codes.OF_PARTITIONS + partition * codes.QUEUES + at


@part
def queue_index(stream: int) -> int:
    """The index under which the jobs on a stream are counted."""
    return (stream - codes.OF_PARTITIONS) % codes.QUEUES if stream >= codes.OF_PARTITIONS else stream


@part
def leave_stream(s: State, instance: int) -> None:
    inst = s.instance[instance]
    s.stream_jobs[queue_index(inst.stream_at)] -= 1
    inst.stream_at = codes.NONE
    leave_partition(s, instance)


@part
def wanted_sms(s: State, instance: int, now: int) -> float:
    """The part of the SMs that the policy wants for the instance's next launch; 0: the policy does not say."""
    if s.call[0].place.function == ZERO:
        return 0.0
    fill_instance_job(s, instance, now)
    sms = ask_about(s, s.call[0].place, 0)
    return sms if sms > 0.0 else 1.0


@part
def launch(s: State, instance: int, now: int) -> bool:
    """Launches the instance's next segment, or the whole program; False when the backend refuses."""
    core = s.core[0]
    inst = s.instance[instance]
    k = inst.issued
    if inst.issued == inst.done:
        enter_gpu(s, instance, now)
        s.flight[core.flight] = instance
        inst.flight_at = core.flight
        core.flight += 1
        count_resources(s, instance, k, 1.0, 0.0)
    else:
        count_resources(s, instance, k, 0.0, 1.0)
    began = max(now, inst.latest_ns)  # some requests may have arrived after the clock was read
    if k == 0:
        inst.started_ns = began
        if inst.live > 0:  # otherwise it has no tag
            core.start_tag_ns = max(core.start_tag_ns, inst.client_start_ns)
    inst.issued = k + 1
    inst.draining = 0
    s.segment_ns[instance, k, 0] = began
    if not inst.whole and s.launch[instance, inst.size, k].draining != ZERO:
        store_at(s.launch[instance, inst.size, k].draining, ZERO)
    core.launches += 1
    core.whole_launches += inst.whole
    what = s.whole[instance, inst.size] if inst.whole else s.launch[instance, inst.size, k]
    handle = choose_handle(s, instance, k, what.handle, wanted_sms(s, instance, now))
    if inst.stream_at < 0:
        take_stream(s, instance)
    if core.backend == codes.VIRTUAL:
        out = s.out[core.out]
        out.instance, out.size, out.segment = instance, inst.size, codes.WHOLE if inst.whole else k
        out.word, out.handle = what.word, handle
        core.out += 1
        return True
    called = read_clock(s, s.clock)
    error = call_launch(s.call[0].graph_launch, handle, s.stream[inst.pool, inst.stream_at])
    took = read_clock(s, s.clock) - called
    core.launch_ns += took
    core.longest_launch_ns = max(core.longest_launch_ns, float(took))
    if error != 0:
        core.error = error
        inst.issued = k  # it is not on the GPU, and did not make it fail
    return bool(error == 0)


@part
def one_by_one(s: State) -> bool:
    """Whether each launch is computed by the host before the next is chosen. Not where the hardware decides."""
    return bool(s.core[0].one_by_one and not s.core[0].whole_always)


@part
def host_has_work(s: State) -> bool:
    """Whether a launch was chosen that the host must compute first."""
    return bool(one_by_one(s) and s.core[0].out > 0)


@part
def may_launch(s: State, instance: int) -> bool:
    """Whether a segment of an active instance is left, and may be launched now."""
    inst = s.instance[instance]
    return bool(
        inst.issued < inst.segments
        and inst.issued - inst.done < max_in_flight(s) + inst.draining
        and next_weights_resident(s, instance)
    )


@part
def delays_no_step(s: State, instance: int) -> bool:
    """Whether the instance's program in one piece would hardly delay the next step of another model."""
    m = s.instance[instance].model
    most = s.core[0].longest_whole_ns
    return bool(s.size[m, s.instance[instance].size].total_ns <= most or WHOLE_PART * s.model[m].target_ns <= most)


@part
def launch_segments(s: State, instance: int, now: int) -> bool:
    """Launches as many segments of an active instance as it may have ahead; at most one where the host computes it."""
    core = s.core[0]
    inst = s.instance[instance]
    if inst.issued == 0:
        # A program in one piece could not be held back for jobs of higher priority, which may come at any moment.
        first = inst.priority >= core.top_priority
        fitting = (
            core.whole_idle == 1
            and delays_no_step(s, instance)
            and (is_uncontended(s, instance) or may_launch_whole(s, instance))
        )
        unequalled = core.top_whole == 1 and core.least_priority < core.top_priority
        if core.whole_always or (
            first and (fitting or unequalled) and weights_resident(s, inst.model)
        ):
            inst.whole = 1
            inst.segments = 1
    while may_launch(s, instance) and not host_has_work(s):
        if not launch(s, instance, now):
            return False
    note_next_launch(s, instance)
    return True
