"""The corpus under NVIDIA's compute-sanitizer: does a pass bring in what the plain kernel does not have?

    python benchmarks/sanitize.py [--tools memcheck,racecheck,synccheck,initcheck] [--seconds 60]

For each tool, the kernels of tests/corpus run plain and with every pass, each variant in a process of its own under the
tool. Findings are counted per variant; results go to benchmarks/results/sanitize.json.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import need_gpu, save

import paellapy as pp

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
VARIANTS = ("plain", "count", "trace", "notify", "sliced", "preemptible")
_ROOT = Path(__file__).parents[1]


def run_corpus(variant: str, seconds: float) -> None:
    """Launches each kernel of the corpus once. Run under the tool, by `main`."""
    sys.path.insert(0, str(_ROOT / "tests"))
    from corpus import TRITON_CASES

    began, ran = time.perf_counter(), []
    report = variant if variant in ("count", "notify") else None
    for case in TRITON_CASES:
        if time.perf_counter() - began > seconds:
            break
        if variant in ("sliced", "preemptible") and not case.sliceable:
            continue
        call = case.make(np.random.default_rng(0), 0.1)
        given = {n: pp.array(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
        if any(isinstance(v, tuple) for v in given.values()):
            continue
        kernel = pp.kernel(case.kernel, report=report)
        keywords = {**given, **call.constexprs, **call.options}
        try:
            _launch(kernel, variant, call.grid, keywords)
        except pp.PaellaError as e:
            print(f"refused {case.name}: {e}".splitlines()[0])
            continue
        ran.append(case.name)
    print("RAN", *ran)


def _launch(kernel: Any, variant: str, grid: tuple[int, ...], keywords: dict[str, Any]) -> None:
    if variant == "trace":
        with pp.trace(records_per_sm=1 << 10):
            kernel[grid](**keywords)
    elif variant == "sliced":
        blocks = int(np.prod(grid))
        half = max(1, blocks // 2)
        kernel.slice(grid, 0, half)(**keywords)
        if blocks > half:
            kernel.slice(grid, half, blocks - half)(**keywords)
    elif variant == "preemptible":
        kernel.preemptible[grid](**keywords).synchronize()
    else:
        kernel[grid](**keywords)
    pp.Device.current().synchronize()


def under(tool: str, variant: str, seconds: float, sanitizer: str) -> dict[str, Any]:
    """Findings of one tool on one variant, by their first lines."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "0", "--print-limit", "1000", sys.executable, __file__]
    command += ["--variant", variant, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * seconds + 60, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        return {"result": "took too long"}
    text = done.stdout + done.stderr
    ran = re.search(r"^RAN (.*)$", text, re.M)
    summary = re.search(r"ERROR SUMMARY: (\d+)", text) or re.search(r"RACECHECK SUMMARY: (\d+)", text)
    kinds = re.findall(r"^========= (Invalid|Uninitialized|Race|Barrier|Error|Warning|Program hit)[^\n]*", text, re.M)
    row = {"kernels": len(ran[1].split()) if ran else 0, "findings": int(summary[1]) if summary else None}
    if not ran:
        row["tail"] = text[-800:]
    return {**row, "kinds": sorted(set(kinds)), "rc": done.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--variant", help="run the corpus in this variant, here and now")
    parser.add_argument("--seconds", type=float, default=30, help="for each tool and variant, about")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.variant:
        return run_corpus(given.variant, given.seconds)
    device = need_gpu("compute-sanitizer")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    rows: dict[str, Any] = {}
    for tool in given.tools.split(","):
        rows[tool] = {}
        for variant in given.variants.split(","):
            rows[tool][variant] = under(tool, variant, given.seconds, sanitizer)
            print(tool, variant, rows[tool][variant], flush=True)
            save("sanitize", rows, device, given.out)
    return None


if __name__ == "__main__":
    main()
