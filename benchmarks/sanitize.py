"""The corpus under NVIDIA's compute-sanitizer: does a pass add errors that the plain kernel does not have?

    python benchmarks/sanitize.py [--cases cuda] [--tools memcheck,racecheck,synccheck,initcheck] [--budget 240]

For each tool, the Triton or CUDA C kernels of tests/corpus run plain and with every pass, each variant in its own
process under the tool, several at a time. The variant `ranges` has ranges around the whole kernel and around the rounds
of its loops. Each variant first runs once without a tool, so that everything is compiled.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness import ROOT, arguments, commit, environment, finish, need_gpu, stored

import paellapy as pp

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
VARIANTS = ("plain", "count", "trace", "ranges", "notify", "sliced", "preemptible")
TITLES = {"triton": "Triton", "cuda": "CUDA C"}
_PARTS = ("sliced", "preemptible")  # the variants in which some blocks run later than others


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel in a variant."""

    name: str
    kernel: Any
    where: Any  # what the kernel is indexed with: a grid; for CUDA C with a block and the bytes of shared memory
    grid: tuple[int, ...]
    args: Sequence[Any] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, variant: str) -> None:
        if variant in ("trace", "ranges"):
            with pp.trace(records_per_sm=1 << 10):
                self.kernel[self.where](*self.args, **self.keywords)
        elif variant == "sliced":
            blocks = int(np.prod(self.grid))
            half = max(1, blocks // 2)
            for first, count in ((0, half), (half, blocks - half)):
                if count:
                    self.kernel.slice(self.where, first, count)(*self.args, **self.keywords)
        elif variant == "preemptible":
            self.kernel.preemptible[self.where](*self.args, **self.keywords).synchronize()
        else:
            self.kernel[self.where](*self.args, **self.keywords)
        pp.Device.current().synchronize()


def triton_launches(variant: str) -> Iterator[Launch]:
    from corpus import TRITON_CASES
    from corpus.ranged import with_ranges

    for case in TRITON_CASES:
        if variant in _PARTS and not case.sliceable:
            continue
        call = case.make(np.random.default_rng(0), 0.1)
        given = {n: pp.array(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
        if not any(isinstance(v, tuple) for v in given.values()):
            kernel = with_ranges(case.kernel) if variant == "ranges" else case.kernel
            keywords = {**given, **call.constexprs, **call.options}
            yield Launch(case.name, pp.kernel(kernel, report=_report(variant)), call.grid, call.grid, keywords=keywords)


def cuda_launches(variant: str) -> Iterator[Launch]:
    from corpus import CUDA_CASES
    from corpus.ranged import inserted_cuda

    for case in CUDA_CASES:
        if not (case.launchable and case.instrumentable) or (variant in _PARTS and not case.sliceable):
            continue
        call = case.make(np.random.default_rng(0), 0.1)
        text = inserted_cuda(case.source, case.entry) if variant == "ranges" else case.source
        name = case.name_expression or case.entry
        kernel = pp.kernel(source=text, name=name, options=case.options, report=_report(variant))
        given = [pp.array(v) if isinstance(v, np.ndarray) else v for v in call.args]
        yield Launch(case.name, kernel, (call.grid, call.block, call.shared_bytes), call.grid, given)


def _report(variant: str) -> Any:
    return variant if variant in ("count", "notify") else None


def run_corpus(cases: str, variant: str, seconds: float) -> None:
    """Launches each kernel once. The last line names the kernels that ran."""
    began, ran = time.perf_counter(), []  # of the second kernel: the first one opens the device, slowly under a tool
    for launch in {"triton": triton_launches, "cuda": cuda_launches}[cases](variant):
        if time.perf_counter() - began > seconds:
            break
        try:
            launch(variant)
        except pp.PaellaError as e:
            print(f"refused {launch.name}: {e}".splitlines()[0])
            continue
        ran.append(launch.name)
        began = time.perf_counter() if len(ran) == 1 else began
    print("RAN", *ran)


def under(tool: str, variant: str, o: Any) -> dict[str, Any]:
    """Findings of one tool on one variant; without a tool everything is compiled."""
    command = [sys.executable, __file__, "--cases", o.cases, "--variant", variant, "--seconds", str(o.seconds)]
    if tool:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "0",
                   "--print-limit", "2000", "--show-backtrace", "no", *command]  # fmt: skip
    run = {"capture_output": True, "text": True, "timeout": 2 * o.seconds + 60, "cwd": ROOT, "env": environment()}
    try:
        done = subprocess.run(command, check=False, **run)
    except subprocess.TimeoutExpired:
        return {"kernels": 0, "findings": None, "commit": commit()}
    text = done.stdout + done.stderr
    ran = re.search(r"^RAN (.*)$", text, re.M)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    findings = int(summary[1]) if summary else None
    return {"kernels": len(ran[1].split()) if ran else 0, "findings": findings, "commit": commit()}


def main() -> None:
    parser = arguments(__doc__, seconds=30.0)
    parser.add_argument("--cases", choices=TITLES, default="triton", help="the language of the kernels")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--variant", choices=VARIANTS, help="run the corpus in this variant, in this process")
    parser.add_argument("--parallel", type=int, default=8, help="number of parallel processes")
    parser.add_argument("--budget", type=float, default=240, help="nothing starts after this many seconds")
    o = parser.parse_args()
    if o.variant:
        run_corpus(o.cases, o.variant, o.seconds)
        return
    device, ends = need_gpu("compute-sanitizer"), time.monotonic() + o.budget
    results = stored("sanitize", o.out)
    rows = results[TITLES[o.cases]] = {tool: {} for tool in o.tools.split(",")}
    with ThreadPoolExecutor(o.parallel) as pool:
        list(pool.map(lambda variant: under("", variant, o), VARIANTS))
        jobs = [(tool, variant) for tool in rows for variant in VARIANTS]
        found = pool.map(lambda job: under(*job, o) if time.monotonic() < ends else None, jobs)
        for (tool, variant), each in zip(jobs, found, strict=True):
            if each is not None:
                plain = rows[tool].get("plain", each)["findings"]
                rows[tool][variant] = {**each, "of_plain_kernels": plain}
    shown = []
    for title, tools in results.items():
        for tool, at in tools.items():
            others = [row for name, row in at.items() if name != "plain"]
            more = sum((row["findings"] or 0) - (row["of_plain_kernels"] or 0) for row in others)
            kernels = [row["kernels"] for row in others]
            shown.append([title, f"`{tool}`", at["plain"]["findings"], more, f"{min(kernels)} to {max(kernels)}"])
    head = ["kernels", "tool", "findings in plain kernels", "more in any variant", "kernels of a variant"]
    finish(o, "sanitize", results, "findings", [head, *shown], device, table="sanitizer")


if __name__ == "__main__":
    main()
