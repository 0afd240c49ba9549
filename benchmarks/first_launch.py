"""First and later launches on the virtual GPU against Triton's interpreter: kernels of tests/corpus, in one run.

    python benchmarks/first_launch.py [--every 3] [--seconds 100]

Each side runs in its own process. The virtual GPU begins with empty caches on disk (Triton's and ours), so its first
launch compiles; the interpreter (TRITON_INTERPRET=1) compiles nothing. Each side first launches a kernel that is not
counted, so that imports are not measured. Results go to benchmarks/results/first_launch.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LATER = 4  # launches after the first, of which the fastest counts


def run_side(interpreted: bool, every: int, seconds: float) -> None:
    """Times first and later launches, in seconds; a line of JSON for each kernel."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from corpus import TRITON_CASES

    import paellapy as pp

    chosen = [c for c in TRITON_CASES if c.evaluable]
    ends = time.monotonic() + 300
    with pp.Device("virtual:h200"):
        for number, case in enumerate([chosen[0], *chosen[1::every]]):
            if time.monotonic() > ends:
                break
            call = case.make(np.random.default_rng(0), 1.0)
            if any(isinstance(v, tuple) for v in call.args.values()):
                continue
            given = {n: _tensor(torch, v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
            fn = case.kernel if interpreted else pp.kernel(case.kernel, report=None)
            options = {} if interpreted else call.options
            try:
                took = [_timed(fn, call.grid, {**given, **call.constexprs, **options}) for _ in range(1 + LATER)]
            except Exception as e:
                print(json.dumps([case.name, None, f"{type(e).__name__}: {e}"[:120]]), flush=True)
                continue
            if number:
                print(json.dumps([case.name, took[0], min(took[1:])]), flush=True)
            else:  # the evaluator's own loops were compiled meanwhile, once for all kernels
                ends = time.monotonic() + seconds


def _tensor(torch: Any, array: Any) -> Any:
    """An array as PyTorch has it, in memory of its own."""
    kind = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.copy().view(np.uint8).reshape(-1)).view(kind).reshape(array.shape)


def _timed(fn: Any, grid: Any, keywords: dict[str, Any]) -> float:
    start = time.perf_counter()
    fn[grid](**keywords)
    return time.perf_counter() - start


def side(name: str, every: int, seconds: float) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        settings = {**os.environ, **one_thread, "PAELLAPY_CACHE_DIR": f"{folder}/ours", "TRITON_CACHE_DIR": folder}
        settings["TRITON_INTERPRET"] = "1" if name == "interpreter" else "0"
        command = [sys.executable, __file__, "--side", name, "--every", str(every), "--seconds", str(seconds)]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=3 * seconds + 300)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if not rows:
        raise SystemExit(f"{name}: {done.stderr[-800:]}")
    return {row[0]: row[1:] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="every nth kernel of the corpus")
    parser.add_argument("--seconds", type=float, default=300, help="approximate seconds for each side")
    parser.add_argument("--side", choices=("virtual", "interpreter"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.side:
        return run_side(given.side == "interpreter", given.every, given.seconds)
    from common import save

    sides = {name: side(name, given.every, given.seconds) for name in ("interpreter", "virtual")}
    ratios: dict[str, list[float]] = {"first": [], "later": []}
    cases: dict[str, Any] = {}
    for name in sides["interpreter"].keys() & sides["virtual"].keys():
        ours, theirs = sides["virtual"][name], sides["interpreter"][name]
        if ours[0] is None or theirs[0] is None:
            cases[name] = {"virtual": ours, "interpreter": theirs}
            continue
        cases[name] = {"first": theirs[0] / ours[0], "later": theirs[1] / ours[1], "virtual_s": ours}
        for kind in ratios:
            ratios[kind].append(cases[name][kind])
    faster = {kind: statistics.median(found) for kind, found in ratios.items() if found}
    print(faster, len(ratios["first"]), "kernels")
    save("first_launch", {"times_faster": faster, "kernels": len(ratios["first"]), "cases": cases}, None, given.out)
    return None


if __name__ == "__main__":
    main()
