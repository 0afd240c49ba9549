"""A short model beside a flood of long ones, simulated: the effect of each policy.

    python benchmarks/short_beside_long.py

The short model (4 segments, 0.1 ms) gets 500 requests per second at random times. Sixty-four clients ask for the long
one (80 segments, 4 ms) without pause, through 32 instances; each of its batches fills a quarter of the GPU. Also writes
docs/short_beside_long.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import save

from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.policies.policy import policy_names
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.simulate import Fidelity, simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson

PLOT = Path(__file__).parents[1] / "docs" / "short_beside_long.png"
SEEDS = (0, 1, 2, 3, 4)
BASELINES = ("streams", "serial", "fifo")


def models(long_segments: int = 80) -> list[ModelProfile]:
    block = {"warps": 8, "registers": 8192}

    def segment(us: float, blocks: int, kernels: int) -> SegmentProfile:
        return SegmentProfile(us * 1e3, blocks, blocks * block["warps"], blocks * block["registers"], 0, kernels)

    short = ModelProfile("short", {1: [segment(25, 66, 5)] * 4}, target_ms=1.0, instances=8, priority=1)
    long = ModelProfile("long", {1: [segment(50, 264, 5)] * long_segments}, target_ms=200.0, instances=32)
    return [short, long]


def run(policy: str, seed: int, fidelity: Fidelity = "segments", seconds: float = 2.0, segments: int = 80) -> Results:
    load = Poisson(500, "short", duration=seconds) + ClosedLoop("long", clients=64, duration=seconds)
    return simulate(models(segments), load, policy, seed=seed, fidelity=fidelity)


def figures(results: Sequence[Results]) -> dict[str, Any]:
    p99 = [each.model("short").p99_ms for each in results]
    rate = [each.all.throughput for each in results]
    long = [each.model("long").throughput for each in results]
    return {
        "short_p99_ms_median": round(statistics.median(p99), 3),
        "short_p99_ms_spread": [round(min(p99), 3), round(max(p99), 3)],
        "short_p50_ms_median": round(statistics.median(each.model("short").p50_ms for each in results), 3),
        "requests_per_s_median": round(statistics.median(rate), 1),
        "long_per_s_median": round(statistics.median(long), 1),
    }


def plot(runs: dict[str, list[Results]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    names = sorted(runs, key=lambda name: _median_p99(runs[name]), reverse=True)
    for row, name in enumerate(names):
        ms = np.concatenate([_short(each) for each in runs[name]])
        p50, p99 = np.percentile(ms, [50, 99])
        left.barh(row, p99, color="tab:blue" if name not in BASELINES else "tab:gray")
        left.plot([p50], [row], "|", color="black", markersize=12, label="median" if row == 0 else None)
        left.annotate(f" {p99:.3g} ms", (p99, row), va="center", fontsize="small")
        rate = statistics.median(each.model("long").throughput for each in runs[name])
        right.barh(row, rate, color="tab:blue" if name not in BASELINES else "tab:gray")
    left.set_yticks(range(len(names)), names)
    left.set(xscale="log", xlim=(0.05, 2000), xlabel="p99 latency of the short model, ms (alone: 0.1 ms)")
    left.set_title("A short model beside a flood of long ones")
    left.legend(fontsize="small", loc="upper right")
    right.set(xlabel="long requests per second", title="What it costs the long model")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def _median_p99(results: Sequence[Results]) -> float:
    return statistics.median(each.model("short").p99_ms for each in results)


def _short(result: Results) -> Any:
    jobs = result.jobs[result.jobs["model"] == 0]
    return (jobs["finish_ns"] - jobs["arrival_ns"]) / 1e6


def main() -> None:
    runs = {name: [run(name, seed) for seed in SEEDS] for name in policy_names()}
    results: dict[str, Any] = {"segments": {name: figures(each) for name, each in runs.items()}}
    # Every block on its SM: a shorter flood, one seed.
    results["blocks"] = {
        name: figures([run(name, 0, "blocks", seconds=0.25, segments=20)])
        for name in ("streams", "fifo", "paella", "edf")
    }
    for fidelity in ("segments", "blocks"):
        print(fidelity)
        for name, each in results[fidelity].items():
            ratios = [each["short_p99_ms_median"] / results[fidelity][base]["short_p99_ms_median"]
                      for base in ("streams", "fifo")]  # fmt: skip
            rates = [each["requests_per_s_median"] / results[fidelity][base]["requests_per_s_median"]
                     for base in ("streams", "fifo")]  # fmt: skip
            each["p99_ratio_to_streams_and_fifo"] = [round(ratio, 3) for ratio in ratios]
            each["throughput_ratio_to_streams_and_fifo"] = [round(rate, 3) for rate in rates]
            print(f"  {name:9}", each)
    plot(runs)
    print("saved", save("short_beside_long", results), PLOT)


if __name__ == "__main__":
    main()
