"""How much longer a model takes when its weights have left the GPU's cache.

    python benchmarks/cold_cache.py [--runs 25] [--out DIR]

Each CNN of figure 11 is launched as a graph: repeatedly; after reading enough other memory to fill the cache several
times; and after the other seven models ran, as in a mix of them. The gap between kernel starts
(benchmarks/kernel_gaps.py) is stored from before and after: if it differs, more than the cache has changed. CUDA only.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import need_gpu, save
from gpu_probe import probe
from paper_models import FIG11
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch_graphs import capture, half_net, median_us

from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.cuda_graphs import instantiate, launch_once

FLUSH_BYTES = 256 << 20  # an H200's cache holds 50 MB


def launch(graph: int) -> None:
    check(driver().cuGraphLaunch(graph, 0), "launching a graph")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = need_gpu("the cache is a GPU's")
    graphs: dict[str, int] = {}
    weights: dict[str, int] = {}
    keep: list[Any] = []
    for kind in track(FIG11, description="capturing", transient=True):
        net = half_net(kind)
        captured, kept = capture(net, kind, 1)
        graphs[kind.label] = instantiate(captured.handle)
        weights[kind.label] = sum(p.numel() * p.element_size() for p in net.parameters())
        keep += [captured, kept]
    launch_once(graphs.values(), 0)
    other = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    other.sum()
    gap_ns = [probe().look()["kernel_gap_ns"]]
    models: dict[str, Any] = {}
    table = Table(title="one launch, µs", box=None)
    columns = "model", "weights, MB", "again and again", "after other memory", "ratio", "after the others", "ratio"
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    for name, graph in track(graphs.items(), description="timing", transient=True):
        others = [each for label, each in graphs.items() if label != name]
        run = partial(launch, graph)
        warm = median_us(run, args.runs)
        cold = median_us(run, args.runs, before=other.sum)
        mixed = median_us(run, args.runs, before=partial(launch_once, others, 0))
        models[name] = {
            "weights_bytes": weights[name], "warm_us": warm, "cold_us": cold, "cold_ratio": cold / warm,
            "after_others_us": mixed, "after_others_ratio": mixed / warm,
        }  # fmt: skip
        shown = (f"{warm:.0f}", f"{cold:.0f}", f"{cold / warm:.3f}", f"{mixed:.0f}", f"{mixed / warm:.3f}")
        table.add_row(name, f"{weights[name] / 1e6:.0f}", *shown)
    Console(width=120).print(table)
    gap_ns.append(probe().look()["kernel_gap_ns"])
    print(f"kernels began {gap_ns[0]:.0f} ns after one another, in the end {gap_ns[1]:.0f}")
    print(save("cold_cache", {"kernel_gap_ns": gap_ns, "models": models}, device, args.out))


if __name__ == "__main__":
    main()
