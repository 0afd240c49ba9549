"""Jobs, requests and result files of background.py and of the other runs with training beside serving.

The losses of 200 steps are compared with the plain loop's, and the plain loop's with those of a second run of it.
PyTorch's algorithms that add in arbitrary order are off in all of them (`deterministic`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch asks for where algorithms are deterministic

import numpy as np
import torch
from common import save
from engine_load import Generator, poisson

import paellapy as pp
from paellapy.instrument.device import Device
from paellapy.scheduler.core.state import Limits

F = torch.nn.functional
RATE = 250.0  # requests a second
STEPS = 200  # whose losses are compared


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
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3, 2, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip


def trainee(kind: str, where: str, small: bool, seed: int = 0) -> tuple[Callable[[], Any], list[Any]]:
    """A step on data that stay on the GPU, and its state."""
    # Where it only warns, attention adds its gradients in any order; resnet's pooling knows no other way.
    torch.use_deterministic_algorithms(True, warn_only=kind != "transformer")
    torch.manual_seed(seed)
    if kind == "transformer":
        net: Any = SmallTransformer(32 if small else 512, 1 if small else 4).to(where).train()
        x = torch.randint(0, 1000, (2 if small else 16, 8 if small else 256), device=where)
        y = x.flip(1).reshape(-1)
    else:
        if small:
            net = small_net()
        else:
            from torchvision.models import resnet18

            net = resnet18(num_classes=10)
        net = net.to(where).train()
        x = torch.randn(2 if small else 32, 3, 16 if small else 128, 16 if small else 128, device=where)
        y = torch.randint(0, 10, (len(x),), device=where)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=where != "cpu")

    def step() -> Any:
        optimizer.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, [net, optimizer]


def plain_losses(kind: str, where: str, small: bool, seed: int) -> list[float]:
    step, _ = trainee(kind, where, small, seed)
    losses: list[float] = torch.stack([step().detach() for _ in range(STEPS)]).cpu().tolist()
    return losses


def plain_speed(step: Callable[[], Any], where: str, seconds: float) -> float:
    """Steps a second of the loop as everybody writes it."""
    _wait(where)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
        if steps % 8 == 0:
            _wait(where)
    _wait(where)
    return steps / (time.perf_counter() - began)


def _wait(where: str) -> None:
    if where != "cpu":
        torch.cuda.synchronize()


def served(small: bool) -> pp.Model:
    if small:
        return pp.Model.from_torch(small_net(), torch.zeros(1, 3, 16, 16), name="served", batch=(1,), instances=4)
    from torchvision.models import resnet50

    torch.manual_seed(0)
    net = resnet50().eval().cuda()
    return pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), name="served", dtype=torch.float16,
                               channels_last=True, batch=(1,), instances=4)  # fmt: skip


class Load:
    """Poisson arrivals for the served model from a client of its own; every output is compared with that of a request
    that was alone.
    """

    INPUTS = 8

    def __init__(self, engine: pp.Engine) -> None:
        rng = np.random.default_rng(0)
        spec = engine.models["served"].inputs["input"]
        self._inputs = rng.standard_normal((self.INPUTS, *spec.shape)).astype(spec.dtype)
        answers = [next(iter(engine.infer_sync("served", {"input": x}).values())) for x in self._inputs]
        self._expected = np.stack(answers)
        self._generator = Generator(engine, ["served"], [self._inputs], front=1)
        self.wrong = 0

    def __call__(self, seed: int, seconds: float) -> list[float]:
        """Latencies in ms from the moment each request was due."""
        rng = np.random.default_rng(seed)
        n = max(20, int(RATE * seconds))
        which = rng.integers(0, self.INPUTS, n)
        run = self._generator.run(poisson(rng, RATE, n), np.zeros(n, np.int64), which, priority=[1])
        found = run.outputs.view(self._expected.dtype).reshape(n, *self._expected.shape[1:]).astype(np.float32)
        wanted = self._expected[which].astype(np.float32)
        differs = np.abs(found - wanted).reshape(n, -1).max(axis=1)
        self.wrong += int((~(differs <= 0.02 * np.abs(wanted).max())).sum())
        return [float(ns) * 1e-6 for ns in run.latency_ns]


def make_engine(device: str, policy: str = "priority") -> pp.Engine:
    """With a front end for the client."""
    return pp.Engine(device, policy=policy, limits=Limits(fronts=2))


def rate_of(job: Any, seconds: float) -> float:
    before, began = job.steps, time.perf_counter()
    time.sleep(seconds)
    return float((job.steps - before) / (time.perf_counter() - began))


class Points:
    """Results by name, kept on disk as they come."""

    def __init__(self, path: Path, device: Device) -> None:
        self._path, self._device = path, device
        self.found: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}

    def __call__(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self.found:
            began = time.perf_counter()
            self.found[name] = measure()
            save(self._path.stem, self.found, self._device, self._path.parent)
            print(f"{name}: {self.found[name]} ({time.perf_counter() - began:.1f} s)", flush=True)
        return self.found[name]


def beside(load: Load, job: Any, args: argparse.Namespace) -> dict[str, Any]:
    latencies, speeds = [], []
    for seed in range(args.seeds):
        before, began = job.steps, time.perf_counter()
        latencies.append(load(seed, args.seconds))
        speeds.append((job.steps - before) / (time.perf_counter() - began))
    if job.error is not None:
        raise job.error
    return {**summary(latencies, load), "steps_per_s": [round(each, 2) for each in speeds]}


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[pp.Engine, Load, Points]]:
    """An engine with the served model, warm; its load; and the file of the results."""
    with make_engine(args.device) as engine:
        points = Points(args.folder / f"{args.name}.json", engine.device)
        engine.load(served(args.small))
        load = Load(engine)
        load(99, 0.3)
        yield engine, load, points


def alone(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    return summary([load(s, args.seconds) for s in range(args.seeds)], load)


def summary(latencies: list[list[float]], load: Load) -> dict[str, Any]:
    return {
        "p50_ms": [round(float(np.percentile(each, 50)), 4) for each in latencies],
        "p99_ms": [round(float(np.percentile(each, 99)), 4) for each in latencies],
        "all_p99_ms": round(float(np.percentile([ms for each in latencies for ms in each], 99)), 4),
        "requests": sum(map(len, latencies)),
        "wrong": load.wrong,
    }


def compare_losses(engine: pp.Engine, kind: str, where: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of 200 steps, by seed: the plain loop's, its own once more, and the captured job's."""
    found: dict[str, Any] = {"steps": STEPS, "equal": [], "plain_repeats": [], "last": []}
    for seed in range(args.loss_seeds):
        plain, again = (plain_losses(kind, where, args.small, seed) for _ in range(2))
        step, state = trainee(kind, where, args.small, seed)
        got: list[float] = []

        def note(job: Any, got: list[float] = got) -> None:
            got.append(float(job.outputs["output"]))
            if len(got) == STEPS:
                job.stop()

        job = engine.background(step, name=f"{kind} {seed}", state=state, every=1, callback=note)
        if not job.join(60) or job.error is not None:
            raise RuntimeError(f"{kind}, seed {seed}: {job.error or 'no 200 steps in a minute'}")
        found["equal"].append(got == plain)
        found["plain_repeats"].append(plain == again)
        found["last"].append([plain[-1], got[-1]])
    return found


def where_of(args: argparse.Namespace) -> str:
    return "cpu" if args.device.startswith("virtual") else "cuda"


def deterministic() -> None:
    """As for a run that is to be repeated bit for bit."""
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("high")  # tensor cores, as everybody trains
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is for finding faults, and takes time
