"""Correctness under load: 100,000 requests over mixed models, policies and batch sizes, each compared with NumPy.

    python benchmarks/engine_soak.py [--device virtual:h200|cuda] [--requests 100000] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import save
from rich.progress import Progress

import paellapy as pp
from paellapy.scheduler.core.check import check_at_rest
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.policies.policy import policy_names

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from engine_models import mlp_model, mlp_reference, random_inputs, scale_model, scale_reference

KINDS = (
    (scale_model("short", 3.0, batch=(1, 4)), scale_reference(3.0)),
    (scale_model("long", 2.0, steps=30, batch=(1, 2)), scale_reference(2.0, 30)),
    (mlp_model("mlp", batch=(1, 2, 4, 8), target_ms=50.0), mlp_reference()),
)
DIFFERENT = 64  # inputs per model
WAVE = 2000  # requests at once


def prepare() -> list[tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    rng = np.random.default_rng(0)
    found = []
    for model, reference in KINDS:
        given = [random_inputs(model, rng) for _ in range(DIFFERENT)]
        found.append((model.name, [(inputs, reference(inputs)) for inputs in given]))
    return found


async def wave(engine: Engine, work: Any, n: int, rng: np.random.Generator) -> int:
    """Sends n requests at once; how many answers were wrong."""

    async def one(kind: int, which: int, k: int) -> bool:
        name, cases = work[kind]
        inputs, expected = cases[which]
        outputs = await engine.infer(name, inputs, priority=k % 3, client=k % 7)
        return all(np.allclose(outputs[key], value, rtol=1e-3, atol=1e-5) for key, value in expected.items())

    kinds, which = rng.integers(0, len(work), n), rng.integers(0, DIFFERENT, n)
    right = await asyncio.gather(*(one(int(a), int(b), k) for k, (a, b) in enumerate(zip(kinds, which, strict=True))))
    return n - sum(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    work, rng = prepare(), np.random.default_rng(1)
    start = time.monotonic()
    wrong = sent = 0
    with Engine(args.device, quantum_us=10) as engine, Progress(transient=True) as progress:
        for model, _ in KINDS:
            engine.load(model)
        task = progress.add_task("requests", total=args.requests)
        policies = policy_names()
        while sent < args.requests:
            engine.set_policy(policies[sent // WAVE % len(policies)])
            n = min(WAVE, args.requests - sent)
            wrong += asyncio.run(wave(engine, work, n, rng))
            sent += n
            check_at_rest(engine.state)
            progress.update(task, advance=n, description=engine.policy)
        stats = engine.stats()
    took = time.monotonic() - start
    completed = {name: each["completed"] for name, each in stats["models"].items()}
    batches = {name: round(each["mean_batch"], 2) for name, each in stats["models"].items()}
    results = {
        "requests": sent, "wrong": wrong, "completed": completed, "mean_batch": batches, "policies": policies,
        "seconds": round(took, 1), "segments": stats["segments"], "preemptions": stats["preemptions"],
    }  # fmt: skip
    print(f"{sent:,} requests in {took:.0f} s, {wrong} wrong; completed {completed}, mean batch {batches}")
    print(save("engine_soak", results, pp.Device(args.device), args.out))
    if wrong or sum(completed.values()) != sent:
        raise SystemExit("not every request was answered once and right")


if __name__ == "__main__":
    main()
