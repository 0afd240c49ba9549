"""Training beside serving: resnet50 at 250 requests per second and training jobs beside it, in one run.

    python benchmarks/background.py [--device virtual:h200 --quick] [--resume]

Jobs run under policies that hold them back, with stream priorities, under streams, and paused. Every seed has its own
arrivals, which a compiled client sends whether or not earlier requests are answered. The losses of 200 steps are
compared with the plain loop's; PyTorch's algorithms that add in arbitrary order are off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch asks for where algorithms are deterministic

import numpy as np
import torch
from engine_load import Generator, poisson
from harness import arguments, save, show, stored

import paellapy as pp
from paellapy.scheduler.core.state import Limits

RATE = 250.0  # requests a second
STEPS = 200  # whose losses are compared
INPUTS = 8
# Policies that launch a job's step as one graph, with the priority of the job: they leave the order to the GPU.
WHOLE = {"stream priorities": -1, "streams": 0}
FIGURES: dict[str, Callable[[Any], Any]] = {
    "mean_ms": np.mean, "p50_ms": lambda each: np.percentile(each, 50), "p99_ms": lambda each: np.percentile(each, 99)
}  # fmt: skip


class SmallTransformer(torch.nn.Module):
    def __init__(self, width: int, layers: int, words: int = 1000) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def small_net(width: int = 8) -> torch.nn.Module:
    body = torch.nn.Conv2d(3, width, 3, 2, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*body, torch.nn.Linear(width, 10))


def torchvision_model(name: str, **about: Any) -> Any:
    import torchvision

    return getattr(torchvision.models, name)(**about)


def trainee(kind: str, where: str, small: bool, seed: int = 0) -> tuple[Callable[[], Any], list[Any]]:
    """A step on data that stay on the GPU, and its state."""
    # Where it only warns, attention adds its gradients in any order; resnet's pooling knows no other way.
    torch.use_deterministic_algorithms(True, warn_only=kind != "transformer")
    torch.manual_seed(seed)
    if kind == "transformer":
        net: Any = SmallTransformer(32 if small else 512, 1 if small else 4)
        x = torch.randint(0, 1000, (2 if small else 16, 8 if small else 256), device=where)
        y = x.flip(1).reshape(-1)
    else:
        net = small_net() if small else torchvision_model("resnet18", num_classes=10)
        x = torch.randn(2 if small else 32, 3, 16 if small else 128, 16 if small else 128, device=where)
        y = torch.randint(0, 10, (len(x),), device=where)
    net = net.to(where).train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=where != "cpu")

    def step() -> Any:
        optimizer.zero_grad()
        out = net(x)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, [net, optimizer]


def plain_speed(step: Callable[[], Any], where: str, seconds: float) -> float:
    """Steps a second of the loop as everybody writes it."""
    wait = torch.cuda.synchronize if where != "cpu" else lambda: None
    for _ in range(20):
        step()
    wait()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
        if steps % 8 == 0:
            wait()
    wait()
    return steps / (time.perf_counter() - began)


class Load:
    """Poisson arrivals for the served model from a producer of its own; every output is compared with that of a request
    that was alone.
    """

    def __init__(self, engine: pp.Engine, small: bool) -> None:
        torch.manual_seed(0)
        about: dict[str, Any] = {"name": "served", "batch": (1,), "instances": 4}
        if small:
            model = pp.Model.from_torch(small_net(), torch.zeros(1, 3, 16, 16), **about)
        else:
            half = {"dtype": torch.float16, "channels_last": True}
            net = torchvision_model("resnet50").eval().cuda()
            model = pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), **half, **about)
        engine.load(model)
        rng, spec = np.random.default_rng(0), model.inputs["input"]
        inputs = rng.standard_normal((INPUTS, *spec.shape)).astype(spec.dtype)
        self._expected = np.stack([next(iter(engine.infer_sync("served", {"input": x}).values())) for x in inputs])
        self._generator = Generator(engine, ["served"], [inputs], producer=1)
        self.wrong = 0

    def __call__(self, seed: int, seconds: float) -> list[float]:
        """Latencies in ms from the moment each request was due."""
        rng = np.random.default_rng(seed)
        n = max(20, int(RATE * seconds))
        which = rng.integers(0, INPUTS, n)
        run = self._generator.run(poisson(rng, RATE, n), np.zeros(n, np.int64), which, priority=[1])
        found = run.outputs.view(self._expected.dtype).reshape(n, *self._expected.shape[1:]).astype(np.float32)
        wanted = self._expected[which].astype(np.float32)
        differs = np.abs(found - wanted).reshape(n, -1).max(axis=1)
        self.wrong += int((~(differs <= 0.02 * np.abs(wanted).max())).sum())
        return [float(ns) * 1e-6 for ns in run.latency_ns]

    def summary(self, latencies: list[list[float]]) -> dict[str, Any]:
        return {
            **{name: [float(FIGURES[name](each)) for each in latencies] for name in ("p50_ms", "p99_ms")},
            "all_p99_ms": float(np.percentile(np.concatenate(latencies), 99)),
            "requests": sum(map(len, latencies)), "wrong": self.wrong,
        }  # fmt: skip

    def alone(self, o: Any) -> dict[str, Any]:
        return self.summary([self(seed, o.seconds) for seed in o.seeds])


@contextmanager
def serving(device: str, small: bool, policy: str = "priority") -> Iterator[tuple[pp.Engine, Load]]:
    """An engine with the served model, warm, and its load."""
    with pp.Engine(device, policy=policy, limits=Limits(producers=2)) as engine:
        load = Load(engine, small)
        load(99, 0.3)
        yield engine, load


class Run:
    """Measures points and stores each."""

    def __init__(self, engine: pp.Engine, load: Load, o: argparse.Namespace) -> None:
        self._engine, self._load, self._o = engine, load, o
        self._where = "cpu" if o.device.startswith("virtual") else "cuda"
        self.found = stored("background", o.out)
        self._known = set(self.found) if o.resume else set()

    def point(self, name: str, measure: Callable[[], Any]) -> None:
        if name not in self._known:
            self.found[name] = measure()
            save("background", self.found, self._engine.device, self._o.out, **quoted(self.found))
            print(f"{name}: {str(self.found[name])[:160]}", flush=True)

    def _job(self, kind: str, **options: Any) -> Any:
        step, state = trainee(kind, self._where, self._o.quick)
        return self._engine.background(step, name=kind, state=state, **options)

    def _end(self, job: Any) -> None:
        job.stop()
        job.join()
        if job.error is not None:
            raise job.error

    def _beside(self, name: str, policy: str, job: Any) -> None:
        self._engine.set_policy(policy)

        def speed(run: Callable[[], Any]) -> tuple[Any, float]:
            before, began = job.steps, time.perf_counter()
            return run(), (job.steps - before) / (time.perf_counter() - began)

        def measure() -> dict[str, Any]:
            found = [speed(lambda s=seed: self._load(s, self._o.seconds)) for seed in self._o.seeds]
            return {**self._load.summary([each for each, _ in found]), "steps_per_s": [each for _, each in found]}

        self.point(f"{name}: job alone", lambda: speed(lambda: time.sleep(self._o.seconds))[1])
        self.point(name, measure)

    def beside(self, kind: str) -> None:
        """The job in segments under each policy that holds it back, and as one graph; between requests alone."""
        for title, ways in ((f"{kind}, 100 µs", self._o.ways.split(",")), (f"{kind}, one graph", WHOLE)):
            self._engine.set_policy("priority")
            self.point(f"{title}: alone before", lambda: self._load.alone(self._o))
            for way in ways:
                job = self._job(kind, priority=WHOLE[way]) if way in WHOLE else self._job(kind, quantum_us=100.0)
                self._beside(f"{title}: {way}", "streams" if way in WHOLE else way, job)
                self._end(job)
            self._engine.set_policy("priority")
            self.point(f"{title}: alone again", lambda: self._load.alone(self._o))

    def paused(self, kind: str) -> dict[str, Any]:
        """Requests beside a paused job and without it, in the order alone, paused, paused, alone, and so on: a steady
        drift of the machine adds the same to both. Each round has the same arrivals in both.
        """
        found: dict[str, list[list[float]]] = {"alone": [], "paused": []}
        for k in range(self._o.rounds):
            for way in list(found)[:: 1 if k % 2 == 0 else -1]:
                job = self._job(kind) if way == "paused" else None
                if job is not None:
                    job.pause()
                self._load(99, 0.2)
                found[way].append(self._load(k, self._o.seconds))
                if job is not None:
                    self._end(job)
        rounds = {way: {name: [float(f(each)) for each in times] for name, f in FIGURES.items()}
                  for way, times in found.items()}  # fmt: skip
        return {"requests": {way: sum(map(len, each)) for way, each in found.items()}, "rounds": rounds}

    def losses(self, kind: str) -> dict[str, Any]:
        """Whether all losses of a captured job are the plain loop's, by seed."""
        equal = []
        for seed in range(self._o.loss_seeds):
            step, _ = trainee(kind, self._where, self._o.quick, seed)
            plain = torch.stack([step().detach() for _ in range(STEPS)]).cpu().tolist()
            step, state = trainee(kind, self._where, self._o.quick, seed)
            got: list[float] = []

            def note(job: Any, got: list[float] = got) -> None:
                got.append(float(job.outputs["output"]))
                if len(got) == STEPS:
                    job.stop()

            job = self._engine.background(step, name=f"{kind} {seed}", state=state, every=1, callback=note)
            if not job.join(60) or job.error is not None:
                raise RuntimeError(f"{kind}, seed {seed}: {job.error or 'no 200 steps in a minute'}")
            equal.append(got == plain)
        return {"equal": equal}

    def all(self) -> None:
        kinds, where = self._o.jobs.split(","), self._where
        self.point("alone", lambda: self._load.alone(self._o))
        for kind in kinds:
            self.beside(kind)
        for kind in kinds:
            self._engine.set_policy("priority")
            self.point(f"{kind}: paused and alone", lambda k=kind: self.paused(k))
            step, _ = trainee(kind, where, self._o.quick)
            self.point(f"{kind}: plain loop", lambda s=step: plain_speed(s, where, self._o.seconds))
            self.point(f"{kind}: losses", lambda k=kind: self.losses(k))


def quoted(points: dict[str, Any]) -> dict[str, Any]:
    def p99_to(name: str, base: str) -> float:
        return statistics.median(np.divide(points[name]["p99_ms"], points[base]["p99_ms"]).tolist())

    def alone_speed(job: str, way: str) -> float:
        """Of the job without requests, cut or in one piece as it is under that policy; the quickest run."""
        runs = {name.split(": ")[1]: speed for name, speed in points.items()
                if name.startswith(f"{job}: ") and name.endswith(": job alone")}  # fmt: skip
        return max(speed for each, speed in runs.items() if (each in WHOLE) == (way in WHOLE))

    beside = [["aim", "", "≤ 1.07", "≤ 1.07", "", "≥ 0.80", ""]]
    for name in sorted(points, key=lambda name: name.split(",")[0]):
        job, _, way = name.partition(": ")
        plain = points.get(f"{job.split(',')[0]}: plain loop")
        is_beside = isinstance(points[name], dict) and "steps_per_s" in points[name]
        if is_beside and f"{job}: alone again" in points:
            p99 = [p99_to(name, f"{job}: alone {when}") for when in ("before", "again")]
            speed = statistics.median(points[name]["steps_per_s"])
            cells = (*p99, statistics.median(points[name]["p99_ms"]), speed / alone_speed(job, way))
            beside.append([job, way, *(f"{v:.2f}" for v in cells), f"{speed / plain:.2f}" if plain else "–"])
    facts = [["aim", "", "≤ 1.005", "≤ 1.005", "≤ 1.005"]]
    for kind in (name.split(":")[0] for name in points if name.endswith(": losses")):
        equal, rounds, cells = points[f"{kind}: losses"]["equal"], points[f"{kind}: paused and alone"]["rounds"], []
        for figure in ("p50_ms", "mean_ms", "p99_ms"):
            r = np.divide(rounds["paused"][figure], rounds["alone"][figure])
            error = r.std(ddof=1) / len(r) ** 0.5 if len(r) > 1 else 0.0
            cells.append(f"{r.mean():.3f} ± {error:.3f}")
        facts.append([kind, f"{sum(equal)} of {len(equal)}", *cells])
    heads = {
        "training": ["job, its segments", "policy", "p99 ÷ before the job", "p99 ÷ after it", "p99, ms",
                     "steps ÷ the job alone", "steps ÷ the plain loop alone"],
        "training-facts": ["job", "seeds with all losses equal, bit for bit", "p50 while it is paused ÷ alone", "mean",
                           "p99"],
    }  # fmt: skip
    alone = points.get("alone", {"p99_ms": [0.0], "requests": 0})
    seeds = len(alone["p99_ms"])
    figures = {"training.seeds": str(seeds), "training.requests": str(alone["requests"] // seeds)}
    tables = {"training": [heads["training"], *beside], "training-facts": [heads["training-facts"], *facts]}
    return {"tables": tables, "figures": figures}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seeds=range(5), seconds=1.0, rounds=10)
    parser.add_argument("--loss-seeds", type=int, default=5)
    parser.add_argument("--jobs", default="resnet18,transformer")
    parser.add_argument("--ways", default="priority", help="policies that hold a job back; also tally, reef, orion")
    parser.add_argument("--resume", action="store_true", help="keep the stored points of a run that was stopped")
    o = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("high")  # tensor cores, as everybody trains
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is for finding faults, and takes time
    with serving(o.device, o.quick) as (engine, load):
        run = Run(engine, load, o)
        run.all()
    head, *rows = quoted(run.found)["tables"]["training"]
    show("training beside serving", head, rows)


if __name__ == "__main__":
    main()
