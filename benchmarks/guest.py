"""An unmodified training script in another process, beside a serving engine: free, and under `paellapy run`.

    python benchmarks/guest.py                 on a GPU, in an environment with MPS under MPS
    python benchmarks/guest.py --device virtual:h200 --small      to try it

resnet50 gets 250 requests per second by Poisson arrivals; the script trains resnet18, eagerly and as one CUDA graph per
step. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from background_jobs import Load, alone, serving, summary
from child_steps import Steps
from common import RESULTS

import paellapy as pp

SCRIPT = Path(__file__).parent / "guest_training.py"
# Name; under `paellapy run`; its step as one CUDA graph; options.
SCRIPTS: tuple[tuple[str, bool, bool, tuple[str, ...]], ...] = (
    ("free", False, False, ()), ("gated", True, False, ()), ("gated, 8 in flight", True, False, ("--in-flight", "8")),
    ("gated, 4 in flight", True, False, ("--in-flight", "4")),
    ("gated, 2 in flight", True, False, ("--in-flight", "2")),
    ("gated, share 0.3", True, False, ("--share", "0.3")),
    ("captured, free", False, True, ()), ("captured, gated", True, True, ()),
)  # fmt: skip


class Script:
    """The child, and how many steps it has made by when."""

    def __init__(self, gated: bool, small: bool, captured: bool = False, options: tuple[str, ...] = ()) -> None:
        before = [sys.executable, "-m", "paellapy", "run", "--best-effort", *options] if gated else [sys.executable]
        line = [*before, str(SCRIPT), "small" if small else "resnet18", *(["captured"] if captured else [])]
        self._process = self._start(line)
        self._steps = Steps(self._process)
        self.speed, self.end = self._steps.speed, self._steps.end
        self.wait(40, 45.0)

    def _start(self, line: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    def wait(self, steps: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._steps.made < steps:
            if time.monotonic() > end or self._process.poll() is not None:
                raise SystemExit(f"the script made no {steps} steps in {seconds} s")
            time.sleep(0.02)


def measure(engine: pp.Engine, load: Load, script: Script, args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    time.sleep(args.seconds)
    by_itself = script.speed(began, time.monotonic())
    latencies, speeds = [], []
    for seed in range(args.seeds):
        began = time.monotonic()
        latencies.append(load(seed, args.seconds))
        speeds.append(round(script.speed(began, time.monotonic()), 2))
    jobs = [{k: v for k, v in each.items() if k != "pid"} for each in engine.job_stats().values()]
    return {**summary(latencies, load), "steps_per_s_alone": round(by_itself, 2), "steps_per_s": speeds, "jobs": jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scripts", default=";".join(name for name, *_ in SCRIPTS), help="scripts, separated by ;")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="guest")
    args = parser.parse_args()
    mps = " under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else ""
    with serving(args) as (engine, load, points):
        points(f"alone{mps}", lambda: alone(load, args))
        for name, gated, captured, options in SCRIPTS:
            if name + mps in points.found or name not in args.scripts.split(";"):
                continue
            script = Script(gated, args.small, captured, options)
            try:
                points(name + mps, lambda script=script: measure(engine, load, script, args))
            finally:
                script.end()
        points(f"alone again{mps}", lambda: alone(load, args))


if __name__ == "__main__":
    main()
