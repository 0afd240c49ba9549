"""More models than memory: Zipf-distributed requests to models of which a tenth fit, compared with common practice.

    python benchmarks/more_models.py                     # on a GPU: 40 of torchvision's models with random weights
    python benchmarks/more_models.py --device virtual:h200 --models 6 --seconds 3      # to try it

Each part is stored as soon as it is done; stored parts are measured again only with --again:

* link: the bandwidth of copies from pinned memory in this run;
* engine, load: every model is loaded;
* cold: one request at a time to evicted models: latency ÷ max(copy at the link's bandwidth, run);
* default, lru: Zipf arrivals, with victims chosen by the default and by least recent use: hit rates, latencies;
* beside: p99 of models that stay resident, asked by a compiled client, while cold models come and go, ÷ the same
  without cold models;
* to_cuda: `module.to("cuda")` for every cold request, keeping the weights of as many models by least recent use;
* processes: a process for each of some models, started before; a cold request moves its model to the GPU.

In all parts every output is compared with PyTorch's, and `wrong` is the number of outputs that differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as spawn
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from engine_load import Generator, poisson
from model_zoo import Zoo

import paellapy as pp
from paellapy.scheduler.core.state import Limits

RATE, SEED, ROUNDS = 60.0, 5, 4
TARGET_MS = 50.0  # about twice what the largest model takes to come


def percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 95, 99)) if values else (float("nan"),) * 3
    within = float(np.mean(np.array(values) <= TARGET_MS)) if values else float("nan")
    return dict(zip(("p50_ms", "p95_ms", "p99_ms"), map(float, found), strict=True)) | {
        "n": len(values), "within_target": within,
    }  # fmt: skip


def arrivals(names: list[str], rate: float, seconds: float, seed: int, s: float = 1.1) -> list[tuple[float, str]]:
    draw = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, len(names) + 1) ** s
    order = np.random.default_rng(0).permutation(len(names))  # which model is popular has nothing to do with its size
    times = np.cumsum(draw.exponential(1 / rate, int(rate * seconds)))
    picks = draw.choice(len(names), len(times), p=share / share.sum())
    return [(float(t), names[order[k]]) for t, k in zip(times, picks, strict=True)]


def play(load: list[tuple[float, str]], ask: Any, threads: int = 48) -> list[tuple[str, float, bool]]:
    """Requests at their times, whether or not others are answered; latency counts from the intended time."""
    begin = time.perf_counter() + 0.2

    def one(item: tuple[float, str]) -> tuple[str, float, bool]:
        right = ask(item[1])
        return item[1], (time.perf_counter() - begin - item[0]) * 1e3, right

    with ThreadPoolExecutor(threads) as pool:
        asked = []
        for item in load:
            wait = begin + item[0] - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            asked.append(pool.submit(one, item))
        return [each.result() for each in asked]


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.zoo = args, Zoo(args.models, args.device, args.half)
        self.names = list(self.zoo.modules)
        self.input = {"input": self.zoo.example[0].numpy()}
        self.budget = int(self.zoo.total_bytes * args.share)

    def engine(self, policy: str, room: float = 1.0) -> pp.Engine:
        instances = args_instances(self.args.device)
        memory = int(self.budget * room) + instances
        return pp.Engine(self.args.device, policy=policy, memory_bytes=memory, limits=Limits(fronts=2))

    def ask(self, engine: pp.Engine, name: str) -> bool:
        return self.zoo.right(name, next(iter(engine.infer_sync(name, self.input).values())))

    def ask_timed(self, engine: pp.Engine, name: str) -> tuple[float, bool]:
        """Milliseconds until the answer is there, and whether it is right."""
        since = time.perf_counter()
        found = engine.infer_sync(name, self.input)
        took = time.perf_counter() - since
        return took * 1e3, self.zoo.right(name, next(iter(found.values())))

    def link(self) -> dict[str, float]:
        if not self.zoo.cuda:
            return {"gbps": 64.0 * 0.8}
        torch = self.zoo.torch
        host, there = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 29, dtype=torch.uint8,
                                                                                             device="cuda")  # fmt: skip
        took = []
        for _ in range(5):
            torch.cuda.synchronize()
            since = time.perf_counter()
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - since)
        return {"gbps": (1 << 29) / float(np.median(took)) / 1e9}

    def with_models(self, policy: str, **about: Any) -> tuple[pp.Engine, dict[str, Any]]:
        engine = self.engine(policy)
        for name in self.names:
            self.zoo.answer(name)  # before anybody measures
        since = time.perf_counter()
        for name in self.names:
            engine.load(self.zoo.model(name, instances=1, **about))
        return engine, {"models": len(self.names), "weights_bytes": self.zoo.total_bytes, "budget_bytes": self.budget,
                        "load_s": time.perf_counter() - since, "memory": brief(engine.memory())}  # fmt: skip

    def cold(self, engine: pp.Engine, gbps: float) -> dict[str, Any]:
        rows, right = [], []
        for name in self.names[: self.args.cold]:
            right.append(self.ask(engine, name))
            asked = [self.ask_timed(engine, name) for _ in range(5)]
            warm = min(ms for ms, _ in asked)
            engine.evict(name)
            before = engine.memory()["models"][name]["reload_s"]
            took, last = self.ask_timed(engine, name)
            right += [each for _, each in asked] + [last]
            reload_s = engine.memory()["models"][name]["reload_s"] - before
            copy = self.zoo.nbytes(name) / gbps / 1e6
            rows.append({"model": name, "mb": self.zoo.nbytes(name) / 1e6, "cold_ms": took, "warm_ms": warm,
                         "copy_ms": copy,
                         "starts_with_mb": engine.memory()["models"][name]["starts_with_bytes"] / 1e6,
                         "reload_ms": reload_s * 1e3, "of_bound": took / max(copy, warm),
                         "of_link": copy / (reload_s * 1e3), **timeline(engine, name)})  # fmt: skip
        return {"rows": rows, "wrong": right.count(False), "latency": percentiles([r["cold_ms"] for r in rows]),
                "of_bound": float(np.median([r["of_bound"] for r in rows])),
                "of_link": float(np.median([r["of_link"] for r in rows]))}  # fmt: skip

    def steady(self, engine: pp.Engine) -> dict[str, Any]:
        before = engine.memory()
        load = arrivals(self.names, self.args.rate, self.args.seconds, SEED)
        found = play(load, lambda name: self.ask(engine, name))
        after = engine.memory()
        hits, misses = (sum(after["models"][n][what] - before["models"][n][what] for n in self.names)
                        for what in ("hits", "misses"))  # fmt: skip
        return {"requests": len(found), "wrong": sum(not right for _, _, right in found),
                "hit_rate": hits / max(1, hits + misses), "evicted": after["evicted"] - before["evicted"],
                "reload_s": after["reload_s"] - before["reload_s"],
                "brought_gb": (after["brought_bytes"] - before["brought_bytes"]) / 1e9,
                **percentiles([ms for _, ms, _ in found])}  # fmt: skip

    def beside(self, engine: pp.Engine) -> dict[str, Any]:
        """Two models that stay, at a fixed rate: alone and with the others coming and going, in turn, with the same
        arrivals.
        """
        stay = sorted(self.names, key=self.zoo.nbytes)[:2]
        others = [name for name in self.names if name not in stay]
        found: dict[str, Any] = {"stay": stay}
        for name in stay:
            engine.unload(name)
        for name in stay:
            engine.load(self.zoo.model(name, instances=2, resident=True, priority=1))
        engine.set_policy("priority")
        client = Generator(engine, stay, [self.zoo.example.numpy()] * 2, front=1)
        seconds, evicted = self.args.seconds / ROUNDS, engine.memory()["evicted"]
        latencies: dict[str, list[list[float]]] = {"alone": [], "beside": []}
        wrong = 0
        for k in range(ROUNDS):
            for what, each in latencies.items():
                with ThreadPoolExecutor(1) as pool:
                    load = arrivals(others, self.args.rate / 4, seconds, SEED + 1 + k) if what == "beside" else []
                    coming = pool.submit(play, load, lambda name: self.ask(engine, name))
                    ms, differ = self._stayed(client, stay, seconds, SEED + k)
                    each.append(ms)
                    wrong += differ + sum(not right for _, _, right in coming.result())
        for what, each in latencies.items():
            found[what] = percentiles([ms for part in each for ms in part])
            found[what]["rounds_p99_ms"] = [float(np.percentile(part, 99)) for part in each]
        found |= {"wrong": wrong, "evicted": engine.memory()["evicted"] - evicted}
        found["p99_ratio"] = found["beside"]["p99_ms"] / found["alone"]["p99_ms"]
        return found

    def _stayed(self, client: Generator, stay: list[str], seconds: float, seed: int) -> tuple[list[float], int]:
        """Latencies in ms, and the number of wrong outputs."""
        draw = np.random.default_rng(seed)
        rate = 2 * self.args.rate
        n = max(20, int(rate * seconds))
        model = draw.integers(0, len(stay), n)
        run = client.run(poisson(draw, rate, n), model, np.zeros(n, np.int64), priority=[1, 1])
        outputs = run.outputs.view(self.zoo.example.numpy().dtype)
        wrong = sum(not self.zoo.right(stay[m], outputs[k, : outputs.shape[1]]) for k, m in enumerate(model.tolist()))
        return (run.latency_ns * 1e-6).tolist(), wrong

    def to_cuda(self) -> dict[str, Any]:
        """What people do now: modules kept on the GPU up to the budget, moved by `.to` when they are asked for."""
        torch, kept, held = self.zoo.torch, OrderedDict[str, int](), 0
        where = "cuda" if self.zoo.cuda else "cpu"
        x, cold = self.zoo.example.to(where), []

        def ask(name: str) -> bool:
            nonlocal held
            missing = name not in kept
            since = time.perf_counter()
            if missing:
                while kept and held + self.zoo.nbytes(name) > self.budget:
                    old, n = kept.popitem(last=False)
                    self.zoo.modules[old].cpu()
                    held -= n
                self.zoo.modules[name].to(where)
                kept[name] = self.zoo.nbytes(name)
                held += kept[name]
            kept.move_to_end(name)
            with torch.no_grad():
                found = self.zoo.modules[name](x)[0].float().cpu().numpy()
            if missing:
                cold.append((time.perf_counter() - since) * 1e3)
            return self.zoo.right(name, found)

        for name in self.names:
            self.zoo.answer(name)
            self.zoo.modules[name].cpu()
        load = arrivals(self.names, self.args.rate, self.args.seconds / 2, SEED)
        found = play(load, ask, threads=1)
        return {"requests": len(found), "wrong": sum(not right for _, _, right in found),
                "hit_rate": 1 - len(cold) / len(found), "cold": percentiles(cold),
                **percentiles([ms for _, ms, _ in found])}  # fmt: skip

    def processes(self) -> dict[str, Any]:
        """One process per model, all of them there; their weights come from the process's own memory."""
        count = min(self.args.processes, len(self.names))
        made = spawn.get_context("spawn")
        lines, children, cold, right = [], [], [], []
        for k in range(count):
            ours, theirs = made.Pipe()
            child = made.Process(target=serve_one, args=(theirs, k, self.args.device, self.args.half), daemon=True)
            child.start()
            lines.append(ours)
            children.append(child)
        try:
            for line in lines:
                line.recv()
            for _ in range(3):
                for k, line in enumerate(lines):
                    since = time.perf_counter()
                    line.send("run")
                    found = line.recv()
                    cold.append((time.perf_counter() - since) * 1e3)
                    right.append(self.zoo.right(f"m{k}", found))
                    line.send("leave")
                    line.recv()
        finally:
            for child in children:
                child.kill()
                child.join()
        # each once before: what it loads, it loads then
        return {"processes": count, "wrong": right.count(False), "cold": percentiles(cold[count:])}


def serve_one(line: Any, k: int, device: str, half: bool) -> None:
    """A process with one model: its weights are on the GPU from a request until it is told to let them go."""
    zoo = Zoo(1, device, half, first=k)
    where = "cuda" if zoo.cuda else "cpu"
    (module,) = zoo.modules.values()
    module.cpu()
    x = zoo.example.to(where)
    line.send("ready")
    with zoo.torch.no_grad():
        while True:
            if line.recv() == "run":
                module.to(where)
                line.send(module(x)[0].float().cpu().numpy())
            else:
                module.cpu()
                line.send("left")


def timeline(engine: pp.Engine, name: str) -> dict[str, Any]:
    """Of the model's latest request, in ms from the order to bring its weights: segments, and what each needs."""
    (row, loaded), *_ = [item for item in engine.loaded_rows().items() if item[1].model.name == name]
    s, instance = engine.state, loaded.instance_rows[0]
    n, w = int(s.size["segments"][row, 0]), s.weights[row]
    ms = (s.segment_ns[instance, :n].astype(np.float64) - float(w["ordered_ns"])) * 1e-6
    return {"all_there_ms": (float(w["came_ns"]) - float(w["ordered_ns"])) * 1e-6,
            "needs_chunks": s.segment["chunks"][row, 0, :n].tolist(),
            "segments_ms": [[round(float(each), 3) for each in pair] for pair in ms]}  # fmt: skip


def args_instances(device: str) -> int:
    """Room for instances beside the weights: forty models took 646 MB on an H200. With more, weights would get the
    rest.
    """
    return 4 << 20 if device.startswith("virtual") else 646_000_000


def brief(account: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in account.items() if key != "models"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.1, help="part of all weights that fits")
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cold", type=int, default=40, help="models whose cold requests are timed singly")
    parser.add_argument("--half", action="store_true", help="use 16-bit weights")
    parser.add_argument("--parts", default="link,engine,to_cuda,processes")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    path = args.out / "more_models.json"
    results = json.loads(path.read_text())["results"] if path.is_file() and not args.again else {}
    run = Run(args)
    device = pp.Device(args.device)

    def keep(name: str, found: Any) -> None:
        results[name] = found
        save("more_models", results, device, args.out)
        print(name, json.dumps({k: v for k, v in found.items() if k != "rows"}), flush=True)

    for part in args.parts.split(","):
        if part in results:
            continue
        if part == "link":
            keep("link", run.link())
        elif part == "to_cuda":
            keep("to_cuda", run.to_cuda())
        elif part == "processes":
            keep("processes", run.processes())
        elif part == "engine":
            engine, about = run.with_models("paella")
            with engine:
                keep("load", about)
                keep("cold", run.cold(engine, results["link"]["gbps"]))
                keep("default", run.steady(engine))
                engine.set_policy("lru")
                keep("lru", run.steady(engine))
                keep("beside", run.beside(engine))
            keep("engine", {"done": True})
        else:
            raise SystemExit(f"no part {part!r}: there are link, engine, to_cuda, processes")


if __name__ == "__main__":
    main()
