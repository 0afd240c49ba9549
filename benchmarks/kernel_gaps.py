"""The time between starts of a graph's consecutive kernels, and the actions of a process that make it longer.

    python benchmarks/kernel_gaps.py [--out DIR]

A graph of chained kernels that do almost nothing is timed before and after other work was launched, uploaded or copied
and has ended; every case runs in its own process. The last case is a resnet34 that PyTorch captured. CUDA only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from common import need_gpu, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

KERNELS = 200  # of the graph that is timed
RUNS = 9
MANY = 100
SOURCE = 'extern "C" __global__ void nothing(int* x) { if (x[0] == 77) x[1] = 1; }'


class Bench:
    """Streams, a kernel, and graphs of it."""

    def __init__(self) -> None:
        import cupy as cp

        self.cp = cp
        self.kernel = cp.RawKernel(SOURCE, "nothing")
        self.x = cp.zeros(1 << 20, np.int32)
        self.keep: list[Any] = []
        self.one, self.other, self._timed_on = (cp.cuda.Stream(non_blocking=True) for _ in range(3))
        self._timed = self.graph(KERNELS)

    def graph(self, kernels: int) -> Any:
        with self.cp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            for _ in range(kernels):
                self.kernel((1,), (32,), (self.x,))
            self.keep.append(stream.end_capture())
        return self.keep[-1]

    def launch(self, stream: Any, kernels: int) -> None:
        """One by one."""
        with stream:
            for _ in range(kernels):
                self.kernel((1,), (32,), (self.x,))

    def launch_graphs(self, stream: Any, count: int) -> None:
        for _ in range(count):
            self.graph(5).launch(stream=stream)

    def upload(self, count: int, launched: bool) -> None:
        for _ in range(count):
            made = self.graph(5)
            made.upload(stream=self.one)
            if launched:
                made.launch(stream=self.one)

    def copy(self, stream: Any, count: int) -> None:
        half = self.x.nbytes // 2
        for _ in range(count):
            self.cp.cuda.runtime.memcpyAsync(self.x.data.ptr, self.x.data.ptr + half, half, 3, stream.ptr)

    def copy_from_host(self, stream: Any, count: int) -> None:
        host = self.cp.cuda.alloc_pinned_memory(self.x.nbytes)
        for _ in range(count):
            self.cp.cuda.runtime.memcpyAsync(self.x.data.ptr, host.ptr, self.x.nbytes, 1, stream.ptr)
        self.keep.append(host)

    def gap_ns(self) -> float:
        """Of the graph that is timed, from one kernel to the next."""
        cp, times = self.cp, []
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(RUNS):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(self._timed_on)
            self._timed.launch(stream=self._timed_on)
            end.record(self._timed_on)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) * 1e6 / KERNELS)
        return float(np.median(times))


Step = Callable[[Bench], None]


def first(bench: Bench) -> None:
    bench.launch(bench.one, MANY)


# What is done, after which the graph is timed again.
CASES: dict[str, tuple[Step, ...]] = {
    f"{MANY} kernels one by one on a stream": (first,),
    "and 7 on another": (first, lambda b: b.launch(b.other, 7)),
    "and 8 on another": (first, lambda b: b.launch(b.other, 8)),
    f"and {MANY} graphs on another": (first, lambda b: b.launch_graphs(b.other, MANY)),
    f"and {MANY} copies from the host on another": (first, lambda b: b.copy_from_host(b.other, MANY)),
    f"and {MANY} copies within the GPU on another": (first, lambda b: b.copy(b.other, MANY)),
    "2 graphs uploaded, not launched": (lambda b: b.upload(2, launched=False),),
    "4 graphs uploaded, not launched": (lambda b: b.upload(4, launched=False),),
    f"{MANY} graphs uploaded and launched, each in turn": (lambda b: b.upload(MANY, launched=True),),
}


def gaps(case: str) -> tuple[float, float]:
    bench = Bench()
    before = bench.gap_ns()
    for step in CASES[case]:
        step(bench)
    return before, bench.gap_ns()


def resnet34_us() -> tuple[float, float]:
    """PyTorch's own graph, before and after kernels on a second stream."""
    import torch
    from paper_models import Kind
    from torch_graphs import half_net, median_us

    kind = Kind("resnet34")
    net, graph = half_net(kind), torch.cuda.CUDAGraph()
    x = torch.randn(1, *kind.image, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(3):
            net(x)
        with torch.cuda.graph(graph):
            net(x)

    before = median_us(graph.replay, RUNS)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(8):
            x.add_(1.0)
    return before, median_us(graph.replay, RUNS)


def apart(function: Callable[..., tuple[float, float]], *args: Any) -> tuple[float, float]:
    """In a process of its own: what is looked for lasts as long as the process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = need_gpu("the gaps are a GPU's")
    table = Table(title="from one kernel of a graph to the next, ns", box=None)
    for column in ("what was done", "before", "after", "ratio"):
        table.add_column(column, justify="right" if table.columns else "left")
    found = {}
    for case in track(CASES, description="cases", transient=True):
        before, after = apart(gaps, case)
        found[case] = {"before_ns": before, "after_ns": after, "ratio": after / before}
        table.add_row(case, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}")
    before, after = apart(resnet34_us)
    whole = {"before_us": before, "after_us": after, "ratio": after / before}
    Console().print(table)
    print(f"resnet34 of PyTorch: {before:.0f} µs, after 8 kernels on a second stream {after:.0f} µs")
    print(save("kernel_gaps", {"cases": found, "resnet34": whole}, device, args.out))


if __name__ == "__main__":
    main()
