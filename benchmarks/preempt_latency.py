"""How long a GPU takes to become free of a preempted kernel, and how long resuming it takes.

Blocks of a known length fill the GPU several times over. From `preempt()` on, the host polls until the launch is over:
the time covers the flag's way to the GPU, the rest of the running blocks, and the exit of the others. `resume` is the
time of the call. Every block is checked to have run once. Only rounds in which blocks were kept from running count;
`held` is their part of all rounds.

    python benchmarks/preempt_latency.py [--out DIR] [--rounds 50]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import need_gpu, save
from rich.console import Console
from rich.table import Table

import paellapy as pp

# Only one thread reads the clock: if all do, they wait for each other, and blocks take a quarter longer.
SPIN = """
extern "C" __global__ void spin(unsigned* count, unsigned ns) {
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
        atomicAdd(count + blockIdx.x, 1u);
    }
    __syncthreads();
}
"""
THREADS = 256
COLUMNS = ("free p50", "free p99", "resume p50", "left p50", "held")


def measure(device: Any, block_us: float, blocks: int, rounds: int) -> dict[str, float | None]:
    kernel = pp.kernel(source=SPIN, name="spin", report=None)
    rng = np.random.default_rng(0)
    wave = device.sm_count * (device.limits.threads // THREADS)
    whole_us = block_us * blocks / wave
    free, resumed, left = np.empty(rounds), np.empty(rounds), np.empty(rounds)
    counts = [device.array(np.zeros(blocks, np.uint32)) for _ in range(rounds)]  # freeing one would wait for the GPU
    for k, count in enumerate(counts):
        launch = kernel.preemptible[blocks, THREADS](count, np.uint32(block_us * 1e3))
        begin = time.perf_counter()
        wait_us = 10 + rng.uniform(0, 0.5) * whole_us
        while time.perf_counter() - begin < wait_us * 1e-6:
            pass
        start = time.perf_counter()
        launch.preempt()
        run = launch._run
        while run is not None and not run.over():
            pass
        free[k] = (time.perf_counter() - start) * 1e6
        left[k] = len(launch.left)
        start = time.perf_counter()
        launch.resume()
        resumed[k] = (time.perf_counter() - start) * 1e6
        launch.synchronize()
        assert (count.numpy() == 1).all(), "a block ran twice or never"
    held = left > 0
    if not held.any():  # the kernel was always over before the flag came: nothing was measured
        return dict.fromkeys(COLUMNS[:-1]) | {"held": 0.0}
    return {
        "free p50": float(np.median(free[held])),
        "free p99": float(np.quantile(free[held], 0.99)),
        "resume p50": float(np.median(resumed[held])),
        "left p50": float(np.median(left[held])),
        "held": float(held.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    device = need_gpu("preemption is measured on a GPU")
    results = {}
    with device:
        for block_us in (2, 10, 50):
            for blocks in (5_000, 50_000):
                results[f"{blocks} blocks of {block_us} µs"] = measure(device, block_us, blocks, options.rounds)
    table = Table(title=f"preemption on {device.title}, µs")
    for column in ("launch", *COLUMNS):
        table.add_column(column, justify="right")
    for name, row in results.items():
        table.add_row(name, *("–" if row[c] is None else f"{row[c]:.{2 if c == 'held' else 1}f}" for c in COLUMNS))
    Console(width=140).print(table)
    print("written to", save("preempt_latency", results, device, options.out))


if __name__ == "__main__":
    main()
