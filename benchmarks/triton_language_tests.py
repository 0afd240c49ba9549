"""Triton's own language tests on the virtual GPU: which pass, which are refused, which fail.

    python benchmarks/triton_language_tests.py --source PATH [--files test_core.py,test_standard.py] [--every 10]

PATH is a checkout of Triton (PyPI has no source distribution of it), best of the version installed. Nothing of it is
copied: its tests run from there, with `fn[grid](…)` going through `pp.kernel` and tensors on the CPU. Tests of
assembly and of launch metadata need hardware; what fails is counted by its error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from common import save
from public_kernels import Kernels, host_code_of_a_gpu, through

import paellapy as pp

FILES = ("test_core.py", "test_standard.py", "test_random.py", "test_tuple.py", "test_libdevice.py",
         "test_conversions.py", "test_annotations.py", "test_tensor_descriptor.py", "test_mxfp.py")  # fmt: skip
_REFUSED = re.compile(r"(UnsupportedOpError|LaunchError|ArgumentError|InstrumentError|CompileError): (.*)")


class Plugin:
    """Counts the outcomes of the tests, and runs every nth of them."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.kernels = Kernels()
        self.found: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failed: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[:: self.every]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        with through(self.kernels), host_code_of_a_gpu(), contextlib.suppress(AttributeError):
            yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.found["passed"] += 1
        elif report.skipped:
            self.found["skipped by the test itself"] += 1
        elif report.failed:
            text = str(report.longrepr)
            refused = _REFUSED.search(text)
            lines = [line for line in text.splitlines() if line.startswith("E ")]
            why = f"{refused[1]}: {refused[2]}"[:160] if refused else (lines[0][2:].strip() if lines else "?")[:160]
            kind = "refused" if refused else "failed"
            self.found[kind] += 1
            self.reasons[f"{kind}: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', why)[:110]}"] += 1
            self.failed[report.nodeid.rpartition("/")[2]] = why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Triton")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--every", type=int, default=1, help="run every nth test")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    folder = given.source / "python" / "test" / "unit" / "language"
    if not folder.is_dir():
        raise SystemExit(f"{given.source} is no checkout of Triton: there is no {folder}")
    rows: dict[str, Any] = {}
    with pp.Device("virtual:h200") as device:
        for name in given.files.split(","):
            plugin = Plugin(given.every)
            command = [str(folder / name), "--device", "cpu", "-q", "-p", "no:cacheprovider", "--tb=short"]
            pytest.main(command, plugins=[plugin])
            rows[name] = {**plugin.found, "reasons": dict(plugin.reasons.most_common(20))}
            print(name, rows[name], file=sys.stderr, flush=True)
            save("triton_language_tests", {"every": given.every, "files": rows}, device, given.out)


if __name__ == "__main__":
    main()
