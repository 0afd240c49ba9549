"""The cost of reporting on a GPU: time of an instrumented kernel ÷ time of the plain one, in one run.

Each variant is captured into a CUDA graph of many launches; replays of all variants take turns, so that clock changes
affect all of them alike. The ratio is of medians; the spread is the middle half of the per-round ratios. "one counter"
is an alternative: all blocks of the GPU share one counter, as in Paella. "one flag" and "at the start" are alternatives
to "preempt": all blocks read one copy of the flag; every block waits for the flag before it does anything else.

    python benchmarks/report_cost.py [--out DIR] [--rounds 40] [--flags]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import kernels as bench_kernels
import numpy as np
from common import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

import paellapy as pp
from paellapy.instrument.device.cuda_launch import CudaLauncher
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.ptx import passes, preempt
from paellapy.instrument.records import FLAG_COPIES, LEFT_HEAD_BYTES, SM_LINE

FLAGS = ("plain", "plain again", "preempt", "one flag", "at the start")
VARIANTS = ("plain", "plain again", "count", "trace", "notify", "slice", "preempt", "one flag", "one counter")


class Graph:
    """Many launches of one kernel as a CUDA graph, timed by events."""

    def __init__(self, device: Any, launch: Callable[[], Any], launches: int) -> None:
        cu = driver()
        self.launches, self.stream = launches, device.stream()
        with self.stream:
            launch()  # compiled and loaded before the capture begins
            self.stream.synchronize()
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            check(cu.cuStreamBeginCapture(self.stream.handle, mode), "capturing")
            for _ in range(launches):
                launch()
            graph = check(cu.cuStreamEndCapture(self.stream.handle), "capturing")
        self.exec = check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")

    def time_ns(self) -> float:
        """Nanoseconds per launch."""
        start = self.stream.record()
        check(driver().cuGraphLaunch(self.exec, self.stream.handle), "launching a graph")
        end = self.stream.record()
        end.synchronize()
        return end.elapsed_ns(start) / self.launches


def changed(launcher: CudaLauncher, text: str) -> CudaLauncher:
    """A kernel with other PTX."""
    compiled = launcher.compiled
    assert text != compiled.ptx
    source = compiled.source
    code = compiled.assemble(text, source.arch, source.name, source.ptxas_options, source.ptxas_path)
    return CudaLauncher(launcher.device, replace(compiled, ptx=text, code=code), launcher.pick)


def one_counter(launcher: CudaLauncher) -> CudaLauncher:
    """The `count` variant with every SM's line moved onto the first one."""
    line = f"mad.wide.u32 %paellapy_a, %paellapy_sm, {SM_LINE.itemsize}, %paellapy_a;"
    return changed(launcher, launcher.compiled.ptx.replace(line, ""))


def one_flag(launcher: CudaLauncher) -> CudaLauncher:
    """The `preempt` variant with every block reading the first copy of the flag."""
    line = f"and.b32 %paellapy_pu, %paellapy_pu, {FLAG_COPIES - 1};"
    return changed(launcher, launcher.compiled.ptx.replace(line, "mov.u32 %paellapy_pu, 0;"))


def at_the_start(launcher: CudaLauncher) -> CudaLauncher:
    """The `preempt` variant with the decision before the kernel's first instruction."""
    compiled = launcher.compiled
    with mock.patch.object(preempt.Opening, "walk"):
        ptx = passes.apply(compiled.original_ptx, compiled.config, compiled.name, compiled.unread_params)
        return changed(launcher, ptx)


WATCHING = {"preempt": lambda launcher: launcher, "one flag": one_flag, "at the start": at_the_start}


def measure(
    device: Any, work: bench_kernels.Work, variants: Sequence[str], rounds: int, records: int
) -> dict[str, Any]:
    flag, noted = device.flag(), device.array(np.zeros(LEFT_HEAD_BYTES // 4 + int(np.prod(work.grid)), np.uint32))

    def variant(name: str) -> Graph:
        level = name if name in ("count", "notify") else None
        kernel = pp.kernel(work.kernel, report=level)
        call: Callable[[], Any] = lambda: kernel[work.grid](*work.args, **work.keywords)  # noqa: E731
        if name == "slice":
            total = int(np.prod(work.grid))
            call = lambda: kernel.slice(work.grid, 0, total)(*work.args, **work.keywords)  # noqa: E731
        if name == "trace":
            with pp.trace(records_per_sm=records):
                return Graph(device, call, work.launches)
        if name in WATCHING:  # the flag is never set: every block looks at it and runs
            values, key, options = kernel._bind(device, work.args, work.keywords)
            key = (*key, *sorted(options.items()))
            watching = WATCHING[name](kernel._prepare(device, values, key, options, sliced=False, preempt=True))
            words = (0, noted.ptr, flag.address, 1)
            call = lambda: watching(work.grid, values, words=words)  # noqa: E731
        if name == "one counter":
            counting = pp.kernel(work.kernel, report="count")
            values, key, options = counting._bind(device, work.args, work.keywords)
            key = (*key, *sorted(options.items()))
            launcher = one_counter(counting._prepare(device, values, key, options, False))
            call = lambda: launcher(work.grid, values)  # noqa: E731
        return Graph(device, call, work.launches)

    graphs = {name: variant(name) for name in variants}
    for graph in graphs.values():
        for _ in range(3):
            graph.time_ns()
    times = {name: np.empty(rounds) for name in graphs}
    for r in range(rounds):
        for name, graph in graphs.items():
            times[name][r] = graph.time_ns()
    plain = np.median(times["plain"])
    result: dict[str, Any] = {"plain_us": plain / 1e3, "blocks": int(np.prod(work.grid))}
    for name in variants[1:]:
        ratios = times[name] / times["plain"]
        result[name] = {
            "ratio": float(np.median(times[name]) / plain),
            "middle_half": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--records", type=int, default=1 << 14, help="records per SM of the trace's rings")
    parser.add_argument("--flags", action="store_true", help="only the cost of a flag; stored as preempt_cost.json")
    options = parser.parse_args()
    variants = FLAGS if options.flags else VARIANTS
    device = pp.Device("cuda")
    with device:
        works = bench_kernels.works(device)
        results = {
            w.name: measure(device, w, variants, options.rounds, options.records)
            for w in track(works, description="kernels")
        }
    table = Table(title=f"instrumented ÷ plain on {device.title}")
    for column in ("kernel", "plain µs", *variants[1:]):
        table.add_column(column, justify="right")
    for name, r in results.items():
        table.add_row(name, f"{r['plain_us']:.2f}", *(f"{r[v]['ratio']:.3f}" for v in variants[1:]))
    Console(width=140).print(table)
    print("written to", save("preempt_cost" if options.flags else "report_cost", results, device, options.out))


if __name__ == "__main__":
    main()
