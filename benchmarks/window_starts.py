"""The cost of starting a graph in a window of SMs: on the GPU, and for the host that launches it.

    python benchmarks/window_starts.py [--nodes 28] [--out DIR]

Two CNNs run at batch 1, as one graph and cut into graphs of some nodes each, one behind the other: on all SMs, inside a
window (a green context) from a stream that has all SMs, and from a stream of the window. The cost of a further graph is
the difference divided by the number of cuts. Then it measures the time of a graph in each of 8 windows, which differ in
their SMs; the graphs per second of several streams at once; and the time of the host's call, the first time a graph is
launched on each of 32 streams in each window, and the second and third time. CUDA only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import need_gpu, save
from paper_models import FIG11
from rich.console import Console
from rich.table import Table
from torch_graphs import capture, half_net

from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.cuda_graphs import (
    CapturedGraph,
    CudaPartitions,
    instantiate,
    launch_once,
    segment_graph,
)
from paellapy.scheduler.core.tuning import Tuning

WINDOWS = 8
STREAMS = 32
ROUNDS, RUNS = 10, 10
MODELS = (FIG11[0], FIG11[4])
WAYS = ("all SMs", "in a window", "in a window, from its own stream")
AT_ONCE = (1, 2, 4, 8, 16, 32)
TOGETHER = (*WAYS[:1], "in windows", "in windows, from their own streams", "in one", "in one, from its own streams")


def make(
    graph: CapturedGraph, bounds: list[tuple[int, int]], word: int, stream: int, windows: CudaPartitions, n: int
) -> list[list[int]]:
    """Executable graphs of every part: on all SMs, and in each of the first n windows."""
    made: list[list[int]] = []
    for first, end in bounds:
        with segment_graph(graph, first, end, word) as part:
            made.append([instantiate(part.handle), *windows.confined(part, range(n), end_inside=True)])
            launch_once(made[-1], stream)
    return [list(each) for each in zip(*made, strict=True)]


def run_us(handles: list[int], stream: int) -> float:
    """Time of graphs one behind the other, the shortest of some runs."""
    cu, times = driver(), []
    for _ in range(RUNS):
        begin = time.perf_counter_ns()
        for _ in range(ROUNDS):
            for handle in handles:
                check(cu.cuGraphLaunch(handle, stream), "launching")
        check(cu.cuStreamSynchronize(stream), "waiting")
        times.append((time.perf_counter_ns() - begin) / ROUNDS / 1e3)
    return min(times[1:])


def graphs_per_s(jobs: list[tuple[int, int]]) -> float:
    """Graphs that run at once, each again and again on a stream of its own: the most of some runs."""
    cu, best = driver(), 0.0
    for _ in range(RUNS // 2):
        begin = time.perf_counter_ns()
        for _ in range(ROUNDS):
            for handle, stream in jobs:
                check(cu.cuGraphLaunch(handle, stream), "launching")
        for _, stream in jobs:
            check(cu.cuStreamSynchronize(stream), "waiting")
        best = max(best, ROUNDS * len(jobs) / (time.perf_counter_ns() - begin) * 1e9)
    return best


def launch_us(handle: int, stream: int) -> float:
    """How long the host's call takes, with nothing in flight."""
    begin = time.perf_counter_ns()
    check(driver().cuGraphLaunch(handle, stream), "launching")
    took = (time.perf_counter_ns() - begin) / 1e3
    check(driver().cuStreamSynchronize(stream), "waiting")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=28, help="nodes in each part")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = need_gpu("windows of SMs are green contexts")
    windows = CudaPartitions(device, WINDOWS, Tuning.for_device(device).partition_share)
    pinned = device._allocate_pinned(64)
    word = int(pinned.ctypes.data)
    stream = CudaStream(device, 0)
    own = windows.stream(0, 0)
    results: dict[str, Any] = {"models": {}}
    table = Table(title=f"graphs of {args.nodes} nodes", box=None)
    for column in ("model", "where", "one graph, µs", "parts", "all of them, µs", "each more, µs"):
        table.add_column(column, justify="left" if column in ("model", "where") else "right")
    for kind in MODELS:
        graph, keep = capture(half_net(kind), kind, 1)
        n = len(graph.nodes)
        bounds = [(first, min(n, first + args.nodes)) for first in range(0, n, args.nodes)]
        wholes = make(graph, [(0, n)], word, stream.handle, windows, 1)
        parts = make(graph, bounds, word, stream.handle, windows, 1)
        found: dict[str, Any] = {"nodes": n, "parts": len(bounds)}
        results["models"][kind.label] = found
        for where, k, on in zip(WAYS, (0, 1, 1), (stream.handle, stream.handle, own.handle), strict=True):
            whole, all_us = run_us(wholes[k], on), run_us(parts[k], on)
            more = (all_us - whole) / max(1, len(bounds) - 1)
            found[where] = {"whole_us": whole, "parts_us": all_us, "start_us": more}
            table.add_row(kind.label, where, f"{whole:.1f}", str(len(bounds)), f"{all_us:.1f}", f"{more:.1f}")
        del keep
    graph, _keep = capture(half_net(MODELS[0]), MODELS[0], 1)
    streams = [CudaStream(device, 0) for _ in range(STREAMS)]
    handles = make(graph, [(0, len(graph.nodes))], word, stream.handle, windows, WINDOWS)
    results["windows"] = [
        {"sms": len(sms), "alone_us": run_us(each, stream.handle)}
        for sms, each in zip(windows.sms, handles[1:], strict=True)
    ]
    print("in each window:", ", ".join(f"{w['sms']} SMs {w['alone_us']:.1f} µs" for w in results["windows"]))
    # Every job has graphs of its own: one that runs waits for itself. Their memory is the same, and nobody reads it.
    most = range(max(AT_ONCE))
    instances = [make(graph, [(0, len(graph.nodes))], word, stream.handle, windows, WINDOWS) for _ in most]
    spread, single = [windows.stream(j % WINDOWS, 0) for j in most], [windows.stream(0, 0) for _ in most]
    ways = [
        [(instances[j][0][0], streams[j].handle) for j in most],
        [(instances[j][1 + j % WINDOWS][0], streams[j].handle) for j in most],
        [(instances[j][1 + j % WINDOWS][0], spread[j].handle) for j in most],
        [(instances[j][1][0], streams[j].handle) for j in most],
        [(instances[j][1][0], single[j].handle) for j in most],
    ]
    together = Table(title=f"{MODELS[0].label} at once, graphs a second", box=None)
    for column in ("where", *map(str, AT_ONCE)):
        together.add_column(column, justify="left" if column == "where" else "right")
    results["together"] = {}
    for where, jobs in zip(TOGETHER, ways, strict=True):
        rates = results["together"][where] = {str(n): graphs_per_s(jobs[:n]) for n in AT_ONCE}
        together.add_row(where, *(f"{each:,.0f}" for each in rates.values()))
    Console(width=120).print(together)
    rounds = [
        [[launch_us(each[0], s.handle) for each in handles] for s in streams] for _ in range(3)
    ]  # [round][stream][on all SMs, then each window]
    for name, times in zip(("first", "second", "third"), rounds, strict=True):
        wide, narrow = np.array(times)[:, 0], np.array(times)[:, 1:]
        results[name] = {
            where: {"median_us": float(np.median(each)), "most_us": float(each.max())}
            for where, each in (("all SMs", wide), ("in a window", narrow))
        }
        print(f"{name} launch on a stream, µs:", results[name])
    Console(width=120).print(table)
    print(save("window_starts", results, device, args.out))


if __name__ == "__main__":
    main()
