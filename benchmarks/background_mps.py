"""The jobs of background.py in processes of their own under NVIDIA MPS: the way to share a GPU without a scheduler.

    CUDA_MPS_PIPE_DIRECTORY=… python benchmarks/background_mps.py
    python benchmarks/background_mps.py --device virtual:h200 --small     to try it, without MPS

Each job is the same training step as in background.py, launched as one CUDA graph, and nothing holds it back. The
engine runs under MPS too, also where it is alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from background import Load, alone, deterministic, serving, summary, trainee
from child_steps import Steps
from common import RESULTS
from guest_training import captured

SAYS_S = 0.05  # between two counts of steps


def child(kind: str, small: bool) -> None:
    """Captures the step, waits for a line, and prints the number of steps and the time again and again."""
    deterministic()
    where = "cpu" if small else "cuda"
    step, _ = trainee(kind, where, small)
    run = step if small else captured(step)
    run().item()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, said = 0, time.monotonic()
    while True:
        loss = run()
        steps += 1
        if time.monotonic() - said > SAYS_S:
            loss.item()  # so that steps are counted when they are done
            said = time.monotonic()
            print(steps, said, flush=True)


class Job:
    """A child, and how many steps it has made by when."""

    def __init__(self, kind: str, small: bool) -> None:
        line = [sys.executable, __file__, "--child", kind, *(["--small"] if small else [])]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> None:
        """Lets it train, once it is ready."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the job ended before its first step")
        process.stdin.write("go\n")
        process.stdin.flush()
        self._steps = Steps(process)
        while self._steps.counts < 4:
            if process.poll() is not None:
                raise SystemExit("the job ended")
            time.sleep(0.02)

    def speed(self, since: float, until: float) -> float:
        return round(self._steps.speed(since, until, 2 * SAYS_S), 2)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def by_itself(job: Job, seconds: float) -> float:
    began = time.monotonic()
    time.sleep(seconds)
    return job.speed(began, time.monotonic())


def beside(load: Load, job: Job, args: argparse.Namespace) -> dict[str, Any]:
    latencies, speeds = [], []
    for seed in range(args.seeds):
        began = time.monotonic()
        latencies.append(load(seed, args.seconds))
        speeds.append(job.speed(began, time.monotonic()))
    return {**summary(latencies, load), "steps_per_s": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny networks on the CPU, to try the script")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each point and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", default="resnet18,transformer")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="background_mps")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.small)
        return
    if not args.small and not os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        raise SystemExit("there is no MPS: start nvidia-cuda-mps-control -d, and set CUDA_MPS_PIPE_DIRECTORY")
    deterministic()
    jobs = {kind: Job(kind, args.small) for kind in args.jobs.split(",")}
    try:
        with serving(args) as (_, load, points):
            points("alone", lambda: alone(load, args))
            for kind, job in jobs.items():
                job.start()
                points(f"{kind}: job alone", lambda job=job: by_itself(job, args.seconds))
                points(kind, lambda job=job: beside(load, job, args))
                job.end()
                points(f"{kind}: alone again", lambda: alone(load, args))
    finally:
        for job in jobs.values():
            job.end()


if __name__ == "__main__":
    main()
