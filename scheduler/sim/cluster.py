"""`simulate_cluster`: many simulated GPUs behind routers. Every GPU runs the scheduler's own core; timing only.

Time advances in periods of `stale_ms`. At the start of a period every GPU reports its core's predictions. Routers
distribute the period's requests by these reports and by the requests they have sent since; then all GPUs advance, on
all cores at once where there are many.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numba
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.gpu_model.tables import Floats, Ints, new_tree, tree_first, tree_rebuild, tree_set
from paellapy.instrument.numba_ext.link import address_of, compiled, part
from paellapy.instrument.numba_ext.tables import TableSet, table, table_set
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import PREDICTED_WEIGHT, SLOW
from paellapy.scheduler.core.atomics import call_advance
from paellapy.scheduler.core.codes import NEVER, NONE, OK
from paellapy.scheduler.core.processes import usable_cpus
from paellapy.scheduler.core.profiles import MOST_NS, ModelProfile
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.values import Rule, check_names, check_values, integer, number, one_of, or_none
from paellapy.scheduler.policies.policy import Policy, Rank
from paellapy.scheduler.sim import tables
from paellapy.scheduler.sim.segment_model import MORE_RECORDS, advance
from paellapy.scheduler.sim.simulate import (
    SimulationOptions,
    check_conserved,
    check_ordered,
    checked_models,
    checked_workload,
    loaded_gpu,
    new_core,
    numbers_for,
    prepare,
    requests_of,
    simulated_part,
)
from paellapy.scheduler.sim.tables import ARRIVAL, FACTOR, GAIN, LIVE
from paellapy.scheduler.sim.workload import Workload, WorkloadError

Routing = Literal["weighted", "predicted", "least_loaded", "two_choices", "round_robin"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
WEIGHTED, PREDICTED, LEAST_LOADED, TWO_CHOICES, ROUND_ROBIN = range(5)
INBOX = 512  # most requests sent to a GPU in one period
ROWS = 1024  # most requests waiting at one GPU
HELD_S = 20.0  # longest time for which a router holds a request that no GPU can take
NOTICED_MS = 1.0  # time until a router resends a request whose GPU has failed and whose connection breaks
MOST_GPUS = 1 << 16
LONGEST_TAIL_S = 60.0  # after the last arrival
MANY_GPUS = 64  # with fewer, to hand a period to threads takes longer than to simulate it (on 2 ARM cores)
PARTS = 16  # consecutive parts of a run, for standard errors


_GPU = integer(0, MOST_GPUS - 1)
_FOR = number(0, MOST_NS / 1e9, above=True, infinite=True)
_WHEN = {"gpu": _GPU, "at_s": number(0, MOST_NS / 1e9), "for_s": _FOR}


@dataclass(frozen=True, slots=True)
class Failure:
    """A GPU that fails at `at_s` and is away for `for_s`; it comes back empty.

    >>> Failure(gpu=3, at_s=0.1)
    Failure(gpu=3, at_s=0.1, for_s=inf)
    """

    gpu: int
    at_s: float
    for_s: float = math.inf

    def __post_init__(self) -> None:
        check_values(self, _WHEN)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A GPU that is slower than its profiles by the factor `times`, from `at_s` on.

    >>> Straggler(gpu=0, times=2.0)
    Straggler(gpu=0, times=2.0, at_s=0.0, for_s=inf)
    """

    gpu: int
    times: float
    at_s: float = 0.0
    for_s: float = math.inf

    def __post_init__(self) -> None:
        check_values(self, _WHEN | {"times": _FACTOR})


_FACTOR = number(1e-6, 1e6)  # of a speed


def _list_of(kind: type) -> Rule:
    return Rule(
        lambda given: isinstance(given, Sequence) and all(isinstance(each, kind) for each in given),
        f"a list, such as [{kind.__name__}(gpu=0, …)]",
    )


PLACEMENT = Rule(
    lambda given: isinstance(given, Sequence)
    and all(isinstance(each, Sequence | Set) and not isinstance(each, str) for each in given),
    "one list of models for each GPU",
)
_OPTIONS = {
    "gpus": integer(1, MOST_GPUS),
    "router": one_of(*ROUTINGS),
    "placement": or_none(PLACEMENT),
    "stale_ms": number(0.01, 1000),
    "speeds": Rule(
        lambda given: isinstance(given, list | tuple) and bool(given) and all(map(_FACTOR.fits, given)),
        f"a list of {_FACTOR.wanted} each; 1 is the speed of the profiles",
    ),
    "routers": integer(1, 1024),
    "failures": _list_of(Failure),
    "stragglers": _list_of(Straggler),
    "threads": or_none(integer(1, 1024)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of `simulate_cluster`."""

    gpus: int = 1000
    router: Routing = "weighted"
    placement: Sequence[Sequence[str]] | None = None  # names of the models of each GPU; None: all GPUs have all models
    stale_ms: float = 2.0  # age of the load reports by which routers choose
    speeds: Sequence[float] = (1.0,)  # relative speeds, assigned to the GPUs in turn: 0.5 takes twice as long
    routers: int = 1
    failures: Sequence[Failure] = ()
    stragglers: Sequence[Straggler] = ()
    policy: str | Policy | Rank = "paella"
    device: str = "virtual:h200"
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        check_values(self, _OPTIONS)
        if self.placement is not None and len(self.placement) != self.gpus:
            text = f"placement has {len(self.placement)} lists of models: it must have one for each of {self.gpus} GPUs"
            raise ArgumentError(text, field="placement", given=self.placement, limit=self.gpus)
        for name in ("failures", "stragglers"):
            for each in getattr(self, name):
                if each.gpu >= self.gpus:
                    text = f"{name} names GPU {each.gpu}, but the cluster has the GPUs 0 to {self.gpus - 1}"
                    raise ArgumentError(text, field=name, given=each, limit=self.gpus)


def simulate_cluster(
    profiles: Sequence[ModelProfile] | ModelProfile, workload: Workload, gpus: int = 1000, **options: Any
) -> ClusterResults:
    """Runs the workload on `gpus` GPUs to its end.

    `options`: `router` is "weighted" (what our routers do), "predicted", "least_loaded", "two_choices" or
    "round_robin", and there are `routers` of them; `stale_ms`, the age of the load reports by which they choose;
    `placement`, the names of each GPU's models (None: all GPUs have all models); `speeds`, relative to the profiles and
    assigned to the GPUs in turn; `failures` and `stragglers`; `policy`, `device`, `seed`; `threads`, the host's for the
    simulation.

    >>> from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
    >>> from paellapy.scheduler.sim.workload import Poisson
    >>> found = simulate_cluster(mix_profiles(), Poisson(4000, MIX, duration=0.05), gpus=2)
    >>> found.lost
    0
    """
    models = checked_models(profiles, "profiles")
    check_names("simulate_cluster", options, ClusterOptions)
    o = ClusterOptions(gpus=gpus, **options)
    return _Cluster(models, checked_workload(workload), o).run()


# -- tables

FLEET = np.dtype(  # [1]
    [
        ("routing", "i8"),
        ("routers", "i8"),
        ("random", "u8"),  # state of the random generator
        ("unplaced", "i8"),  # requests of this period that no GPU could take
    ],
    align=True,
)

ASKED = np.dtype(  # a request as the cluster sees it
    [
        ("first_ns", "i8"),  # when its client sent it
        ("time_ns", "i8"),  # when it was sent to its GPU
        ("held_ns", "i8"),  # since when its router has looked for a GPU
        ("deadline_ns", "i8"),
        ("priority", "i8"),
        ("model", "i4"),
        ("client", "i4"),
        ("gpu", "i4"),
        ("record", "i4"),  # its number among the GPU's requests
        ("sent", "i4"),  # how often it was sent, including requests that it replaces
        ("finish_ns", "i8"),  # NEVER: not finished, or its GPU failed
    ],
    align=True,
)


@table_set
class Fleet(TableSet):
    """The routers' knowledge of every GPU, and the requests in transit."""

    fleet: Table = table(FLEET, 1)
    gpu_at: NDArray[np.uint64] = table(np.uint64, "gpus")  # addresses of the simulated GPUs' tables
    state_at: NDArray[np.uint64] = table(np.uint64, "gpus")
    up: Ints = table(np.int64, "gpus")
    row: Ints = table(np.int64, "gpus", "models")  # row of a model in its GPU's tables; NONE: the GPU does not have it
    report: Floats = table(np.float64, "gpus", "reported")  # the latest published SimGpu.report
    step_ns: Floats = table(np.float64, "gpus", "models")  # time that one more request adds to the queue
    added_ns: Floats = table(np.float64, "routers", "gpus")  # work sent since the last report
    sent: Ints = table(np.int64, "routers", "gpus")  # requests sent since the last report
    tree: Floats = table(np.float64, "routers", "models", "nodes")  # the smallest keys of all GPUs, by model
    turn: Ints = table(np.int64, "models")
    host: Ints = table(np.int64, "models", "gpus")  # GPUs that have the model; only the first `hosts` entries count
    hosts: Ints = table(np.int64, "models")
    inbox: Table = table(ARRIVAL, "gpus", INBOX)
    arrived: Ints = table(np.int64, "gpus")  # number of requests in the inbox
    records: Ints = table(np.int64, "gpus")  # requests sent there so far


def new_fleet(rows: NDArray[np.int64], steps_ns: Floats, routing: int, routers: int, seed: int) -> Fleet:
    """`rows[gpu, model]` says where each model is. All GPUs are up and idle, and have no addresses yet."""
    gpus, models = rows.shape
    found = Fleet.zeros(
        {"gpus": gpus, "models": models, "reported": models - GAIN, "routers": routers, "nodes": len(new_tree(gpus))},
        row=np.ascontiguousarray(rows), step_ns=np.ascontiguousarray(steps_ns),
    )  # fmt: skip
    found.fleet["routing"], found.fleet["routers"] = routing, routers
    found.fleet["random"] = np.uint64(int(seed) * 2 + 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    found.tree[...] = np.inf
    found.inbox["time_ns"] = NEVER
    set_hosts(found, range(gpus))
    return found


def set_hosts(f: Fleet, up: Sequence[int] | range) -> None:
    """Sets the GPUs that take requests from now on."""
    f.up[:] = 0
    f.up[list(up)] = 1
    for m in range(f.row.shape[1]):
        there = np.flatnonzero((f.row[:, m] != NONE) & (f.up == 1))
        f.host[m, : len(there)] = there
        f.hosts[m] = len(there)


# -- routers: they assign each request of a period to a GPU, by the reports of that period
#
# The first three rules keep, for every router and model, a tree of the GPUs' keys, so that a choice takes log(GPUs)
# steps.
# A router knows the requests that it has sent since the last report, and assumes that the other routers have sent as
# many.


@part
def draw(f: Fleet, n: int) -> int:
    """A random number below n (xorshift)."""
    x = f.fleet[0].random
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    f.fleet[0].random = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(n)))


@part
def estimate(f: Fleet, router: int, gpu: int, model: int) -> float:
    """When a request sent now would be done, in ns from now."""
    if f.up[gpu] == 0 or f.row[gpu, model] == NONE or f.arrived[gpu] >= INBOX:
        return np.inf
    added = f.added_ns[router, gpu] * f.fleet[0].routers
    factor = f.report[gpu, f.report.shape[1] + FACTOR]
    return float((f.report[gpu, f.row[gpu, model]] + added) * factor)


@part
def load_of(f: Fleet, router: int, gpu: int) -> float:
    """The number of requests at a GPU, as far as the router knows."""
    if f.arrived[gpu] >= INBOX:
        return np.inf
    return float(f.report[gpu, f.report.shape[1] + LIVE] + f.sent[router, gpu] * f.fleet[0].routers)


@part
def choose(f: Fleet, router: int, model: int) -> int:
    """The chosen GPU, or NONE."""
    hosts = f.hosts[model]
    if hosts == 0:
        return NONE
    routing = f.fleet[0].routing
    if routing == ROUND_ROBIN:
        f.turn[model] += 1
        return int(f.host[model, f.turn[model] % hosts])
    if routing == TWO_CHOICES:
        one, other = f.host[model, draw(f, hosts)], f.host[model, draw(f, hosts)]
        return int(one if load_of(f, router, one) <= load_of(f, router, other) else other)
    keys = f.tree[router, model]
    gpu = tree_first(keys)
    return int(NONE if keys[1] == np.inf else gpu)


@part
def key_of(f: Fleet, router: int, gpu: int, model: int) -> float:
    """The key that the router minimizes; infinite for a GPU without the model."""
    if f.fleet[0].routing == PREDICTED:
        return estimate(f, router, gpu, model)
    if f.fleet[0].routing == WEIGHTED:
        slow = max(1.0, f.report[gpu, f.report.shape[1] + FACTOR] / SLOW)
        work_ns = (load_of(f, router, gpu) + 1.0) * f.step_ns[gpu, model] * slow
        return float(work_ns + PREDICTED_WEIGHT * estimate(f, router, gpu, model))
    return load_of(f, router, gpu) if f.up[gpu] == 1 and f.row[gpu, model] != NONE else np.inf


@part
def send(f: Fleet, asked: Table, i: int, router: int, gpu: int) -> None:
    a = asked[i]
    m = a.model
    row = f.row[gpu, m]
    entry = f.inbox[gpu, f.arrived[gpu]]
    entry.time_ns, entry.deadline_ns, entry.model = a.time_ns, a.deadline_ns, row
    entry.priority, entry.client = a.priority, a.client
    entry.predicted_ns = f.report[gpu, row] + f.added_ns[router, gpu] * f.fleet[0].routers
    f.arrived[gpu] += 1
    a.gpu, a.record = gpu, f.records[gpu]
    a.sent += 1
    f.records[gpu] += 1
    f.added_ns[router, gpu] += f.step_ns[gpu, m] / f.report[gpu, f.report.shape[1] + GAIN]
    f.sent[router, gpu] += 1
    if f.fleet[0].routing < TWO_CHOICES:
        for other in range(f.row.shape[1]):
            if f.row[gpu, other] != NONE:
                tree_set(f.tree[router, other], gpu, key_of(f, router, gpu, other))


@compiled
def route(f: Fleet, asked: Table, first: int, last: int) -> None:
    """Routes the requests of a period in order of time. All reports must be new."""
    gpus, models = f.row.shape
    f.added_ns[:] = 0.0
    f.sent[:] = 0
    f.arrived[:] = 0
    f.fleet[0].unplaced = 0
    if f.fleet[0].routing < TWO_CHOICES:
        for router in range(f.fleet[0].routers):
            for m in range(models):
                keys = f.tree[router, m]
                for gpu in range(gpus):
                    keys[keys.shape[0] // 2 + gpu] = key_of(f, router, gpu, m)
                tree_rebuild(keys)
    for i in range(first, last):
        router = 0 if f.fleet[0].routers == 1 else draw(f, f.fleet[0].routers)
        gpu = choose(f, router, asked[i].model)
        if gpu == NONE or f.arrived[gpu] >= INBOX:
            f.fleet[0].unplaced += 1
            asked[i].gpu = NONE
            continue
        send(f, asked, i, router, gpu)


@compiled
def advance_some(f: Fleet, function: int, first: int, last: int, end: float) -> int:
    """Advances GPUs first … last - 1 to `end`; returns the GPU that needs room for records, or NONE if all are done."""
    for gpu in range(first, last):
        if f.up[gpu] == 1:
            if call_advance(np.uint64(function), f.gpu_at[gpu], f.state_at[gpu], end) == MORE_RECORDS:
                return gpu
            for k in range(f.arrived[gpu]):  # requests left in the inbox are lost
                f.inbox[gpu, k].time_ns = NEVER
    return int(NONE)


# -- the run


def slow_down(core: st.State, one: tables.SimGpu, speed: float) -> None:
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
        self._gpu, self._options = simulated_part(o.device), SimulationOptions(seed=o.seed)
        self._asked, self._sent_ns, self._clients = self._requests(workload)
        self._seconds = workload.seconds
        self._policy = self._options.policy(o.policy)
        self._away = [0] * o.gpus  # number of failures of each GPU that have begun and not ended
        self._slow: list[list[float]] = [[] for _ in range(o.gpus)]  # factors of its stragglers, the same
        rows = np.full((o.gpus, len(models)), NONE, np.int64)
        steps_ns = np.zeros((o.gpus, len(models)))
        for gpu, there in enumerate(self._placement):
            rows[gpu, there] = np.arange(len(there))
            for m in there:
                batch = max(models[m].batch)
                steps_ns[gpu, m] = models[m].alone_ns(batch) / batch / self._speed(gpu)
        self._fleet = new_fleet(rows, steps_ns, ROUTINGS.index(o.router), o.routers, o.seed)
        self._cores: list[st.State] = []
        self._gpus: list[tables.SimGpu] = []
        for gpu in range(o.gpus):
            core, one = self._new_gpu(gpu)
            self._cores.append(core)
            self._gpus.append(one)
            self._attach(gpu)

    def _checked_placement(self) -> list[list[int]]:
        everywhere = [list(range(len(self._names)))] * self._o.gpus
        if self._o.placement is None:
            return everywhere
        unknown = {name for each in self._o.placement for name in each} - set(self._names)
        if unknown:
            text = f"the placement names {', '.join(sorted(map(str, unknown)))}, but there is no profile of that name"
            raise ArgumentError(text, field="placement", given=unknown, limit=self._names)
        return [sorted(self._names.index(name) for name in set(each)) for each in self._o.placement]

    def _requests(self, workload: Workload) -> tuple[Table, NDArray[np.int64], int]:
        arrivals, loops, numbers = requests_of(workload, self._models, self._options)
        if len(loops):
            text = "a cluster cannot be simulated with closed loops: use Poisson, Lognormal or a trace"
            raise WorkloadError(text, field="workload", given=workload)
        asked = np.zeros(len(arrivals), ASKED)
        asked["first_ns"] = asked["held_ns"] = arrivals["time_ns"]
        for name in ("time_ns", "model", "client", "priority", "deadline_ns"):
            asked[name] = arrivals[name]
        asked["gpu"], asked["record"], asked["finish_ns"] = NONE, NONE, NEVER
        return asked, asked["first_ns"].copy(), numbers_for(len(numbers))

    def _speed(self, gpu: int) -> float:
        return float(self._o.speeds[gpu % len(self._o.speeds)])

    def _new_gpu(self, gpu: int) -> tuple[st.State, tables.SimGpu]:
        own = [self._models[m] for m in self._placement[gpu]]
        core = new_core(own, ROWS, self._clients)
        prepare(core, own, self._policy, self._gpu, self._options)
        nobody = np.zeros(0, tables.LOOP_CLIENT)
        one = loaded_gpu(core, own, self._gpu, self._seconds, self._fleet.inbox[gpu], nobody, self._options)
        slow_down(core, one, self._speed(gpu))
        one.work[...] *= math.prod(self._slow[gpu])
        expected = max(256, int(1.5 * len(self._asked) / self._o.gpus))
        return core, one._replace(records=np.zeros(expected, tables.RECORD), report=self._fleet.report[gpu])

    def _attach(self, gpu: int) -> None:
        self._fleet.gpu_at[gpu], self._fleet.state_at[gpu] = self._gpus[gpu].address, self._cores[gpu].address

    # -- time

    def run(self) -> ClusterResults:
        o, period_ns = self._o, self._o.stale_ms * 1e6
        function = address_of(advance, tables.SimGpu.numba_type, st.State.numba_type, numba.types.float64)
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
                now_ns = self._skipped(now_ns, first, late, events)
                until = now_ns + period_ns
                due = late["time_ns"] < until
                if due.any():
                    self._mix_in(late[due], first)
                    late = late[~due]
                last = bisect_left(self._asked["time_ns"], until, first)  # NumPy's search would copy the column
                route(self._fleet, self._asked, first, last)
                if self._fleet.fleet["unplaced"][0]:
                    last, held = self._held(first, last, until, events[0][0] if events else math.inf)
                    late = np.concatenate([late, held])
                self._advance(pool, edges, function, until)
                first, now_ns = last, until
        self._note_done(range(o.gpus))
        requests = self._asked[self._asked["sent"] >= 0]
        check_conserved(self._sent_ns, requests["first_ns"])
        check_ordered(requests["first_ns"], requests["held_ns"], requests["time_ns"], requests["finish_ns"])
        return ClusterResults(
            models=tuple(self._models),
            router=o.router,
            gpus=o.gpus,
            seconds=self._seconds,
            requests=requests,
            events=sum(int(each.sim["events"][0]) for each in self._gpus),
        )

    def _skipped(self, now_ns: float, first: int, late: Table, events: list[tuple[float, Any]]) -> float:
        """The time, or the start of the next period with an event or a request where all GPUs are idle until then."""
        times = [float(self._asked["time_ns"][first])] if first < len(self._asked) else []
        times += [float(late["time_ns"].min())] if len(late) else []
        times += [events[0][0]] if events else []
        period_ns = self._o.stale_ms * 1e6
        periods = (min(times, default=now_ns) - now_ns) // period_ns
        return now_ns + periods * period_ns if periods >= 1 and self._idle() else now_ns

    def _idle(self) -> bool:
        return not any(core.core["live"][0] for core in self._cores)

    def _note_done(self, gpus: Iterable[int]) -> None:
        """Records when the requests of these GPUs were done."""
        asked = self._asked
        for gpu in gpus:
            records = self._gpus[gpu].records[: self._gpus[gpu].sim["records"][0]]
            mine = np.flatnonzero((asked["gpu"] == gpu) & (asked["record"] < len(records)))
            found = records[asked["record"][mine]]
            done = found["status"] == OK
            done &= found["started_ns"] != NEVER  # before that, its status is the default, a refusal
            asked["finish_ns"][mine[done]] = found["finish_ns"][done]

    def _advance(self, pool: ThreadPoolExecutor, edges: list[int], function: int, until: float) -> None:
        def some(k: int) -> None:
            first = edges[k]
            while (short := advance_some(self._fleet, function, first, edges[k + 1], until)) != NONE:
                self._gpus[short] = tables.more_records(self._gpus[short])
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
            yield slow.at_s * 1e9, lambda s=slow: self._slow_down(s)
            if slow.for_s < math.inf:
                yield (slow.at_s + slow.for_s) * 1e9, lambda s=slow: self._speed_up(s)

    def _slow_down(self, slow: Straggler) -> Table:
        self._slow[slow.gpu].append(slow.times)
        self._gpus[slow.gpu].work[...] *= slow.times
        return np.zeros(0, ASKED)

    def _speed_up(self, slow: Straggler) -> Table:
        self._slow[slow.gpu].remove(slow.times)
        self._gpus[slow.gpu].work[...] /= slow.times
        return np.zeros(0, ASKED)

    def _fail(self, failure: Failure) -> Table:
        """Takes a GPU down with all its requests, and returns them to be sent again."""
        gpu, asked = failure.gpu, self._asked
        self._away[gpu] += 1
        self._note_done([gpu])
        mine = np.flatnonzero(asked["gpu"] == gpu)
        lost = mine[asked["finish_ns"][mine] > failure.at_s * 1e9]
        again = asked[lost].copy()
        noticed = np.maximum(again["time_ns"], int(failure.at_s * 1e9 + NOTICED_MS * 1e6))
        again["time_ns"] = again["held_ns"] = noticed
        again["gpu"], again["finish_ns"] = NONE, NEVER
        asked["sent"][lost] = -1  # the new copies stand for them
        asked["gpu"][mine] = NONE
        self._cores[gpu], self._gpus[gpu] = self._new_gpu(gpu)
        self._fleet.records[gpu] = 0
        self._attach(gpu)
        self._set_hosts()
        return np.asarray(again)

    def _return(self, failure: Failure) -> Table:
        self._away[failure.gpu] -= 1
        self._gpus[failure.gpu].sim["now_ns"] = (failure.at_s + failure.for_s) * 1e9
        self._set_hosts()
        return np.zeros(0, ASKED)

    def _set_hosts(self) -> None:
        set_hosts(self._fleet, [gpu for gpu, failures in enumerate(self._away) if not failures])

    def _held(self, first: int, last: int, until: float, event_ns: float) -> tuple[int, Table]:
        """Takes the requests that no GPU could take out of a period, to be sent again in the next one, or after
        the next event where no GPU with the model is up; not those that their routers would hold too long. Returns the
        period's new end, and the requests.
        """
        some = self._asked[first:last]
        when = np.where(self._fleet.hosts[some["model"]] > 0, until, max(until, event_ns))
        held = (some["gpu"] == NONE) & (some["sent"] >= 0) & (when - some["held_ns"] <= HELD_S * 1e9)
        again = some[held].copy()
        again["time_ns"] = when[held]
        self._asked = np.delete(self._asked, first + np.flatnonzero(held))
        return last - len(again), again

    def _mix_in(self, late: Table, first: int) -> None:
        """Merges requests to be sent again into those of this period."""
        rest = np.concatenate([late, self._asked[first:]])
        self._asked = np.concatenate([self._asked[:first], rest[np.argsort(rest["time_ns"], kind="stable")]])


# -- results


@dataclass(frozen=True, slots=True)
class ClusterResults:
    """The results of one run. `requests` has one row per request (ASKED), in order of arrival."""

    models: tuple[ModelProfile, ...]
    router: str
    gpus: int
    seconds: float
    requests: Table
    events: int

    @property
    def done(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.requests["finish_ns"] != NEVER
        return found

    @property
    def lost(self) -> int:
        """The number of requests without an answer."""
        return int((~self.done).sum())

    @property
    def again(self) -> int:
        """The number of requests that were sent more than once."""
        return int((self.requests["sent"] > 1).sum())

    def latency_ms(self, model: str | None = None) -> NDArray[np.float64]:
        """Latencies of the answered requests, of one model or of all."""
        rows = self._rows(model)
        return np.asarray((rows["finish_ns"] - rows["first_ns"]) * 1e-6)

    def _rows(self, model: str | None) -> Table:
        rows = self.requests[self.done]
        if model is None:
            return rows
        return np.asarray(rows[rows["model"] == [each.name for each in self.models].index(model)])

    def slowdown(self) -> NDArray[np.float64]:
        """Latency ÷ the time alone on a GPU with the profiled speed."""
        rows = self._rows(None)
        alone = np.array([each.alone_ns() for each in self.models])
        return np.asarray((rows["finish_ns"] - rows["first_ns"]) / alone[rows["model"]])

    def attainment(self, model: str | None = None) -> float:
        """The fraction of all requests that met their deadline or model's target, or were answered without either."""
        met = self._met()
        if model is not None:
            met = met[self.requests["model"] == [each.name for each in self.models].index(model)]
        return float(met.mean()) if len(met) else 1.0

    def attainment_error(self) -> float:
        """The standard error of the attainment, from `PARTS` consecutive parts of the run."""
        parts = [each.mean() for each in np.array_split(self._met(), PARTS) if len(each)]
        return float(np.std(parts, ddof=1) / np.sqrt(len(parts))) if len(parts) > 1 else 0.0

    def _met(self) -> NDArray[np.bool_]:
        rows, target = self.requests, np.array([float(each.target_ns) for each in self.models])
        due = np.where(rows["deadline_ns"] < NEVER, rows["deadline_ns"], rows["first_ns"] + target[rows["model"]])
        found: NDArray[np.bool_] = self.done & (rows["finish_ns"] <= due)
        return found

    def summary(self) -> dict[str, float]:
        ms = self.latency_ms()
        p50, p99 = np.percentile(ms, (50, 99)) if len(ms) else (float("nan"),) * 2
        slow = float(np.percentile(self.slowdown(), 99)) if len(ms) else float("nan")
        return {
            "requests": len(self.requests), "p50_ms": float(p50), "p99_ms": float(p99), "slowdown_p99": slow,
            "attainment": self.attainment(), "lost": self.lost, "sent_again": self.again,
        }  # fmt: skip

    def __str__(self) -> str:
        found = self.summary()
        return (
            f"{self.router} on {self.gpus} GPUs: {found['requests']:,} requests in {self.seconds:g} s, p50 "
            f"{found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms, p99 slowdown {found['slowdown_p99']:.1f}, within "
            f"target {found['attainment']:.1%}, lost {found['lost']}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"router": self.router, "gpus": self.gpus, "seconds": self.seconds, **self.summary()}
