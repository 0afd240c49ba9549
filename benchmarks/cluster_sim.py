"""Routing rules compared on simulated clusters: 8 to 1,000 GPUs, equal and unequal ones, new and old load reports.

    python benchmarks/cluster_sim.py [--gpus 8 64 1000] [--seconds 0.5]

The workload is Paella's mix with lognormal arrivals, at a part of the throughput of one saturated GPU, which is
measured in the same run.
"""

from __future__ import annotations

import time
from typing import Any

from harness import arguments, finish

import paellapy as pp
from paellapy.scheduler.sim.cluster import ROUTINGS
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles

LOAD = 0.8
SPEEDS = {"equal": (1.0,), "unequal": (1.0, 0.75, 0.5)}
STALE_MS = (0.5, 5.0)
MOST_GPU_S = 100.0  # simulated in one run


def main() -> None:
    parser = arguments(__doc__, seconds=0.5)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1000])
    o = parser.parse_args()
    profiles = mix_profiles()
    full = pp.simulate(profiles, pp.Poisson(12_000, MIX, duration=0.5))
    per_gpu = float(full.all.completed / full.seconds)
    cases: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for gpus in o.gpus:
        for fleet, speeds in SPEEDS.items():
            rate = LOAD * per_gpu * sum(speeds[k % len(speeds)] for k in range(gpus))
            load = pp.Lognormal(rate, MIX, duration=min(o.seconds, MOST_GPU_S / gpus))
            for stale_ms in STALE_MS:
                found = {}
                for router in ROUTINGS:
                    cpu = time.process_time()
                    run = pp.simulate_cluster(
                        profiles, load, gpus=gpus, router=router, speeds=speeds, stale_ms=stale_ms
                    )
                    found[router] = {**run.to_dict(), "cpu_s": time.process_time() - cpu}
                cases.append({"gpus": gpus, "fleet": fleet, "stale_ms": stale_ms, "rate": rate, "by_router": found})
                rows.append(
                    [f"{gpus:,}", fleet, f"{stale_ms:g}", *(f"{each['attainment']:.3f}" for each in found.values())]
                )
                print(rows[-1], flush=True)
    head = ["GPUs", "their speeds", "age of reports, ms", *(f"`{router}`" for router in ROUTINGS)]
    content = {"load": LOAD, "per_gpu": per_gpu, "speeds": SPEEDS, "cases": cases}
    finish(o, "cluster_sim", content, "requests within target", [head, *rows])


if __name__ == "__main__":
    main()
