"""The engine against CUDA streams, in one run: latency at light load, p99 slowdown in a mix, saturation throughput.

    python benchmarks/engine_h200.py [--device cuda|virtual:h200] [--quick] [--seeds 3] [--out DIR]

The four models consist of Triton kernels and take about 0.3, 0.6, 1.2 and 3 ms alone (like torchvision's CNNs at batch
1). They are requested in inverse proportion to their length, with lognormal gaps (σ = 1.5, as in Paella). `streams`
launches whole graphs on a stream for every job with CUDA's default of 8 hardware queues; `streams, 32 queues` uses the
maximum. CUDA reads the number when a process first uses the GPU, so `streams` runs in its own process. Every output is
compared with that of the same function run without the engine. On a virtual GPU the host computes the data, so the
times mean nothing there; it only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from common import save
from engine_load import Generator, Run, lognormal_gaps
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import paellapy as pp
from paellapy.instrument.device import CudaDevice
from paellapy.instrument.env import CONNECTIONS as QUEUES
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.scheduler.policies.policy import Policy, find_policy

OUTPUT = 64
INPUTS = 4  # different inputs per model
PROBE_LAYERS = 16
SIGMA = 1.5
FRACTIONS = (0.6, 0.8, 0.95)
ACTIVE = (6, 12, 24, 48)  # jobs at once, in place of what they demand
TARGETS = {"light": 1.02, "p99": 0.5, "saturation": 1.0, "batching": 1.8}


@pp.kernel(report=None)
@triton.jit
def layer(x, first, w, out, rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out = (first + sin(x w)) / 2, `first` being the model's input.

    However many follow each other, the result depends on the input and forgets rounding: a contraction. So outputs may
    be compared between batch sizes, whose tiles add up in another order.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, N, BK):
        depth = k + tl.arange(0, BK)
        total += tl.dot(tl.load(x + m[:, None] * N + depth[None, :]), tl.load(w + depth[:, None] * N + n[None, :]))
    own = tl.load(first + m[:, None] * N + n[None, :]).to(tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], (0.5 * own + 0.5 * tl.sin(total)).to(tl.float16))


@pp.kernel(report=None)
@triton.jit
def head(x, out, tokens, N: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    item = tl.program_id(0)
    tl.store(out + item * B + i, tl.load(x + item * tokens * N + i).to(tl.float32))


def tile_rows(rows: int) -> int:
    """As a library of products would choose: enough tiles to fill the GPU, then larger ones that read weights less."""
    return 16 if rows <= 64 else 32 if rows <= 128 else 64


@dataclass(frozen=True, slots=True)
class Kind:
    """One model: how wide, and how long it should take."""

    name: str
    width: int
    tokens: int
    target_ms: float

    def model(self, layers: int, batch: tuple[int, ...], instances: int | None, name: str | None = None) -> Model:
        width, tokens = self.width, self.tokens

        def fn(weights: Any, inputs: Any, outputs: Any) -> None:
            count = inputs["x"].shape[0]
            rows = count * tokens
            tile = tile_rows(rows)
            buffers = [pp.empty((rows, width), np.float16) for _ in range(2)]
            source = inputs["x"]
            for k in range(layers):
                target, w = buffers[k % 2], weights[f"w{k % 2}"]
                layer[(rows // tile, width // 64)](source, inputs["x"], w, target, rows, N=width, BM=tile, BN=64, BK=64)
                source = target
            head[(count,)](source, outputs["y"], tokens, N=width, B=OUTPUT)

        rng = np.random.default_rng(width)
        weights = {f"w{k}": (rng.standard_normal((width, width)) / width**0.5).astype(np.float16) for k in range(2)}
        return Model(
            name or self.name,
            fn,
            inputs={"x": TensorSpec((tokens, width), np.float16)},
            outputs={"y": TensorSpec((OUTPUT,))},
            weights=weights,
            batch=batch,
            instances=instances,
            target_ms=4 * self.target_ms,
        )

    def inputs(self) -> NDArray[np.float16]:
        rng = np.random.default_rng(self.tokens)
        return rng.uniform(-1, 1, (INPUTS, self.tokens, self.width)).astype(np.float16)


KINDS = (
    Kind("tiny", 256, 16, 0.3),
    Kind("small", 512, 32, 0.6),
    Kind("medium", 1024, 32, 1.2),
    Kind("large", 2048, 64, 3.0),
)
QUICK = (Kind("tiny", 128, 16, 0.03), Kind("small", 128, 16, 0.09))


def choose_layers(device: str, kinds: tuple[Kind, ...]) -> list[int]:
    """As many layers as make up the time a model should take."""
    with Engine(device) as engine:
        found = []
        for kind in kinds:
            engine.load(kind.model(PROBE_LAYERS, (1,), 1, f"probe {kind.name}"))
            per_layer = engine.profile(f"probe {kind.name}")[0].whole_ns / (PROBE_LAYERS + 1)
            found.append(max(2, round(kind.target_ms * 1e6 / per_layer) - 1))
    return found


def references(device: Any, models: list[Model], inputs: list[NDArray[np.float16]]) -> list[NDArray[np.float32]]:
    """What each function computes when it is simply called."""
    found = []
    with device:
        for model, given in zip(models, inputs, strict=True):
            weights = {k: pp.array(v) for k, v in model.weights.items()}
            rows = []
            for x in given:
                y = pp.empty((1, OUTPUT))
                model.fn(weights, {"x": pp.array(x[None])}, {"y": y})
                rows.append(y.numpy()[0])
            found.append(np.array(rows))
    return found


class Bench:
    """One engine with the models loaded, and the runs made on it."""

    def __init__(
        self,
        device: str,
        kinds: tuple[Kind, ...],
        layers: list[int],
        batch: tuple[int, ...],
        instances: int,
        active: int | None,
        quantum_us: float = 100.0,
        memory_bytes: int | None = None,
    ) -> None:
        self.engine = Engine(device, max_active=active, quantum_us=quantum_us, memory_bytes=memory_bytes)
        self.models = [kind.model(n, batch, instances) for kind, n in zip(kinds, layers, strict=True)]
        for model in self.models:
            self.engine.load(model)
        self.inputs = [kind.inputs() for kind in kinds]
        self.expected = references(self.engine.device, self.models, self.inputs)
        self.alone_ns = np.array([self.engine.profile(m.name)[0].whole_ns for m in self.models])
        self.generator = Generator(self.engine, [m.name for m in self.models], self.inputs)
        share = 1 / self.alone_ns
        self.share = share / share.sum()
        self.checked = self.wrong = 0

    def requests(self, n: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        return rng.choice(len(self.models), n, p=self.share).astype(np.int64), rng.integers(0, INPUTS, n)

    def check(self, run: Run) -> Run:
        wanted = np.stack([self.expected[m][w] for m, w in zip(run.model, run.which, strict=True)])
        self.checked += len(wanted)
        self.wrong += int((~np.isclose(run.outputs.view(np.float32), wanted, rtol=2e-2, atol=2e-2).all(axis=1)).sum())
        return run

    def saturate(self, policy: str | Policy, n: int, outstanding: int, seed: int) -> Run:
        """As many requests as the engine can take."""
        self.engine.set_policy(policy)
        model, which = self.requests(n, seed)
        return self.check(self.generator.run(np.zeros(n, np.int64), model, which, outstanding))

    def offer(self, policy: str | Policy, rate: float, n: int, seed: int) -> Run:
        """Arrivals in bursts, whatever the engine makes of them."""
        self.engine.set_policy(policy)
        model, which = self.requests(n, seed)
        at = lognormal_gaps(np.random.default_rng(seed + 1000), rate, SIGMA, n)
        return self.check(self.generator.run(at, model, which, 1 << 30))

    def light(self, model: int, n: int) -> dict[str, float]:
        """One request at a time, against a copy of its inputs and one launch of the same graph."""
        self.engine.set_policy("paella")
        which = np.arange(n, dtype=np.int64) % INPUTS
        run = self.check(self.generator.run(np.zeros(n, np.int64), np.full(n, model, np.int64), which, 1))
        found = {"engine_us": float(np.median(run.latency_ns[n // 4 :])) / 1e3}
        if isinstance(self.engine.device, CudaDevice):
            found["graph_us"] = float(np.median(self.generator.alone_ns(model, 0, n, True)[n // 4 :])) / 1e3
            found["launch_us"] = float(np.median(self.generator.alone_ns(model, 0, n, False)[n // 4 :])) / 1e3
        else:
            found["graph_us"] = float(self.alone_ns[model]) / 1e3
        found["ratio"] = found["engine_us"] / found["graph_us"]
        return found

    def slowdown(self, run: Run) -> dict[str, float]:
        slow = run.latency_ns / self.alone_ns[run.model]
        return {
            "p50": float(np.quantile(slow, 0.5)),
            "p99": float(np.quantile(slow, 0.99)),
            "within_4x": float((slow <= 4).mean()),
            "throughput": run.throughput,
            "mean_batch": float(run.batch.mean()),
        }


def sizes(quick: bool) -> tuple[tuple[Kind, ...], int, int, float]:
    """Models, requests at light load and at saturation, and seconds of the others."""
    return (QUICK, 20, 60, 0.02) if quick else (KINDS, 200, 12000, 0.8)


def mixed(bench: Bench, policy: str, base: float, seconds: float, seeds: int, name: str) -> list[dict[str, Any]]:
    rows = []
    for fraction in FRACTIONS:
        for seed in range(seeds):
            n = max(40, int(base * fraction * seconds))
            run = bench.offer(policy, base * fraction, n, seed)
            rows.append({"load": fraction, "seed": seed, "policy": name, **bench.slowdown(run)})
    return rows


def streams_alone(args: argparse.Namespace) -> None:
    """What `streams` does, in a process that has CUDA's own number of queues."""
    kinds, _, n_sat, seconds = sizes(args.quick)
    layers = choose_layers(args.device, kinds)
    bench = Bench(args.device, kinds, layers, (1,), args.instances, 8)
    bench.saturate("streams", max(20, n_sat // 10), 64, 99)  # warm
    found = [bench.saturate("streams", n_sat, 64, seed).steady_throughput for seed in range(args.seeds)]
    rows = mixed(bench, "streams", float(np.median(found)), seconds, args.seeds, "streams")
    bench.engine.close()
    facts = {"layers": layers, "saturation": found, "mixed": rows, "checked": bench.checked, "wrong": bench.wrong}
    args.streams.write_text(json.dumps(facts))


def measure(args: argparse.Namespace, progress: Progress, found: dict[str, Any]) -> None:
    """Fills `found` as it goes."""
    kinds, n_light, n_sat, seconds = sizes(args.quick)
    ours = ("streams", "srpt", "slack")
    seeds = range(args.seeds)
    task = progress.add_task("streams, in a process of its own", total=len(kinds) + 7 * args.seeds + 10)

    def step(what: str) -> None:
        progress.update(task, advance=1, description=what)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streams.json"
        command = [sys.executable, *sys.argv, "--streams", str(path)]
        subprocess.run(command, check=True, env={**os.environ, QUEUES: "8"})
        streams = json.loads(path.read_text())
    layers, base = streams["layers"], float(np.median(streams["saturation"]))
    step("loading, batch 1")
    plain = Bench(args.device, kinds, layers, (1,), args.instances, args.active)
    step("light load")
    found["models"] = {
        k.name: {"layers": n, "width": k.width, "tokens": k.tokens, "alone_us": t / 1e3, "share": s}
        for k, n, t, s in zip(kinds, layers, plain.alone_ns.tolist(), plain.share.tolist(), strict=True)
    }
    found["light"] = {}
    for m, kind in enumerate(kinds):
        found["light"][kind.name] = plain.light(m, n_light)
        step("saturation")
    plain.saturate("streams", max(20, n_sat // 10), 64, 99)  # warm
    found["saturation"], found["mixed"] = {"streams": streams["saturation"]}, streams["mixed"]
    for policy in ours:
        name = "streams, 32 queues" if policy == "streams" else policy
        found["saturation"][name] = []
        for seed in seeds:
            found["saturation"][name].append(plain.saturate(policy, n_sat, 64, seed).steady_throughput)
            step(f"saturation, {name}")
        found["mixed"] += mixed(plain, policy, base, seconds, args.seeds, name)
        step(f"mixed load, {name}")
    found["active"] = {}
    for active in ACTIVE:
        fixed = replace(find_policy("srpt"), active=active)
        found["active"][active] = [plain.saturate(fixed, n_sat, 64, seed).steady_throughput for seed in seeds[:2]]
        step(f"saturation with {active} jobs at once")
    plain.engine.close()
    batched = Bench(args.device, kinds, layers, (1, 2, 4, 8), max(2, args.instances // 2), args.active)
    step("saturation with batches")
    batched.saturate("srpt", max(20, n_sat // 10), 256, 99)
    found["batched"], found["batched_mixed"] = {}, []
    for policy in ("srpt", "slack"):
        found["batched"][policy] = []
        for seed in seeds:
            full = batched.saturate(policy, 3 * n_sat, 512, seed)
            found["batched"][policy].append(full.steady_throughput)
            found.setdefault("batched_mean", []).append(float(full.batch.mean()))
            step(f"saturation with batches, {policy}")
            run = batched.offer(policy, 0.95 * base, max(40, int(0.95 * base * seconds)), seed)
            found["batched_mixed"].append({"load": 0.95, "seed": seed, "policy": policy, **batched.slowdown(run)})
            step(f"95% load with batches, {policy}")
    batched.engine.close()
    found["checked"] = streams["checked"] + plain.checked + batched.checked
    found["wrong"] = streams["wrong"] + plain.wrong + batched.wrong
    found["targets"] = judge(found)


def judge(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target with the value reached: the median, and the worst and best over seeds or models."""

    def p99(load: float, policy: str) -> NDArray[np.float64]:
        rows = [r for r in found["mixed"] if r["load"] == load and r["policy"] == policy]
        return np.array([r["p99"] for r in sorted(rows, key=lambda r: r["seed"])])

    loads = sorted({row["load"] for row in found["mixed"]})
    streams = np.array(found["saturation"]["streams"])  # by seed: the same requests
    values = {
        "light load, engine / one graph launch": ("light", [v["ratio"] for v in found["light"].values()], "<="),
        **{
            f"p99 slowdown at {load:.0%}, {policy} / streams": ("p99", (p99(load, policy) / p99(load, "streams")), "<=")
            for load in loads
            for policy in ("srpt", "slack")
        },
        **{
            f"saturation, {policy} / streams": ("saturation", np.array(found["saturation"][policy]) / streams, ">=")
            for policy in ("srpt", "slack")
        },
        **{
            f"saturation with batches, {policy} / streams": ("batching", np.array(rates) / streams, ">=")
            for policy, rates in found["batched"].items()
        },
    }
    out = {}
    for name, (which, given, sign) in values.items():
        array = np.asarray(given, np.float64)
        value, target = float(np.median(array)), TARGETS[which]
        met = value <= target if sign == "<=" else value >= target
        out[name] = {
            "median": value, "least": float(array.min()), "most": float(array.max()),
            "target": f"{sign} {target}", "met": bool(met),
        }  # fmt: skip
    return out


def show(found: dict[str, Any], title: str, took_s: float) -> None:
    console = Console()
    models = Table(title=f"{title}: models", box=None)
    for column in ("model", "kernels", "alone, µs", "graph, µs", "engine, µs", "ratio"):
        models.add_column(column, justify="left" if column == "model" else "right")
    for name, each in found["models"].items():
        light = found["light"][name]
        models.add_row(
            name, str(each["layers"] + 1), f"{each['alone_us']:.1f}", f"{light['graph_us']:.1f}",
            f"{light['engine_us']:.1f}", f"{light['ratio']:.3f}",
        )  # fmt: skip
    results = Table(title="Against CUDA streams", box=None)
    for column in ("what", "median", "least … most", "target", ""):
        results.add_column(column, justify="left" if column == "what" else "right")
    for name, each in found["targets"].items():
        results.add_row(
            name, f"{each['median']:.3f}", f"{each['least']:.3f} … {each['most']:.3f}", each["target"],
            "[green]met[/]" if each["met"] else "[red]missed[/]",
        )  # fmt: skip
    console.print(models, results)
    fixed = ", ".join(f"{n}: {np.median(rates):,.0f}/s" for n, rates in found["active"].items())
    console.print(f"srpt at saturation by jobs at once: {fixed}")
    if "(virtual)" in title:
        console.print("On a virtual GPU the host computes the data: only the outputs mean something, not the times.")
    console.print(f"{found['checked']:,} outputs checked, {found['wrong']} wrong; {took_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="use two small models and few requests")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--active", type=int, help="batches of all models that share the GPU (default: by demand)")
    parser.add_argument("--streams", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--instances", type=int, default=16, help="batches of one model that may be in flight")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.streams:
        return streams_alone(args)
    device = pp.Device(args.device)
    start = time.monotonic()
    name = "engine_h200" if isinstance(device, CudaDevice) else "engine_virtual"
    found: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))
    try:
        with Progress(transient=True) as progress:
            measure(args, progress, found)
    except BaseException:
        if found:
            print(save(f"{name}_unfinished", found, device, args.out))
        raise
    show(found, device.title, time.monotonic() - start)
    print(save(name, found, device, args.out))
    if found["wrong"]:
        raise SystemExit(f"{found['wrong']} of {found['checked']} outputs are wrong")
    return None


if __name__ == "__main__":
    main()
