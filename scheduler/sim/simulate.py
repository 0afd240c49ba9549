"""`simulate`: a workload on a simulated GPU, under the same core and policies that run a real one. Timing only.

    from paellapy.scheduler.sim.mix import MIX, mix_profiles
    result = simulate(mix_profiles(), Lognormal(4000, MIX, duration=2), "srpt")
    print(result); result.plot()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from paellapy.instrument.device.heaps import heap_push
from paellapy.instrument.device.parts import Part, part
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.errors import ArgumentError, NoDeviceError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import new_windows
from paellapy.scheduler.core.crowd import CROWDED
from paellapy.scheduler.core.demand import TOGETHER, busy_alone
from paellapy.scheduler.core.models import ModelProfile, ProfileError, install, open_model, set_capacity
from paellapy.scheduler.core.step import attach_policy
from paellapy.scheduler.policies.policy import Policy, Rank, find_policy
from paellapy.scheduler.sim import fluid_state as fluid
from paellapy.scheduler.sim.blocks import BlocksGpu
from paellapy.scheduler.sim.fluid import MORE_RECORDS, run_fluid
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.trace import OwnKernels, TracedGpu
from paellapy.scheduler.sim.workload import Workload, WorkloadError

Fidelity = Literal["segments", "blocks"]
FIDELITIES: tuple[Fidelity, ...] = ("segments", "blocks")
HOST_LAUNCH_NS = 6000.0  # cuGraphLaunch called from compiled code, 90–670 nodes: 5–8 µs measured beside an H200
COPY_GBPS = 8.0  # of inputs that waited for a lane; with HAND_OVER_NS, what fits the H200's sweep of a dynamic batcher
SEGMENT_GAP_NS = 2000.0  # cutting at every 24 nodes (≈70 µs) cost 2–5% alone on the GPU
MAX_ROWS = 1 << 17  # requests waiting at a time; beyond, the simulated front end refuses
BINS = 400  # at most, of the time that a run takes


def simulate(
    models: Sequence[ModelProfile] | ModelProfile,
    workload: Workload,
    policy: str | Policy | Rank = "paella",
    device: str = "virtual:h200",
    *,
    fidelity: Fidelity = "segments",
    seed: int = 0,
    active: int | None = None,
    look_ahead: int | None = None,
    demand: float | None = None,
    queues: int | None = None,
    admission: bool = False,
    sm_windows: int = 0,
    host_launch_ns: float = HOST_LAUNCH_NS,
    kernels: OwnKernels | None = None,
) -> Results:
    """Run the workload to its end in simulated time.

    `fidelity="segments"`: segments share the GPU like a fluid, a million events per second. `"blocks"`: every block of
    every kernel on its SM, about a thousand times slower; with the models' own `kernels` the result has a `trace`.
    `active` and `look_ahead` override the policy's; `demand` lets in jobs until together they would keep that many GPUs
    busy, however many they are. Where neither they nor the policy say how many, it is as in an engine, if the models'
    demand was measured. `queues`: of the hardware (CUDA has 8, paellapy sets 32), to which launches are dealt one after
    the other, and wait there behind long graphs; left out, nobody does. With fidelity "blocks" it is streams that are
    dealt to them, and only under the policy `streams`. `admission`: as in a server, requests that would miss their
    deadline, or their model's target, are refused when they come ("queue full"); for open loads, and segments.
    `sm_windows`: jobs keep to windows of SMs, as with `Engine(sm_windows=8)`, by a rule that was made for one sweep of
    eight windows on an H200; for segments of models whose demand was measured (without windows).

    >>> from paellapy.scheduler.core.models import ModelProfile, SegmentProfile
    >>> from paellapy.scheduler.sim.workload import Poisson
    >>> net = ModelProfile("net", {1: [SegmentProfile(50e3)] * 4})
    >>> simulate([net], Poisson(1000, "net", duration=0.1), "fifo").all.completed
    90
    """
    if fidelity not in FIDELITIES:
        raise ArgumentError(f"fidelity is {' or '.join(FIDELITIES)}, not {fidelity!r}")
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ArgumentError(f"the seed is {seed!r}: give a whole number of zero or more")
    if queues is not None and not (isinstance(queues, int | np.integer) and queues >= 1):
        raise ArgumentError(f"queues is {queues!r}: give a whole number from 1 up, or leave it out")
    if demand is not None and not (demand > 0 and math.isfinite(demand)):
        raise ArgumentError(f"demand is {demand!r}: give GPUs to keep busy, more than 0, or leave it out")
    if not (host_launch_ns >= 0 and math.isfinite(host_launch_ns)):
        raise ArgumentError(f"host_launch_ns is {host_launch_ns!r}: give nanoseconds, 0 or more")
    models = [models] if isinstance(models, ModelProfile) else models
    chosen = find_policy(policy)
    if active is not None:
        chosen = replace(chosen, active=active)
    if look_ahead is not None:
        chosen = replace(chosen, look_ahead=look_ahead)
    gpu = simulated_part(device)
    names = [each.name for each in models]
    if not models or len(set(names)) < len(names):
        raise ProfileError(f"simulate needs models with names of their own, not {names}")
    arrivals = workload.arrivals(names, seed)
    clients = workload.loop_clients(names)
    priorities = np.array([each.priority for each in models])
    for asked in (arrivals, clients):
        own = asked["priority"] == fluid.MODELS_PRIORITY
        asked["priority"][own] = priorities[asked["model"][own]]
    if admission and (len(clients) or fidelity != "segments"):
        raise WorkloadError(
            "admission is for loads that come whether or not they are answered, and for fidelity 'segments': "
            "leave it out, or choose those"
        )
    if sm_windows != 0 and not codes.LEAST_WINDOWS <= sm_windows <= codes.WINDOWS:
        raise ArgumentError(f"sm_windows={sm_windows}: 0, for none, or {codes.LEAST_WINDOWS} to {codes.WINDOWS}")
    if sm_windows and (fidelity != "segments" or not all(each.demand for each in models)):
        raise ArgumentError(
            "sm_windows is for fidelity 'segments' and models whose demand was measured, as an engine measures it that "
            "loads them: leave it out, or choose those"
        )
    state = _state(models, len(arrivals) + len(clients))
    state.core["windows"][0] = sm_windows
    set_capacity(state, gpu)
    attach_policy(state, chosen)
    if demand is None and chosen.active is None and all(each.demand for each in models):
        demand = CROWDED
    if demand is not None:
        state.core["max_active"][0], state.core["demand_limit"][0] = len(state.lane), demand
    for each in models:
        open_model(state, install(state, each)[0])
    if sm_windows:
        state.confined[:, :, -1, 0] = 1  # any program can be confined
    timing = Timing.for_part(gpu)
    f = fluid.new_fluid(state, resources(state, models, gpu, timing), arrivals, clients, BINS)
    if admission:
        f = f._replace(window=new_windows(max(each.batch) for each in models))
    f.sim["free"][0] = len(state.request)
    f.sim["queues"][0] = queues or 0
    f.sim["horizon_ns"][0] = workload.seconds * 1e9
    f.sim["bin_ns"][0] = max(1.0, workload.seconds * 1e9 / BINS)
    f.sim["launch_ns"][0], f.sim["segment_gap_ns"][0] = host_launch_ns, SEGMENT_GAP_NS
    f.sim["resume_ns"][0] = timing.launch_ns
    for k in range(len(clients)):  # a nanosecond apart: whoever is served first has come first
        heap_push.py_func(f.timer, f.timer_id, 0, k, float(k), k)  # type: ignore[attr-defined]
    f.sim["timers"][0] = len(clients)
    trace = None
    if fidelity == "segments":
        while run_fluid(f, state) == MORE_RECORDS:
            f = _more_records(f)
    elif kernels is None:
        f = BlocksGpu(gpu, timing, models, f, state, seed).run()
    else:
        traced = TracedGpu(gpu, timing, models, f, state, seed, kernels)
        f = traced.run()
        trace = traced.trace(chosen.name)
    jobs = f.records[: f.sim["records"][0]].copy()
    end_ns = float(jobs["finish_ns"].max()) if len(jobs) else 0.0
    counters = {"segment_events": int(f.sim["events"][0]), "launches": int(state.core["launches"][0])}
    for name in ("steps", "decisions", "preemptions"):
        counters[name] = int(state.core[name][0])
    return Results(
        policy=chosen.name,
        device=device,
        models=tuple(models),
        jobs=jobs,
        seconds=end_ns / 1e9,
        occupancy=f.bins[: math.ceil(end_ns / f.sim["bin_ns"][0])] / f.sim["bin_ns"][0],
        bin_ms=float(f.sim["bin_ns"][0]) / 1e6,
        counters=counters,
        admission=admission,
        trace=trace,
    )


def simulated_part(device: str) -> Part:
    """The GPU that a device's name stands for."""
    kind, _, name = device.partition(":")
    if kind != "virtual":
        raise NoDeviceError(f"simulate runs on a virtual GPU, not on {device!r}: name one as in 'virtual:h200'")
    return part(name or "h200")


def _state(models: Sequence[ModelProfile], requests: int) -> st.State:
    programs = [program for each in models for program in each.sizes.values()]
    return st.new_state(
        st.Limits(
            models=len(models),
            lanes=sum(each.lanes for each in models),
            lanes_per_model=max(each.lanes for each in models),
            sizes=max(len(each.sizes) for each in models),
            batch=max(max(each.batch) for each in models),
            segments=max(len(program) for program in programs),
            # The ring is sized by rows, and takes the opening of every model before the core first looks.
            requests=min(requests + len(models), MAX_ROWS),
            inputs=1,
        )
    )


def resources(
    state: st.State, models: Sequence[ModelProfile], gpu: Part, timing: Timing
) -> fluid.Programs:
    """Per segment, the share of each resource it takes alone, and its time; the last row is the whole program's."""
    n, sizes, segments = state.segment.shape
    use = np.zeros((n, sizes, segments + 1, 3))
    work = np.zeros((n, sizes, segments + 1))
    busy, kernels = np.zeros((n, sizes)), np.zeros((n, sizes))
    bandwidth = gpu.bandwidth_gbps * timing.bandwidth_efficiency  # GB/s is bytes/ns
    for m, model in enumerate(models):
        for k, (batch, program) in enumerate(model.sizes.items()):
            for i, each in enumerate(program):
                slots = max(
                    each.blocks / (gpu.sms * gpu.sm.blocks),
                    each.warps / (gpu.sms * gpu.sm.warps),
                    each.registers / (gpu.sms * gpu.sm.registers),
                    each.shared_bytes / (gpu.sms * gpu.sm.shared_bytes),
                )
                memory = each.bytes / each.time_ns / bandwidth
                use[m, k, i] = np.minimum((slots, memory, each.kernels * timing.grid_issue_ns / each.time_ns), 1.0)
                work[m, k, i] = each.time_ns
            total = math.fsum(work[m, k, : len(program)])
            if batch in model.demand:  # seen, not estimated: the whole keeps that part of the GPU busy
                guess = (use[m, k, : len(program)].max(axis=1) * work[m, k, : len(program)]).sum() / total
                busy[m, k] = busy_alone(model.demand[batch], model.together.get(batch, TOGETHER))
                use[m, k, : len(program)] *= busy[m, k] / max(guess, 1e-9)
            use[m, k, -1] = (use[m, k, : len(program)] * work[m, k, : len(program), None]).sum(axis=0) / total
            work[m, k, -1], kernels[m, k] = total, sum(each.kernels for each in program)
    copy = np.zeros(n)
    copy[: len(models)] = [model.input_bytes / COPY_GBPS for model in models]
    return fluid.Programs(use, work, busy, copy, kernels)


def _more_records(f: fluid.Fluid) -> fluid.Fluid:
    return f._replace(records=np.concatenate([f.records, np.zeros_like(f.records)]))
