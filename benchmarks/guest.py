"""An unmodified training script in another process, beside a serving engine: free, and under `paellapy run`.

    python benchmarks/guest.py [--mps] [--device virtual:h200 --quick]

resnet50 gets 250 requests per second by Poisson arrivals; the script trains resnet18 eagerly. Ratios are of one run.
With `--mps` engine and script share the GPU through an MPS daemon, which the run starts and stops.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from background import Load, serving
from harness import arguments, commit, environment, mps_daemon, save, show, stored

# Name → options of `paellapy run --best-effort`; None: the script runs without it.
SCRIPTS: dict[str, tuple[str, ...] | None] = {"free": None, "gated": (), "gated, 2 in flight": ("--in-flight", "2")}


def train(small: bool) -> None:
    """An ordinary training loop; it prints the number of its steps and the time, again and again."""
    import torch

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if small:
        net, shape = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)).to(where), (4, 3, 8, 8)
    else:
        from torchvision.models import resnet18

        net, shape = resnet18(num_classes=10).to(where), (32, 3, 128, 128)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(shape, device=where), torch.randint(0, 10, (shape[0],), device=where)
    steps, said = 0, time.monotonic()
    while True:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
        if time.monotonic() - said > 0.05:
            loss.item()  # so that steps are counted when they are done
            said = time.monotonic()
            print(steps, said, flush=True)


class Script:
    """The training script in a process of its own, and its steps by time."""

    def __init__(self, options: tuple[str, ...] | None, small: bool) -> None:
        before = [] if options is None else ["-m", "paellapy", "run", "--best-effort", *options]
        line = [sys.executable, *before, str(Path(__file__)), "--train", *(["--quick"] if small else [])]
        self._process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment())
        self._said: list[tuple[int, float]] = []
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + 60
        while not self._said or self._said[-1][0] < 40:
            if time.monotonic() > end or self._process.poll() is not None:
                self.end()
                raise SystemExit("the script made no 40 steps in a minute")
            time.sleep(0.02)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = line.split()
            if len(said) == 2:  # the last line of a killed process may be cut
                self._said.append((int(said[0]), float(said[1])))

    def speed(self, since: float) -> float:
        """Steps a second from then until now."""
        until = time.monotonic()
        time.sleep(0.1)  # a line may come that long after its step
        within = [each for each in list(self._said) if since <= each[1] <= until]
        return 0.0 if len(within) < 2 else (within[-1][0] - within[0][0]) / (within[-1][1] - within[0][1])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(load: Load, script: Script, o: Any) -> dict[str, Any]:
    began = time.monotonic()
    time.sleep(o.seconds)
    by_itself, latencies, speeds = script.speed(began), [], []
    for seed in o.seeds:
        began = time.monotonic()
        latencies.append(load(seed, o.seconds))
        speeds.append(script.speed(began))
    return {**load.summary(latencies), "steps_per_s_alone": by_itself, "steps_per_s": speeds, "commit": commit()}


def quoted(points: dict[str, Any]) -> dict[str, Any]:
    rows = [["script", "p50 ÷ alone", "p99 ÷ alone", "steps per second beside requests", "without"]]
    rows.append(["aim behind a gate", "", "≤ 1.15", "", ""])
    for name, point in points.items():
        if "steps_per_s" in point:
            base = points["alone under MPS" if "MPS" in name else "alone"]
            p50 = statistics.median(point["p50_ms"]) / statistics.median(base["p50_ms"])
            p99 = float(np.median(np.divide(point["p99_ms"], base["p99_ms"])))
            speeds = (statistics.median(point["steps_per_s"]), point["steps_per_s_alone"])
            rows.append([name, f"{p50:.2f}", f"{p99:.2f}", *(f"{speed:.0f}" for speed in speeds)])
    both = "gated" in points and "alone" in points
    ratio = points["gated"]["all_p99_ms"] / points["alone"]["all_p99_ms"] if both else 0.0
    return {"tables": {"scripts": rows}, "figures": {"gate.p99": f"{ratio:.2f}"} if both else {}}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seeds=range(5), seconds=1.5)
    parser.add_argument("--mps", action="store_true", help="share the GPU through an MPS daemon")
    parser.add_argument("--scripts", default=";".join(SCRIPTS), help="separated by ;")
    parser.add_argument("--train", action="store_true", help="be the training script")
    o = parser.parse_args()
    if o.train:
        train(o.quick)
    points, under = stored("guest", o.out), " under MPS" if o.mps else ""
    with mps_daemon() if o.mps else nullcontext({}) as env:
        os.environ.update(env)
        with serving(o.device, o.quick) as (engine, load):
            points[f"alone{under}"] = {**load.alone(o), "commit": commit()}
            for name in o.scripts.split(";"):
                script = Script(SCRIPTS[name], o.quick)
                try:
                    points[name + under] = measure(load, script, o)
                finally:
                    script.end()
                save("guest", points, engine.device, o.out, **quoted(points))
    head, *rows = quoted(points)["tables"]["scripts"]
    show("a training script beside requests", head, rows)


if __name__ == "__main__":
    main()
