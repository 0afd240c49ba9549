"""The cost of reporting and of being preemptible on a GPU: time of an instrumented kernel ÷ time of the plain one.

    python benchmarks/report_cost.py [--rounds 40] [--preemptible] [--against CHECKOUT]

Each variant is captured into a CUDA graph of many launches; replays of all variants take turns, so that clock changes
affect all of them alike. "one counter" is an alternative: all blocks of the GPU share one counter, as in Paella. Then
the host's time of a launch, `pp.kernel` against Triton's own launcher.

`--preemptible` measures the cost of a kernel that can be preempted, and how long the GPU takes to become free of one:
blocks of a known length fill the GPU several times over, and from `preempt()` on the host polls until the launch is
over. Every block is checked to have run once. Only rounds in which blocks were kept from running count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from harness import arguments, finish, in_turns, need_gpu, save
from kernels import Work, add, works

import paellapy as pp
from paellapy.instrument.device.cuda_launch import CudaLauncher
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.ptx.compiled import assemble
from paellapy.instrument.records import LEFT_HEAD_BYTES, SM_LINE

VARIANTS = ("plain", "plain again", "count", "trace", "notify", "slice", "one counter")
# Only one thread reads the clock: if all do, they wait for each other, and blocks take a quarter longer.
SPIN = """
extern "C" __global__ void spin(unsigned* count, unsigned ns) {
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
        atomicAdd(count + blockIdx.x, 1u);
    }
    __syncthreads();
}
"""
THREADS = 256


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


def prepared(kernel: Any, device: Any, work: Work, **options: bool) -> tuple[CudaLauncher, Any]:
    """A launcher of a kernel without its own bookkeeping, and the values to launch it with."""
    values, key, chosen = kernel._bind(device, work.args, work.keywords)
    return kernel._prepare(device, values, (*key, *sorted(chosen.items())), chosen, False, **options), values


def one_counter(launcher: CudaLauncher) -> CudaLauncher:
    """The `count` variant with every SM's line moved onto the first one."""
    compiled, source = launcher.compiled, launcher.compiled.source
    line = f"mad.wide.u32 %paellapy_line, %paellapy_sm, {SM_LINE.itemsize}, %paellapy_line;"
    text = compiled.ptx.replace(line, "")
    assert text != compiled.ptx
    code = assemble(text, source.arch, source.name, source.ptxas_options, source.ptxas_path)
    return CudaLauncher(launcher.device, replace(compiled, ptx=text, code=code), launcher.pick)


def variant(name: str, device: Any, work: Work) -> Graph:
    kernel = pp.kernel(work.kernel, report=name if name in ("count", "notify") else None)
    call: Callable[[], Any] = lambda: kernel[work.grid](*work.args, **work.keywords)  # noqa: E731
    if name == "trace":
        with pp.trace(records_per_sm=1 << 14):
            return Graph(device, call, work.launches)
    total = int(np.prod(work.grid))
    if name == "slice":
        call = lambda: kernel.slice(work.grid, 0, total)(*work.args, **work.keywords)  # noqa: E731
    elif name == "preempt":  # the flag is never set: every block looks at it and runs
        flag, left = device.flag(), device.array(np.zeros(LEFT_HEAD_BYTES // 4 + total, np.uint32))
        watching, values = prepared(kernel, device, work, preempt=True)
        call = lambda: watching(work.grid, values, words=(0, left.ptr, flag.address, 1))  # noqa: E731
    elif name == "one counter":
        launcher, values = prepared(pp.kernel(work.kernel, report="count"), device, work)
        counting = one_counter(launcher)
        call = lambda: counting(work.grid, values)  # noqa: E731
    return Graph(device, call, work.launches)


def measure(device: Any, work: Work, variants: tuple[str, ...], rounds: int) -> dict[str, Any]:
    graphs = {name: variant(name, device, work) for name in variants}
    times = np.array([[graph.time_ns() for graph in graphs.values()] for _ in range(rounds + 3)])[3:]
    plain = times[:, 0]
    result: dict[str, Any] = {"plain_us": float(np.median(plain)) / 1e3}
    for name, column in zip(variants[1:], times.T[1:], strict=True):
        half = [float(np.quantile(column / plain, q)) for q in (0.25, 0.75)]
        result[name] = {"ratio": float(np.median(column) / np.median(plain)), "middle_half": half}
    return result


def launch_costs(device: Any) -> dict[str, Any]:
    """The host's time of one launch of a short kernel, with PyTorch's tensors; the GPU's queue is never full."""
    import torch

    n = 4096
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    z = torch.empty_like(x)
    kernels = {f"pp.kernel, {level or 'plain'}": pp.kernel(add, report=level) for level in (None, "count", "notify")}
    ways = {"triton's launcher": add, **kernels}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(60):
        for name, kernel in ways.items():
            torch.cuda.synchronize()
            since = time.perf_counter_ns()
            for _ in range(200):
                kernel[(4,)](x, y, z, n, B=1024)
            found[name].append((time.perf_counter_ns() - since) / 200e3)
            torch.cuda.synchronize()
    us = {name: float(np.median(each[3:])) for name, each in found.items()}
    return {name: {"us": each, "ratio": each / us["triton's launcher"]} for name, each in us.items()}


def latency(device: Any, block_us: float, blocks: int, rounds: int) -> dict[str, float]:
    kernel = pp.kernel(source=SPIN, name="spin", report=None)
    rng = np.random.default_rng(0)
    whole_us = block_us * blocks / (device.sm_count * (device.limits.threads // THREADS))
    free, resumed, left = np.empty(rounds), np.empty(rounds), np.empty(rounds)
    counts = [device.array(np.zeros(blocks, np.uint32)) for _ in range(rounds)]  # freeing one would wait for the GPU
    for k, count in enumerate(counts):
        launch = kernel.preemptible[blocks, THREADS](count, np.uint32(block_us * 1e3))
        begin, wait_us = time.perf_counter(), 10 + rng.uniform(0, 0.5) * whole_us
        while time.perf_counter() - begin < wait_us * 1e-6:
            pass
        start = time.perf_counter()
        launch.preempt()
        run = launch._run
        while run is not None and not run.over():
            pass
        free[k] = (time.perf_counter() - start) * 1e6
        left[k] = len(launch.left)
        start = time.perf_counter()
        launch.resume()
        resumed[k] = (time.perf_counter() - start) * 1e6
        launch.synchronize()
        assert (count.numpy() == 1).all(), "a block ran twice or never"
    held = left > 0
    if not held.any():  # the kernel was always over before the flag came: nothing was measured
        return {"held": 0.0}
    return {"free p50": float(np.median(free[held])), "free p99": float(np.quantile(free[held], 0.99)),
            "resume p50": float(np.median(resumed[held])), "held": float(held.mean())}  # fmt: skip


def preemptible(device: Any, o: Any) -> None:
    costs = {work.name: measure(device, work, ("plain", "plain again", "preempt"), o.rounds) for work in works(device)}
    save("preempt_cost", costs, device, o.out)
    found = {f"{blocks} blocks of {us} µs": latency(device, us, blocks, o.rounds)
             for us in (2, 10, 50) for blocks in (5_000, 50_000)}  # fmt: skip
    fast, slow = ([each["free p99"] for name, each in found.items() if each["held"] and ("of 50" in name) == long]
                  for long in (False, True))  # fmt: skip
    ratios = [each["preempt"]["ratio"] for each in costs.values()]
    reached = [f"{min(us):.0f} to {max(us):.0f}" for us in (fast, slow)]
    rows = [
        ["figure", "aim", "reached"],
        ["µs from `preempt()` until the GPU is free, p99: blocks of 2 to 10 µs", "< 100", reached[0]],
        ["the same, blocks of 50 µs, which run to their end", "< 100", reached[1]],
        ["kernel that can be preempted ÷ plain kernel", "≤ 1.02", f"{min(ratios):.3f} to {max(ratios):.3f}"],
    ]  # fmt: skip
    finish(o, "preempt_latency", found, "preemption", rows, device, table="sharing")


def main() -> None:
    parser = arguments(__doc__, rounds=40, against=True)
    parser.add_argument("--preemptible", action="store_true", help="the cost and the latency of preemption instead")
    o = parser.parse_args()
    device = need_gpu("the cost of reporting")
    if o.against:
        o.rounds = 2

        def compared(results: Any) -> dict[str, float]:
            rows = results.get("kernels", results).items()
            return {f"{name}, {kind}": row[kind]["ratio"] for name, row in rows for kind in VARIANTS[2:] if kind in row}

        print(save("report_cost_against", in_turns(o, __file__, "report_cost", compared), device, o.out))
        return
    with device:
        if o.preemptible:
            preemptible(device, o)
            return
        found = {work.name: measure(device, work, VARIANTS, o.rounds) for work in works(device)}
        launch = launch_costs(device)
    kinds = ("count", "trace", "notify", "one counter")
    rows = [[name, f"{each['plain_us']:.1f}", *(f"{each[kind]['ratio']:.3f}" for kind in kinds)]
            for name, each in found.items()]  # fmt: skip
    head = ["kernel", "plain, µs", "`count`", "`trace`", "`notify`", "all blocks on one counter"]
    content, figures = {"kernels": found, "launch": launch}, {"launch": f"{launch['pp.kernel, count']['ratio']:.2f}"}
    title = "instrumented ÷ plain"
    finish(o, "report_cost", content, title, [head, *rows], device, table="costs", figures=figures)


if __name__ == "__main__":
    main()
