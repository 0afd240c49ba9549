"""The effect of confining jobs to windows of SMs while many share the GPU: without the engine.

    python benchmarks/sm_partitions.py [--seconds 0.5] [--seeds 3] [--out DIR]

Paella's mix of eight CNNs runs at batch 1 as whole graphs, first come first served, up to 24 at once: on all SMs, or
with the kernels of each graph inside a window of some SMs (a green context). Either an instance has one window, and a
free instance with the emptiest window is taken (`instance`); or an instance has several windows, and the emptiest is
taken (`window`); or all instances of a model share one window (`model`). The fill of a window is the number of jobs in
it, or (`aware`) also those in windows that share SMs with it. It measures throughput with 96 requests always waiting,
and slowdowns in bursts. CUDA only.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
from common import need_gpu, save
from engine_load import lognormal_gaps
from numpy.typing import NDArray
from paper_models import FIG11
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch_graphs import capture, half_net

from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver, library
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, CudaWindows, launch_once, segment, segment_graph
from paellapy.scheduler.core.atomics import call_launch, load_at, store_at
from paellapy.scheduler.core.state import monotonic_ns

REFUSED, LOST = -1, -2
compiled = numba.njit(nogil=True, error_model="numpy")

INSTANCES = (10, 10, 8, 6, 6, 6, 6, 4)
STREAMS = 32
MOST = 24
OUTSTANDING = 96
REQUESTS = 4000
LONGEST_NS = 20_000_000_000  # a run that takes longer has lost something
_WORD_BYTES = 64  # a cache line for each instance's word
SHARE_OF_REQUESTS = np.array([kind.share for kind in FIG11]) / sum(kind.share for kind in FIG11)


@dataclass(frozen=True, slots=True)
class How:
    """The number of windows and of their SMs, who chooses a window, and the number of jobs that still have all SMs."""

    name: str
    count: int = 0
    sms: int = 0
    by: str = "instance"
    choices: int = 1
    aware: bool = False
    roomy: int = 0


SYSTEMS = (
    How("all SMs"),
    How("8 windows of 48, by instance", 8, 48),
    How("8 windows of 48, one of 2", 8, 48, "window", 2),
    How("8 windows of 48, one of 2, aware", 8, 48, "window", 2, aware=True),
    How("8 windows of 48, one of 4, aware", 8, 48, "window", 4, aware=True),
    How("8 windows of 48, one of 8", 8, 48, "window", 8),
    How("8 windows of 48, one of 8, aware", 8, 48, "window", 8, aware=True),
    How("8 windows of 48, one of 8, aware, few have all", 8, 48, "window", 8, aware=True, roomy=4),
    How("8 windows of 48, by model", 8, 48, "model"),
    How("8 windows of 32, by instance", 8, 32),
    How("8 windows of 64, by instance", 8, 64),
    How("4 windows of 32, by instance", 4, 32),
    How("2 windows of 64, by instance", 2, 64),
    How("all SMs, again"),
)


@compiled
def fullness(jobs: Any, overlap: Any, window: int) -> float:
    total = 0.0
    for other in range(overlap.shape[1]):
        total += overlap[window, other] * jobs[other]
    return total


@compiled
def drive(
    clock: int, launch: int, at: Any, model: Any, graphs: Any, instances: Any, windows: Any, overlap: Any, words: Any,
    streams: Any, most: int, roomy: int, any_instance: bool, outstanding: int, latency: Any, scratch: Any,
) -> int:  # fmt: skip
    """Serves requests at their times, or `outstanding` at once; how long it took, or REFUSED or LOST.

    `graphs[m, l]` are an instance's on all SMs, then in each of its windows, `windows[m, l]`. `any_instance`: the first
    that is free; else one whose first window is the emptiest.
    """
    n = at.shape[0]
    request = np.full(words.shape, -1)
    where = np.zeros(words.shape, np.int64)  # the window, or -1
    on = np.zeros(words.shape, np.int64)
    used = np.zeros(streams.shape[0], np.int64)
    jobs = np.zeros(overlap.shape[0], np.int64)
    sent = np.zeros(n, np.int64)
    begin = at.copy()
    start = monotonic_ns(clock, scratch)
    first = active = done = arrived = 0
    while done < n:
        now = monotonic_ns(clock, scratch) - start
        if now > LONGEST_NS:
            return LOST
        for m in range(words.shape[0]):
            for instance in range(instances[m]):
                r = request[m, instance]
                if r >= 0 and load_at(words[m, instance]) != np.uint64(0):
                    store_at(words[m, instance], np.uint64(0))
                    latency[r] = now - begin[r]
                    request[m, instance] = -1
                    used[on[m, instance]] = 0
                    if where[m, instance] >= 0:
                        jobs[where[m, instance]] -= 1
                    active -= 1
                    done += 1
        while arrived < n and (arrived - done < outstanding if outstanding > 0 else at[arrived] <= now):
            if outstanding > 0:
                begin[arrived] = now
            arrived += 1
        for r in range(first, arrived):
            if active >= most:
                break
            if sent[r]:
                continue
            m = model[r]
            best = -1
            least = 0.0
            for instance in range(instances[m]):
                if request[m, instance] < 0:
                    full = fullness(jobs, overlap, windows[m, instance, 0])
                    if best < 0 or (not any_instance and full < least):
                        best, least = instance, full
            if best < 0:
                continue
            to = 0
            where[m, best] = -1
            if active >= roomy:
                for k in range(windows.shape[2]):
                    full = fullness(jobs, overlap, windows[m, best, k])
                    if to == 0 or full < least:
                        to, least = k + 1, full
                where[m, best] = windows[m, best, to - 1]
                jobs[where[m, best]] += 1
            stream = 0
            while used[stream]:
                stream += 1
            used[stream] = sent[r] = 1
            request[m, best], on[m, best] = r, stream
            active += 1
            if call_launch(launch, graphs[m, best, to], streams[stream]) != 0:
                return REFUSED
        while first < arrived and sent[first]:
            first += 1
    return monotonic_ns(clock, scratch) - start


class Bench:
    def __init__(self) -> None:
        self.device = need_gpu("windows of SMs are green contexts")
        every = track(zip(FIG11, INSTANCES, strict=True), "capturing", len(FIG11), transient=True)
        self.graphs: list[list[CapturedGraph]] = []
        self._keep: list[Any] = []
        for kind, instances in every:  # with the same weights on all of them
            net = half_net(kind)
            graphs, keep = zip(*(capture(net, kind, 1) for _ in range(instances)), strict=True)
            self.graphs.append(list(graphs))
            self._keep.append(keep)
        self._pinned = self.device._allocate_pinned(_WORD_BYTES * sum(INSTANCES))
        self._streams = [CudaStream(self.device, 0) for _ in range(STREAMS)]
        self.streams = np.array([each.handle for each in self._streams], np.uint64)
        shape = (len(FIG11), max(INSTANCES))
        self.words, self.wide = np.zeros(shape, np.uint64), np.zeros(shape, np.uint64)
        for k, (m, instance) in enumerate(self._each()):
            self.words[m, instance] = self._pinned.ctypes.data + _WORD_BYTES * k
            graph = self.graphs[m][instance]
            self.wide[m, instance] = segment(graph, 0, len(graph.nodes), int(self.words[m, instance]))
        launch_once([int(self.wide[m, instance]) for m, instance in self._each()], self._streams[0].handle)
        for each in self._streams:  # a stream's first work takes longer
            check(driver().cuGraphLaunch(int(self.wide[0, 0]), each.handle), "opening a stream")
            each.synchronize()
        self._pinned[:] = 0
        libc = ctypes.CDLL(None)
        self._clock = np.uint64(ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value or 0)
        self._launch = np.uint64(ctypes.cast(library().cuGraphLaunch, ctypes.c_void_p).value or 0)
        self._made: dict[tuple[int, int], CudaWindows] = {}
        self._confined: dict[tuple[int, int, int, int, int], int] = {}
        self.alone_ns = self.alone(SYSTEMS[0])

    def _each(self) -> list[tuple[int, int]]:
        return [(m, instance) for m, n in enumerate(INSTANCES) for instance in range(n)]

    def _windows(self, how: How) -> CudaWindows:
        key = (how.count, how.sms)
        if key not in self._made:
            # Half an SM less: a window has whole groups of them, and one more where the share asks for a bit of it.
            self._made[key] = CudaWindows(self.device, how.count, (how.sms - 0.5) / self.device.sm_count)
        return self._made[key]

    def _inside(self, how: How, m: int, instance: int, window: int) -> int:
        """An instance's graph in a window."""
        key = (how.count, how.sms, m, instance, window)
        if key not in self._confined:
            graph = self.graphs[m][instance]
            with segment_graph(graph, 0, len(graph.nodes), int(self.words[m, instance])) as made:
                (self._confined[key],) = self._windows(how).confined(made, [window], end_inside=False)
            launch_once([self._confined[key]], self._streams[0].handle)
            self._pinned[:] = 0
        return self._confined[key]

    def confined(self, how: How) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float64]]:
        """Graphs of every instance on all SMs and in its windows, which these are, and how much windows share."""
        graphs = np.stack([self.wide] * (1 + how.choices), -1)
        windows = np.zeros((*self.wide.shape, how.choices), np.int64)
        overlap = np.eye(max(1, how.count))
        if how.aware:
            overlap = np.array([[len(a & b) / how.sms for b in self._windows(how).sms] for a in self._windows(how).sms])
        for m, instance in self._each() if how.count else []:
            home = m if how.by == "model" else m + instance
            for k in range(how.choices):
                windows[m, instance, k] = (home + k * how.count // how.choices) % how.count
                graphs[m, instance, 1 + k] = self._inside(how, m, instance, int(windows[m, instance, k]))
        return graphs, windows, overlap

    def run(
        self, how: How, at: Any, model: Any, outstanding: int = 0, most: int = MOST
    ) -> tuple[NDArray[np.int64], int]:
        latency, scratch = np.zeros(len(model), np.int64), np.zeros(8, np.int64)
        graphs, windows, overlap = self.confined(how)
        took = drive(
            self._clock, self._launch, at, model, graphs, np.array(INSTANCES), windows, overlap, self.words,
            self.streams, most, how.roomy, how.by == "window", outstanding, latency, scratch,
        )  # fmt: skip
        if took < 0:
            raise SystemExit("a graph could not be launched" if took == REFUSED else "a graph never came to its end")
        return latency, took

    def alone(self, how: How) -> NDArray[np.float64]:
        """Each model's time when nothing else runs, in a window where there are any."""
        n = 40
        how = replace(how, roomy=0)
        times = [self.run(how, np.zeros(n, np.int64), np.full(n, m), 1, 1)[0] for m in range(len(FIG11))]
        return np.array([np.median(each[n // 4 :]) for each in times])

    def measure(self, how: How, rates: list[int], seeds: int, seconds: float) -> dict[str, Any]:
        stretch = self.alone(how) / self.alone_ns
        mix = np.random.default_rng(0).choice(len(FIG11), REQUESTS, p=SHARE_OF_REQUESTS)
        took = self.run(how, np.zeros(REQUESTS, np.int64), mix, OUTSTANDING)[1]
        found: dict[str, Any] = {**asdict(how), "saturation": REQUESTS / took * 1e9, "alone": stretch.tolist()}
        for rate in rates:
            slow = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                n = int(rate * seconds)
                at, model = lognormal_gaps(rng, rate, 1.5, n), rng.choice(len(FIG11), n, p=SHARE_OF_REQUESTS)
                slow.append(self.run(how, at, model)[0] / self.alone_ns[model])
            found[f"p50_{rate}"] = [float(np.quantile(each, 0.5)) for each in slow]
            found[f"p99_{rate}"] = [float(np.quantile(each, 0.99)) for each in slow]
            found[f"within_4x_{rate}"] = [float((each <= 4).mean()) for each in slow]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="4000,5000")
    parser.add_argument("--systems", type=int, default=len(SYSTEMS), help="run only the first N systems")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rates = [int(each) for each in args.rates.split(",")]
    bench = Bench()
    chosen = SYSTEMS[: args.systems]
    rows: list[dict[str, Any]] = []
    for how in track(chosen, "systems", transient=True):
        rows.append(bench.measure(how, rates, args.seeds, args.seconds))
        print(how.name, f"{rows[-1]['saturation']:,.0f}/s", flush=True)
        path = save("sm_partitions", rows, bench.device, args.out)  # each is kept as soon as it is measured
    table = Table(title="Eight CNNs at batch 1, by what their kernels are confined to", box=None)
    for column in ("confined to", "alone ×", "saturation/s", *(f"p50, p99 at {r}/s" for r in rates)):
        table.add_column(column, justify="left" if column == "confined to" else "right")
    for r in rows:
        slow = (", ".join(f"{np.median(r[f'{q}_{rate}']):.2f}" for q in ("p50", "p99")) for rate in rates)
        table.add_row(r["name"], f"{np.mean(r['alone']):.2f}", f"{r['saturation']:,.0f}", *slow)
    Console(width=120).print(table)
    print(path)


if __name__ == "__main__":
    main()
