"""Measures how well the virtual GPU predicts the real one, and fits the profile it predicts with.

Each task has two steps, because the first needs the GPU and the second only its measurements:

    python benchmarks/calibrate.py record              # on the GPU: times the corpus, writes calibration_PART.json
    python benchmarks/calibrate.py fit                 # anywhere: fits the timing profile, reports the error

    python benchmarks/calibrate.py record --fresh 1    # on the GPU: other sizes and other inputs
    python benchmarks/calibrate.py check --fresh 1     # anywhere: the error of the profile as it is, nothing fitted

`record` traces every corpus kernel at several sizes, and pairs of large kernels on two streams. `fit` runs the same
launches on the virtual twin and fits the waits and, at the smallest size, a factor per kernel. It reports two errors:
with the factors at the larger sizes, and without a kernel's factor, by waits fitted without that kernel. The timing's
other constants were set by hand on these same launches, so neither error is held out (docs/virtual-gpu.md); the error
of `check` is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from calibration_model import check_and_report, fit_and_report, inputs_of
from common import RESULTS, save
from corpus import TRITON_CASES
from kernels import add as vector_add
from kernels import attention, gemm, layer_norm, softmax

import paellapy as pp

SCALES = (1.0, 4.0, 16.0)
FRESH_SCALES = (2.0, 6.0, 11.0, 24.0)  # none of those above
REPEATS = 12


def upload(device: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return device.array(value)
    if isinstance(value, tuple):
        return tuple(upload(device, v) for v in value)
    return value


def spans(trace: pp.Trace) -> list[dict[str, float]]:
    """Per launch: first start to last end, and what its blocks did meanwhile."""
    rows = []
    for launch in np.unique(trace.blocks["launch"]):
        blocks = trace.blocks[trace.blocks["launch"] == launch]
        span = int(blocks["end_ns"].max() - blocks["start_ns"].min())
        lived = (blocks["end_ns"] - blocks["start_ns"]).astype(np.int64)
        rows.append(
            {
                "span_ns": span,
                "block_ns": float(np.median(lived)),
                "resident_blocks": float(lived.sum() / max(span, 1)),
            }
        )
    return rows


def measure_case(device: Any, case: Any, scale: float, seed: int) -> dict[str, Any]:
    call = inputs_of(case, scale, seed)
    kernel = pp.kernel(case.kernel, report=None)
    args = {name: upload(device, value) for name, value in call.args.items()}
    rest = {**call.constexprs, **call.options}
    with pp.trace(records_per_sm=1 << 15) as trace:
        for _ in range(REPEATS):
            kernel[call.grid](**args, **rest)
            device.synchronize()
    rows = spans(trace)[2:]  # the first launches meet cold caches
    launch = trace.launches[0]
    result: dict[str, Any] = {name: float(np.median([r[name] for r in rows])) for name in rows[0]}
    result |= {
        "case": case.name,
        "scale": scale,
        "seed": seed,
        "blocks": int(launch["blocks"]),
        "max_resident_per_sm": int(trace.residency().max_blocks.max()),
    }
    return result


def large_works(device: Any, seed: int) -> dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Kernels of a few hundred µs, long enough to overlap for sure."""
    half = np.float16
    n, rows, size, heads, length = (3 << 25, 50000, 5120, 160, 3072) if seed else (1 << 26, 65536, 4096, 256, 2048)
    f, h = device.empty, lambda *s: device.empty(s, half)
    return {
        "add": (vector_add, (n // 1024,), (f(n), f(n), f(n), n), {"B": 1024}),
        "softmax": (softmax, (rows,), (f((rows, 1000)), f((rows, 1000)), 1000), {"B": 1024}),
        "layer norm": (layer_norm, (rows,), (f((rows, 1000)), f((rows, 1000)), f(1000), f(1000), 1000, 1e-5),
                       {"B": 1024}),
        "gemm": (gemm, ((size // 128) ** 2,), (h(size, size), h(size, size), h(size, size), size, size, size),
                 {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8}),
        "attention": (attention, (length // 128, heads), (*(h(heads, length, 64) for _ in range(4)), length, 0.125),
                      {"D": 64, "BM": 128, "BN": 64, "num_warps": 8}),
    }  # fmt: skip


PAIRS = (("add", "gemm"), ("gemm", "add"), ("softmax", "gemm"), ("add", "softmax"), ("attention", "add"),
         ("gemm", "attention"), ("layer norm", "gemm"), ("softmax", "layer norm"))  # fmt: skip


def measure_pairs(device: Any, seed: int) -> dict[str, Any]:
    works = large_works(device, seed)
    kernels = {name: pp.kernel(work[0], report=None) for name, work in works.items()}

    def launch(name: str) -> None:
        _, grid, args, keywords = works[name]
        kernels[name][grid](*args, **keywords)

    alone = {}
    for name in works:
        with pp.trace(records_per_sm=1 << 16) as trace:
            for _ in range(5):
                launch(name)
                device.synchronize()
        alone[name] = float(np.median([r["span_ns"] for r in spans(trace)[2:]]))
    together = {}
    streams = [device.stream(), device.stream()]
    for a, b in PAIRS:
        totals, starts = [], []
        for _ in range(4):
            with pp.trace(records_per_sm=1 << 16) as trace:
                for stream, name in zip(streams, (a, b), strict=True):
                    with stream:
                        launch(name)
            first, second = (trace.blocks[trace.blocks["launch"] == i] for i in trace.launches["launch"])
            begin = int(first["start_ns"].min())
            totals.append(int(trace.blocks["end_ns"].max()) - begin)
            starts.append(int(second["start_ns"].min()) - begin)
        together[f"{a} + {b}"] = {"total_ns": float(np.median(totals)), "second_starts_ns": float(np.median(starts))}
    return {"alone": alone, "together": together}


def name_of(part: str, seed: int) -> str:
    return f"calibration_fresh{seed}_{part}" if seed else f"calibration_{part}"


def record(seed: int, out: Path | None) -> None:
    device = pp.Device("cuda")
    part = device.title.removeprefix("NVIDIA ").split()[0].lower()
    capability = device.capability[0] * 10
    rows = []
    with device:
        scales = FRESH_SCALES if seed else SCALES
        todo = [(c, s) for c in TRITON_CASES for s in scales if c.min_sm <= capability]
        for case, scale in track(todo, description="kernels"):
            rows.append(measure_case(device, case, scale, seed))
        save(name_of(part, seed), {"kernels": rows}, device, out)  # kept whatever becomes of the pairs
        pairs = measure_pairs(device, seed)
    print("written to", save(name_of(part, seed), {"kernels": rows, **pairs}, device, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("record", "fit", "check"))
    parser.add_argument("--part", default="h200")
    parser.add_argument("--fresh", type=int, default=0, metavar="SEED", help="other sizes, and inputs from this seed")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON files (default: results/)")
    options = parser.parse_args()
    if options.step == "check" and not options.fresh:
        parser.error("check needs --fresh SEED: the profile is fitted to the recording without one")
    if options.step == "fit" and options.fresh:
        parser.error("fit takes the recording without --fresh: what is checked must not be fitted")
    if options.step == "record":
        return record(options.fresh, options.out)
    name = name_of(options.part, options.fresh)
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    run = fit_and_report if options.step == "fit" else check_and_report
    return run(measured, options.part, lambda device: large_works(device, options.fresh), PAIRS)


if __name__ == "__main__":
    main()
