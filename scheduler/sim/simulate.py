"""`simulate`: a workload on a simulated GPU, under the same core and policies as on a real one. Timing only.

    from paellapy.scheduler.sim.mix import MIX, mix_profiles
    result = simulate(mix_profiles(), Lognormal(4000, MIX, duration=2), "srpt")
    print(result); result.plot()
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.heaps import heap_push
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import new_allowances
from paellapy.scheduler.core.capacity import Capacity, set_capacity
from paellapy.scheduler.core.clients import client_numbers
from paellapy.scheduler.core.install import install, open_model
from paellapy.scheduler.core.profiles import ModelProfile, ProfileError
from paellapy.scheduler.core.step import attach_step
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tenants import checked_tenants, give_tenant
from paellapy.scheduler.policies.attach import attach_policy
from paellapy.scheduler.policies.policy import Policy, PolicyError, Rank
from paellapy.scheduler.sim import fluid_state as fluid
from paellapy.scheduler.sim.blocks import BlocksGpu
from paellapy.scheduler.sim.fluid import MORE_RECORDS, run_fluid
from paellapy.scheduler.sim.memory import manage_weights, weight_counters
from paellapy.scheduler.sim.options import SimulationOptions, asked_options, simulated_part
from paellapy.scheduler.sim.resources import resources
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.trace import OwnKernels, TracedGpu
from paellapy.scheduler.sim.workload import Workload, WorkloadError

MAX_ROWS = 1 << 17  # requests waiting at a time; the simulated front end refuses further ones
BINS = 400  # most bins into which the time of a run is divided


def simulate(
    models: Sequence[ModelProfile] | ModelProfile,
    workload: Workload,
    policy: str | Policy | Rank = "paella",
    device: str = "virtual:h200",
    *,
    kernels: OwnKernels | None = None,
    **options: Any,
) -> Results:
    """Runs the workload to its end in simulated time.

    `options` are the fields of `SimulationOptions`: `fidelity`, `seed`, `active`, `look_ahead`, `demand`, `queues`,
    `admission`, `sm_windows`, `host_launch_ns`, `tuning`, `tenants`, `memory_bytes`, `pcie_gbps`. With fidelity
    "blocks" and the models' own `kernels`, the result has a `trace`.

    >>> from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
    >>> from paellapy.scheduler.sim.workload import Poisson
    >>> net = ModelProfile("net", {1: [SegmentProfile(50e3)] * 4})
    >>> simulate([net], Poisson(1000, "net", duration=0.1), "fifo").all.completed
    90
    """
    models = [models] if isinstance(models, ModelProfile) else models
    asked = asked_options(options)
    chosen, gpu = asked.policy(policy), simulated_part(device)
    names = [each.name for each in models]
    if not models or len(set(names)) < len(names):
        raise ProfileError(f"the models' names are {names}: give at least one model, each with a different name")
    arrivals, clients, numbers = _load(workload, models, asked)
    _check(asked, models, clients)
    state = new_core(models, len(arrivals) + len(clients), _numbers_for(len(numbers)))
    prepare(state, models, chosen, gpu, asked)
    _give_tenants(state, numbers, asked)
    f = fluid_of(state, models, gpu, workload.seconds, arrivals, clients, asked)
    trace = None
    if asked.fidelity == "segments":
        while run_fluid(f, state) == MORE_RECORDS:
            f = fluid.more_records(f)
    elif kernels is None:
        f = BlocksGpu(gpu, models, f, state, asked.seed).run()
    else:
        traced = TracedGpu(gpu, models, f, state, asked.seed, kernels)
        f = traced.run()
        trace = traced.trace(chosen.name)
    _check_end(state, chosen)
    jobs = _jobs(f, numbers)
    end_ns = float(jobs["finish_ns"].max()) if len(jobs) else 0.0
    return Results(
        policy=chosen.name,
        device=device,
        models=tuple(models),
        jobs=jobs,
        seconds=end_ns / 1e9,
        occupancy=f.bins[: math.ceil(end_ns / f.sim["bin_ns"][0])] / f.sim["bin_ns"][0],
        bin_ms=float(f.sim["bin_ns"][0]) / 1e6,
        counters=_counters(state, f, asked),
        admission=asked.admission,
        trace=trace,
        clients=tuple(numbers),
        numbers=numbers,
        gpu_ms=_gpu_times(state, models, numbers),
    )


def _jobs(f: fluid.Fluid, numbers: Mapping[str, int]) -> Table:
    """The records of all requests, with each client's place among the clients instead of its number."""
    jobs = f.records[: f.sim["records"][0]].copy()
    place = {number: k for k, number in enumerate(numbers.values())}
    jobs["client"] = [place[number] for number in jobs["client"].tolist()]
    return jobs


def _counters(state: st.State, f: fluid.Fluid, asked: SimulationOptions) -> dict[str, int]:
    counters = {name: int(state.core[name][0]) for name in ("launches", "steps", "decisions", "preemptions")}
    counters["segment_events"] = int(f.sim["events"][0])
    return counters if asked.memory_bytes is None else counters | weight_counters(state)


def _load(
    workload: Workload, models: Sequence[ModelProfile], options: SimulationOptions
) -> tuple[Table, Table, dict[str, int]]:
    """Arrivals, closed-loop clients, and all clients' numbers by name. Requests default to their model's priority."""
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"workload={workload!r}: it must be a workload, such as pp.Poisson(1000, 'net', duration=1.0); join "
            "several with +"
        )
    names = [each.name for each in models]
    arrivals, clients = workload.arrivals(names, options.seed), workload.loop_clients(names)
    priorities = np.array([each.priority for each in models])
    for asked in (arrivals, clients):
        own = asked["priority"] == fluid.MODELS_PRIORITY
        asked["priority"][own] = priorities[asked["model"][own]]
    known = workload.clients_named()
    title = {number: name or f"client {k + 1}" for k, (number, name) in enumerate(known.items())}
    nobody = next((title[k] for k, name in known.items() if name is None), None)
    # As in an engine whose tenants were made first. Its clients without a name have one number, 0.
    given = [each for each in [*options.tenants, *title.values()] if each != nobody or nobody in options.tenants]
    number = client_numbers(given, _numbers_for(len(known)))
    for asked in (arrivals, clients):
        asked["client"] = [number.get(title[k], 0) for k in asked["client"].tolist()]
    return arrivals, clients, {name: number.get(name, 0) for name in title.values()}


def _numbers_for(clients: int) -> int:
    """Client numbers of the core: as many as in an engine, or enough for all clients."""
    return max(st.Limits().clients, clients + 1)


def _give_tenants(state: st.State, clients: Mapping[str, int], asked: SimulationOptions) -> None:
    unknown = set(asked.tenants) - set(clients)
    if unknown:
        raise ArgumentError(
            f"no client of the workload is named {min(unknown)!r}; its clients are {', '.join(clients)}. Name one, "
            "as in ClosedLoop(…, client='alice')"
        )
    for name, tenant in checked_tenants(asked.tenants).items():
        give_tenant(state, clients[name], name, tenant)


def _gpu_times(
    state: st.State, models: Sequence[ModelProfile], clients: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """The GPU's busy time, by model and by client."""
    return {
        "busy": {"": float(state.core["gpu_ns"][0]) / 1e6},
        "models": {each.name: float(state.model["gpu_ns"][m]) / 1e6 for m, each in enumerate(models)},
        "clients": {name: float(state.client["gpu_ns"][k]) / 1e6 for name, k in clients.items()},
    }


def _check(asked: SimulationOptions, models: Sequence[ModelProfile], clients: Table) -> None:
    """Raises an error for options that this load or these models do not support."""
    if asked.admission and (len(clients) or asked.fidelity != "segments"):
        raise WorkloadError(
            "admission needs an open-loop workload (Poisson, Lognormal, TraceWorkload) and fidelity='segments': choose "
            "these, or leave admission out"
        )
    if asked.sm_windows and (asked.fidelity != "segments" or not all(each.demand for each in models)):
        raise ArgumentError(
            "sm_windows needs fidelity='segments' and profiles with a measured demand, as engine.model_profile(name) "
            "returns them: choose these, or leave sm_windows out"
        )


def _check_end(state: st.State, policy: Policy) -> None:
    """Raises PolicyError if requests still wait although nothing will happen any more; warns of answers that are not
    numbers.
    """
    if bad := int(state.core["bad_ranks"][0]):
        warnings.warn(
            f"policy {policy.name} gave {bad} times an answer that is not a number (NaN): such a rank goes last, and "
            "such an admit counts as False; check its divisors for 0",
            stacklevel=3,
        )
    if stuck := int(state.core["live"][0]):
        raise PolicyError(
            f"policy {policy.name} leaves {stuck} requests waiting for ever: `admit` refuses all of them, and no later "
            "event would change that; let `admit` return a time in ns that comes, or open its gate in a `tick`"
        )


def new_core(models: Sequence[ModelProfile], requests: int, clients: int = 256) -> st.State:
    """The core's tables, large enough for these models."""
    programs = [program for each in models for program in each.sizes.values()]
    return st.new_state(
        st.Limits(
            models=len(models),
            lanes=sum(each.lanes for each in models),
            lanes_per_model=max(each.lanes for each in models),
            sizes=max(len(each.sizes) for each in models),
            batch=max(max(each.batch) for each in models),
            segments=max(len(program) for program in programs),
            # The ring is sized by rows, and must hold an OPEN_MODEL message for every model before the core's first
            # step.
            requests=min(requests + len(models), MAX_ROWS),
            clients=max(clients, 1),
            inputs=1,
        )
    )


def prepare(
    state: st.State, models: Sequence[ModelProfile], policy: Policy, gpu: Part, asked: SimulationOptions
) -> None:
    """The core as in an engine: with the GPU's capacity, the policy, and the models open."""
    state.core["windows"][0] = asked.sm_windows
    state.tuning[:] = asked.tuning_for(gpu).row()
    timing = Timing.for_part(gpu)
    set_capacity(state, Capacity.of(gpu.sms, gpu.sm, timing, gpu.bandwidth_gbps * timing.bandwidth_efficiency))
    attach_policy(state, policy)
    attach_step(state)
    demand = asked.demand
    if demand is None and policy.active is None and all(each.demand for each in models):
        demand = float(state.tuning["demand_limit"][0])
    if demand is not None:
        state.core["max_active"][0], state.core["demand_limit"][0] = len(state.lane), demand
    for each in models:
        open_model(state, install(state, each)[0])
    if asked.memory_bytes is not None:
        manage_weights(state, models, asked.memory_bytes)
    if asked.sm_windows:
        state.confined[:, :, -1, 0] = 1  # any program can be confined


def fluid_of(
    state: st.State,
    models: Sequence[ModelProfile],
    gpu: Part,
    seconds: float,
    arrivals: Table,
    clients: Table,
    asked: SimulationOptions,
) -> fluid.Fluid:
    """The simulated GPU with its load, before the first event."""
    timing = Timing.for_part(gpu)
    f = fluid.new_fluid(state, resources(state, models, gpu, timing), arrivals, clients, BINS)
    if asked.admission:
        f = f._replace(allowance=new_allowances((max(each.batch) for each in models), asked.tuning_for(gpu)))
    f.sim["free"][0] = len(state.request)
    f.sim["queues"][0] = asked.queues or 0
    f.sim["horizon_ns"][0] = seconds * 1e9
    f.sim["bin_ns"][0] = max(1.0, seconds * 1e9 / BINS)
    f.sim["launch_ns"][0], f.sim["segment_gap_ns"][0] = (
        state.tuning[name][0] for name in ("host_launch_ns", "segment_gap_ns")
    )
    f.sim["resume_ns"][0] = timing.launch_ns
    for k in range(len(clients)):  # a nanosecond apart, so that clients have a defined order
        heap_push.py_func(f.timer, f.timer_id, 0, k, float(k), k)  # type: ignore[attr-defined]
    f.sim["timers"][0] = len(clients)
    return f
