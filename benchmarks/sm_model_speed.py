"""The speed of the SM model on one core, and a check that its cost is linear in the number of blocks.

python benchmarks/sm_model_speed.py [--quick] [--folder DIR] writes benchmarks/results/sm_model_speed.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import RESULTS, save

from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import part

GPU = part("h200")


def one_grid(n_blocks: int, **work: object) -> SmModel:
    sim = SmModel(GPU)
    sim.launch(sim.stream(), Kernel(n_blocks, 256, 32, **work))  # type: ignore[arg-type]
    return sim


def recorded(n_blocks: int) -> SmModel:
    return one_grid(n_blocks, duration_ns=2000.0)


def memory_bound(n_blocks: int) -> SmModel:
    return one_grid(n_blocks, cost=BlockCost(bytes=12288))


def all_pools(n_blocks: int) -> SmModel:
    return one_grid(n_blocks, cost=BlockCost(bytes=12288, flops=1e5, tensor_flops=1e6))


def small_kernels(n_blocks: int) -> SmModel:
    """Eight streams of graphs of 24 kernels with 20 blocks each: a mix of batch-1 networks in segments."""
    sim = SmModel(GPU)
    program = sim.program([Kernel(20, 128, 40 + k, cost=BlockCost(bytes=50_000)) for k in range(24)])
    streams = [sim.stream() for _ in range(8)]
    for k in range(n_blocks // program.n_blocks):
        sim.launch_program(streams[k % 8], program, trace=False)
    return sim


WORKLOADS: dict[str, Callable[[int], SmModel]] = {
    "recorded durations": recorded,
    "memory bound": memory_bound,
    "memory, fp32 and tensor": all_pools,
    "small kernels, 8 streams": small_kernels,
}


def measure(make: Callable[[int], SmModel], n_blocks: int, repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        sim = make(n_blocks)
        before = time.process_time()  # of this process: other work on the machine is not the model's cost
        sim.run()
        seconds.append(time.process_time() - before)
        sim.check_integrity()
    blocks = sim.block_events
    return {
        "blocks": blocks,
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "blocks_per_s": blocks / statistics.median(seconds),
        "block_events_per_s": 2 * blocks / statistics.median(seconds),  # a start and an end each
        "ns_per_block": statistics.median(seconds) / blocks * 1e9,
        "simulated_ms": sim.now_ns / 1e6,
    }


def stepping(n: int) -> dict[str, float]:
    """What one launch, one run to its end and one look at the completions cost from Python."""
    sim = SmModel(GPU, history=1000)
    s = sim.stream()
    before = time.process_time()
    for _ in range(n):
        sim.launch(s, Kernel(4, 256, 32, duration_ns=5000.0), trace=False)
        sim.run(stop_on_completion=True)
        sim.completed()
    return {"cycles": n, "us_per_cycle": (time.process_time() - before) / n * 1e6}


def exponent(rows: list[dict[str, float]]) -> float:
    """The slope of log time over log blocks: 1 is linear."""
    x = np.log([row["blocks"] for row in rows])
    y = np.log([row["seconds_median"] for row in rows])
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use small sizes, to see that it runs")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = (10_000, 30_000) if options.quick else (20_000, 100_000, 500_000, 2_000_000)
    recorded(100).run()  # compile or load
    results: dict[str, object] = {"part": GPU.name}
    for name, make in WORKLOADS.items():
        rows = [measure(make, n, 3 if n > 200_000 else 7) for n in sizes]
        results[name] = {"rows": rows, "exponent": exponent(rows)}
        print(f"{name:26s} {rows[-1]['blocks_per_s'] / 1e6:5.2f} M blocks/s  time ~ blocks^{exponent(rows):.3f}")
    results["stepping from Python"] = stepping(2_000 if options.quick else 20_000)
    print("stepping from Python      ", results["stepping from Python"])
    results["clock"] = "process CPU time, one thread, median of the repeats"
    print(save("sm_model_speed", results, folder=options.folder))


if __name__ == "__main__":
    main()
