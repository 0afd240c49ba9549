"""Cost and gain of best effort on some of the SMs, beside a model of high priority: without the engine.

    python benchmarks/best_effort_sms.py [--seconds 1.5] [--out DIR]

resnet50 at batch 1 gets 250 requests per second (Poisson), beside batches that follow each other without pause, cut
into segments. While resnet50 is active, the segments of the second model wait at the gate, or run in a green context of
some SMs, to which their kernel nodes are assigned. These are segments of the same job or (two jobs) of a second job, so
that the first can take the whole GPU back without waiting for a segment that has few SMs. High priority has all SMs or
(apart) the SMs outside the green context, so that no SM serves both. CUDA only.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import numba
import numpy as np
from common import need_gpu, save
from engine_load import poisson
from numpy.typing import NDArray
from paper_models import Kind
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch_graphs import capture, half_net

from paellapy.instrument.device import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver, library
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, instantiate, launch_once, read_graph, segment
from paellapy.scheduler.core.atomics import call_launch, load_at, store_at
from paellapy.scheduler.core.state import monotonic_ns

compiled = numba.njit(nogil=True, error_model="numpy")

HP_INSTANCES = 4
RATE = 250.0
SMS = (16, 32, 64)
QUANTUM_US = 80.0
_LARGE_SHARED = 48 * 1024  # beyond this a kernel must be told that it may


@compiled
def drive(
    clock: int, launch: int, at_ns: Any, hp: Any, hp_words: Any, hp_streams: Any, graphs: Any, words: Any,
    streams: Any, wide: Any, narrow: Any, ahead: int, latency: Any, scratch: Any, until_ns: int,
) -> int:  # fmt: skip
    """Serves the arrivals, and chain c between them (`wide[c]`) and beside them (`narrow[c]`); how long it took.

    `graphs[c, 0 or 1, k]` is segment k of chain c on all or on some SMs; scratch[2 + c] counts those that are done.
    """
    n, instances, chains, m = at_ns.shape[0], hp.shape[0], graphs.shape[0], graphs.shape[2]
    which = np.full(instances, -1)
    head, tail = np.zeros(chains, np.int64), np.zeros(chains, np.int64)
    start = monotonic_ns(clock, scratch)
    sent = done = 0
    while True:
        now = monotonic_ns(clock, scratch) - start
        busy = 0
        for k in range(instances):
            if which[k] >= 0 and load_at(hp_words[k]) != np.uint64(0):
                store_at(hp_words[k], np.uint64(0))
                latency[which[k]] = now - at_ns[which[k]]
                which[k] = -1
                done += 1
            if which[k] < 0 and sent < n and at_ns[sent] <= now:
                which[k] = sent
                sent += 1
                call_launch(launch, hp[k], hp_streams[k])
            busy += which[k] >= 0
        more = done < n or now < until_ns
        waiting = 0
        for c in range(chains):
            while head[c] < tail[c] and load_at(words[c, head[c] % m]) != np.uint64(0):
                store_at(words[c, head[c] % m], np.uint64(0))
                head[c] += 1
            waiting += tail[c] - head[c]
            if more and (narrow[c] if busy else wide[c]) and tail[c] - head[c] < ahead:
                call_launch(launch, graphs[c, 1 if busy else 0, tail[c] % m], streams[c])
                tail[c] += 1
        if more:
            for c in range(chains):
                scratch[2 + c] = head[c]
            scratch[6] = now
        elif waiting == 0:
            return now


class Captured:
    """A model's graph, and what must stay alive with it."""

    def __init__(self, kind: Kind, batch: int, priority: int) -> None:
        self.graph, self._keep = capture(half_net(kind), kind, batch, priority)

    def confined(self, context: Any, device: int) -> CapturedGraph:
        """The same on a context's SMs: a node follows its context only where it names the kernel, not a function."""
        cu = driver()
        clone = check(cu.cuGraphClone(self.graph.handle), "cloning a graph")
        for node in self.graph.nodes:
            copy = check(cu.cuGraphNodeFindInClone(node, clone), "finding a node")
            if check(cu.cuGraphNodeGetType(copy), "reading a node") != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                continue
            params = check(cu.cuGraphKernelNodeGetParams(copy), "reading a kernel's node")
            if params.sharedMemBytes > _LARGE_SHARED:
                most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(cu.cuKernelSetAttribute(most, params.sharedMemBytes, params.kern, device), "allowing memory")
            params.func, params.ctx = cu.CUfunction(0), context
            check(cu.cuGraphKernelNodeSetParams(copy, params), "giving a kernel's node a context")
        return read_graph(clone)


def green_contexts(sms: int, device: int) -> tuple[int, Any, Any]:
    """The number of SMs of the first context, which has at least `sms`; this context; and one with the other SMs."""
    cu = driver()
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    every = check(cu.cuDeviceGetDevResource(device, kind), "reading the SMs")
    parts, _, rest = check(cu.cuDevSmResourceSplitByCount(1, every, 0, sms), "splitting the SMs")
    contexts = []
    for part in (parts[0], rest):
        described = check(cu.cuDevResourceGenerateDesc([part], 1), "describing SMs")
        green = check(cu.cuGreenCtxCreate(described, device, 1), "creating a green context")
        contexts.append(check(cu.cuCtxFromGreenCtx(green), "creating a green context"))
    return int(parts[0].sm.smCount), *contexts


class Bench:
    """High priority and one kind of best effort, captured and cut."""

    def __init__(self, device: CudaDevice, beside: Kind, batch: int) -> None:
        self.device, self.index = device, device.index
        self._words = device._allocate_pinned(1 << 16)
        self._used = 0
        libc = ctypes.CDLL(None)
        self._clock = np.uint64(ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value or 0)
        self._launch = np.uint64(ctypes.cast(library().cuGraphLaunch, ctypes.c_void_p).value or 0)
        self.hp_streams = [CudaStream(device, 1) for _ in range(HP_INSTANCES)]
        self.streams = [CudaStream(device, 0) for _ in range(2)]
        self._hp = [Captured(Kind("resnet50"), 1, 1) for _ in range(HP_INSTANCES)]
        self._be = [Captured(beside, batch, 0) for _ in range(2)]
        self.hp_words = np.array([self._word() for _ in range(HP_INSTANCES)], np.uint64)
        self.hp = self._whole([each.graph for each in self._hp])
        n = len(self._be[0].graph.nodes)
        self.whole = [instantiate(each.graph.handle) for each in self._be]
        self.whole_us = self.time_us([self.whole[0]])
        step = max(1, round(n * QUANTUM_US / self.whole_us))
        self.bounds = [(a, min(n, a + step)) for a in range(0, n, step)]
        self.words = np.array([[self._word() for _ in self.bounds] for _ in self._be], np.uint64)
        self.wide = [self._cut(each.graph, c) for c, each in enumerate(self._be)]
        self.latency_alone = self.run([], 1, 1.5)[0]

    def _word(self) -> int:
        self._used += 1
        return int(self._words[8 * (self._used - 1) :].ctypes.data)

    def _whole(self, graphs: list[CapturedGraph]) -> NDArray[np.uint64]:
        pairs = zip(graphs, self.hp_words.tolist(), strict=True)
        return np.array(self._launched([segment(each, 0, len(each.nodes), word) for each, word in pairs]), np.uint64)

    def _cut(self, graph: CapturedGraph, chain: int) -> list[int]:
        words = self.words[chain].tolist()
        return self._launched([segment(graph, a, b, w) for (a, b), w in zip(self.bounds, words, strict=True)])

    def _launched(self, graphs: list[int]) -> list[int]:
        launch_once(graphs, self.streams[0].handle)
        self._words[:] = 0
        return graphs

    def confine(self, sms: int) -> tuple[int, list[list[int]], NDArray[np.uint64]]:
        """Puts best effort on this number of SMs, and high priority on the others."""
        found, some, others = green_contexts(sms, self.index)
        narrow = [self._cut(each.confined(some, self.index), c) for c, each in enumerate(self._be)]
        return found, narrow, self._whole([each.confined(others, self.index) for each in self._hp])

    def time_us(self, graphs: list[int]) -> float:
        """Of graphs behind each other, the median of some."""
        cu = driver()
        stream = self.streams[0].handle
        first, last = (check(cu.cuEventCreate(0), "creating an event") for _ in range(2))
        times = []
        for _ in range(9):
            check(cu.cuEventRecord(first, stream), "timing")
            for graph in graphs:
                check(cu.cuGraphLaunch(graph, stream), "timing")
            check(cu.cuEventRecord(last, stream), "timing")
            check(cu.cuStreamSynchronize(stream), "timing")
            times.append(float(check(cu.cuEventElapsedTime(first, last), "timing")) * 1e3)
        self._words[:] = 0
        return float(np.median(times[1:]))

    def run(
        self,
        chains: list[tuple[list[int], list[int], bool, bool]],
        ahead: int,
        seconds: float,
        hp: bool = True,
        apart: NDArray[np.uint64] | None = None,
    ) -> tuple[NDArray[np.float64], float]:
        """Latencies in µs, and batches of best effort a second. A chain: its graphs, on all and on some SMs; when."""
        at = poisson(np.random.default_rng(1), RATE, int(RATE * seconds)) if hp else np.zeros(0, np.int64)
        empty = [([0], [0], False, False)]
        given = chains or empty
        graphs = np.array([[w, n] for w, n, _, _ in given], np.uint64)
        words = self.words if chains else np.array([[self._word()]], np.uint64)
        latency, scratch = np.zeros(len(at), np.int64), np.zeros(8, np.int64)
        drive(
            self._clock, self._launch, at, self.hp if apart is None else apart, self.hp_words,
            np.array([s.handle for s in self.hp_streams], np.uint64), graphs, words,
            np.array([s.handle for s in self.streams], np.uint64), np.array([w for _, _, w, _ in given]),
            np.array([n for _, _, _, n in given]), ahead, latency, scratch, 0 if hp else int(seconds * 1e9),
        )  # fmt: skip
        batches = sum(scratch[2 : 2 + len(chains)]) / graphs.shape[2]
        return latency / 1e3, float(batches / max(1, scratch[6]) * 1e9)


def measure(device: CudaDevice, beside: Kind, batch: int, seconds: float) -> list[dict[str, Any]]:
    bench = Bench(device, beside, batch)
    wide, both = bench.wide[0], (True, True)
    alone = bench.run([(wide, wide, *both)], 3, seconds / 2, hp=False)[1]
    p50, p99 = (float(np.quantile(bench.latency_alone, q)) for q in (0.5, 0.99))
    rows = []

    def note(name: str, sms: int, ahead: int, chains: Any, be_us: float, apart: Any = None) -> None:
        latency, rate = bench.run(chains, ahead, seconds, apart=apart)
        a, b = (float(np.quantile(latency, q)) for q in (0.5, 0.99))
        rows.append(
            {
                "beside": beside.name, "batch": batch, "system": name, "sms": sms, "ahead": ahead, "hp_p50_us": a,
                "hp_p99_us": b, "hp_p50_ratio": a / p50, "hp_p99_ratio": b / p99, "be_share": rate / alone,
                "batch_us": be_us, "segments": len(bench.bounds),
            }
        )  # fmt: skip

    whole = bench.time_us(bench.wide[0])
    for ahead in (1, 2):
        note("all SMs, stream priorities", device.sm_count, ahead, [(wide, wide, *both)], whole)
        note("gate", 0, ahead, [(wide, wide, True, False)], whole)
    for wanted in track(SMS, description=beside.name, transient=True):
        sms, narrow, apart = bench.confine(wanted)
        took = bench.time_us(narrow[0])
        one, two = [(wide, narrow[0], *both)], [(wide, wide, True, False), (bench.wide[1], narrow[1], False, True)]
        note("high priority alone on the other SMs", sms, 1, [], took, apart)
        for ahead in (1, 2):
            note("gate, one job on some SMs", sms, ahead, one, took)
            note("gate, a second job on some SMs", sms, ahead, two, took)
            note("gate, one job on some SMs, apart", sms, ahead, one, took, apart)
            note("gate, a second job on some SMs, apart", sms, ahead, two, took, apart)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each run")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = need_gpu("green contexts are CUDA's")
    rows = []
    for kind, batch in ((Kind("resnet50"), 64), (Kind("vgg19"), 32)):
        rows += measure(device, kind, batch, args.seconds)
        path = save("best_effort_sms", rows, device, args.out)
        table = Table(title=f"resnet50 at batch 1 beside {kind.name} at batch {batch}", box=None)
        for column in ("best effort", "SMs", "ahead", "HP p50 ÷ alone", "p99 ÷ alone", "best effort ÷ alone"):
            table.add_column(column, justify="left" if column == "best effort" else "right")
        for r in (r for r in rows if r["beside"] == kind.name):
            figures = (f"{r[k]:.2f}" for k in ("hp_p50_ratio", "hp_p99_ratio", "be_share"))
            table.add_row(r["system"], str(r["sms"]), str(r["ahead"]), *figures)
        Console(width=120).print(table)
    print(path)


if __name__ == "__main__":
    main()
