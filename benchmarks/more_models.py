"""More models than memory: Zipf-distributed requests to models of which a tenth fit, compared with common practice.

    python benchmarks/more_models.py [--device virtual:h200 --quick] [--parts link,engine,to_cuda,processes]

Requests come at their times, whether or not others are answered. Every output is compared with PyTorch's. `to_cuda`
keeps modules on the GPU up to the same budget and moves them by `.to`; `processes` has a process for each model.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from engine_load import Generator, poisson
from harness import arguments, save, show, stored

import paellapy as pp
from paellapy.scheduler.core.state import Limits

KINDS = ("vit_l_16", "vgg16", "convnext_large", "vgg11", "vit_b_16", "convnext_base")
TARGET_MS = 50.0
SEED, ROUNDS = 5, 4
INSTANCES_BYTES = 646_000_000  # of forty models on an H200: room beside the weights


def drawn(torch: Any, module: Any) -> Any:
    """Draws parameters that are zero or nearly zero at first: torchvision gives vision transformers a head of zeros,
    and scales the blocks of ConvNeXt by 1e-6, so that their weights would hardly matter.
    """
    with torch.no_grad():
        for each in module.parameters():
            if float(each.abs().max()) < 1e-4:
                each.normal_(0.0, 0.05)
    return module.eval()


class Zoo:
    """Models with weights of their own, and what each answers."""

    def __init__(self, count: int, device: str, first: int = 0) -> None:
        import torch

        self.torch, self.where = torch, "cuda" if device.startswith("cuda") else "cpu"
        self.modules: dict[str, Any] = {}
        for k in range(first, first + count):
            torch.manual_seed(k)
            self.modules[f"m{k}"] = self._module(k)
        torch.manual_seed(0)
        self.example = torch.randn(1, 3, 224, 224) if self.where == "cuda" else torch.randn(1, 64)
        self.expected: dict[str, Any] = {}

    def _module(self, k: int) -> Any:
        torch = self.torch
        if self.where == "cpu":
            return drawn(torch, torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
        import torchvision

        with torch.device("cuda"):  # there weights are drawn and answers computed in a hundredth of the time
            return drawn(torch, getattr(torchvision.models, KINDS[k % len(KINDS)])(weights=None))

    def nbytes(self, name: str) -> int:
        return sum(t.numel() * t.element_size() for t in self.modules[name].state_dict().values())

    def run(self, name: str) -> Any:
        with self.torch.no_grad():
            return self.modules[name](self.example.to(self.where))[0].float().cpu().numpy()

    def right(self, name: str, found: Any) -> bool:
        """Whether an output is PyTorch's, to within 2 % of the largest value. Another model's output is not."""
        if name not in self.expected:
            self.expected[name] = self.run(name)
        want = self.expected[name]
        return bool(np.abs(found.astype(np.float32) - want).max() <= 0.02 * float(np.abs(want).max()))


def arrivals(names: list[str], rate: float, seconds: float, seed: int) -> list[tuple[float, str]]:
    """Times and models, by Zipf's law: the k-th most popular model gets about 1/k of the requests of the first."""
    draw = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, len(names) + 1) ** 1.1
    order = np.random.default_rng(0).permutation(len(names))  # which model is popular has nothing to do with its size
    times = np.cumsum(draw.exponential(1 / rate, max(4, int(rate * seconds))))
    picks = draw.choice(len(names), len(times), p=share / share.sum())
    return [(float(t), names[order[k]]) for t, k in zip(times, picks, strict=True)]


def play(load: list[tuple[float, str]], ask: Any, threads: int = 48) -> tuple[list[float], int]:
    """Requests at their times: milliseconds from the intended time, and the number of wrong outputs."""
    begin = time.perf_counter() + 0.2

    def one(item: tuple[float, str]) -> tuple[float, bool]:
        right = ask(item[1])
        return (time.perf_counter() - begin - item[0]) * 1e3, right

    with ThreadPoolExecutor(threads) as pool:
        asked = []
        for item in load:
            time.sleep(max(0.0, begin + item[0] - time.perf_counter()))
            asked.append(pool.submit(one, item))
        found = [each.result() for each in asked]
    return [ms for ms, _ in found], sum(not right for _, right in found)


def percentiles(ms: list[float]) -> dict[str, float]:
    return {
        "p50_ms": float(np.percentile(ms, 50)), "p99_ms": float(np.percentile(ms, 99)), "n": len(ms),
        "within_target": float(np.mean(np.array(ms) <= TARGET_MS)),
    }  # fmt: skip


class Run:
    def __init__(self, o: Any) -> None:
        self.o, self.zoo = o, Zoo(o.models, o.device)
        self.names = list(self.zoo.modules)
        self.budget = int(sum(map(self.zoo.nbytes, self.names)) * o.share)

    def ask(self, engine: pp.Engine, name: str) -> tuple[float, bool]:
        since = time.perf_counter()
        found = engine.infer_sync(name, {"input": self.zoo.example[0].numpy()})
        return (time.perf_counter() - since) * 1e3, self.zoo.right(name, next(iter(found.values())))

    def load(self, engine: pp.Engine, name: str, **about: Any) -> None:
        module, example = self.zoo.modules[name], self.zoo.example
        engine.load(pp.Model.from_torch(module, example, name=name, batch=(1,), **about))

    def link(self) -> dict[str, float]:
        """The speed of copies to the GPU, in GB/s."""
        torch, size = self.zoo.torch, 1 << 29
        if self.zoo.where == "cpu":
            return {"gbps": 64.0 * 0.8}
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
        took = []
        for _ in range(5):
            torch.cuda.synchronize()
            since = time.perf_counter()
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - since)
        return {"gbps": size / statistics.median(took) / 1e9}

    def engine(self, results: dict[str, Any]) -> None:
        """Loading, cold requests one at a time, a steady load under two rules, and models that stay beside others."""
        memory = self.budget + (4 << 20 if self.zoo.where == "cpu" else INSTANCES_BYTES)
        with pp.Engine(self.o.device, memory_bytes=memory, limits=Limits(producers=2)) as engine:
            for name in self.names:
                self.zoo.right(name, self.zoo.run(name))  # before anybody measures
            since = time.perf_counter()
            for name in self.names:
                self.load(engine, name, instances=1)
            weights = sum(map(self.zoo.nbytes, self.names))
            results["load"] = {"models": len(self.names), "weights_bytes": weights, "budget_bytes": self.budget,
                               "load_s": time.perf_counter() - since}  # fmt: skip
            results["cold"] = self.cold(engine, results["link"]["gbps"])
            results["default"] = self.steady(engine)
            engine.set_policy("lru")
            results["lru"] = self.steady(engine)
            results["beside"] = self.beside(engine)

    def cold(self, engine: pp.Engine, gbps: float) -> dict[str, Any]:
        rows: dict[str, list[float]] = {"cold_ms": [], "warm_ms": [], "copy_ms": [], "of_bound": [], "of_link": []}
        right = []
        for name in self.names[: self.o.cold]:
            asked = [self.ask(engine, name) for _ in range(6)]
            warm = min(ms for ms, _ in asked[1:])
            engine.evict(name)
            before = engine.memory()["models"][name]["reload_s"]
            asked.append(self.ask(engine, name))
            reload_s = engine.memory()["models"][name]["reload_s"] - before
            took, copy = asked[-1][0], self.zoo.nbytes(name) / gbps / 1e6
            for key, value in zip(
                rows, (took, warm, copy, took / max(copy, warm), copy / (reload_s * 1e3)), strict=True
            ):
                rows[key].append(value)
            right += [each for _, each in asked]
        medians = {key: statistics.median(rows[key]) for key in ("of_bound", "of_link")}
        return {"rows": rows, "wrong": right.count(False), "latency": percentiles(rows["cold_ms"]), **medians}

    def steady(self, engine: pp.Engine) -> dict[str, Any]:
        before = engine.memory()
        load = arrivals(self.names, self.o.rate, self.o.seconds, SEED)
        ms, wrong = play(load, lambda name: self.ask(engine, name)[1])
        after = engine.memory()
        hits, misses = (sum(after["models"][n][what] - before["models"][n][what] for n in self.names)
                        for what in ("hits", "misses"))  # fmt: skip
        return {"requests": len(ms), "wrong": wrong, "hit_rate": hits / max(1, hits + misses), **percentiles(ms),
                "evicted": after["evicted"] - before["evicted"]}  # fmt: skip

    def beside(self, engine: pp.Engine) -> dict[str, Any]:
        """Two models that stay, at a fixed rate: alone and with the others coming and going, in turn, with the same
        arrivals.
        """
        stay = sorted(self.names, key=self.zoo.nbytes)[:2]
        others = [name for name in self.names if name not in stay]
        for name in stay:
            engine.unload(name)
        for name in stay:
            self.load(engine, name, instances=2, resident=True, priority=1)
        engine.set_policy("priority")
        client = Generator(engine, stay, [self.zoo.example.numpy()] * 2, producer=1)
        seconds, wrong = self.o.seconds / ROUNDS, 0
        latencies: dict[str, list[float]] = {"alone": [], "beside": []}
        for k in range(ROUNDS):
            draw = np.random.default_rng(SEED + k)
            n = max(20, int(2 * self.o.rate * seconds))
            model, at = draw.integers(0, len(stay), n), poisson(draw, 2 * self.o.rate, n)
            for what, each in latencies.items():
                with ThreadPoolExecutor(1) as pool:
                    load = arrivals(others, self.o.rate / 4, seconds, SEED + 1 + k) if what == "beside" else []
                    coming = pool.submit(play, load, lambda name: self.ask(engine, name)[1])
                    run = client.run(at, model, np.zeros(n, np.int64), priority=[1, 1])
                    each += (run.latency_ns * 1e-6).tolist()
                    outputs = run.outputs.view(np.float32)
                    wrong += coming.result()[1]
                wrong += sum(not self.zoo.right(stay[m], outputs[i, : len(self.zoo.expected[stay[m]])])
                             for i, m in enumerate(model.tolist()))  # fmt: skip
        found = {what: percentiles(each) for what, each in latencies.items()}
        return {**found, "wrong": wrong, "p99_ratio": found["beside"]["p99_ms"] / found["alone"]["p99_ms"]}

    def to_cuda(self) -> dict[str, Any]:
        """Common practice in one process: modules kept on the GPU up to the budget, moved by `.to` when asked for."""
        kept, cold = OrderedDict[str, int](), []

        def ask(name: str) -> bool:
            missing, since = name not in kept, time.perf_counter()
            if missing:
                while kept and sum(kept.values()) + self.zoo.nbytes(name) > self.budget:
                    self.zoo.modules[kept.popitem(last=False)[0]].cpu()
                self.zoo.modules[name].to(self.zoo.where)
                kept[name] = self.zoo.nbytes(name)
            kept.move_to_end(name)
            found = self.zoo.run(name)
            if missing:
                cold.append((time.perf_counter() - since) * 1e3)
            return self.zoo.right(name, found)

        for name in self.names:
            self.zoo.right(name, self.zoo.run(name))
            self.zoo.modules[name].cpu()
        ms, wrong = play(arrivals(self.names, self.o.rate, self.o.seconds / 2, SEED), ask, threads=1)
        return {"requests": len(ms), "wrong": wrong, "cold": percentiles(cold), **percentiles(ms)}

    def processes(self) -> dict[str, Any]:
        """One process per model, all of them there; their weights come from the process's own memory."""
        made, cold, wrong = multiprocessing.get_context("spawn"), [], 0
        lines, children = [], []
        for k in range(min(self.o.processes, len(self.names))):
            ours, theirs = made.Pipe()
            children.append(made.Process(target=serve_one, args=(theirs, k, self.o.device), daemon=True))
            children[-1].start()
            lines.append(ours)
        try:
            for line in lines:
                line.recv()
            for turn in range(3):
                for k, line in enumerate(lines):
                    since = time.perf_counter()
                    line.send("run")
                    found = line.recv()
                    if turn:  # what a process loads at its first request, it loads once
                        cold.append((time.perf_counter() - since) * 1e3)
                    wrong += not self.zoo.right(f"m{k}", found)
                    line.send("leave")
                    line.recv()
        finally:
            for child in children:
                child.kill()
                child.join()
        return {"processes": len(lines), "wrong": wrong, "cold": percentiles(cold)}


def serve_one(line: Any, k: int, device: str) -> None:
    """A process with one model: its weights are on the GPU from a request until it is told to let them go."""
    zoo = Zoo(1, device, first=k)
    ((name, module),) = zoo.modules.items()
    module.cpu()
    line.send("ready")
    while True:
        if line.recv() == "run":
            module.to(zoo.where)
            line.send(zoo.run(name))
        else:
            module.cpu()
            line.send("left")


def quoted(found: dict[str, Any]) -> dict[str, Any]:
    if not {"load", "beside", "to_cuda", "processes"} <= found.keys():
        return {}
    part, cold, default, lru = (found[each] for each in ("load", "cold", "default", "lru"))
    bound = cold["rows"]["of_bound"]
    ways = {"paellapy": cold["latency"], '`module.to("cuda")`': found["to_cuda"]["cold"],
            "a process for each model": found["processes"]["cold"]}  # fmt: skip
    sizes = f"{part['models']}, {part['weights_bytes'] / 1e9:.1f} GB; {part['budget_bytes'] / 1e9:.1f} GB"
    bounds = ", ".join(f"{value:.2f}" for value in (cold["of_bound"], min(bound), max(bound)))
    p99 = found["beside"]["beside"]["p99_ms"] / found["beside"]["alone"]["p99_ms"]
    rows = [
        ["figure", "value"],
        ["models, their weights; memory for weights", sizes],
        [f"reload, part of the link's {found['link']['gbps']:.0f} GB/s (aim ≥ 0.85), median", f"{cold['of_link']:.2f}"],
        ["cold request ÷ the longer of copy and run (aim ≤ 1.2): median, least, most", bounds],
        ["requests that find their weights on the GPU: default, `lru`",
         f"{default['hit_rate']:.2f}, {lru['hit_rate']:.2f}"],
        ["p99 of all requests: default, `lru`", f"{default['p99_ms']:.1f} ms, {lru['p99_ms']:.1f} ms"],
        *([f"{q} of cold requests: {', '.join(ways)}", ", ".join(f"{each[f'{q}_ms']:.0f} ms" for each in ways.values())]
          for q in ("p50", "p99")),
        ["cold requests within their target, in that order",
         ", ".join(f"{each['within_target']:.2f}" for each in ways.values())],
        ["p99 of two models that stay, while others come and go ÷ alone (aim ≤ 1.10)", f"{p99:.2f}"],
    ]  # fmt: skip
    counts = {"requests": default["requests"], "processes": found["processes"]["processes"]}
    return {"tables": {"more-models": rows}, "figures": {f"memory.{name}": str(n) for name, n in counts.items()}}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seconds=8.0)
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.1, help="part of all weights that fits")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--cold", type=int, default=40, help="models whose cold requests are timed singly")
    parser.add_argument("--parts", default="link,engine,to_cuda,processes")
    parser.add_argument("--processes", type=int, default=6)
    o = parser.parse_args()
    if o.quick:
        o.models, o.share, o.seconds, o.cold, o.processes = 4, 0.5, 0.5, 2, 2
    run, results = Run(o), stored("more_models", o.out)
    for part in o.parts.split(","):
        if part == "engine":
            run.engine(results)
        else:
            results[part] = {"link": run.link, "to_cuda": run.to_cuda, "processes": run.processes}[part]()
        save("more_models", results, pp.Device(o.device), o.out, **quoted(results))
    wrong = {name: each["wrong"] for name, each in results.items() if "wrong" in each}
    show("more models than memory", *(lambda head, *rows: (head, rows))(*quoted(results)["tables"]["more-models"]))
    print(f"wrong outputs: {wrong}")


if __name__ == "__main__":
    main()
