"""`simulate`: a workload on a simulated GPU, under the same core and policies as on a real one. Timing only.

from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
result = simulate(mix_profiles(), Lognormal(4000, MIX, duration=2), "srpt")
print(result); result.plot()
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import ArgumentError, NoDeviceError, PaellaError
from paellapy.instrument.gpu_model.parts import Part, Timing, part
from paellapy.instrument.gpu_model.tables import heap_push
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import new_limits
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import (
    MOST_NS,
    TOGETHER,
    Capacity,
    ModelProfile,
    busy_alone,
    install,
    open_model,
    set_capacity,
)
from paellapy.scheduler.core.residency import needed_bytes, set_weight_budget
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.step import attach_step
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tenants import Tenant, checked_tenants, client_numbers, set_tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.core.values import (
    TRUE_OR_FALSE,
    Rule,
    check_names,
    check_values,
    integer,
    listed,
    number,
    one_of,
    or_none,
    shortened,
)
from paellapy.scheduler.policies.policy import Policy, PolicyError, Rank, attach_policy, find_policy
from paellapy.scheduler.sim import tables
from paellapy.scheduler.sim.block_model import BlocksGpu, OwnKernels, TracedGpu
from paellapy.scheduler.sim.chats import LanguageProfile, Writer, chat_models, run_chats
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.segment_model import MORE_RECORDS, run_segments
from paellapy.scheduler.sim.tables import ISSUE, MEMORY, Programs
from paellapy.scheduler.sim.workload import SEED, Workload, WorkloadError

Fidelity = Literal["segments", "blocks"]
FIDELITIES: tuple[Fidelity, ...] = ("segments", "blocks")
MOST_JOBS = 1 << 20
MAX_ROWS = 1 << 17  # requests waiting at a time; further ones are refused
BINS = 400  # most bins into which the time of a run is divided


_LEAST, _MOST = codes.LEAST_PARTITIONS, codes.PARTITIONS
_OPTIONS = {
    "fidelity": one_of(*FIDELITIES),
    "seed": SEED,
    "active": or_none(integer(1, MOST_JOBS)),
    "max_in_flight": or_none(integer(1, MOST_JOBS)),
    "queues": or_none(integer(1, MOST_JOBS)),
    "demand": or_none(number(0, above=True)),
    "admission": TRUE_OR_FALSE,
    "host_launch_ns": or_none(number(0, MOST_NS)),
    "memory_bytes": or_none(number(1, MOST_NS)),
    "pcie_gbps": or_none(number(0, above=True)),
    "tuning": or_none(Rule(lambda x: isinstance(x, Tuning | Mapping), "a dict of numbers by name")),
    "tenants": Rule(lambda x: isinstance(x, Mapping), "a dict by name, as in tenants={'alice': pp.Tenant(share=3)}"),
    "sm_partitions": Rule(
        lambda x: x == 0 or integer(_LEAST, _MOST).fits(x), f"0, for none, or {_LEAST} to {_MOST}"
    ),
}


class SimulationError(PaellaError):
    """The simulator contradicts itself: its results are not returned."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of `simulate`.

    `fidelity="segments"`: segments share the GPU like a fluid, a million events per second. `"blocks"`: every block of
    every kernel is placed on its SM, about a thousand times slower. `active` and `max_in_flight` override the policy's
    settings; `demand` admits any number of jobs up to a total demand of that many GPUs. If neither they nor the policy
    limit the jobs, the limit is the engine's, provided that the models' demand was measured.

    `queues`: number of hardware queues (CUDA has 8, paellapy sets 32) to which launches are assigned in turn, and where
    they wait behind long graphs; without it, no launch waits. With fidelity "blocks", streams are assigned to the
    queues, and only under the policy `streams`. `admission`: requests that would miss their deadline, or their model's
    target, are refused on arrival ("queue full"), as in a server; only for open loads and fidelity "segments".
    `sm_partitions`: jobs are confined to SM partitions, as with `Engine(sm_partitions=8)`, by a rule fitted to one
    sweep of eight partitions on an H200; only for fidelity "segments" and models with a demand measured without
    partitions. `tuning`: the scheduler's tuning numbers by name, for experiments; the others are the part's own.
    `tenants`: shares and limits of clients that the workload names, such as {"alice": Tenant(share=3, limit=0.5)}.

    `memory_bytes`: budget for weights on the GPU. Other weights arrive over a link of `pcie_gbps` on demand, and some
    leave for them; models then need `weight_bytes`. At the start, the first models given are on the GPU, as far as they
    fit. Without it, all weights are on the GPU.
    """

    fidelity: Fidelity = "segments"
    seed: int = 0
    active: int | None = None
    max_in_flight: int | None = None
    demand: float | None = None
    queues: int | None = None
    admission: bool = False
    sm_partitions: int = 0
    host_launch_ns: float | None = None
    memory_bytes: int | None = None
    pcie_gbps: float | None = None
    tuning: Tuning | Mapping[str, float] | None = None
    tenants: Mapping[str, Tenant | Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(self, _OPTIONS)
        if self.pcie_gbps is not None and self.memory_bytes is None:
            raise ArgumentError(
                f"pcie_gbps={self.pcie_gbps!r} has no effect without memory_bytes, because no weights move: set "
                "memory_bytes, or leave pcie_gbps out", field="memory_bytes", given=None,
            )  # fmt: skip
        if self.memory_bytes is not None and self.fidelity != "segments":
            text = "memory_bytes needs fidelity='segments': choose that, or leave memory_bytes out"
            raise ArgumentError(text, field="fidelity", given=self.fidelity)

    def tuning_for(self, gpu: Part) -> Tuning:
        """The part's tuning numbers, with those that are set for this run."""
        found = Tuning.for_part(gpu.name, self.tuning)
        set_here = {"host_launch_ns": self.host_launch_ns, "link_gbps": self.pcie_gbps}
        return found.with_changes({name: value for name, value in set_here.items() if value is not None})

    def policy(self, given: str | Policy | Rank) -> Policy:
        """The policy with the options that override it."""
        found = find_policy(given)
        if self.active is not None:
            found = replace(found, active=self.active)
        return found if self.max_in_flight is None else replace(found, max_in_flight=self.max_in_flight)


def checked_models(given: Sequence[ModelProfile] | ModelProfile, field: str = "models") -> list[ModelProfile]:
    """The models as a list; ProfileError unless there is at least one, each with a different name."""
    models = [given] if isinstance(given, ModelProfile) else listed(given)
    if not models or not all(isinstance(each, ModelProfile) for each in models):
        text = f"{field}={shortened(given)}: give at least one ModelProfile"
        raise ProfileError(text, field=field, given=given)
    names = [each.name for each in models]
    if len(set(names)) < len(names):
        text = f"the models' names are {names}: give each a different name"
        raise ProfileError(text, field=field, given=names)
    return models


def _sorted_out(given: Any) -> tuple[list[ModelProfile], list[LanguageProfile]]:
    """The models, and the language models among them."""
    all_of_them = listed(given) if isinstance(given, Iterable) else [given]
    languages = [each for each in all_of_them if isinstance(each, LanguageProfile)]
    models = [each for each in all_of_them if not isinstance(each, LanguageProfile)]
    checked = checked_models([*models, *(program for each in languages for program in each.programs)])
    return checked[: len(models)], languages


def checked_workload(given: Any) -> Workload:
    """The workload; WorkloadError if it is none."""
    if not isinstance(given, Workload):
        raise WorkloadError(
            f"workload={shortened(given)}: it must be a workload, such as pp.Poisson(1000, 'net', duration=1.0); join "
            "several with +", field="workload", given=given,
        )  # fmt: skip
    return given


def simulated_part(device: str) -> Part:
    """The GPU for a device's name."""
    kind, _, name = str(device).partition(":")
    if kind != "virtual":
        text = f"device={shortened(device)}: simulate needs a virtual GPU, such as 'virtual:h200'"
        raise NoDeviceError(text, field="device", given=device)
    return part(name or "h200")


def simulate(
    models: Sequence[ModelProfile | LanguageProfile] | ModelProfile | LanguageProfile,
    workload: Workload,
    policy: str | Policy | Rank = "paella",
    device: str = "virtual:h200",
    *,
    kernels: OwnKernels | None = None,
    **options: Any,
) -> Results:
    """Runs the workload to its end in simulated time.

    `options` are the fields of `SimulationOptions`: `fidelity`, `seed`, `active`, `max_in_flight`, `demand`, `queues`,
    `admission`, `sm_partitions`, `host_launch_ns`, `tuning`, `tenants`, `memory_bytes`, `pcie_gbps`. With fidelity
    "blocks" and the models' own `kernels`, the result has a `trace`.

    >>> from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
    >>> from paellapy.scheduler.sim.workload import Poisson
    >>> net = ModelProfile("net", {1: [SegmentProfile(50e3)] * 4})
    >>> simulate([net], Poisson(1000, "net", duration=0.1), "fifo").all.completed
    90
    """
    models, languages = _sorted_out(models)
    check_names("simulate", options, SimulationOptions)
    asked = SimulationOptions(**options)
    chosen, gpu = asked.policy(policy), simulated_part(device)
    arrivals, clients, numbers = requests_of(checked_workload(workload), models, asked)
    _check(asked, models, clients)
    _check_chats(asked, workload, languages)
    state = new_core(models, len(arrivals) + len(clients), numbers_for(len(numbers)), languages)
    prepare(state, models, chosen, gpu, asked, filled=bool(languages))
    writers = [Writer(state, each, workload, asked.seed) for each in languages]
    _give_tenants(state, numbers, asked)
    programs = [*models, *(program for each in languages for program in each.programs)]
    f = loaded_gpu(state, programs, gpu, workload.seconds, arrivals, clients, asked)
    trace = None
    if writers:
        f = run_chats(f, state, writers)
    elif asked.fidelity == "segments":
        while run_segments(f, state, np.inf) == MORE_RECORDS:
            f = tables.more_records(f)
    elif kernels is None:
        f = BlocksGpu(gpu, models, f, state, asked.seed).run()
    else:
        traced = TracedGpu(gpu, models, f, state, asked.seed, kernels)
        f = traced.run()
        trace = traced.trace(chosen.name)
    _check_end(state, chosen)
    for each in writers:
        if not each.idle:
            raise SimulationError(f"texts of {each.profile.name} wait for ever: report this fault", field="texts")
    jobs = _jobs(f, numbers)
    check_conserved(arrivals["time_ns"], jobs[jobs["source"] == codes.NONE]["arrival_ns"])
    answered = jobs[jobs["status"] == codes.OK]
    check_ordered(answered["arrival_ns"], answered["started_ns"], answered["finish_ns"])
    check_in_turn(jobs)
    gpu_ms = _gpu_times(state, programs, numbers)
    check_gpu_time(gpu_ms)
    end_ns = float(f.records["finish_ns"][: f.sim["records"][0]].max(initial=0))
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
        gpu_ms=gpu_ms,
        chats=tuple(each.result(end_ns / 1e9) for each in writers),
    )


def check_conserved(sent: NDArray[np.int64], recorded: NDArray[np.int64]) -> None:
    """Raises SimulationError unless every request of the load, by its time, has exactly one record."""
    if not np.array_equal(np.sort(sent), np.sort(recorded)):
        text = f"the run has {len(recorded)} records for {len(sent)} requests, or others than those: report this fault"
        raise SimulationError(text, field="requests", given=len(recorded), limit=len(sent))


def check_ordered(*times_ns: NDArray[np.int64]) -> None:
    """Raises SimulationError unless the times of every request, such as arrival, start and end, follow each other."""
    for before, after in itertools.pairwise(times_ns):
        if backwards := int((after < before).sum()):
            text = f"{backwards} requests of the run were answered before they began or came: report this fault"
            raise SimulationError(text, field="times", given=backwards, limit=0)


def check_in_turn(jobs: Table) -> None:
    """Raises SimulationError unless each client of a closed loop sends its next request after the answer."""
    looped = jobs[jobs["source"] >= 0]
    looped = looped[np.lexsort((looped["arrival_ns"], looped["source"]))]
    same = looped["source"][1:] == looped["source"][:-1]
    check_ordered(looped["finish_ns"][:-1][same], looped["arrival_ns"][1:][same])


def check_gpu_time(gpu_ms: Mapping[str, Mapping[str, float]]) -> None:
    """Raises SimulationError unless the GPU's busy time is that of all models together, and of all clients."""
    busy = gpu_ms["busy"][""]
    for who in ("models", "clients"):
        if not math.isclose(total := math.fsum(gpu_ms[who].values()), busy, rel_tol=1e-6, abs_tol=1e-6):
            text = f"the {who} had {total:.6g} ms of the GPU, which was busy for {busy:.6g} ms: report this fault"
            raise SimulationError(text, field=who, given=total, limit=busy)


def _jobs(f: tables.SimGpu, numbers: Mapping[str, int]) -> Table:
    """The records of all requests, with each client's place among the clients instead of its number."""
    records = f.records[: f.sim["records"][0]]
    jobs: Table = records[records["source"] != tables.STEP].copy()
    place = {number: k for k, number in enumerate(numbers.values())}
    jobs["client"] = [place[number] for number in jobs["client"].tolist()]
    return jobs


def _counters(state: st.State, f: tables.SimGpu, asked: SimulationOptions) -> dict[str, int]:
    counters = {name: int(state.core[name][0]) for name in ("launches", "steps", "decisions", "preemptions")}
    counters["segment_events"] = int(f.sim["events"][0])
    return counters if asked.memory_bytes is None else counters | weight_counters(state)


def requests_of(
    workload: Workload, models: Sequence[ModelProfile], options: SimulationOptions
) -> tuple[Table, Table, dict[str, int]]:
    """Arrivals, closed-loop clients, and all clients' numbers by name. Requests default to their model's priority."""
    names = [each.name for each in models]
    arrivals, clients = workload.arrivals(names, options.seed), workload.loop_clients(names)
    priorities = np.array([each.priority for each in models])
    for asked in (arrivals, clients):
        own = asked["priority"] == tables.MODELS_PRIORITY
        asked["priority"][own] = priorities[asked["model"][own]]
    known = workload.clients_named()
    title = {number: name or f"client {k + 1}" for k, (number, name) in enumerate(known.items())}
    nobody = next((title[k] for k, name in known.items() if name is None), None)
    # As in an engine whose tenants were made first. Its clients without a name have one number, 0.
    given = [each for each in [*options.tenants, *title.values()] if each != nobody or nobody in options.tenants]
    number = client_numbers(given, numbers_for(len(known)))
    for asked in (arrivals, clients):
        asked["client"] = [number.get(title[k], 0) for k in asked["client"].tolist()]
    return arrivals, clients, {name: number.get(name, 0) for name in title.values()}


def numbers_for(clients: int) -> int:
    """Client numbers of the core: as many as in an engine, or enough for all clients."""
    return max(st.Limits().clients, clients + 1)


def _give_tenants(state: st.State, clients: Mapping[str, int], asked: SimulationOptions) -> None:
    unknown = set(asked.tenants) - set(clients)
    if unknown:
        raise ArgumentError(
            f"no client of the workload is named {min(unknown)!r}; its clients are {', '.join(clients)}. Name one, "
            "as in ClosedLoop(…, client='alice')", field="tenants", given=min(unknown),
        )  # fmt: skip
    for name, tenant in checked_tenants(asked.tenants).items():
        set_tenant(state, clients[name], name, tenant)


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
            "these, or leave admission out", field="admission", given=True,
        )  # fmt: skip
    if asked.sm_partitions and (asked.fidelity != "segments" or not all(each.demand for each in models)):
        raise ArgumentError(
            "sm_partitions needs fidelity='segments' and profiles with a measured demand, as engine.model_profile() "
            "returns them: choose these, or leave sm_partitions out", field="sm_partitions", given=asked.sm_partitions,
        )  # fmt: skip


def _check_chats(asked: SimulationOptions, workload: Workload, languages: Sequence[LanguageProfile]) -> None:
    known = [each.name for each in languages]
    for name in chat_models(workload):
        if name not in known:
            text = f"the workload has chats with {name!r}, but the language models are {', '.join(known) or 'none'}"
            raise WorkloadError(text, field="model", given=name)
    for option, given in (("fidelity", asked.fidelity != "segments"), ("memory_bytes", asked.memory_bytes is not None)):
        if languages and given:
            raise ArgumentError(f"{option} is not for language models: leave it out", field=option, given=given)


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
            "event would change that; let `admit` return a time in ns that comes, or open its gate in a `tick`",
            policy=policy.name, requests=stuck,
        )  # fmt: skip


def new_core(
    models: Sequence[ModelProfile], requests: int, clients: int = 256, languages: Sequence[LanguageProfile] = ()
) -> st.State:
    """The core's tables, large enough for these models."""
    slots = max((max(each.batch) for each in models), default=1)
    models = [*models, *(program for each in languages for program in each.programs)]
    programs = [program for each in models for program in each.sizes.values()]
    return st.new_state(
        st.Limits(
            models=len(models),
            instances=sum(each.instances for each in models),
            instances_per_model=max(each.instances for each in models),
            sizes=max(len(each.sizes) for each in models),
            batch=slots,
            segments=max(len(program) for program in programs),
            # The ring is sized by rows, and must hold an OPEN_MODEL message for every model before the core's first
            # step.
            requests=min(requests + 4 * len(models), MAX_ROWS),
            clients=max(clients, 1),
            inputs=1,
        )
    )


def prepare(
    state: st.State,
    models: Sequence[ModelProfile],
    policy: Policy,
    gpu: Part,
    asked: SimulationOptions,
    filled: bool = False,
) -> None:
    """The core as in an engine: with the GPU's capacity, the policy, and the models open. `filled`: other models fill
    the GPU, so the engine's limit counts even where demand was not measured.
    """
    state.core["partitions"][0] = asked.sm_partitions
    state.tuning[:] = asked.tuning_for(gpu).row()
    timing = Timing.for_part(gpu)
    set_capacity(state, Capacity.of(gpu.sms, gpu.sm, timing, gpu.bandwidth_gbps * timing.bandwidth_efficiency))
    attach_policy(state, policy)
    attach_step(state)
    demand = asked.demand
    if demand is None and policy.active is None and (filled or all(each.demand for each in models)):
        demand = float(state.tuning["demand_limit"][0])
    if demand is not None:
        state.core["max_active"][0], state.core["demand_limit"][0] = len(state.instance), demand
    for each in models:
        open_model(state, install(state, each)[0])
    if asked.memory_bytes is not None:
        manage_weights(state, models, asked.memory_bytes)
    if asked.sm_partitions:
        state.confined[:, :, -1, 0] = 1  # any program can be confined


def loaded_gpu(
    state: st.State,
    models: Sequence[ModelProfile],
    gpu: Part,
    seconds: float,
    arrivals: Table,
    clients: Table,
    asked: SimulationOptions,
) -> tables.SimGpu:
    """The simulated GPU with its load, before the first event."""
    timing = Timing.for_part(gpu)
    f = tables.new_sim_gpu(state, resources(state, models, gpu, timing), arrivals, clients, BINS)
    if asked.admission:
        f = f._replace(admission=new_limits((max(each.batch) for each in models), asked.tuning_for(gpu)))
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


def resources(state: State, models: Sequence[ModelProfile], gpu: Part, timing: Timing) -> Programs:
    """For each segment, the share of each resource it takes alone, and its time; the last row is for the whole
    program.
    """
    n, sizes, segments = state.segment.shape
    use = np.zeros((n, sizes, segments + 1, 4))
    work = np.zeros((n, sizes, segments + 1))
    busy, kernels = np.zeros((n, sizes)), np.zeros((n, sizes))
    capacity = Capacity.of(gpu.sms, gpu.sm, timing)
    bandwidth = gpu.bandwidth_gbps * timing.bandwidth_efficiency  # GB/s is bytes/ns
    for m, model in enumerate(models):
        for k, (batch, program) in enumerate(model.sizes.items()):
            for i, each in enumerate(program):
                memory = each.memory or each.bytes / each.time_ns / bandwidth
                found = (capacity.slots(each), memory, capacity.issuing(each), each.compute)
                use[m, k, i] = np.minimum(found, 1.0)
                work[m, k, i] = each.time_ns
            total = math.fsum(work[m, k, : len(program)])
            if batch in model.demand:  # measured, not estimated: the whole program keeps this part of the GPU busy
                fullest = use[m, k, : len(program), : ISSUE + 1].max(axis=1)
                estimate = (fullest * work[m, k, : len(program)]).sum() / total
                busy[m, k] = busy_alone(model.demand[batch], model.together.get(batch, TOGETHER))
                use[m, k, : len(program), : ISSUE + 1] *= busy[m, k] / max(estimate, 1e-9)
                # Bandwidth and arithmetic were measured separately, where they are known.
                for i, each in enumerate(program):
                    use[m, k, i, MEMORY] = each.memory or use[m, k, i, MEMORY]
            use[m, k, -1] = (use[m, k, : len(program)] * work[m, k, : len(program), None]).sum(axis=0) / total
            work[m, k, -1], kernels[m, k] = total, sum(each.kernels for each in program)
    copy = np.zeros(n)
    copy[: len(models)] = [model.input_bytes / state.tuning["copy_gbps"][0] for model in models]
    return Programs(use, work, busy, copy, kernels)


def manage_weights(state: State, models: Sequence[ModelProfile], memory_bytes: int) -> None:
    """Gives the core a memory budget. Models must be installed, and nothing may have run."""
    for each in models:
        if not 0 < each.weight_bytes <= memory_bytes:
            raise ProfileError(
                f"{each.name} has weight_bytes={each.weight_bytes:,}, which must be above 0 and at most "
                f"memory_bytes={memory_bytes:,}: set the model's weight_bytes, or raise memory_bytes",
                model=each.name, field="weight_bytes", given=each.weight_bytes, limit=memory_bytes,
            )  # fmt: skip
    needed = needed_bytes([(each.priority, each.weight_bytes, codes.KEEP[each.resident]) for each in models])
    if needed > memory_bytes:
        raise ProfileError(
            f"{needed:,} bytes of weights must be on the GPU at once, more than memory_bytes={memory_bytes:,}: models "
            "with resident=True, models of higher priority than another one, and the largest of the others; raise it, "
            "or keep fewer models resident", field="memory_bytes", given=memory_bytes, needed_bytes=needed,
        )  # fmt: skip
    set_weight_budget(state, memory_bytes)
    first = sorted(range(len(models)), key=lambda m: models[m].resident is not True)
    for m in first:
        nbytes = models[m].weight_bytes
        fits = int(state.residency["held_bytes"][0]) + nbytes <= memory_bytes and models[m].resident is not False
        state.weights["location"][m] = codes.RESIDENT if fits else codes.OFF_GPU
        state.residency["held_bytes"][0] += nbytes if fits else 0


def weight_counters(state: State) -> dict[str, int]:
    """Counts of weight movements in a run."""
    r = state.residency[0]
    return {
        "weight_hits": int(state.weights["hits"].sum()),
        "weight_misses": int(state.weights["misses"].sum()),
        "brought": int(r["brought"]),
        "brought_bytes": int(r["brought_bytes"]),
        "evicted": int(r["evicted"]),
        "reload_us": int(r["reload_ns"] / 1e3),
    }
