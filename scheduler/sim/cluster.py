"""`simulate_cluster`: many simulated GPUs behind routers. Every GPU runs the scheduler's own core; timing only.

Time advances in periods of `stale_ms`. At the start of a period every GPU reports its core's predictions. Routers
distribute the period's requests by these reports and by the requests they have sent since; then all GPUs advance, on
all cores at once where there are many.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numba
import numpy as np

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.jit import address_of
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.codes import NEVER, NONE, OK
from paellapy.scheduler.core.cpus import usable_cpus
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.sim import fluid_state as fluid
from paellapy.scheduler.sim.cluster_results import ClusterResults
from paellapy.scheduler.sim.fleet_routing import advance_some, route
from paellapy.scheduler.sim.fleet_state import ASKED, new_fleet, set_hosts
from paellapy.scheduler.sim.fluid import advance
from paellapy.scheduler.sim.options import SimulationOptions, check_names, simulated_part
from paellapy.scheduler.sim.simulate import fluid_of, new_core, prepare
from paellapy.scheduler.sim.workload import Workload, WorkloadError

Routing = Literal["predicted", "least_loaded", "two_choices", "round_robin"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
ROWS = 1024  # most requests waiting at one GPU
NOTICED_MS = 1.0  # time until a router resends a request whose GPU has failed and whose connection breaks
LONGEST_TAIL_S = 60.0  # after the last arrival
MANY_GPUS = 64  # with fewer, to hand a period to threads takes longer than to simulate it (on 2 ARM cores)


@dataclass(frozen=True, slots=True)
class Failure:
    """A GPU that fails at `at_s` and is away for `for_s`; it comes back empty."""

    gpu: int
    at_s: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Straggler:
    """A GPU that is slower than its profiles by the factor `times`, from `at_s` on."""

    gpu: int
    times: float
    at_s: float = 0.0
    for_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of `simulate_cluster`."""

    gpus: int = 1000
    router: Routing = "predicted"
    placement: Sequence[Sequence[str]] | None = None  # names of the models of each GPU; None: all GPUs have all models
    stale_ms: float = 2.0  # age of the outlooks by which routers choose
    speeds: Sequence[float] = (1.0,)  # relative speeds, assigned to the GPUs in turn: 0.5 takes twice as long
    routers: int = 1
    failures: Sequence[Failure] = ()
    stragglers: Sequence[Straggler] = ()
    policy: str = "paella"
    device: str = "virtual:h200"
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.routers < 1:
            raise ArgumentError(f"gpus={self.gpus} and routers={self.routers}: both must be at least 1")
        if self.router not in ROUTINGS:
            raise ArgumentError(f"no router {self.router!r}: choose one of {', '.join(ROUTINGS)}")
        if not 0.01 <= self.stale_ms <= 1000:
            raise ArgumentError(f"stale_ms={self.stale_ms}: it must be from 0.01 to 1000 ms")
        if not self.speeds or not all(0 < each < math.inf for each in self.speeds):
            raise ArgumentError(f"speeds={self.speeds}: each must be above 0; 1 is the speed of the profiles")
        if self.placement is not None and len(self.placement) != self.gpus:
            raise ArgumentError(
                f"the placement has {len(self.placement)} GPUs, but the cluster has {self.gpus}: give one list of "
                "models per GPU"
            )
        for gpu in [*(each.gpu for each in self.failures), *(each.gpu for each in self.stragglers)]:
            if not 0 <= gpu < self.gpus:
                raise ArgumentError(f"there is no GPU {gpu}: the GPUs are 0 to {self.gpus - 1}")


def simulate_cluster(
    profiles: Sequence[ModelProfile] | ModelProfile, workload: Workload, gpus: int = 1000, **options: Any
) -> ClusterResults:
    """Runs the workload on `gpus` GPUs to its end.

    `options`: `router` is "predicted", "least_loaded", "two_choices" or "round_robin", and there are `routers` of them;
    `stale_ms`, the age of the outlooks by which they choose; `placement`, the names of each GPU's models (None: all
    GPUs have all models); `speeds`, relative to the profiles and assigned to the GPUs in turn; `failures` and
    `stragglers`; `policy`, `device`, `seed`; `threads`, the host's for the simulation.

    >>> from paellapy.scheduler.sim.mix import MIX, mix_profiles
    >>> from paellapy.scheduler.sim.workload import Poisson
    >>> found = simulate_cluster(mix_profiles(), Poisson(4000, MIX, duration=0.05), gpus=2, router="predicted")
    >>> found.lost
    0
    """
    models = [profiles] if isinstance(profiles, ModelProfile) else list(profiles)
    names = [each.name for each in models]
    if not models or len(set(names)) < len(names):
        raise ArgumentError(f"the models' names are {names}: give at least one model, each with a different name")
    check_names("simulate_cluster", options, ClusterOptions)
    o = ClusterOptions(gpus=gpus, **options)
    return _Cluster(models, workload, o).run()


def slow_down(core: st.State, one: fluid.Fluid, speed: float) -> None:
    """Changes the speed of a GPU: everything takes longer, at the same share of the GPU."""
    core.size["total_ns"] /= speed
    for name in ("time_ns", "tail_ns"):
        core.segment[name] /= speed
    one.work[...] /= speed


class _Cluster:
    def __init__(self, models: list[ModelProfile], workload: Workload, o: ClusterOptions) -> None:
        self._models, self._o = models, o
        self._names = [each.name for each in models]
        self._placement = self._checked_placement()
        self._asked = self._requests(workload)
        self._seconds = workload.seconds
        self._gpu, self._options = simulated_part(o.device), SimulationOptions(seed=o.seed)
        self._policy = self._options.policy(o.policy)
        rows = np.full((o.gpus, len(models)), NONE, np.int64)
        steps_ns = np.zeros((o.gpus, len(models)))
        for gpu, there in enumerate(self._placement):
            rows[gpu, there] = np.arange(len(there))
            for m in there:
                batch = max(models[m].batch)
                steps_ns[gpu, m] = models[m].alone_ns(batch) / batch / self._speed(gpu)
        self._fleet = new_fleet(rows, steps_ns, ROUTINGS.index(o.router), o.routers, o.seed)
        self._cores: list[st.State] = []
        self._fluids: list[fluid.Fluid] = []
        for gpu in range(o.gpus):
            core, one = self._new_gpu(gpu)
            self._cores.append(core)
            self._fluids.append(one)
            self._attach(gpu)

    def _checked_placement(self) -> list[list[int]]:
        everywhere = [list(range(len(self._names)))] * self._o.gpus
        if self._o.placement is None:
            return everywhere
        unknown = {name for each in self._o.placement for name in each} - set(self._names)
        if unknown:
            raise ArgumentError(
                f"the placement names {', '.join(sorted(unknown))}, but there is no profile of that name"
            )
        return [sorted(self._names.index(name) for name in set(each)) for each in self._o.placement]

    def _requests(self, workload: Workload) -> Table:
        if len(workload.loop_clients(self._names)):
            raise WorkloadError("a cluster cannot be simulated with closed loops: use Poisson, Lognormal or a trace")
        arrivals = workload.arrivals(self._names, self._o.seed)
        asked = np.zeros(len(arrivals), ASKED)
        asked["first_ns"] = asked["time_ns"] = arrivals["time_ns"]
        asked["model"], asked["gpu"], asked["record"] = arrivals["model"], NONE, NONE
        asked["finish_ns"] = NEVER
        return asked

    def _speed(self, gpu: int) -> float:
        return float(self._o.speeds[gpu % len(self._o.speeds)])

    def _new_gpu(self, gpu: int) -> tuple[st.State, fluid.Fluid]:
        own = [self._models[m] for m in self._placement[gpu]]
        core = new_core(own, ROWS)
        prepare(core, own, self._policy, self._gpu, self._options)
        nobody = np.zeros(0, fluid.LOOP_CLIENT)
        one = fluid_of(core, own, self._gpu, self._seconds, self._fleet.inbox[gpu], nobody, self._options)
        slow_down(core, one, self._speed(gpu))
        expected = max(256, int(1.5 * len(self._asked) / self._o.gpus))
        return core, one._replace(records=np.zeros(expected, fluid.RECORD), report=self._fleet.report[gpu])

    def _attach(self, gpu: int) -> None:
        self._fleet.fluid_at[gpu], self._fleet.state_at[gpu] = self._fluids[gpu].address, self._cores[gpu].address

    # -- time

    def run(self) -> ClusterResults:
        o, period_ns = self._o, self._o.stale_ms * 1e6
        function = address_of(advance, fluid.Fluid.numba_type, st.State.numba_type, numba.types.float64)
        threads = o.threads or (max(1, int(usable_cpus())) if o.gpus >= MANY_GPUS else 1)
        pieces = min(o.gpus, 4 * threads) if threads > 1 else 1
        edges = np.linspace(0, o.gpus, pieces + 1).astype(int).tolist()
        events = sorted(self._events(), key=lambda each: each[0])
        late = np.zeros(0, ASKED)  # requests to be sent again
        first, now_ns, end_ns = 0, 0.0, (self._seconds + LONGEST_TAIL_S) * 1e9
        with ThreadPoolExecutor(threads) as pool:
            self._advance(pool, edges, function, 0.0)
            while now_ns < end_ns and not (first == len(self._asked) and not len(late) and self._idle()):
                while events and events[0][0] <= now_ns:
                    late = np.concatenate([late, events.pop(0)[1]()])
                until = now_ns + period_ns
                due = late["time_ns"] < until
                if due.any():
                    self._mix_in(late[due], first)
                    late = late[~due]
                last = bisect_left(self._asked["time_ns"], until, first)  # NumPy's search would copy the column
                route(self._fleet, self._asked, first, last)
                self._advance(pool, edges, function, until)
                first, now_ns = last, until
        self._note_done(range(o.gpus))
        return ClusterResults(
            models=tuple(self._models),
            router=o.router,
            gpus=o.gpus,
            seconds=self._seconds,
            requests=self._asked[self._asked["sent"] >= 0],
            events=sum(int(each.sim["events"][0]) for each in self._fluids),
        )

    def _idle(self) -> bool:
        return not any(core.core["live"][0] for core in self._cores)

    def _note_done(self, gpus: Iterable[int]) -> None:
        """Records when the requests of these GPUs were done."""
        asked = self._asked
        for gpu in gpus:
            records = self._fluids[gpu].records[: self._fluids[gpu].sim["records"][0]]
            mine = np.flatnonzero((asked["gpu"] == gpu) & (asked["record"] < len(records)))
            found = records[asked["record"][mine]]
            done = found["status"] == OK
            done &= found["started_ns"] != NEVER  # before that, its status is the default, a refusal
            asked["finish_ns"][mine[done]] = found["finish_ns"][done]

    def _advance(self, pool: ThreadPoolExecutor, edges: list[int], function: int, until: float) -> None:
        def some(k: int) -> None:
            first = edges[k]
            while (short := advance_some(self._fleet, function, first, edges[k + 1], until)) != NONE:
                self._fluids[short] = fluid.more_records(self._fluids[short])
                self._attach(short)
                first = short

        if len(edges) == 2:
            some(0)
        else:
            list(pool.map(some, range(len(edges) - 1)))

    # -- failures and stragglers

    def _events(self) -> Iterable[tuple[float, Any]]:
        for failure in self._o.failures:
            yield failure.at_s * 1e9, lambda f=failure: self._fail(f)
            if failure.for_s < math.inf:
                yield (failure.at_s + failure.for_s) * 1e9, lambda f=failure: self._return(f)
        for slow in self._o.stragglers:
            yield slow.at_s * 1e9, lambda s=slow: self._change_speed(s.gpu, s.times)
            if slow.for_s < math.inf:
                yield (slow.at_s + slow.for_s) * 1e9, lambda s=slow: self._change_speed(s.gpu, 1.0 / s.times)

    def _change_speed(self, gpu: int, times: float) -> Table:
        self._fluids[gpu].work[...] *= times
        return np.zeros(0, ASKED)

    def _fail(self, failure: Failure) -> Table:
        """Takes a GPU down with all its requests, and returns them to be sent again."""
        gpu, asked = failure.gpu, self._asked
        self._note_done([gpu])
        mine = np.flatnonzero(asked["gpu"] == gpu)
        lost = mine[asked["finish_ns"][mine] == NEVER]
        again = asked[lost].copy()
        again["time_ns"], again["gpu"] = failure.at_s * 1e9 + NOTICED_MS * 1e6, NONE
        asked["sent"][lost] = -1  # the new copies stand for them
        asked["gpu"][mine] = NONE
        self._cores[gpu], self._fluids[gpu] = self._new_gpu(gpu)
        self._fleet.records[gpu] = 0
        self._attach(gpu)
        set_hosts(self._fleet, np.flatnonzero(self._fleet.up * (np.arange(self._o.gpus) != gpu)).tolist())
        return np.asarray(again)

    def _return(self, failure: Failure) -> Table:
        now = np.flatnonzero(self._fleet.up).tolist()
        self._fluids[failure.gpu].sim["now_ns"] = (failure.at_s + failure.for_s) * 1e9
        set_hosts(self._fleet, sorted({*now, failure.gpu}))
        return np.zeros(0, ASKED)

    def _mix_in(self, late: Table, first: int) -> None:
        """Merges requests to be sent again into those of this period."""
        rest = np.concatenate([late, self._asked[first:]])
        self._asked = np.concatenate([self._asked[:first], rest[np.argsort(rest["time_ns"], kind="stable")]])
