"""The jobs of background.py in processes of their own under NVIDIA MPS: the way to share a GPU without a scheduler.

    python benchmarks/background.py              measures them too
    python benchmarks/background.py --part mps   in an environment of MPS: measures them alone

Each job is the same training step as in background.py, launched as one CUDA graph, and nothing holds it back. The
engine runs under MPS too, also where it is alone. This file by itself is the process of one job.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from background_jobs import Load, alone, deterministic, serving, summary, trainee
from child_steps import Steps
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
        line = [sys.executable, __file__, kind, *(["--small"] if small else [])]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Until it has made its first steps. Then it does nothing until it is started."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the job ended before its first step")

    def start(self) -> None:
        process = self._process
        assert process.stdin is not None
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


def measure_all(args: argparse.Namespace) -> None:
    """The points of background.py's part `mps`, in an environment of MPS."""
    deterministic()
    jobs = {kind: Job(kind, args.small) for kind in args.jobs.split(",")}
    try:
        with serving(args) as (_, load, points):
            for job in jobs.values():  # they must not load or capture while requests are measured
                job.wait()
            for kind, job in jobs.items():
                title = f"{kind}, under MPS"
                points(f"{title}: alone before", lambda: alone(load, args))
                job.start()
                points(f"{title}: none: job alone", lambda job=job: by_itself(job, args.seconds))
                points(f"{title}: none", lambda job=job: beside(load, job, args))
                job.end()
                points(f"{title}: alone again", lambda: alone(load, args))
    finally:
        for job in jobs.values():
            job.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("child", help="the job to train: resnet18 or transformer")
    parser.add_argument("--small", action="store_true", help="a tiny network on the CPU, to try the script")
    args = parser.parse_args()
    child(args.child, args.small)


if __name__ == "__main__":
    main()
