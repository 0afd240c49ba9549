"""Routers compared on simulated clusters of unequal GPUs, and the cost of simulating a thousand GPUs.

    python benchmarks/cluster_sim.py [--gpus 8 64 1000] [--routings predicted …] [--plot docs/cluster_sim.png]

The workload is Paella's mix with lognormal arrivals; reports are 2 ms old. The load is relative to the throughput of
one saturated GPU, measured in the same run. Results are written after every run, and other stored loads are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from common import RESULTS, save

from paellapy.scheduler.sim.cluster import ROUTINGS, simulate_cluster
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import Lognormal, Poisson

SPEEDS = (1.0, 0.75, 0.5)


def capacity(profiles: Any) -> float:
    """Requests a second of one GPU that has always something to do."""
    asked = 12_000.0
    found = simulate(profiles, Poisson(asked, MIX, duration=1.0))
    return float(found.all.completed / found.seconds)


def measure(profiles: Any, gpus: int, rate: float, given: argparse.Namespace, router: str) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    found = simulate_cluster(
        profiles, Lognormal(rate, MIX, duration=given.seconds), gpus=gpus, router=router, speeds=SPEEDS, stale_ms=2.0,
        routers=given.routers,
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    took = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "cores": cores}
    print(found, {name: round(value, 1) for name, value in took.items()}, flush=True)
    return {**found.to_dict(), **took}


def with_ratios(size: dict[str, Any]) -> dict[str, Any]:
    p99 = {router: row["p99_ms"] for router, row in size["by_router"].items()}
    for other in ("two_choices", "round_robin"):
        if other in p99 and "predicted" in p99:
            size[f"predicted_to_{other}"] = p99["predicted"] / p99[other]
    return size


def plot(sizes: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    gpus = [each["gpus"] for each in sizes]
    for router in ROUTINGS:
        rows = [(each["gpus"], each["by_router"][router]["p99_ms"]) for each in sizes if router in each["by_router"]]
        if rows:
            left.plot(*zip(*rows, strict=True), marker="o", label=router)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="p99 latency, ms")
    left.legend()
    cpu = [each["by_router"]["predicted"]["cpu_s"] for each in sizes]
    right.plot(gpus, cpu, marker="o", label="measured")
    right.plot(gpus, [n * cpu[-1] / gpus[-1] for n in gpus], linestyle="--", label="linear")
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="CPU seconds per simulated second")
    right.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 64, 1000], help="no number: only plot")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", default="cluster_sim")
    given = parser.parse_args()
    path = RESULTS / f"{given.out}.json"
    if not given.gpus:
        plot(json.loads(path.read_text())["results"]["sizes"], given.plot)
        return
    profiles = mix_profiles()
    per_gpu = capacity(profiles)
    facts = {"load": given.load, "per_gpu": per_gpu, "speeds": list(SPEEDS), "routers": given.routers}
    sizes: dict[int, dict[str, Any]] = {}
    if path.exists():
        before = json.loads(path.read_text())["results"]
        if all(before[name] == value for name, value in facts.items()):
            sizes = {each["gpus"]: each for each in before["sizes"]}
    simulate_cluster(profiles, Poisson(8000, MIX, duration=0.01), gpus=2)  # compiled now
    for gpus in given.gpus:
        rate = given.load * per_gpu * sum(SPEEDS[k % len(SPEEDS)] for k in range(gpus))
        size = sizes.setdefault(gpus, {"gpus": gpus, "rate": rate, "by_router": {}})
        for router in given.routings:
            size["by_router"][router] = measure(profiles, gpus, rate, given, router)
            save(given.out, {**facts, "sizes": [with_ratios(sizes[n]) for n in sorted(sizes)]})
    if given.plot is not None:
        plot([sizes[n] for n in sorted(sizes)], given.plot)


if __name__ == "__main__":
    main()
