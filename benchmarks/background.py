"""Training beside serving: resnet50 at 250 requests a second, and training jobs beside it, in one run.

    python benchmarks/background.py                 on a GPU
    python benchmarks/background.py --device virtual:h200 --small     to try it

For each job: the plain loop's speed, the job's alone, and both under each way to share the GPU. Every seed has its own
arrivals. Results are written after every point; points that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, save

import paellapy as pp
from paellapy.instrument.device import Device

F = torch.nn.functional
RATE = 250.0  # requests a second
# Ways to share the GPU with a job of low priority, and their policies.
WAYS = {"priority": "priority", "tally": "tally", "reef": "reef", "orion": "orion", "stream priorities": "streams"}


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


def trainee(kind: str, where: str, small: bool) -> tuple[Callable[[], Any], list[Any]]:
    """A step on data that stay on the GPU, and its state."""
    torch.manual_seed(0)
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


def plain_speed(kind: str, where: str, small: bool, seconds: float) -> tuple[float, list[float]]:
    """Steps a second of the loop as everybody writes it, and its first losses."""
    step, _ = trainee(kind, where, small)
    losses = [step().detach() for _ in range(20)]
    _wait(where)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
        if steps % 8 == 0:
            _wait(where)
    _wait(where)
    return steps / (time.perf_counter() - began), [float(each) for each in losses]


def _wait(where: str) -> None:
    if where != "cpu":
        torch.cuda.synchronize()


def served(small: bool) -> pp.Model:
    if small:
        return pp.Model.from_torch(small_net(), torch.zeros(1, 3, 16, 16), name="served", batch=(1,), lanes=2)
    from torchvision.models import resnet50

    net = resnet50().eval().cuda()
    return pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), name="served", dtype=torch.float16,
                               channels_last=True, batch=(1,), lanes=4)  # fmt: skip


def ask(engine: pp.Engine, seed: int, seconds: float) -> list[float]:
    """Latencies in ms of Poisson arrivals, from the moment each was due."""
    rng = np.random.default_rng(seed)
    spec = engine.models["served"].inputs["input"]
    x = rng.standard_normal(spec.shape).astype(spec.dtype)
    found = []
    due = time.perf_counter() + 0.01
    end = due + seconds
    while due < end:
        while time.perf_counter() < due:
            pass
        engine.infer_sync("served", {"input": x}, priority=1)
        found.append((time.perf_counter() - due) * 1e3)
        due += rng.exponential(1 / RATE)
    return found


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


def beside(engine: pp.Engine, job: Any, args: argparse.Namespace) -> dict[str, Any]:
    latencies, speeds = [], []
    for seed in range(args.seeds):
        before, began = job.steps, time.perf_counter()
        latencies.append(ask(engine, seed, args.seconds))
        speeds.append((job.steps - before) / (time.perf_counter() - began))
    if job.error is not None:
        raise job.error
    return {**summary(latencies), "steps_per_s": [round(each, 2) for each in speeds]}


def summary(latencies: list[list[float]]) -> dict[str, Any]:
    return {
        "p50_ms": [round(float(np.percentile(each, 50)), 4) for each in latencies],
        "p99_ms": [round(float(np.percentile(each, 99)), 4) for each in latencies],
        "all_p99_ms": round(float(np.percentile([ms for each in latencies for ms in each], 99)), 4),
        "requests": sum(map(len, latencies)),
    }


def measure(engine: pp.Engine, kind: str, args: argparse.Namespace, points: Points) -> None:
    """One job of low priority under each policy, then one like the served model's."""
    where = "cpu" if args.device.startswith("virtual") else "cuda"
    _, losses = points(f"{kind}: plain loop", lambda: plain_speed(kind, where, args.small, args.seconds))
    engine.set_policy("priority")
    step, state = trainee(kind, where, args.small)
    got: list[float] = []
    job = engine.background(step, name=kind, state=state, every=1, callback=lambda job: _note(got, job))
    while len(got) < len(losses) and job.error is None:
        time.sleep(0.01)
    points(f"{kind}: losses", lambda: {"equal": got == losses, "first": losses[:2], "last": [got[-1], losses[-1]]})
    profile = engine.job_profile(kind)
    points(f"{kind}: step", lambda: {"whole_ms": profile.alone_ns() * 1e-6, "segments": len(profile.sizes[1])})
    pp.save_profiles(args.folder / f"{args.name}-{kind}.profile.json", [profile])
    for way, policy in WAYS.items():
        engine.set_policy(policy)
        points(f"{kind}: {way}: job alone", lambda: rate_of(job, args.seconds))
        points(f"{kind}: {way}", lambda: beside(engine, job, args))
    engine.set_policy("priority")
    job.pause()
    points(f"{kind}: paused", lambda: summary([ask(engine, s, args.seconds) for s in range(args.seeds)]))
    job.stop()
    job.join()
    points(f"{kind}: alone again", lambda: summary([ask(engine, s, args.seconds) for s in range(args.seeds)]))
    engine.set_policy("streams")
    step, state = trainee(kind, where, args.small)
    equal = engine.background(step, name=kind, state=state, priority=0)
    points(f"{kind}: streams", lambda: beside(engine, equal, args))
    equal.stop()
    equal.join()


def _note(got: list[float], job: Any) -> None:
    if len(got) < 20:
        got.append(float(job.outputs["output"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="nets of a few weights, to try the script")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each point and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", default="resnet18,transformer")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="background")
    args = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    with pp.Engine(args.device, policy="priority") as engine:
        points = Points(args.folder / f"{args.name}.json", engine.device)
        engine.load(served(args.small))
        ask(engine, 99, 0.3)
        points("alone", lambda: summary([ask(engine, s, args.seconds) for s in range(args.seeds)]))
        for kind in args.jobs.split(","):
            measure(engine, kind, args, points)


if __name__ == "__main__":
    main()
