"""Records the traces that ship as `pp.recordings`, on any device.

    python benchmarks/record_traces.py [--device virtual:h200] [--out paellapy/recordings]

The files are named after the GPU: those of a real H200 are `h200-…`, those of the virtual one `virtual-h200-…`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from harness import RESULTS, arguments
from kernels import add, gemm, softmax

import paellapy as pp
import paellapy.recordings
from paellapy.demo.models import rivals, rush
from paellapy.instrument.device import VirtualDevice

FOLDER = Path(paellapy.recordings.__file__).parent


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return pp.array(np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype))


def traced(run: Callable[[], object]) -> pp.Trace:
    """The second of two runs: the first one compiles and warms the caches. It is traced too, because kernels that
    trace are compiled on their own: done in between, that would keep two streams milliseconds apart."""
    for _ in range(2):
        with pp.trace() as t:
            run()
    return t


@triton.jit
def row_sums(x, first, out, B: tl.constexpr):
    """Sums of rows of different lengths: row i is x[first[i]:first[i + 1]]."""
    row = tl.program_id(0)
    begin, end = tl.load(first + row), tl.load(first + row + 1)
    total = tl.zeros((B,), tl.float32)
    for i in range(begin, end, B):
        at = i + tl.arange(0, B)
        total += tl.load(x + at, mask=at < end, other=0.0)
    tl.store(out + row, tl.sum(total))


def tail_effect(device: pp.Device) -> pp.Trace:
    """Two and a half waves of blocks, some far longer than others: SMs that have run dry wait for the last ones."""
    kernel, options = pp.kernel(row_sums), {"B": 256, "num_warps": 8}
    few = pp.array(np.zeros(256, np.float32)), pp.array(np.array([0, 256], np.int32)), pp.empty(1)
    rows = device.sm_count * int(kernel.theoretical_occupancy(*few, **options).blocks_per_sm) * 5 // 2
    lengths = np.random.default_rng(0).lognormal(np.log(6000), 0.5, rows).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    args = pp.array(np.ones(first[-1], np.float32)), pp.array(first), pp.empty(rows)
    return traced(lambda: kernel[(rows,)](*args, **options))


def add_two_waves(device: pp.Device) -> pp.Trace:
    kernel, options = pp.kernel(add), {"B": 1024, "num_warps": 4}
    occupancy = kernel.theoretical_occupancy(*(pp.empty(1024) for _ in range(3)), 1024, **options)
    blocks = 2 * device.sm_count * int(occupancy.blocks_per_sm)
    n = blocks * 1024
    args = normal(n), normal(n), pp.empty(n), n
    return traced(lambda: kernel[(blocks,)](*args, **options))


def two_streams(device: pp.Device) -> pp.Trace:
    """GEMMs on half of the SMs, long enough for small softmaxes of another stream to run beside them: these are
    launched some 25 µs apart by a real host."""
    big, small = pp.kernel(gemm), pp.kernel(softmax)
    m, k, columns, rows = 128 * 8, 8192, 1000, 512
    tiles = {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8, "num_stages": 3}
    a, b, c = normal(m, k, dtype=np.float16), normal(k, m, dtype=np.float16), pp.empty((m, m), np.float16)
    x, out = normal(rows, columns), pp.empty((rows, columns))
    one, other = pp.stream(), pp.stream()

    def run() -> None:
        with one:
            for _ in range(3):
                big[(64,)](a, b, c, m, m, k, **tiles)
        with other:
            for _ in range(6):
                small[(rows,)](out, x, columns, B=1024, num_warps=4)

    return traced(run)


def mix(policy: str, max_active: int) -> Callable[[pp.Device], pp.Trace]:
    """Two models that compete for the GPU. On a virtual one in simulated time: in real time, computing the data on the
    host would take far longer than the GPU would."""

    def record(device: pp.Device) -> pp.Trace:
        if isinstance(device, VirtualDevice):
            active = None if policy == "streams" else max_active
            found = pp.simulate(rivals(), rush(), policy, device.name, trace=True, active=active).trace
            assert found is not None
            return found
        with pp.Engine(device, policy, max_active=max_active) as engine:
            for model in rivals():
                engine.load(model)
            asyncio.run(ask(engine))  # the first time is not recorded: kernels load, clocks rise
            with engine.trace() as t:
                asyncio.run(ask(engine))
        return t

    return record


async def ask(engine: pp.Engine) -> None:
    """Sends the rush on time. It spins: timers of an event loop are a millisecond apart."""
    names = list(engine.models)
    tasks, start_ns = [], time.perf_counter_ns()
    for at in rush().arrivals(names, seed=0):
        name = names[at["model"]]
        inputs = {"x": np.zeros(engine.models[name].inputs["x"].shape, np.float32)}
        while time.perf_counter_ns() - start_ns < at["time_ns"]:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.infer(name, inputs)))
    await asyncio.gather(*tasks)


EXAMPLES = {  # `streams` launches everything at once; software scheduling keeps two jobs on the GPU, enough to fill it
    "tail-effect": tail_effect, "add-two-waves": add_two_waves, "two-streams": two_streams,
    "mix-streams": mix("streams", max_active=16), "mix-paella": mix("paella", max_active=2),
}  # fmt: skip
MOST_BYTES = 300_000


def gpu_name(device: pp.Device) -> str:
    """virtual:h200 -> virtual-h200, "NVIDIA H200" -> h200."""
    if device.name.startswith("virtual:"):
        return device.name.replace(":", "-")
    return re.sub(r"[^a-z0-9]+", "-", device.title.lower().removeprefix("nvidia ")).strip("-")


def main() -> None:
    parser = arguments(__doc__, device="auto")
    parser.add_argument("--only", choices=EXAMPLES, action="append", help="may be repeated (default: all)")
    o = parser.parse_args()
    folder, device = FOLDER if o.out == RESULTS else o.out, pp.Device.open(o.device)
    folder.mkdir(parents=True, exist_ok=True)
    for name in o.only or EXAMPLES:
        with device:
            t = EXAMPLES[name](device)
        path = folder / f"{gpu_name(device)}-{name}.pptrace"
        if t.dropped or t.unfinished:
            raise SystemExit(f"{name}: {t.dropped} records dropped, {t.unfinished} unfinished; not written")
        t.save(path)
        print(f"{t.summary()}\nwritten to {path}: {path.stat().st_size:,} of at most {MOST_BYTES:,} bytes\n")


if __name__ == "__main__":
    main()
