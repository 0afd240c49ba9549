"""Records the traces that ship as `pp.examples`, on any device.

    python benchmarks/record_examples.py [--device virtual:h200] [--out paellapy/examples]

The files are named after the GPU: those of a real H200 are `h200-…`, those of the virtual one `virtual-h200-…`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kernels import add, gemm, softmax

import paellapy as pp
import paellapy.examples

FOLDER = Path(paellapy.examples.__file__).parent


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return pp.array(np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype))


def resident(device: pp.Device, occupancy: Any) -> int:
    """Blocks of a kernel that the whole GPU holds at once."""
    return device.sm_count * int(occupancy.blocks_per_sm)


def traced(run: Callable[[], object]) -> pp.Trace:
    """The second of two runs: the first one compiles and warms the caches."""
    run()
    with pp.trace() as t:
        run()
    return t


def gemm_tail(device: pp.Device) -> pp.Trace:
    """A little more than a whole number of waves of tiles: most SMs wait for the last tiles."""
    kernel, options = pp.kernel(gemm), {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8, "num_stages": 3}
    k = 1024

    def arguments(tiles: int) -> tuple[Any, ...]:
        m, n = 128 * tiles, 1024
        return normal(m, k, dtype=np.float16), normal(k, n, dtype=np.float16), pp.empty((m, n), np.float16), m, n, k

    fits = resident(device, kernel.theoretical_occupancy(*arguments(1), **options))
    rows = -(-fits * 9 // 8 // 8)  # of 8 tiles: 1⅛ waves
    args = arguments(rows)
    return traced(lambda: kernel[(rows * 8,)](*args, **options))


def add_two_waves(device: pp.Device) -> pp.Trace:
    kernel, options = pp.kernel(add), {"B": 1024, "num_warps": 4}
    x = normal(1024)
    blocks = 2 * resident(device, kernel.theoretical_occupancy(x, x, pp.empty(1024), 1024, **options))
    n = blocks * 1024
    args = normal(n), normal(n), pp.empty(n), n
    return traced(lambda: kernel[(blocks,)](*args, **options))


def two_streams(device: pp.Device) -> pp.Trace:
    """A GEMM on half of the SMs, long enough for small softmaxes of another stream to run beside it."""
    big, small = pp.kernel(gemm), pp.kernel(softmax)
    m, k, columns, rows = 128 * 8, 4096, 1000, 512
    tiles = {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8, "num_stages": 3}
    a, b, c = normal(m, k, dtype=np.float16), normal(k, m, dtype=np.float16), pp.empty((m, m), np.float16)
    x, out = normal(rows, columns), pp.empty((rows, columns))
    one, other = pp.stream(), pp.stream()

    def run() -> None:
        with one:
            for _ in range(2):
                big[(64,)](a, b, c, m, m, k, **tiles)
        with other:
            for _ in range(6):
                small[(rows,)](out, x, columns, B=1024, num_warps=4)

    return traced(run)


EXAMPLES = {"gemm-tail": gemm_tail, "add-two-waves": add_two_waves, "two-streams": two_streams}


def gpu_name(device: pp.Device) -> str:
    """virtual:h200 -> virtual-h200, "NVIDIA H200" -> h200."""
    if device.name.startswith("virtual:"):
        return device.name.replace(":", "-")
    return re.sub(r"[^a-z0-9]+", "-", device.title.lower().removeprefix("nvidia ")).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    device = pp.Device(given.device)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, record in EXAMPLES.items():
        with device:
            t = record(device)
        path = given.out / f"{gpu_name(device)}-{name}.pptrace"
        t.save(path)
        print(t.summary())
        print(f"written to {path}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
