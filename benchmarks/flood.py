"""A short CNN beside a flood of long ones, simulated from profiles measured on the H200: the effect of each limit.

    python benchmarks/flood.py [--out DIR]

squeezenet1_1 gets 500 requests per second at random times; 64 clients ask for densenet121 without pause, through 32
instances.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, save
from rich.console import Console
from rich.table import Table

from paellapy.scheduler.core.profiles import load_profiles
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson

SHORT, LONG = "squeezenet1_1", "densenet121"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "streams": ("streams", {}),
    "srpt": ("srpt", {}),
    "paella": ("paella", {}),
    "srpt, 8 jobs at once": ("srpt", {"active": 8}),
    "srpt, 16 jobs at once": ("srpt", {"active": 16}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    known = {each.name: each for each in load_profiles(RESULTS / "paper_profiles_plain.json")}
    models = [known[SHORT], replace(known[LONG], instances=32)]
    load = Poisson(500, SHORT, duration=1.0) + ClosedLoop(LONG, clients=64, duration=1.0)
    table = Table(box=None)
    for column in ("", f"{SHORT} p50, ms", "p99", f"{LONG}/s"):
        table.add_column(column, justify="right" if column else "left")
    found = {}
    for name, (policy, how) in WAYS.items():
        result = simulate(models, load, policy, **how)
        short, rate = result.model(SHORT), result.model(LONG).throughput
        found[name] = {"short_p50_ms": short.p50_ms, "short_p99_ms": short.p99_ms, "long_per_s": rate}
        table.add_row(name, f"{short.p50_ms:.2f}", f"{short.p99_ms:.2f}", f"{rate:,.0f}")
    Console().print(table)
    print(save("flood", found, None, args.out))


if __name__ == "__main__":
    main()
