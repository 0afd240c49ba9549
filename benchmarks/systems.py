"""The published systems as policies: limits, shares, best effort beside high priority, DISB, order of jobs.

    python benchmarks/systems.py [--device virtual:h200 --quick] [--only limits,pairs] [--points fair] [--seeds 5]

Every point is stored as soon as it is measured, and a second run goes on where the first ended. Every output is
compared with the module's own in eager mode. `--quick` uses models that a CPU can compute.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from engine_load import Loaded, Setup, in_order, poisson
from harness import Points, arguments, save, show, stored
from models import DISB, TINY, VARIANTS, Bound, Kind

from paellapy.instrument.device import Device
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import set_params
from paellapy.scheduler.core.tenants import Tenant, set_tenant

BOUND = ("memory_bound", "compute_bound", "memory_bound_2", "compute_bound_2", "full_bound")
PAIRS = ((0, 3), (0, 2), (1, 2), (1, 3), (0, 4))  # high priority and best effort, by their place in BOUND
CLAIMS = {
    "token": "KubeShare, Gemini: each container gets its request, and no more than its limit",
    "quota": "GaiaGPU: measured usage follows the share that was asked for",
    "antman": "opportunistic jobs take only the time they are left",
    "fair": "Salus, CFS: GPU time by weight",
    "tgs": "little impact on production; best effort up to 15 times MPS's",
    "orion": "best effort beside unlike work: up to 7.3 times the requests of a GPU",
    "reef": "real time within 2 % of alone, best effort 7.7 times as fast",
    "tally": "p99 within 7.2 % of alone, 80 % of the throughput of sharing freely",
    "muxflow": "offline work uses what online work leaves",
    "mlfq": "XSched: short jobs pass long ones without being known",
    "lax": "more deadlines met than in order of arrival",
    "pack": "Salus: jobs that fit run at once",
}
Tasks = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # a point's name, and how to measure it


def limits(loaded: Loaded, o: Any, seed: int) -> Tasks:
    """A model that is held to a part of the time, alone and beside another; shares of models and of tenants; TGS."""
    rows = [each.row for each in loaded.generator.loaded]
    state, seconds = loaded.engine.state, 0.4 * o.seconds
    change = loaded.engine.core.run

    def held(policy: str, param: str, limit: float, both: bool) -> dict[str, Any]:
        own = {"request": limit} if policy == "token" else {}  # a model gets its request, and at most its limit
        change(lambda: set_params(state, rows[0], {param: limit} | own))
        change(lambda: set_params(state, rows[1], {"share": 0.45} if policy == "quota" else {}))
        return loaded.loops(policy, [0, 0, 1, 1] if both else [0, 0], seconds)

    def weighted(by_tenant: bool) -> dict[str, Any]:
        def give() -> None:
            for k, (row, weight) in enumerate(zip(rows, (1.0, 3.0, 6.0), strict=True), 1):
                state.model["share"][row] = 1.0 if by_tenant else weight
                set_tenant(state, k, f"tenant {k}", Tenant(share=weight if by_tenant else 1.0))

        change(give)
        return loaded.loops("fair", [0, 0, 1, 1, 2, 2], 2 * seconds, client=[1, 2, 3])

    for policy, param in (("token", "limit"), ("antman", "performance"), ("quota", "share")):
        for limit in (0.1, 0.25, 0.5):
            for where in ("alone", "contended"):
                given = (policy, param, limit, where == "contended")
                yield f"{policy}|{limit}|{where}", functools.partial(held, *given)
    yield "fair|models", lambda: weighted(False)
    yield "fair|tenants", lambda: weighted(True)
    for policy in ("tgs", "priority", "streams"):
        for name, jobs in (("alone", [2]), ("beside", [2, 1]), ("best effort alone", [1])):
            yield f"tgs|{policy}|{name}", functools.partial(loaded.loops, policy, jobs, 2 * seconds)


def high(loaded: Loaded, o: Any, seed: int) -> Tasks:
    """High priority (250 a second) beside large batches that follow each other."""
    given = (seed, 20.0 if o.quick else 250.0, 1.2 * o.seconds, [0])
    yield "alone", lambda: loaded.beside("priority", *given, [])
    for low in (1, 2):
        kind = loaded.kinds[low].label
        for jobs in (1, 2):
            yield f"{kind}|alone {jobs}", functools.partial(loaded.loops, "streams", [low] * jobs, 0.4 * o.seconds)
        for policy in ("priority", "orion", "reef", "tally", "muxflow", "tgs", "streams"):
            jobs_beside = [low] if policy == "streams" else [low, low]
            yield f"{kind}|{policy}", functools.partial(loaded.beside, policy, *given, jobs_beside)


def pairs(loaded: Loaded, o: Any, seed: int) -> Tasks:
    """High priority that is bound by memory or by compute, beside best effort that is bound by either."""
    names = [kind.label for kind in loaded.kinds]
    for first, low in PAIRS:
        rate = 20.0 if o.quick else 0.5e9 / float(loaded.alone_ns[first])
        given = (seed, rate, 0.5 * o.seconds, [first])
        pair = f"{names[first]}+{names[low]}"
        yield f"{pair}|alone", functools.partial(loaded.beside, "priority", *given, [])
        for policy in ("priority", "orion"):
            yield f"{pair}|{policy}", functools.partial(loaded.beside, policy, *given, [low])


def disb(loaded: Loaded, o: Any, seed: int) -> Tasks:
    """DISB A to E: real time alone, and beside best effort under REEF and under the plain gate."""
    rt = len(loaded.priorities) - loaded.priorities.count(0)
    every, low = list(range(rt)), list(range(rt, len(loaded.kinds)))
    loads = {
        "A": (every[:1], low[:1], 100.0, "uniform"), "B": (every[:1], low[:1], 0.0, "loop"),
        "C": (every[:1], low, 100.0, "uniform"), "D": (every, low, 20.0, "uniform"), "E": (every, low, 20.0, "poisson"),
    }  # fmt: skip
    for name, (real, rest, rate, arrivals) in loads.items():
        given = (seed, rate, 2.0 * o.seconds, real)  # with fewer than 200 requests a p99 is the slowest of them
        for which, policy, jobs in (("alone", "priority", []), ("reef", "reef", rest), ("priority", "priority", rest)):
            yield f"{name}|{which}", functools.partial(loaded.beside, policy, *given, jobs, arrivals)


def deadlines(loaded: Loaded, policy: str, seed: int, o: Any) -> dict[str, Any]:
    """Requests for a short and a long model with deadlines, nine tenths of the load that one job at a time allows."""
    rng = np.random.default_rng(seed)
    parts = {0: (0.15, 5.0), 3: (0.75, 8.0)}  # model: part of the GPU's time that it takes alone, deadline ÷ time alone
    due_ns = [int(parts.get(m, (0, 0.0))[1] * ns) for m, ns in enumerate(loaded.alone_ns.tolist())]
    due_ns = [10**10] * len(due_ns) if o.quick else due_ns  # a virtual GPU computes with the CPU, which takes longer
    rates = [20.0 if o.quick else part * 1e9 / float(loaded.alone_ns[m]) for m, (part, _) in parts.items()]
    times = [poisson(rng, rate, max(8, int(rate * o.seconds))) for rate in rates]
    at, model = in_order(times, list(parts))
    which = rng.integers(0, VARIANTS, len(at))
    run = loaded.offer(policy, at, model, which, active=1, deadline_ns=due_ns, may_fail=True)
    met = (run.status == codes.OK) & (run.latency_ns <= np.array(due_ns)[run.model])
    return {"met": float(met.mean())}


def order(loaded: Loaded, o: Any, seed: int) -> Tasks:
    """A short model beside a long one, deadlines near capacity, and small models that fit together.

    Under `mlfq` and `lax` one job is active at a time: the figures show the order of the jobs, not the gain of sharing.
    """
    given = (seed, 20.0 if o.quick else 100.0, 0.8 * o.seconds, [0])
    yield "mlfq|alone", lambda: loaded.beside("fifo", *given, [], active=1)
    for policy in ("mlfq", "fifo", "srpt"):
        yield f"mlfq|{policy}", functools.partial(loaded.beside, policy, *given, [3, 3], active=1)
    for policy in ("lax", "edf", "fifo"):
        yield f"lax|{policy}", functools.partial(deadlines, loaded, policy, seed, o)
    for policy in ("pack", "serial"):
        yield f"pack|{policy}", functools.partial(loaded.loops, policy, [0, 1, 2, 0, 1, 2], 0.4 * o.seconds)


def groups(quick: bool) -> dict[str, tuple[tuple[Kind, ...], tuple[int, ...], Any, int, float]]:
    """Models that are loaded together, their priorities, the points, instances and µs of a segment."""
    if quick:
        small, large = TINY
        two, three, four = Kind("tiny2", items=2), Kind("tiny3", items=2), Kind("tiny4", items=4)
        return {
            "limits": ((small, large, Kind("tiny2")), (0, 0, 1), limits, 3, 100.0),
            "pairs": (tuple(Bound(n, tiny=True) for n in BOUND), (1, 1, 0, 0, 0), pairs, 3, 100.0),
            "high": ((small, Kind("tiny2", items=4), four), (1, 0, 0), high, 3, 100.0),
            "disb": ((small, large, two, three), (1, 1, 0, 0), disb, 3, 100.0),
            "order": ((small, Kind("tiny2"), Kind("tiny3"), four), (0,) * 4, order, 3, 100.0),
        }
    real = {kind.name: kind for kind in DISB}
    rt = [real[n] for n in ("vgg19", "resnet152", "densenet201", "inception_v3", "distilbert")]
    low = [Kind(n, items=8) for n in ("resnet152", "densenet201", "vgg19", "inception_v3")]
    large = Kind("resnet50", items=64)
    small = tuple(map(Kind, ("resnet18", "mobilenet_v2", "squeezenet1_1")))
    return {
        "limits": ((Kind("resnet50"), Kind("resnet18"), Kind("mobilenet_v2")), (0, 0, 1), limits, 3, 100.0),
        "pairs": (tuple(Bound(n) for n in BOUND), (1, 1, 0, 0, 0), pairs, 2, 100.0),
        "high": ((Kind("resnet50"), large, Kind("vgg19", items=32)), (1, 0, 0), high, 4, 70.0),
        "disb": ((*rt, *low), (1,) * 5 + (0,) * 4, disb, 2, 30.0),
        "order": ((*small, large), (0,) * 4, order, 3, 100.0),
    }


Figures = list[tuple[str, str, str]]  # what, its value, and what it is compared with


def table(points: dict[str, Any]) -> list[list[str]]:
    """A row for each figure of each system of which all points are there."""

    def at(name: str, *figure: str) -> float:
        return statistics.median(functools.reduce(lambda value, key: value[key], figure, points[name]))

    def times(name: str, alone: str, figure: str = "p99_us") -> str:
        return f"{at(name, figure) / at(alone, figure):.2f}"

    def limited(name: str) -> Figures:
        held = next(iter(points[f"limits|{name}|0.1|alone"]["alone_share"]))

        def had(limit: str, where: str) -> str:
            return f"{at(f'limits|{name}|{limit}|{where}', 'alone_share', held):.3f}"

        return [
            (f"part of the GPU, asked for {limit}", had(limit, "alone"), f"{had(limit, 'contended')} when contended")
            for limit in ("0.1", "0.25", "0.5")
        ]

    def fair() -> Figures:
        rows = []
        for what in ("models", "tenants"):
            had = [statistics.median(each) for each in points[f"limits|fair|{what}"]["gpu_share"].values()]
            parts = "\u00a0:\u00a0".join(f"{x / sum(had):.3f}" for x in had)  # in one line
            rows.append((f"parts of the GPU's time of three {what}", parts, "shares 1 : 3 : 6"))
        return rows

    def tgs() -> Figures:
        _, low, production = points["limits|tgs|tgs|beside"]["per_s"]

        def kept(policy: str, model: str, alone: str) -> str:
            name = f"limits|tgs|streams|{alone}"
            return f"{at(f'limits|tgs|{policy}|beside', 'per_s', model) / at(name, 'per_s', model):.2f}"

        return [
            (f"{what} ÷ alone", kept("tgs", *of), f"gate {kept('priority', *of)}, streams {kept('streams', *of)}")
            for what, *of in (("production", production, "alone"), ("best effort", low, "best effort alone"))
        ]

    def orion() -> Figures:
        rows = []
        for pair in (name.split("|")[1] for name in points if name.startswith("pairs|") and name.endswith("|orion")):
            name, gate, alone = (f"pairs|{pair}|{which}" for which in ("orion", "priority", "alone"))
            both = " + ".join(each.replace("_", " ") for each in pair.split("+"))
            rows += [(f"{both}: best effort ÷ the gate's", times(name, gate, "low_per_s"), ""),
                     (f"{both}: p99 ÷ alone", times(name, alone), f"gate {times(gate, alone)}")]  # fmt: skip
        return rows

    def large(policy: str) -> Figures:
        rows = []
        for kind in (name.split("|")[1] for name in points if name.startswith("high|") and name.endswith("|alone 2")):
            tail = [times(f"high|{kind}|{each}", "high|alone") for each in (policy, "priority")]
            rest = [f"{at(f'high|{kind}|{each}', 'low_per_s') / at(f'high|{kind}|alone 2', 'per_s', kind):.2f}"
                    for each in (policy, "priority")]  # fmt: skip
            rows += [(f"beside {kind}: p99 ÷ alone", tail[0], f"gate {tail[1]}"),
                     (f"beside {kind}: best effort", rest[0], f"gate {rest[1]}")]  # fmt: skip
        return rows

    def reef() -> Figures:
        rows = [(f"DISB {load}: p99 ÷ alone", *(times(f"disb|{load}|{each}", f"disb|{load}|alone")
                 for each in ("reef", "priority"))) for load in "ABCDE"]  # fmt: skip
        return [*large("reef"), *((what, own, f"gate {gate}") for what, own, gate in rows)]

    def ordered(name: str, what: str, figure: str, scale: float, policies: str, digits: int) -> Figures:
        own, *others = (
            (each, f"{at(f'order|{name}|{each}', figure) * scale:.{digits}f}") for each in policies.split()
        )
        return [(what, own[1], ", ".join(f"{each} {value}" for each, value in others))]

    def pack() -> Figures:
        shares = {each: [*points[f"order|pack|{each}"]["alone_share"].values()] for each in ("pack", "serial")}
        own, serial = (f"{np.median(np.sum(each, axis=0)):.2f}" for each in shares.values())
        return [("sum of the jobs' time alone ÷ time", own, f"serial {serial}")]

    made: dict[str, Callable[[], Figures]] = {
        **{name: functools.partial(limited, name) for name in ("token", "quota", "antman")}, "fair": fair, "tgs": tgs,
        "orion": orion, "reef": reef, **{name: functools.partial(large, name) for name in ("tally", "muxflow")},
        "mlfq": lambda: ordered("mlfq", "p50 of the short one, ms", "p50_us", 1e-3, "mlfq fifo srpt alone", 2),
        "lax": lambda: ordered("lax", "deadlines met", "met", 1.0, "lax edf fifo", 3), "pack": pack,
    }  # fmt: skip
    rows = []
    for name, claim in CLAIMS.items():
        try:
            figures = made[name]()
        except (KeyError, StopIteration):  # not measured yet
            continue
        rows += [["" if k else f"`{name}`", "" if k else claim, *each] for k, each in enumerate(figures)]
    return [["system", "its paper's claim", "figure", "on an H200", "compared with"], *rows]


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seeds=range(5), seconds=1.0)
    parser.add_argument("--only", default="limits,pairs,high,disb,order", help="parts to run")
    parser.add_argument("--points", default="", help="only points with this in their names")
    parser.add_argument("--budget", type=float, default=3600.0, help="begin no new point after this many seconds")
    o = parser.parse_args()
    results: dict[str, Any] = {"checked": {}, "points": {}, **stored("systems", o.out)}
    points, began = Points(results["points"]), time.monotonic()
    for name, (kinds, priorities, tasks, instances, quantum_us) in groups(o.quick).items():
        if name not in o.only.split(","):
            continue
        setup = Setup(instances=instances, active=None, quantum_us=quantum_us)
        loaded = Loaded(o.device, kinds, setup, priorities, shares=name == "pairs")
        try:
            for seed in o.seeds:
                for key, measure in tasks(loaded, o, seed):
                    if o.points not in key or points.has(f"{name}|{key}", seed) or time.monotonic() - began > o.budget:
                        continue
                    points.add(f"{name}|{key}", seed, measure())
                    results["checked"][name] = {"outputs": loaded.checked, "wrong": loaded.wrong}
                    save("systems", results, Device(o.device), o.out, tables={"systems": table(results["points"])})
        finally:
            loaded.close()
        print(f"{name}: {loaded.checked} outputs, {loaded.wrong} wrong, {time.monotonic() - began:.0f} s", flush=True)
    head, *rows = table(results["points"])
    show("published systems", head, rows)


if __name__ == "__main__":
    main()
