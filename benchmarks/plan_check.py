"""The expectation of `paellapy plan` against a longer simulation of other requests, on ten random fleets.

    python benchmarks/plan_check.py [--fleets 10] [--requests 400000] [--processes 10]

Near its capacity a fleet's attainment varies with every burst. So the simulation to compare with must be long; its
standard error, from parts of it, is stored as well.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np
from common import save

from paellapy.cluster.plan import Fleet, plan
from paellapy.scheduler.sim.cluster import simulate_cluster
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
from paellapy.scheduler.sim.workload import Lognormal


def random_fleet(seed: int) -> Fleet:
    """Two to eight models, two to twelve GPUs of two speeds, memory for some of the models, 40 to 90 % load."""
    random = np.random.default_rng(seed)
    names = sorted(random.choice(list(MIX), random.integers(2, 9), replace=False))
    profiles = mix_profiles(names=names)
    gpus = int(random.integers(2, 13))
    share = random.dirichlet(np.ones(len(names)))
    speeds = (1.0, float(random.choice([0.6, 0.8, 1.0])))
    work_s = sum(part * each.alone_ns() * 1e-9 for part, each in zip(share, profiles, strict=True))
    # In simulated time, 4.4 of these models at once do what one GPU can.
    rate = random.uniform(0.4, 0.9) * 4.4 * gpus * np.mean(speeds) / work_s
    memory_gb = {name: float(random.uniform(1, 10)) for name in names}
    room = max(max(memory_gb.values()), random.uniform(1.3, 3.0) * sum(memory_gb.values()) / gpus)
    rates = {name: float(rate * part) for name, part in zip(names, share, strict=True)}
    return Fleet(profiles, rates, gpus, memory_gb, room, speeds)


def check(seed: int, requests: int, pinned: bool) -> dict[str, Any]:
    """`pinned`: one of several at once, each on a core of its own."""
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[seed % len(cores)]})
    fleet = random_fleet(seed)
    began = time.perf_counter()
    found = plan(fleet)
    took_s = time.perf_counter() - began
    rate = sum(fleet.rates.values())
    workload = Lognormal(rate, dict(fleet.rates), duration=requests / rate, sigma=fleet.sigma)
    seen = simulate_cluster(
        fleet.profiles, workload, gpus=fleet.gpus, placement=found.placement, speeds=fleet.speeds, seed=1000 + seed
    )
    return {
        "fleet": seed,
        "gpus": fleet.gpus,
        "models": len(fleet.rates),
        "rate": rate,
        "replicas": sum(map(len, found.placement)),
        "plan_s": took_s,
        "expected": found.attainment,
        "simulated": seen.attainment(),
        "standard_error": seen.attainment_error(),
        "points_apart": 100 * abs(found.attainment - seen.attainment()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=10)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--processes", type=int, default=1, help="fleets checked in parallel")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        pinned = given.processes > 1
        for done in as_completed(pool.submit(check, seed, given.requests, pinned) for seed in range(given.fleets)):
            rows.append(done.result())
            print(rows[-1], flush=True)
            rows.sort(key=lambda row: row["fleet"])
            save("plan_check", {"fleets": rows, "most_points_apart": max(each["points_apart"] for each in rows)})


if __name__ == "__main__":
    main()
