"""The cost of a memory budget where everything fits: an engine with `memory_bytes` ÷ an engine without, in one run.

    python benchmarks/memory_cost.py [--device cuda|virtual:h200] [--quick] [--rounds 4] [--out DIR]

Both engines serve the models of engine_h200.py. In each round each engine starts anew, one after the other and in
alternating order, and gets the same requests: one at a time (`light`), a mix with bursts at three loads (`mixed`), and
as many as it can take (`saturation`). Weights of an engine with a budget may leave at any time; the budget is large
enough that none do.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from engine_h200 import FRACTIONS, Bench, choose_layers, sizes
from rich.progress import track

import paellapy as pp

POLICY = "srpt"
BUDGET = 16 << 30
WAYS = {"without": None, "with": BUDGET}


def measured(bench: Bench, base: float, args: argparse.Namespace) -> dict[str, float]:
    _, n_light, n_saturate, seconds = sizes(args.quick)
    found = {f"light, {m.name}, µs": bench.light(k, n_light)["engine_us"] for k, m in enumerate(bench.models)}
    bench.saturate(POLICY, max(20, n_saturate // 10), 64, 99)  # warm
    for fraction in FRACTIONS:
        run = bench.offer(POLICY, base * fraction, max(40, int(base * fraction * seconds)), 0)
        slow = bench.slowdown(run)
        found |= {f"mixed, {fraction:g} of saturation, {q}": slow[q] for q in ("p50", "p99")}
    found["saturation, requests per second"] = bench.saturate(POLICY, n_saturate, 64, 0).steady_throughput
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="use two small models and few requests")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--instances", type=int, default=16, help="batches of one model that may be in flight")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    kinds, _, n_saturate, _ = sizes(args.quick)
    layers = choose_layers(args.device, kinds)
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: {way: [] for way in WAYS})
    counts = {"checked": 0, "wrong": 0, "evicted": 0}
    first = Bench(args.device, kinds, layers, (1,), args.instances, None)  # the first engine of a process is slower
    with first.engine:
        base = first.saturate(POLICY, n_saturate, 64, 1).steady_throughput
    for k in track(range(args.rounds), description="rounds"):
        for way in sorted(WAYS, reverse=bool(k % 2)):
            memory_bytes = WAYS[way]
            bench = Bench(args.device, kinds, layers, (1,), args.instances, None, memory_bytes=memory_bytes)
            with bench.engine as engine:
                for name, value in measured(bench, base, args).items():
                    rows[name][way].append(value)
                counts["checked"], counts["wrong"] = counts["checked"] + bench.checked, counts["wrong"] + bench.wrong
                counts["evicted"] += engine.memory()["evicted"] if memory_bytes else 0
        ratios = {name: ratio(each) for name, each in rows.items()}
        results: dict[str, Any] = {"budget_bytes": BUDGET, "ratios": ratios, "runs": dict(rows), **counts}
        save("memory_cost", results, pp.Device(args.device), args.out)
    for name, each in ratios.items():
        print(f"{name}: {each['median']:.3f} ({each['least']:.3f} to {each['most']:.3f})")
    print(counts)


def ratio(each: dict[str, list[float]]) -> dict[str, float]:
    """Of every round: with a budget ÷ without."""
    found = np.array(each["with"]) / np.array(each["without"])
    spread = np.array(each["without"]) / np.median(each["without"])
    return {"median": float(np.median(found)), "least": float(found.min()), "most": float(found.max()),
            "least_without": float(spread.min()), "most_without": float(spread.max())}  # fmt: skip


if __name__ == "__main__":
    main()
