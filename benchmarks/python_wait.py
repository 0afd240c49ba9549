"""What a Python user waits for a model beside the GPU's own time, and what an engine costs PyTorch's work on the CPU.

    python benchmarks/python_wait.py [--device cuda] [--rounds 2] [--quick]

One client asks in a row and after pauses. *Bare* has its inputs in pinned memory, copies them in, replays a CUDA graph,
copies the outputs out and spins on an event; *from NumPy* also copies from and to arrays, as an engine does. The engine
is asked by `infer_sync` and by `await infer`. The ways take turns in one run. `busy`: cores that the process used.

PyTorch's operations on the CPU run alone, beside an engine that is asked every 20 ms, and beside it with as many
threads as there are cores, which is PyTorch's default.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from harness import arguments, save, show, stored
from models import Kind
from numpy.typing import NDArray

import paellapy as pp
from paellapy.scheduler.core.processes import usable_cpus

PAUSES_MS = {0: 400, 2: 120, 10: 60, 50: 24, 200: 6}  # requests of each way in one round
AIMS = {"infer_sync": (1.08, 1.12), "await infer": (1.08, 1.12)}
Ask = Callable[[], object]


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Bare:
    """A graph of PyTorch's with copies from and to pinned memory."""

    def __init__(self, net: torch.nn.Module, x: NDArray[Any], channels_last: bool) -> None:
        with torch.no_grad():
            self._x, self._stream = x, torch.cuda.Stream()
            layout = torch.channels_last if channels_last else torch.contiguous_format
            net = net.cuda().to(torch.from_numpy(x).dtype).to(memory_format=layout)
            self._pinned = torch.from_numpy(x)[None].pin_memory()
            self._given = self._pinned.cuda()
            self._graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(3):
                    made = net(self._given.contiguous(memory_format=layout))
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=self._stream):
                made = net(self._given.contiguous(memory_format=layout))
            self._made, self._out = made, torch.empty_like(made, device="cpu").pin_memory()
            self._event, self._held = torch.cuda.Event(), net

    def ask(self) -> None:
        with torch.cuda.stream(self._stream):
            self._given.copy_(self._pinned, non_blocking=True)
            self._graph.replay()
            self._out.copy_(self._made, non_blocking=True)
            self._event.record()
        while not self._event.query():
            pass

    def from_numpy(self) -> NDArray[Any]:
        self._pinned.numpy()[0] = self._x
        self.ask()
        return self._out.numpy()[0].copy()


async def timed(ask: Callable[[], Awaitable[object]] | Ask, count: int, pause_s: float) -> tuple[list[float], float]:
    """Milliseconds of each request, and the CPU time ÷ time meanwhile."""
    found, wall, cpu = [], time.perf_counter(), time.process_time()
    for _ in range(count):
        if pause_s:
            time.sleep(pause_s)
        since = time.perf_counter()
        answer = ask()
        if isinstance(answer, Awaitable):
            await answer
        found.append((time.perf_counter() - since) * 1e3)
    return found, (time.process_time() - cpu) / (time.perf_counter() - wall)


def waits(o: argparse.Namespace) -> dict[str, Any]:
    """By model and pause: the median time of each way."""
    cnn = Kind("tiny1" if o.quick else "resnet18")
    nets = {
        "x * 2": (Double(), np.random.default_rng(0).standard_normal(75_000).astype(np.float32), False),
        cnn.name: (cnn.build("cpu"), cnn.inputs()[0], True),
    }
    real, found = o.device.startswith("cuda"), {}
    with pp.Engine(o.device) as engine:
        for name, (net, x, layout) in nets.items():
            half = torch.from_numpy(x).dtype
            engine.load(pp.Model.from_torch(net, torch.from_numpy(x)[None].float(), name=name, dtype=half, batch=(1,),
                                            channels_last=layout))  # fmt: skip
        for name, (net, x, layout) in nets.items():
            ways: dict[str, Any] = {}
            if real:
                bare = Bare(net, x, layout)
                ways = {"bare": bare.ask, "from NumPy": bare.from_numpy}
            (key,) = engine.core.models.find(name).model.inputs
            given = {key: x}
            if real:  # the same answer
                wrong = np.abs(next(iter(engine.infer_sync(name, given).values())) - bare.from_numpy()).max()
                assert wrong <= 0.02 * np.abs(bare.from_numpy()).max(), wrong
            ways["infer_sync"] = lambda name=name, given=given: engine.infer_sync(name, given)
            ways["await infer"] = lambda name=name, given=given: engine.infer(name, given)
            found[name] = asyncio.run(by_pause(ways, o))
    return found


async def by_pause(ways: dict[str, Any], o: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pause_ms, count in PAUSES_MS.items():
        ms: dict[str, list[float]] = {way: [] for way in ways}
        busy: dict[str, list[float]] = {way: [] for way in ways}
        for k in range(o.rounds):
            for way in list(ways)[:: 1 if k % 2 else -1]:
                await timed(ways[way], 3, pause_ms * 1e-3)  # so that the engine knows the pause
                took, used = await timed(ways[way], 4 if o.quick else count, pause_ms * 1e-3)
                ms[way] += took
                busy[way].append(used)
        found[str(pause_ms)] = {
            "p50_ms": {way: statistics.median(each) for way, each in ms.items()},
            "p99_ms": {way: float(np.quantile(each, 0.99)) for way, each in ms.items()},
            "busy": {way: statistics.mean(each) for way, each in busy.items()},
        }
        print(pause_ms, found[str(pause_ms)], flush=True)
    return found


def operations() -> dict[str, Ask]:
    """Some that PyTorch divides among threads: a millisecond alone, more or less."""
    a, b, out = torch.randn(1 << 22), torch.randn(1 << 22), torch.empty(1 << 22)
    left, right, product = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    net, images = torch.nn.Conv2d(3, 32, 3), torch.randn(4, 3, 224, 224)
    return {
        "a + b": lambda: torch.add(a, b, out=out), "sum": a.sum, "a @ b": lambda: torch.mm(left, right, out=product),
        "convolution": lambda: net(images),
    }  # fmt: skip


@torch.no_grad()
def host_threads(o: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of operations on the CPU: mean, median and 99 %."""
    ops, seconds = operations(), 0.1 if o.quick else 0.7
    found: dict[str, Any] = {name: {} for name in ops}
    threads = torch.get_num_threads()

    def measure(case: str) -> None:
        for name, op in ops.items():
            took, end = [], time.perf_counter() + seconds
            while time.perf_counter() < end:
                since = time.perf_counter()
                op()
                took.append((time.perf_counter() - since) * 1e3)
            found[name].setdefault(case, []).append(
                {"mean_ms": statistics.mean(took), "p50_ms": statistics.median(took),
                 "p99_ms": float(np.quantile(took, 0.99))}
            )  # fmt: skip

    measure("alone")  # once more afterwards: this one also warms up
    found = {name: {} for name in ops}
    for _ in range(o.rounds):
        torch.set_num_threads(threads)
        measure("alone")
        with pp.Engine(o.device) as engine:
            engine.load(pp.Model.from_torch(Double(), torch.zeros(1, 75_000), name="double", batch=(1,)))
            left = torch.get_num_threads()
            with asked(engine, "double", 0.02):
                measure("beside")
                torch.set_num_threads(threads)
                measure("beside, all threads")
    merged = {name: {case: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
                     for case, runs in cases.items()} for name, cases in found.items()}  # fmt: skip
    return {"cpus": usable_cpus(), "threads": threads, "threads_beside": left, "operations": merged}


@contextmanager
def asked(engine: pp.Engine, name: str, every_s: float) -> Iterator[None]:
    """Requests from another thread meanwhile."""
    ended, x = threading.Event(), np.zeros(75_000, np.float32)
    (key,) = engine.core.models.find(name).model.inputs

    def ask() -> None:
        while not ended.wait(every_s):
            engine.infer_sync(name, {key: x})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = arguments(__doc__, device="cuda", rounds=2, quick=True)
    parser.add_argument("--parts", nargs="+", default=["waits", "threads"], choices=["waits", "threads"])
    o = parser.parse_args()
    known = stored("python_wait", o.out)
    threads = host_threads(o) if "threads" in o.parts else known["host_threads"]
    rows = [(name, *(f"{by[case]['mean_ms']:.2f}" for case in by),
             *(f"{by[case]['mean_ms'] / by['alone']['mean_ms']:.2f}" for case in list(by)[1:]))
            for name, by in threads["operations"].items()]  # fmt: skip
    beside = ["operation", "alone, ms", "beside, ms", "all threads, ms", "beside ÷ alone", "all threads ÷ alone"]
    show(f"{threads['cpus']:g} CPUs", beside, rows)
    found = waits(o) if "waits" in o.parts else known["waits"]
    ways = list(next(iter(next(iter(found.values())).values()))["p50_ms"])
    table: list[Any] = [("model", "pause, ms", *ways, *(f"{way} ÷ bare" for way in ways[2:]), "cores busy")]
    for name, by_ms in found.items():
        for pause, each in by_ms.items():
            p50 = each["p50_ms"]
            ratios = [f"{p50[way] / p50['bare']:.2f}" if "bare" in p50 else "" for way in ways[2:]]
            table.append((name, pause, *(f"{p50[way]:.3f}" for way in ways), *ratios, f"{each['busy'][ways[-2]]:.2f}"))
    from paellapy.instrument.device import Device

    show("Milliseconds, p50", table[0], table[1:])
    save("python_wait", {"waits": found, "host_threads": threads}, Device.open(o.device), o.out,
         tables={"python-wait": table, "host-threads": [beside, *rows]})  # fmt: skip


if __name__ == "__main__":
    main()
