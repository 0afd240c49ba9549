"""The factors of an engine's throughput at saturation: pieces, jobs at once, order, hardware queues.

    python benchmarks/saturation_factors.py [--device cuda] [--quick] [--seeds 2] [--out DIR]

The models and requests of `engine_h200.py`, as many as the engine takes, in every combination of
- pieces: whole graphs, or segments of 50 to 400 µs;
- jobs that share the GPU: 8 to 64;
- order: first come first served, or shortest remaining time;
- hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): 8, CUDA's default, or 32. CUDA reads the number when a process first
  uses the GPU, so each value runs in its own process;
- segments a job has on the GPU: one, two (the second waits behind the first), or four.
Throughput is relative to whole graphs, all at once, with CUDA's 8 queues; the p99 slowdown is at 80 % of that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from engine_h200 import KINDS, QUICK, Bench, choose_layers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import paellapy as pp
from paellapy.instrument.queues import VARIABLE
from paellapy.scheduler.policies.fifo import rank as fifo
from paellapy.scheduler.policies.policy import policy
from paellapy.scheduler.policies.srpt import rank as srpt

QUEUES = (8, 32)
QUANTA_US = (50.0, 100.0, 200.0, 400.0)
ACTIVE = (8, 16, 64)


def policies() -> list[tuple[dict[str, Any], Any]]:
    """What is varied, and the policy that does it. The first is what all are compared with."""
    found: list[tuple[dict[str, Any], Any]] = [
        ({"order": "fifo", "active": "all", "pieces": False, "ahead": 1}, "streams")
    ]
    for order, function in (("fifo", fifo.rank), ("srpt", srpt.rank)):
        for active in ACTIVE:
            for pieces, ahead in ((False, 1), (True, 1), (True, 2), (True, 4)):
                if pieces and ahead != 2 and active != ACTIVE[0]:
                    continue
                what = {"order": order, "active": active, "pieces": pieces, "ahead": ahead}
                found.append(
                    (what, policy(name="varied", active=active, max_in_flight=ahead, whole=not pieces)(function))
                )
    return found


def one_process(args: argparse.Namespace) -> None:
    """Every combination for the number of queues this process was started with, written quantum by quantum."""
    kinds = QUICK if args.quick else KINDS
    n = 80 if args.quick else 4000
    layers = choose_layers(args.device, kinds)
    rows: list[dict[str, Any]] = []
    base = args.base  # of streams: what 80 % refers to
    quanta = QUANTA_US[:1] if args.quick else QUANTA_US
    with Progress(transient=True) as progress:
        task = progress.add_task("runs", total=len(quanta) * len(policies()) * args.seeds)
        for quantum in quanta:
            bench = Bench(args.device, kinds, layers, (1,), args.instances, 8, quantum)
            bench.saturate("streams", n // 4, 64, 99)
            for what, each in policies():
                if quantum != quanta[0] and not what["pieces"]:
                    continue  # whole graphs have no quantum
                runs = [bench.saturate(each, n, 64, seed) for seed in range(args.seeds)]
                base = base or float(np.median([run.throughput for run in runs]))
                offered = [bench.offer(each, 0.8 * base, int(0.4 * n), seed) for seed in range(args.seeds)]
                p99 = [bench.slowdown(run)["p99"] for run in offered]
                quantum_us = quantum if what.pop("pieces") else None
                throughput = [run.throughput for run in runs]
                rows.append(
                    {"queues": args.queues, **what, "quantum_us": quantum_us, "throughput": throughput, "p99": p99}
                )
                progress.update(task, advance=args.seeds, description=f"{args.queues} queues, {quantum:g} µs")
            bench.engine.close()
            args.write.write_text(json.dumps(rows))
            if bench.wrong:
                raise SystemExit(f"{bench.wrong} of {bench.checked} outputs are wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--queues", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.queues:
        return one_process(args)
    rows: list[dict[str, Any]] = []
    base = 0.0
    # Beside the results, and kept there if this is ended before its time.
    folder = args.out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"saturation_factors_{queues}.json" for queues in QUEUES]
    for queues, where in zip(QUEUES, parts, strict=True):
        command = [sys.executable, __file__, *sys.argv[1:], "--queues", str(queues), "--write", str(where)]
        command += ["--base", str(base)]
        subprocess.run(command, check=True, env={**os.environ, VARIABLE: str(queues)})
        rows += json.loads(where.read_text())
        base = float(next(np.median(r["throughput"]) for r in rows if r["active"] == "all"))
    table = Table(title=f"throughput at saturation ÷ streams with 8 queues ({base:,.0f}/s)", box=None)
    for column in ("queues", "order", "active", "pieces", "ahead", "median", "least … most", "p99 at 80 %"):
        table.add_column(column, justify="right")
    for r in rows:
        ratio = np.array(r["throughput"]) / base
        r["ratio"] = float(np.median(ratio))
        pieces = "whole" if r["quantum_us"] is None else f"{r['quantum_us']:g} µs"
        table.add_row(
            str(r["queues"]), r["order"], str(r["active"]), pieces, str(r["ahead"]), f"{r['ratio']:.3f}",
            f"{ratio.min():.3f} … {ratio.max():.3f}", f"{np.median(r['p99']):.2f}",
        )  # fmt: skip
    Console().print(table)
    device = pp.Device(args.device)
    print(save("saturation_factors", {"streams_per_s": base, "runs": rows}, device, args.out))
    for where in parts:
        where.unlink()
    return None


if __name__ == "__main__":
    main()
