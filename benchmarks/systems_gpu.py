"""The published systems as policies, on a GPU: limits, shares, best effort beside high priority, DISB, order of jobs.

    python benchmarks/systems_gpu.py [--device cuda|virtual:h200] [--tiny] [--only limits,pairs] [--seeds 5] [--out DIR]

Every point is written as soon as it is measured; a second run continues where the first ended. Every output is compared
with the module's own in eager mode. `--tiny` uses models that a CPU can compute: with a virtual GPU it shows that
everything runs. `predict` (a second command) predicts the pairs from the measured profiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bound_models import Bound
from common import RESULTS, commit, save, seeds
from paper_models import DISB, TINY, Kind
from paper_runs import Loaded, Setup
from systems_order import order_group
from systems_runs import Group, Options, beside, between_steps, loops

from paellapy.instrument.device import Device
from paellapy.scheduler.core.profiles import load_profiles, save_profiles, set_params
from paellapy.scheduler.core.shares import Tenant, set_tenant
from paellapy.scheduler.sim.simulate import simulate as simulate_profiles
from paellapy.scheduler.sim.workload import ClosedLoop

NAME = "systems_gpu"
BOUND = ("memory_bound", "compute_bound", "memory_bound_2", "compute_bound_2", "full_bound")


def limits(loaded: Loaded, o: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A model that is held to a part of the time, alone and beside another; shares of models and of tenants; TGS."""
    rows = [each.row for each in loaded.generator.loaded]
    state, seconds = loaded.engine.state, 0.4 * o.seconds

    def held(policy: str, param: str, limit: float, both: bool) -> dict[str, Any]:
        own = {"request": limit} if policy == "token" else {}  # what it may have at most it is to get
        between_steps(loaded, lambda: set_params(state, rows[0], {param: limit} | own))
        other = {"share": 0.45} if policy == "quota" else {}
        between_steps(loaded, lambda: set_params(state, rows[1], other))
        return loops(loaded, policy, [0, 0, 1, 1] if both else [0, 0], seconds)

    def weighted(by_tenant: bool) -> dict[str, Any]:
        weights = (1.0, 3.0, 6.0)

        def give() -> None:
            for k, (row, weight) in enumerate(zip(rows, weights, strict=True), 1):
                state.model["share"][row] = 1.0 if by_tenant else weight
                set_tenant(state, k, f"tenant {k}", Tenant(share=weight if by_tenant else 1.0))

        between_steps(loaded, give)
        return loops(loaded, "fair", [0, 0, 1, 1, 2, 2], 2 * seconds, client=[1, 2, 3])

    def best_effort(policy: str, jobs: list[int]) -> dict[str, Any]:
        return loops(loaded, policy, jobs, 2 * seconds)

    for seed in o.seeds:
        for policy, param in (("token", "limit"), ("antman", "performance"), ("quota", "share")):
            for limit in (0.1, 0.25, 0.5):
                for both in (False, True):
                    where = "contended" if both else "alone"
                    key = f"{policy}|{limit}|{where}|{seed}"
                    yield key, lambda p=policy, a=param, x=limit, b=both: held(p, a, x, b)
        for by_tenant in (False, True):
            yield f"fair|{'tenants' if by_tenant else 'models'}|{seed}", lambda b=by_tenant: weighted(b)
        for policy in ("tgs", "priority", "streams"):
            for name, jobs in (("alone", [2]), ("beside", [2, 1]), ("best effort alone", [1])):
                yield f"tgs|{policy}|{name}|{seed}", lambda p=policy, j=jobs: best_effort(p, j)


def high_beside(loaded: Loaded, o: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """High priority (250 a second) beside large batches that follow each other."""
    rate, seconds = (20.0 if o.tiny else 250.0), 1.2 * o.seconds
    for seed in o.seeds:
        yield f"alone|{seed}", lambda s=seed: beside(loaded, "priority", s, rate, seconds, [0], [])
        for low in (1, 2):
            kind = loaded.kinds[low].label
            for jobs in (1, 2):
                alone = [low] * jobs
                yield f"{kind}|alone {jobs}|{seed}", lambda a=alone: loops(loaded, "streams", a, 0.4 * o.seconds)
            for policy in ("priority", "orion", "reef", "tally", "muxflow", "tgs", "streams"):
                pair = [low, low] if policy != "streams" else [low]
                yield (
                    f"{kind}|{policy}|{seed}",
                    lambda p=policy, s=seed, b=pair: beside(loaded, p, s, rate, seconds, [0], b),
                )


def pairs(loaded: Loaded, o: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """High priority that is bound by memory or by compute, beside best effort that is bound by either."""
    seconds = 0.5 * o.seconds
    names = [kind.label for kind in loaded.kinds]
    for seed in o.seeds:
        for high, low in ((0, 3), (0, 2), (1, 2), (1, 3), (0, 4)):  # the first two of high priority
            rate = 20.0 if o.tiny else 0.5e9 / float(loaded.alone_ns[high])
            pair = f"{names[high]}+{names[low]}"
            yield (
                f"{pair}|alone|{seed}",
                lambda s=seed, r=rate, h=high: beside(loaded, "priority", s, r, seconds, [h], []),
            )
            for policy in ("priority", "orion"):
                yield (
                    f"{pair}|{policy}|{seed}",
                    lambda p=policy, s=seed, r=rate, h=high, b=low: beside(loaded, p, s, r, seconds, [h], [b]),
                )
            yield f"{pair}|both loops|{seed}", lambda h=high, b=low: loops(loaded, "streams", [h, b], seconds)
        for m, name in enumerate(names):
            yield f"{name}|loop alone|{seed}", lambda k=m: loops(loaded, "streams", [k], 0.5 * seconds)


def disb(loaded: Loaded, o: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """DISB A to E: real time alone, and beside best effort under REEF and under the plain gate."""
    rt = len(loaded.priorities) - loaded.priorities.count(0)
    every, low = list(range(rt)), list(range(rt, len(loaded.kinds)))
    vgg, res = [every[0]], [low[0]]
    loads = {
        "A": (vgg, res, 100.0, "uniform"), "B": (vgg, res, 0.0, "loop"), "C": (vgg, low, 100.0, "uniform"),
        "D": (every, low, 20.0, "uniform"), "E": (every, low, 20.0, "poisson"),
    }  # fmt: skip
    seconds = 2.0 * o.seconds  # 200 requests at 100 a second: with fewer, a p99 is the slowest of them
    for seed in o.seeds:
        for name, (high, beside_it, rate, kind) in loads.items():
            given = (seed, rate, seconds, high)
            yield f"{name}|alone|{seed}", lambda g=given, k=kind: beside(loaded, "priority", *g, [], k)
            for policy in ("reef", "priority"):
                yield (
                    f"{name}|{policy}|{seed}",
                    lambda g=given, k=kind, p=policy, b=beside_it: beside(loaded, p, *g, b, k),
                )


def groups(o: Options) -> dict[str, Group]:
    if o.tiny:
        small, large = TINY
        bound = tuple(Bound(n, tiny=True) for n in BOUND)
        return {
            "limits": Group("limits", (small, large, Kind("tiny2")), (0, 0, 1), limits),
            "pairs": Group("pairs", bound, (1, 1, 0, 0, 0), pairs),
            "high": Group("high", (small, Kind("tiny2", items=4), Kind("tiny4", items=4)), (1, 0, 0), high_beside),
            "disb": Group("disb", (small, large, Kind("tiny2", items=2), Kind("tiny3", items=2)), (1, 1, 0, 0), disb),
            "order": order_group(tiny=True),
        }
    bound = tuple(Bound(n) for n in BOUND)
    real = {kind.name: kind for kind in DISB}
    order = [real[n] for n in ("vgg19", "resnet152", "densenet201", "inception_v3", "distilbert")]
    low = [Kind(n, items=8) for n in ("resnet152", "densenet201", "vgg19", "inception_v3")]
    return {
        "limits": Group("limits", (Kind("resnet50"), Kind("resnet18"), Kind("mobilenet_v2")), (0, 0, 1), limits),
        "pairs": Group("pairs", bound, (1, 1, 0, 0, 0), pairs, instances=2),
        "high": Group("high", (Kind("resnet50"), Kind("resnet50", items=64), Kind("vgg19", items=32)), (1, 0, 0),
                      high_beside, instances=4, quantum_us=70.0),
        "disb": Group("disb", (*order, *low), (1,) * 5 + (0,) * 4, disb, instances=2, quantum_us=30.0),
        "order": order_group(tiny=False),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    folder = args.out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    points: dict[str, Any] = found.setdefault("points", {})
    options = Options(list(args.seeds), args.seconds, args.tiny)
    began = time.monotonic()
    for name, group in groups(options).items():
        if args.only and name not in args.only.split(","):
            continue
        since = time.monotonic()
        setup = Setup((1,), group.instances, active=None, quantum_us=group.quantum_us)
        loaded = Loaded(args.device, group.kinds, setup, group.priorities, shares=name == "pairs")
        print(f"{name}: loaded in {time.monotonic() - since:.1f} s", flush=True)
        save_profiles(folder / f"{NAME}_profiles_{name}.json", loaded.profiles())
        try:
            for key, run in group.points(loaded, options):
                if f"{name}|{key}" in points:
                    continue
                if time.monotonic() - began > args.most_s:
                    print("out of time: run it again to go on", flush=True)
                    return
                points[f"{name}|{key}"] = run()
                found["commit"] = commit()
                checked = found.setdefault("checked", {})
                checked[name] = {"outputs": loaded.checked, "wrong": loaded.wrong}
                save(NAME, found, Device(args.device), folder)
        finally:
            loaded.close()
        print(f"{name}: {time.monotonic() - since:.1f} s in all, {loaded.checked} outputs, {loaded.wrong} wrong")


def predict(args: argparse.Namespace) -> None:
    """How two chains slow each other, by the profiles that were measured: to be compared with `both loops`."""
    folder = args.out or RESULTS
    profiles = {each.name: each for each in load_profiles(folder / f"{NAME}_profiles_pairs.json")}
    points = json.loads((folder / f"{NAME}.json").read_text())["results"]["points"]
    found = {}
    for key in sorted(points):
        group, pair, what, *_ = key.split("|")
        if group != "pairs" or what != "both loops" or pair in found:
            continue
        high, low = pair.split("+")
        load = ClosedLoop(high, duration=0.5) + ClosedLoop(low, duration=0.5)
        both = simulate_profiles([profiles[high], profiles[low]], load, "streams")
        row = {}
        for name in (high, low):
            alone = simulate_profiles([profiles[name]], ClosedLoop(name, duration=0.5), "streams")
            seen = [p["per_s"][name] for k, p in points.items() if k.startswith(f"pairs|{pair}|both loops")]
            seen_alone = [p["per_s"][name] for k, p in points.items() if k.startswith(f"pairs|{name}|loop alone")]
            row[name] = {
                "predicted": alone.model(name).throughput / both.model(name).throughput,
                "measured": float(np.median(seen_alone) / np.median(seen)),
            }
        found[pair] = row
        print(pair, row)
    save("systems_stretch", found, None, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("measure", "predict"), default="measure")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use models that a CPU can compute")
    parser.add_argument("--only", help="parts to run, of limits, pairs, high, disb, order")
    parser.add_argument("--seeds", type=seeds, default=range(5))
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a run; most points take a part of it")
    parser.add_argument("--most-s", type=float, default=1e9, help="begin no new point after this many seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (predict if args.command == "predict" else measure)(args)


if __name__ == "__main__":
    main()
