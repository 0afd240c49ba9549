"""The cost of the core's account of GPU time by model and tenant: CPU time with it and without it. No GPU.

    python benchmarks/accounting_cost.py [--sets 8] [--rounds 8] [--out DIR]

The core without the account is built here and nowhere else: its module of shares is loaded with the account's lines
taken out. Each build runs in a process of its own, and the two take turns, round by round. A third process has the core
as it is once more; its ratio shows the error of the measurement. The place of code and tables in memory makes one
process of the same build faster than another, so there are several sets of processes, and a figure is the median over
the sets of the median over a set's rounds. Two figures, in CPU time:

* `decision`: one launch with everything that belongs to it (see core_speed.py), while 1000 requests wait;
* `segment`: one segment of a simulated run of eight CNNs, with the simulated GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import save

NAME = "accounting_cost"
MODULE = "paellapy.scheduler.core.shares"
BUILDS = ("with", "without", "with again")
FIGURES = ("decision", "segment")
POLICY = "fair"
WAITING, MODELS = 1000, 8
STEPS = 20_000
RATE, SECONDS = 5000.0, 0.5
# What the account consists of, and what stands in its place in the core without it.
CUTS = {
    "    s.model[m].gpu_ns += gpu_ns\n": "",
    "    each, each_gpu = time_ns / a.taken, gpu_ns / a.taken\n": "    each = time_ns / a.taken\n",
    "        client.gpu_ns += each_gpu\n": "",
    """    if core.flight > 0 and now > core.gpu_at_ns:
        ns = now - core.gpu_at_ns
        core.gpu_ns += ns
        core.gpu_clock_ns += ns / core.gpu_demand
    core.gpu_at_ns = max(core.gpu_at_ns, now)
""": "    pass\n",
    """    pass_time(s, now)
    if core.flight == 0:
        core.gpu_clock_ns = core.gpu_demand = 0.0
    a.gpu_demand = max(a.demand, 1e-3)
    a.gpu_from_ns = core.gpu_clock_ns
    core.gpu_demand += a.gpu_demand
""": "    pass\n",
    """    pass_time(s, now)
    ns = a.gpu_demand * (core.gpu_clock_ns - a.gpu_from_ns)
    a.gpu_from_ns = core.gpu_clock_ns
    return float(ns)
""": "    return 0.0\n",
    "    s.core[0].gpu_demand -= s.instance[instance].gpu_demand\n": "    pass\n",
}


def without_account(source: str) -> str:
    for cut, instead in CUTS.items():
        if source.count(cut) != 1:
            raise SystemExit(f"{MODULE} has changed: the account's lines are not in it once as\n{cut}")
        source = source.replace(cut, instead)
    return source


def take_out_account() -> None:
    """Loads the module of shares without the account, before any other module of the core can import it."""
    spec = find_spec(MODULE)
    if MODULE in sys.modules or spec is None or spec.origin is None:
        raise RuntimeError(f"{MODULE} must be loaded here first")
    made = types.ModuleType(MODULE)
    made.__spec__, made.__file__ = spec, spec.origin
    sys.modules[MODULE] = made
    exec(compile(without_account(Path(spec.origin).read_text()), spec.origin, "exec"), made.__dict__)


def decisions() -> Callable[[], float]:
    import numpy as np
    from core_speed import drive, waiting

    from paellapy.scheduler.core import codes, tables

    s = waiting(MODELS, WAITING, POLICY)
    taken, message = np.zeros(64, tables.COMPLETION), np.zeros(1, tables.SUBMISSION)
    message["kind"], message["instance"], message["slot"] = codes.SUBMIT, codes.NONE, codes.NONE
    now = 10**10

    def once() -> float:
        nonlocal now
        now += 10**9
        since = time.process_time_ns()
        made = drive(s, taken, message, STEPS, now)
        return (time.process_time_ns() - since) / made

    return once


def segments() -> Callable[[], float]:
    from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
    from paellapy.scheduler.sim.simulate import simulate
    from paellapy.scheduler.sim.workload import Lognormal

    models, load = mix_profiles(), Lognormal(RATE, MIX, duration=SECONDS)

    def once() -> float:
        since = time.process_time_ns()
        run = simulate(models, load, POLICY)
        took = time.process_time_ns() - since
        return took / float(run.counters["segment_events"])

    return once


def work(build: str) -> None:
    """Answers every line of input with the CPU time in ns of a decision and of a simulated segment."""
    if build == "without":
        take_out_account()
    figures = {"decision": decisions(), "segment": segments()}
    for once in figures.values():
        once()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: once() for name, once in figures.items()}), flush=True)


class Worker:
    """A build of the core in a process of its own."""

    def __init__(self, build: str, cache: str) -> None:
        # The core without the account must not replace the compiled core on disk.
        env = {**os.environ, "NUMBA_CACHE_DIR": cache} if build == "without" else None
        command = [sys.executable, __file__, "--work", build]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.rows: list[dict[str, float]] = []

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def wait(self) -> None:
        if self._read() != "ready\n":
            raise SystemExit("a build of the core did not start")

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rows.append(json.loads(self._read()))

    def close(self) -> None:
        self._process.communicate()


def measure_set(rounds: int, cache: str) -> dict[str, list[dict[str, float]]]:
    workers = {build: Worker(build, cache) for build in BUILDS}
    turns = list(workers.values())
    try:
        for each in turns:
            each.wait()
        for _ in range(rounds):
            for each in turns:
                each.ask()
            turns = turns[1:] + turns[:1]  # so that none is always the first
    finally:
        for each in turns:
            each.close()
    return {build: each.rows for build, each in workers.items()}


def measure(sets: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        found = [measure_set(rounds, cache) for _ in range(sets)]
    return {"policy": POLICY, "sets": sets, "rounds": rounds} | {name: summary(found, name) for name in FIGURES}


def summary(found: list[dict[str, list[dict[str, float]]]], name: str) -> dict[str, Any]:
    """Of one figure: the median of each build in ns, and the ratios of each set, with the median over the sets."""

    def ratios(one: str, other: str) -> list[float]:
        sides = [zip(each[one], each[other], strict=True) for each in found]
        return [round(statistics.median(a[name] / b[name] for a, b in rows), 4) for rows in sides]

    builds = {build: [row[name] for each in found for row in each[build]] for build in BUILDS}
    cost, same = ratios("with", "without"), ratios("with again", "with")
    return {
        "ns": {build: round(statistics.median(each), 1) for build, each in builds.items()},
        "ratio": round(statistics.median(cost), 4),
        "ratio_of_sets": cost,
        "same_build_ratio": round(statistics.median(same), 4),
        "same_build_ratio_of_sets": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=8, help="of processes")
    parser.add_argument("--rounds", type=int, default=8, help="of each set")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", choices=BUILDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    found = measure(args.sets, args.rounds)
    print(json.dumps(found, indent=1))
    print("saved", save(NAME, found, folder=args.out))


if __name__ == "__main__":
    main()
