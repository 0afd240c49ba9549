"""The corpus under NVIDIA's compute-sanitizer: does a pass add errors that the plain kernel does not have?

    python benchmarks/sanitize.py [--cases cuda] [--tools memcheck,racecheck,synccheck,initcheck] [--budget 240]

For each tool, the Triton or CUDA C kernels of tests/corpus run plain and with every pass, each variant in its own
process under the tool, several at a time. The variant `ranges` has ranges around the whole kernel and around the rounds
of its loops. Each variant first runs once without a tool, so that everything is compiled. Findings are counted per
variant; results go to benchmarks/results after each, to sanitize.json or sanitize_cuda.json. Nothing starts after the
budget.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import need_gpu, save
from sanitized import CASES, VARIANTS, run_corpus

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
RESULTS = {"triton": "sanitize", "cuda": "sanitize_cuda"}  # the file for each kind of kernels
_ROOT = Path(__file__).parents[1]


def here(cases: str, variant: str, seconds: float) -> list[str]:
    """The command that runs one variant in its own process."""
    return [sys.executable, __file__, "--cases", cases, "--variant", variant, "--seconds", str(seconds)]


def under(tool: str, cases: str, variant: str, seconds: float, sanitizer: str) -> dict[str, Any]:
    """Findings of one tool on one variant, by their first lines."""
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "0"]
    command += ["--print-limit", "2000", "--show-backtrace", "no", *here(cases, variant, seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * seconds + 60, cwd=_ROOT)
    except subprocess.TimeoutExpired as e:
        return {"result": "took too long", "tail": str(e.stdout or b"")[-400:]}
    text = done.stdout + done.stderr
    ran = re.search(r"^RAN (.*)$", text, re.M)
    summary = re.search(r"ERROR SUMMARY: (\d+)", text) or re.search(r"RACECHECK SUMMARY: (\d+)", text)
    row = {"kernels": len(ran[1].split()) if ran else 0, "findings": int(summary[1]) if summary else None}
    if not ran:
        row["tail"] = text[-800:]
    return {**row, "kinds": found_in(text), "rc": done.returncode}


def found_in(text: str) -> dict[str, int]:
    """Number of reports by their kind and the kernel they are about."""
    kinds = Counter[str]()
    words = "Invalid|Uninitialized|Race|Potential|Barrier|Program hit|Host API"
    begin = re.compile(rf"^========= (Error: )?({words})[^\n]*", re.M)
    for report in re.split(r"^=========\s*$", text, flags=re.M):
        if kind := begin.search(report):
            kernel = re.search(r"\bat (?:0x\w+ in )?([A-Za-z_]\w*)(?:\(|\+0x)", report)
            kinds[f"{re.sub(r'0x[0-9a-f]+|[0-9]+', '#', kind[0][10:])[:60]} in {kernel[1] if kernel else '?'}"] += 1
    return dict(kinds)


def warm(cases: str, variant: str, seconds: float) -> None:
    """Compiles what the variant needs, without a tool."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(here(cases, variant, seconds), capture_output=True, timeout=seconds + 15, cwd=_ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, default="triton", help="the language of the kernels")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--variant", help="run the corpus in this variant, in this process")
    parser.add_argument("--seconds", type=float, default=30, help="approximate seconds for each tool and variant")
    parser.add_argument("--parallel", type=int, default=8, help="number of parallel processes")
    parser.add_argument("--budget", type=float, default=240, help="approximate seconds in all")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.variant:
        return run_corpus(given.cases, given.variant, given.seconds)
    device = need_gpu("compute-sanitizer")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tools, variants = given.tools.split(","), given.variants.split(",")
    ends = time.monotonic() + given.budget
    rows: dict[str, Any] = {tool: {} for tool in tools}
    writing = threading.Lock()

    def one(tool: str, variant: str) -> None:
        if time.monotonic() > ends:
            return
        found = under(tool, given.cases, variant, given.seconds, sanitizer)
        with writing:
            rows[tool][variant] = found
            for each in rows[tool].values():  # findings that no pass has made
                each["of_plain_kernels"] = rows[tool].get("plain", {}).get("findings")
            print(tool, variant, found, flush=True)
            save(RESULTS[given.cases], rows, device, given.out)

    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(lambda variant: warm(given.cases, variant, given.seconds), variants))
        print(f"compiled, {ends - time.monotonic():.0f} s left", flush=True)
        for done in [pool.submit(one, tool, variant) for tool in tools for variant in variants]:
            done.result()
    return None


if __name__ == "__main__":
    main()
