"""Models that come and go at random for a long time: answers must be right, and no memory may leak.

    python benchmarks/memory_operations.py                                      # 1,000 operations on a GPU
    python benchmarks/memory_operations.py --device virtual:h200 --operations 10000

Ten models of Triton kernels run in a budget for three. An operation is a request, an eviction, a prefetch, or unloading
a model and loading it again, in the same or another size; two more clients send requests all the time. Every answer is
compared with NumPy's. At the end everything is unloaded; memory that is still held has leaked.

`readings` says step by step what holds memory: the GPU's free bytes (of all processes), the engine's account, PyTorch's
reserved bytes, and the objects that this process holds from the driver. Growth that ends after the first readings is
the driver's own, made at first use; growth that goes on is a leak, and the count that grows with it names the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from driver_tally import Tally

import paellapy as pp
from paellapy.demo.kernels import linear
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.core.check import check_at_rest

WIDTH, MODELS, FIT = 64, 10, 3
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
READINGS = 20  # while the operations run


def chain(name: str, seed: int, layers: int) -> tuple[pp.Model, list[Any]]:
    """x · W + b, again and again."""
    draw = np.random.default_rng(seed)
    made = [(draw.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for _ in range(layers)]
    weights = {f"w{k}": each for k, each in enumerate(made)}
    weights |= {f"b{k}": np.zeros(WIDTH, np.float32) for k in range(layers)}

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        source = inputs["x"]
        for k in range(layers):
            target = outputs["y"] if k == layers - 1 else pp.empty((1, WIDTH))
            call(source, weights[f"w{k}"], weights[f"b{k}"], target)
            source = target

    specs = {"inputs": {"x": pp.TensorSpec((WIDTH,))}, "outputs": {"y": pp.TensorSpec((WIDTH,))}}
    return pp.Model(name, fn, weights=weights, batch=(1,), instances=1, **specs), made


def call(source: Any, weight: Any, bias: Any, target: Any) -> None:
    linear[(1, WIDTH // 16)](source, weight, bias, None, target, 1, WIDTH, WIDTH, "", BM=16, BN=16, BK=32)


class Play:
    """One engine and the operations on it."""

    def __init__(self, engine: pp.Engine, seed: int) -> None:
        self.engine, self.pick = engine, random.Random(seed)
        self.made: dict[str, list[Any]] = {}
        self.locks = {f"m{k}": threading.Lock() for k in range(MODELS)}  # nobody asks for a model that is unloaded
        self.counts = dict.fromkeys(("ask", "evict", "prefetch", "reload"), 0)
        self.wrong = 0
        for name in self.locks:
            self.load(name, 4)

    def load(self, name: str, layers: int) -> None:
        model, self.made[name] = chain(name, self.pick.randrange(1 << 20), layers)
        self.engine.load(model)

    def ask(self, name: str, seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
        with self.locks[name]:
            found = self.engine.infer_sync(name, {"x": x})["y"]
            for each in self.made[name]:
                x = x @ each
        self.wrong += not np.allclose(found, x, rtol=3e-2, atol=3e-2)

    def one(self) -> None:
        pick = self.pick
        name = f"m{pick.randrange(MODELS)}"
        what = pick.choices(list(self.counts), (6, 2, 2, 1))[0]
        self.counts[what] += 1
        if what == "ask":
            self.ask(name, pick.randrange(1000))
        elif what == "reload":
            with self.locks[name]:
                self.engine.unload(name)
                self.load(name, pick.randrange(1, 7))
        else:
            getattr(self.engine, what)(name)


def held(engine: pp.Engine) -> dict[str, int]:
    residents = engine._residents
    assert residents is not None
    store = residents.store
    return {
        "engine": engine.memory.held_bytes, "host": store.held_bytes, "files": store.file_bytes,
        "claims": sum(residents.budget.taken.values()), "rows": len(engine.loaded_rows()),
    }  # fmt: skip


def launches(engine: pp.Engine) -> int:
    """Segments and whole programs that can be launched: on a GPU, executable graphs."""
    made = [each for loaded in engine.loaded_rows().values() for instance in loaded.launches for each in instance]
    return sum(len(each.handles) + 1 for each in made)


def free_bytes(device: Any) -> int | None:
    """Free bytes of the GPU, which other processes may use too."""
    if not isinstance(device, CudaDevice):
        return None
    device.activate()
    return int(check(driver().cuMemGetInfo(), "reading the GPU's memory")[0])


class Readings:
    """What holds memory, at one moment after the other."""

    def __init__(self, device: Any, tally: Tally | None) -> None:
        self.device, self.tally, self.all = device, tally, list[dict[str, Any]]()

    def add(self, when: str, engine: pp.Engine | None) -> int | None:
        """Returns the GPU's free bytes."""
        torch: Any = sys.modules.get("torch")
        with_torch = torch is not None and torch.cuda.is_initialized()
        free = free_bytes(self.device)
        found: dict[str, Any] = {"when": when, "gpu_free": free}
        if engine is not None:
            pages = getattr(engine._backend, "_pages", None)
            found["account"] = held(engine) | {"launches": launches(engine)}
            if pages is not None:
                found["account"] |= {"weights_mapped": pages.used_bytes, "weights_kept": pages.kept_bytes}
        found["torch_reserved"] = int(torch.cuda.memory_reserved()) if with_torch else None
        if self.tally is not None:
            found["driver"], found["not_freed"] = self.tally.live(), dict(self.tally.failed)
        self.all.append(found)
        return free


def play(engine: pp.Engine, args: argparse.Namespace, readings: Readings) -> dict[str, Any]:
    readings.add("engine", engine)
    game, over = Play(engine, args.seed), threading.Event()
    gpu_before = readings.add("loaded", engine)

    def client(seed: int) -> int:
        pick, n = random.Random(seed), 0
        while not over.is_set():
            game.ask(f"m{pick.randrange(MODELS)}", pick.randrange(1000))
            n += 1
        return n

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client, seed) for seed in range(2)]
        try:
            for k in range(1, args.operations + 1):
                game.one()
                if k % max(1, args.operations // READINGS) == 0:
                    readings.add(f"{k} operations", engine)
        finally:
            over.set()
        requests = sum(each.result() for each in asked)
    check_at_rest(engine.state)
    gpu_after, account = readings.add("at rest", engine), engine.memory()
    for name in game.locks:
        engine.unload(name)
    readings.add("unloaded", engine)
    return {
        "operations": sum(game.counts.values()), **game.counts, "requests_beside": requests, "wrong": game.wrong,
        "evicted": account["evicted"], "brought": account["brought"], "failed": account["failed"],
        "seconds": round(time.perf_counter() - began, 1), "held_in_the_end": held(engine),
        "gpu_free_before": gpu_before, "gpu_free_after": gpu_after,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    virtual = args.device.startswith("virtual")
    page = 2 * LAYER_BYTES if virtual else 2 << 20  # a real GPU maps 2 MiB at least
    room = FIT * max(page, 6 * LAYER_BYTES) + ((1 << 17) if virtual else (2 << 20))  # and instances
    tuning = {"chunk_bytes": page}
    device = pp.Device(args.device)
    tally = None if virtual else Tally()
    readings = Readings(device, tally)
    readings.add("device", None)
    with tally or contextlib.nullcontext():
        with pp.Engine(device, memory_bytes=room, quantum_us=2, tuning=tuning) as engine:
            results = play(engine, args, readings)
        readings.add("closed", None)
    results["readings"] = readings.all
    save("memory_operations_virtual" if virtual else "memory_operations", results, device, args.out)
    print({key: value for key, value in results.items() if key != "readings"})
    for each in readings.all:
        print(each)
    if results["wrong"] or any(results["held_in_the_end"].values()):
        raise SystemExit("wrong answers, or something leaked")


if __name__ == "__main__":
    main()
