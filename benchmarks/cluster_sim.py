"""Routers compared on simulated clusters of unequal GPUs, and the cost of simulating a thousand GPUs.

    python benchmarks/cluster_sim.py [--gpus 8 64 256 1000] [--seconds 1]

The workload is Paella's mix with lognormal arrivals; reports are 2 ms old. The load is relative to the throughput of
one saturated GPU, measured in the same run.
"""

from __future__ import annotations

import time
from typing import Any

from harness import arguments, finish

import paellapy as pp
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles

SPEEDS, LOAD = (1.0, 0.75, 0.5), 0.8
ROUTERS = ("predicted", "two_choices", "round_robin")


def main() -> None:
    parser = arguments(__doc__, seconds=1.0)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1000])
    o = parser.parse_args()
    profiles = mix_profiles()
    full = pp.simulate(profiles, pp.Poisson(12_000, MIX, duration=min(1.0, o.seconds)))
    per_gpu = float(full.all.completed / full.seconds)
    pp.simulate_cluster(profiles, pp.Poisson(8000, MIX, duration=0.01), gpus=2)  # compiled now
    sizes: list[dict[str, Any]] = []
    for gpus in o.gpus:
        rate = LOAD * per_gpu * sum(SPEEDS[k % len(SPEEDS)] for k in range(gpus))
        size: dict[str, Any] = {"gpus": gpus, "rate": rate, "by_router": {}}
        for router in ROUTERS:
            wall, cpu = time.perf_counter(), time.process_time()
            load = pp.Lognormal(rate, MIX, duration=o.seconds)
            found = pp.simulate_cluster(profiles, load, gpus=gpus, router=router, speeds=SPEEDS, stale_ms=2.0).to_dict()
            kept = {key: found[key] for key in ("requests", "p50_ms", "p99_ms", "slowdown_p99", "attainment")}
            took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            size["by_router"][router] = {**kept, **took}
            print(gpus, router, kept, flush=True)
        p99 = {router: each["p99_ms"] for router, each in size["by_router"].items()}
        size |= {f"predicted_to_{other}": p99["predicted"] / p99[other] for other in ROUTERS[1:]}
        sizes.append(size)
    rows = []
    for size in sizes:
        ours = size["by_router"]["predicted"]
        over = (f"{size[f'predicted_to_{other}']:.2f}" for other in ROUTERS[1:])
        rows.append([f"{size['gpus']:,}", f"{ours['requests']:,}", f"{ours['p99_ms']:.1f}", *over,
                     f"{1e3 * ours['cpu_s'] / size['gpus']:.0f}"])  # fmt: skip
    head = ["GPUs", "requests", "p99 of `predicted`, ms", *(f"÷ `{other}`" for other in ROUTERS[1:]), "CPU-ms per GPU"]
    content = {"load": LOAD, "per_gpu": per_gpu, "speeds": SPEEDS, "sizes": sizes}
    finish(o, "cluster_sim", content, "simulated clusters", [head, *rows])


if __name__ == "__main__":
    main()
