"""The host's cost of one launch: `pp.kernel` against Triton's own launcher, with torch tensors, in one run.

python benchmarks/launch_overhead.py [--out DIR]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from kernels import add
from rich.console import Console
from rich.table import Table

import paellapy as pp

LAUNCHES, ROUNDS = 200, 60


def host_ns(call: Callable[[], Any]) -> float:
    """Host time per launch, the GPU's queue empty at the start and never full."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(LAUNCHES):
        call()
    spent = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return spent / LAUNCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    out = parser.parse_args().out
    device = pp.Device("cuda")
    n = 4096
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    z = torch.empty_like(x)
    ours = {level: pp.kernel(add, report=level) for level in (None, "count", "notify")}
    own = [device.array(np.zeros(n, np.float32)) for _ in range(3)]
    plain, counting, notifying = ours[None], ours["count"], ours["notify"]
    ways: dict[str, Callable[[], Any]] = {
        "triton's launcher": lambda: add[(4,)](x, y, z, n, B=1024),
        "pp.kernel, plain": lambda: plain[(4,)](x, y, z, n, B=1024),
        "pp.kernel, count": lambda: counting[(4,)](x, y, z, n, B=1024),
        "pp.kernel, notify": lambda: notifying[(4,)](x, y, z, n, B=1024),
        "pp.kernel, count, pp arrays": lambda: counting[(4,)](*own, n, B=1024),
    }
    with device:
        for call in ways.values():
            call()
        times = {name: np.empty(ROUNDS) for name in ways}
        for r in range(ROUNDS):
            for name, call in ways.items():
                times[name][r] = host_ns(call)
        with pp.trace(records_per_sm=1 << 16):
            call = ways["pp.kernel, count"]
            call()
            times["pp.kernel, inside a trace"] = np.array([host_ns(call) for _ in range(ROUNDS)])
    base = float(np.median(times["triton's launcher"]))
    results = {
        name: {"us": float(np.median(t)) / 1e3, "ratio": float(np.median(t)) / base} for name, t in times.items()
    }
    table = Table(title=f"host time of one launch beside {device.title}")
    for column in ("way", "µs", "÷ triton's launcher"):
        table.add_column(column, justify="right")
    for name, r in results.items():
        table.add_row(name, f"{r['us']:.2f}", f"{r['ratio']:.2f}")
    Console(width=100).print(table)
    print("written to", save("launch_overhead", results, device, out))


if __name__ == "__main__":
    main()
