"""Triton's own language tests on the virtual GPU: which pass, which are refused, which fail.

    python benchmarks/triton_language_tests.py --source PATH [--every 20] [--parallel 16] [--seconds 200] [--resume]

PATH is a checkout of Triton or its source distribution, ideally of the installed version. Nothing of it is copied: its
tests run from there, with `fn[grid](…)` and `fn.warmup(…)` redirected through `pp.kernel` and tensors on the CPU. Of
files with more than 1,000 tests every nth test runs. Each test's outcome is written as a line as soon as it is known; a
test that takes longer than a minute is ended and counted, and `--resume` continues with the tests that have no line
yet. Results go to benchmarks/results/triton_language_tests.json.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import arguments, save, show
from public_kernels import Kernels, host_code_of_a_gpu, through
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

import paellapy as pp
from paellapy.instrument.kernels.triton_driver import VirtualDriver

# All files of the folder but four: test_module.py has no tests; test_subprocess.py runs scripts in their own processes
# and compares the text that CUDA's printf writes; test_warp_specialization.py needs PyTorch with CUDA
# and cuBLAS; test_clc.py needs a Blackwell GPU. A file that a version of Triton does not have is skipped.
FILES = ("test_annotations.py", "test_block_pointer.py", "test_compile_errors.py", "test_compile_only.py",
         "test_conversions.py", "test_decorator.py", "test_frontend.py", "test_libdevice.py", "test_line_info.py",
         "test_mxfp.py", "test_pipeliner.py", "test_random.py", "test_reproducer.py", "test_standard.py",
         "test_tuple.py", "test_tensor_descriptor.py", "test_matmul.py", "test_core.py")  # fmt: skip
LARGE = 1000  # tests in a file, from which on only every nth of them runs
LONGEST_S = 60.0  # of one test
_REFUSED = re.compile(r"((?:UnsupportedOp|Launch|Argument|Instrument|Compile|OutOfBounds)Error): (.*)")
# What a test that looks at the compiler's output, or asks the CUDA driver, has in the lines that fail.
_HARDWARE = re.compile(r"\basm\b|\b(?:ptx|ttgir|llir|sass|amdgcn)\b|metadata|n_regs|n_spills|torch\.cuda\.|CUDA driver|"
                       r"cuda_utils|Found no NVIDIA|Torch not compiled with CUDA")  # fmt: skip
HARDWARE = "looks at the compiler's output or asks the CUDA driver"


class Plugin:
    """Runs every nth test of a large file, from one of several processes, and writes a line about each."""

    def __init__(self, log: Path, every: int, which: int, of: int) -> None:
        self.log, self.every, self.which, self.of = log, every, which, of
        self.kernels = Kernels()
        self.done = set(read(log))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = items[:: self.every if len(items) > LARGE else 1][self.which :: self.of]
        items[:] = [item for item in chosen if name_of(item.nodeid) not in self.done]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        with through(self.kernels), warming(self.kernels), contextlib.suppress(AttributeError):
            yield

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(nodeid, "begun", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.note(report.nodeid, "passed", "")
        elif report.skipped:
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
            self.note(report.nodeid, "skipped by the test", str(why))
        elif report.failed:
            self.note(report.nodeid, *outcome_of(str(report.longrepr)))

    def note(self, nodeid: str, outcome: str, why: str) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([name_of(nodeid), outcome, why[:200]]) + "\n")


@contextlib.contextmanager
def warming(kernels: Kernels) -> Iterator[None]:
    """`fn.warmup(…)` of every Triton kernel compiles its pp.kernel instead."""
    before = {kind: kind.__dict__["warmup"] for kind in (KernelInterface, Autotuner)}
    for kind in before:
        kind.warmup = lambda fn, *args, **kwargs: kernels.of(fn).warmup(*args, **kwargs)
    try:
        yield
    finally:
        for kind, method in before.items():
            kind.warmup = method


def name_of(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{Path(file).name}::{test}"


def outcome_of(text: str) -> tuple[str, str]:
    """What a test's failure is, by its traceback."""
    if refused := _REFUSED.search(text):
        return "refused", f"{refused[1]}: {refused[2]}"
    failing = [line for line in text.splitlines() if line.startswith(("E ", ">"))]
    why = next((line[2:].strip() for line in failing if line.startswith("E ")), "?")
    shown = text.splitlines()[-12:]
    return (HARDWARE if _HARDWARE.search("\n".join(shown)) else "failed"), why


def read(log: Path) -> dict[str, tuple[str, str]]:
    """The last outcome of each test. One that was begun and never ended took too long, or ended its process."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {name: (outcome, why) for name, outcome, why in map(json.loads, lines)}


def run_here(folder: Path, files: list[str], log: Path, every: int, which: int, of: int) -> None:
    """Runs one process's part of the tests."""
    driver.set_active(VirtualDriver())
    with pp.Device("virtual:h200"), host_code_of_a_gpu():  # modules ask for the GPU when they are imported
        for name in (each for each in files if (folder / each).exists()):
            plugin = Plugin(log, every, which, of)
            command = [
                str(folder / name),
                "--device",
                "cpu",
                "-q",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                "-W",
                "ignore",
            ]
            command += ["--confcutdir", str(folder.parents[2])]
            pytest.main(command, plugins=[plugin])


class Part:
    """One process with a part of the tests, started anew without the test that was too long for it."""

    def __init__(self, number: int, command: list[str], log: Path) -> None:
        self.command, self.log = [*command, "--part", str(number)], log.with_suffix(f".{number}.jsonl")
        self.start()

    def start(self) -> None:
        self.changed, self.size = time.monotonic(), -1
        output = self.log.with_suffix(".txt").open("a")
        # Some tests find a kernel of an earlier run in Triton's cache, with the paths of that run.
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{self.log}.cache"}
        command = [*self.command, "--log", str(self.log)]
        self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def look(self) -> bool:
        """Whether it still has tests to run."""
        size = self.log.stat().st_size if self.log.exists() else 0
        if size != self.size:
            self.changed, self.size = time.monotonic(), size
        if self.process.poll() is not None:
            if self.process.returncode and self._ended("ended its process"):
                self.start()
                return True
            return False
        if time.monotonic() - self.changed > LONGEST_S and self._ended(f"took longer than {LONGEST_S:g} s"):
            self.process.kill()
            self.process.wait()
            self.start()
        return True

    def _ended(self, why: str) -> bool:
        begun = [name for name, (outcome, _) in read(self.log).items() if outcome == "begun"]
        with self.log.open("a") as file:
            for name in begun:
                file.write(json.dumps([name, "failed", why]) + "\n")
        return bool(begun)


def summary(parts: list[Part], every: int) -> dict[str, Any]:
    total: collections.Counter[str] = collections.Counter()
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, (outcome, why) in (item for part in parts for item in read(part.log).items()):
        total[outcome] += outcome != "begun"
        if outcome not in ("begun", "passed", "skipped by the test"):
            why = re.sub(r"0x[0-9a-f]+|[0-9]+", "N", re.sub(r"/\S*/language/", "", why))
            reasons[outcome][f"{name.partition('[')[0]}: {why[:140]}"] += 1
    counted = total["passed"] + total["refused"] + total["failed"]
    share = total["passed"] / counted if counted else None
    return {"every": every, "total": {kind: n for kind, n in total.items() if n}, "passed_of_the_others": share,
            "reasons": {kind: dict(counts.most_common()) for kind, counts in reasons.items()}}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, seconds=3600.0)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Triton, or its source distribution")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--every", type=int, default=1, help="run every nth test of large files")
    parser.add_argument("--parallel", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--resume", action="store_true", help="keep known outcomes")
    parser.add_argument("--log", type=Path, help="file for the outcomes, one line each")
    parser.add_argument("--part", type=int, help="run one part of the tests in this process")
    o = parser.parse_args()
    folder = o.source.resolve() / "python" / "test" / "unit" / "language"
    if not folder.is_dir():
        raise SystemExit(f"{o.source} is no checkout of Triton: there is no {folder}")
    if o.part is not None:
        run_here(folder, o.files.split(","), o.log, o.every, o.part, o.parallel)
        return
    log = o.log or o.source / "paellapy_outcomes"
    if not o.resume:
        for old in log.parent.glob(f"{log.name}.*.jsonl"):
            old.unlink()
            shutil.rmtree(f"{old}.cache", ignore_errors=True)
    command = [sys.executable, __file__, "--source", str(o.source), "--files", o.files]
    command += ["--every", str(o.every), "--parallel", str(o.parallel)]
    parts = [Part(number, command, log) for number in range(o.parallel)]
    ends = time.monotonic() + o.seconds
    try:
        running = parts
        while running and time.monotonic() < ends:
            time.sleep(2)
            running = [part for part in running if part.look()]
    finally:
        for part in parts:
            part.process.kill()
    found = summary(parts, o.every)
    total = collections.Counter(found["total"])
    show("Triton's language tests", ["outcome", "tests"], list(total.items()))
    counts = {name: total[name] for name in ("passed", "refused", "failed")}
    counts |= {"ran": sum(counts.values()), "skipped": total["skipped by the test"]}
    figures = {f"language.{name}": f"{n:,}" for name, n in counts.items()}
    figures["language.share"] = f"{100 * (found['passed_of_the_others'] or 0):.1f}"
    print(save("triton_language_tests", found, pp.Device("virtual:h200"), o.out, figures=figures))


if __name__ == "__main__":
    main()
