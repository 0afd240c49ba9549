"""Triton's own language tests on the virtual GPU: which pass, which are refused, which fail.

    python benchmarks/triton_language_tests.py --source PATH [--every 20] [--parallel 16]

PATH is a checkout of Triton or its source distribution, ideally of the installed version. Nothing of it is copied: its
tests run from there, with `fn[grid](…)` and `fn.warmup(…)` redirected through `pp.kernel` and tensors on the CPU. Of
files with more than 1,000 tests every nth test runs. A test that takes longer than a minute is ended and counted.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import arguments, environment, save, show
from public_kernels import Kernels, host_code_of_a_gpu, through
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

import paellapy as pp
from paellapy.instrument.kernels.triton_driver import VirtualDriver

# test_module.py has no tests; test_subprocess.py runs scripts in their own processes and compares the text that CUDA's
# printf writes; test_warp_specialization.py needs PyTorch with CUDA and cuBLAS; test_clc.py needs a Blackwell GPU.
LEFT_OUT = {"test_module.py", "test_subprocess.py", "test_warp_specialization.py", "test_clc.py"}
LARGE = 1000  # tests in a file, from which on only every nth of them runs
LONGEST_S = 60  # of one test
_REFUSED = re.compile(r"((?:UnsupportedOp|Launch|Argument|Instrument|Compile|OutOfBounds)Error): (.*)")
# What a test that looks at the compiler's output, or asks the CUDA driver, has in the lines that fail.
_HARDWARE = re.compile(r"\basm\b|\b(?:ptx|ttgir|llir|sass|amdgcn)\b|metadata|n_regs|n_spills|torch\.cuda\.|CUDA driver|"
                       r"cuda_utils|Found no NVIDIA|Torch not compiled with CUDA")  # fmt: skip
HARDWARE = "looks at the compiler's output or asks the CUDA driver"


class Plugin:
    """Runs every nth test of a large file, from one of several processes, and writes a line about each."""

    def __init__(self, o: Any) -> None:
        self.o, self.kernels = o, Kernels()
        signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, *_: Any) -> None:
        raise TimeoutError(f"took longer than {LONGEST_S} s")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[:: self.o.every if len(items) > LARGE else 1][self.o.part :: self.o.parallel]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        signal.alarm(LONGEST_S)
        with through(self.kernels), warming(self.kernels), contextlib.suppress(AttributeError):
            yield
        signal.alarm(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.note(report.nodeid, "passed", "")
        elif report.skipped:
            self.note(report.nodeid, "skipped by the test", "")
        elif report.failed:
            self.note(report.nodeid, *outcome_of(str(report.longrepr)))

    def note(self, nodeid: str, outcome: str, why: str) -> None:
        with self.o.log.open("a") as file:
            file.write(json.dumps([Path(nodeid.partition("[")[0]).name, outcome, why[:140]]) + "\n")


@contextlib.contextmanager
def warming(kernels: Kernels) -> Iterator[None]:
    """`fn.warmup(…)` of every Triton kernel compiles its pp.kernel instead."""

    def warmup(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return kernels.of(fn).warmup(*args, **kwargs)

    with mock.patch.object(KernelInterface, "warmup", warmup), mock.patch.object(Autotuner, "warmup", warmup):
        yield


def outcome_of(text: str) -> tuple[str, str]:
    """What a test's failure is, by its traceback."""
    if refused := _REFUSED.search(text):
        return "refused", f"{refused[1]}: {refused[2]}"
    failing = [line for line in text.splitlines() if line.startswith(("E ", ">"))]
    why = next((line[2:].strip() for line in failing if line.startswith("E ")), "?")
    return (HARDWARE if _HARDWARE.search("\n".join(text.splitlines()[-12:])) else "failed"), why


def run_here(folder: Path, o: Any) -> None:
    """Runs one process's part of the tests."""
    driver.set_active(VirtualDriver())
    with pp.Device("virtual:h200"), host_code_of_a_gpu():  # modules ask for the GPU when they are imported
        for file in (each for each in sorted(folder.glob(o.files)) if each.name not in LEFT_OUT):
            options = ["--device", "cpu", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
            pytest.main([str(file), *options, "--confcutdir", str(folder.parents[2])], plugins=[Plugin(o)])


def main() -> None:
    parser = arguments(__doc__, seconds=3600.0)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Triton, or its source distribution")
    parser.add_argument("--files", default="test_*.py", help="pattern of their names")
    parser.add_argument("--every", type=int, default=1, help="run every nth test of large files")
    parser.add_argument("--parallel", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--part", type=int, help="run one part of the tests in this process")
    parser.add_argument("--log", type=Path, help="file for the outcomes of one part")
    o = parser.parse_args()
    folder = o.source.resolve() / "python" / "test" / "unit" / "language"
    if not folder.is_dir():
        raise SystemExit(f"{o.source} is no checkout of Triton: there is no {folder}")
    if o.part is not None:
        run_here(folder, o)
        return
    command = [sys.executable, __file__, *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch) / f"{k}.jsonl" for k in range(o.parallel)]
        # Some tests find a kernel of an earlier run in Triton's cache, with the paths of that run.
        parts = [
            subprocess.Popen([*command, "--part", str(k), "--log", str(log)], stdout=subprocess.DEVNULL,
                             env=environment(TRITON_CACHE_DIR=f"{log}.cache", COLUMNS=os.environ.get("COLUMNS", "120")))
            for k, log in enumerate(logs)
        ]  # fmt: skip
        for each in parts:
            each.wait()
        lines = [json.loads(line) for log in logs if log.exists() for line in log.read_text().splitlines()]
    total = collections.Counter(outcome for _, outcome, _ in lines)
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, outcome, why in lines:
        if outcome not in ("passed", "skipped by the test"):
            reasons[outcome][f"{name}: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', re.sub(r'/[^ ]*/language/', '', why))}"] += 1
    counts = {name: total[name] for name in ("passed", "refused", "failed")}
    ran = sum(counts.values())
    share = total["passed"] / ran if ran else 0.0
    show("Triton's language tests", ["outcome", "tests"], list(total.items()))
    counts |= {"ran": ran, "skipped": total["skipped by the test"]}
    figures = {f"language.{name}": f"{n:,}" for name, n in counts.items()} | {"language.share": f"{100 * share:.1f}"}
    found = {"every": o.every, "total": dict(total), "passed_of_the_others": share,
             "reasons": {kind: dict(each.most_common()) for kind, each in reasons.items()}}  # fmt: skip
    print(save("triton_language_tests", found, pp.Device("virtual:h200"), o.out, figures=figures))


if __name__ == "__main__":
    main()
