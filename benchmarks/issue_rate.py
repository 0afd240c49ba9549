"""How many kernels per second a GPU issues, and how near real models come to that.

    python benchmarks/issue_rate.py [--seconds 0.3] [--out DIR]

Graphs of chained kernels that do almost nothing, one block each, run with as many chains at once as there are streams.
This gives the rate at which the GPU can start kernels of any kind. It is compared with the kernels of the mix of eight
CNNs at saturation, from the profiles and throughputs that `paper.py` stored. CUDA only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, need_gpu, save
from paper_models import FIG11
from rich.console import Console
from rich.table import Table

from paellapy.scheduler.core.profiles import load_profiles

KERNELS = 200  # of one graph
STREAMS = (1, 2, 4, 8, 16, 32, 64)


def chain(elements: int) -> tuple[Any, Any]:
    """A graph of kernels of one block each, and its stream."""
    x = torch.zeros(elements, device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x.add_(1.0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(KERNELS):
                x.add_(1.0)
    return graph, stream


def rate(chains: list[tuple[Any, Any]], seconds: float) -> float:
    """Kernels a second with every chain launched again and again."""
    rounds, took = 1, 0.0
    while True:
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(rounds):
            for graph, stream in chains:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        took = time.perf_counter() - since
        if took >= seconds:
            return rounds * len(chains) * KERNELS / took
        rounds = max(rounds + 1, int(rounds * min(10.0, 1.1 * seconds / took)))


def of_the_mix(folder: Path) -> dict[str, Any]:
    """Kernels a request has on average, and how many of them a second there were at saturation."""
    profiles = {each.name: each for each in load_profiles(folder / "paper_profiles_plain.json")}
    share = np.array([kind.share for kind in FIG11])
    kernels = np.array([sum(s.kernels for s in profiles[kind.label].sizes[1]) for kind in FIG11])
    each = float((share / share.sum() * kernels).sum())
    points = json.loads((folder / "paper.json").read_text())["results"]["points"]
    systems: dict[str, list[float]] = {}
    for key, point in points.items():
        if key.startswith("saturation|") and "batch" not in key:
            systems.setdefault(key.split("|")[1], []).append(point["throughput"] * each)
    return {"kernels_per_request": each, "kernels_per_s": {k: float(np.median(v)) for k, v in systems.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of each run")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = need_gpu("the rate is a GPU's")
    chains = [chain(128) for _ in range(max(STREAMS))]
    found = {str(n): rate(chains[:n], args.seconds) for n in STREAMS}
    mix = of_the_mix(args.out if args.out and (args.out / "paper.json").exists() else RESULTS)
    table = Table(title="million kernels a second", box=None)
    table.add_column("what")
    table.add_column("M/s", justify="right")
    for n, per_s in found.items():
        table.add_row(f"empty kernels, {n} chains at once", f"{per_s / 1e6:.2f}")
    for system, per_s in mix["kernels_per_s"].items():
        table.add_row(f"the mix at saturation, {system}", f"{per_s / 1e6:.2f}")
    Console().print(table)
    print(save("issue_rate", {"empty_kernels_per_s": found, "mix": mix}, device, args.out))


if __name__ == "__main__":
    main()
