"""First and later launches on the virtual GPU against Triton's interpreter: kernels of tests/corpus, in one run.

    python benchmarks/first_launch.py [--every 3] [--seconds 600] [--longest 60]

Each side runs in its own process, and both run kernel after kernel. The virtual GPU begins with empty caches on disk
(Triton's and ours), so its first launch compiles; the interpreter (TRITON_INTERPRET=1) compiles nothing. Each side
first launches a kernel that is not counted, so that imports are not measured. A kernel that takes too long on a side is
ended there and not counted. Results go to benchmarks/results/first_launch.json, anew after every kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import select
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
STARTING_S = 300  # a side's imports, and the loops that the virtual GPU compiles once


def corpus() -> list[Any]:
    sys.path.insert(0, str(ROOT / "tests"))
    from corpus import TRITON_CASES

    return [case for case in TRITON_CASES if case.evaluable]


def answer(interpreted: bool) -> None:
    """Reads numbers of kernels; writes the seconds of each one's first and fastest later launch, as a line of JSON."""
    import torch

    import paellapy as pp

    chosen = corpus()
    with pp.Device("virtual:h200"):
        for line in sys.stdin:
            try:
                print(json.dumps(launched(pp, torch, chosen[int(line)], interpreted)), flush=True)
            except Exception as e:
                print(json.dumps([None, f"{type(e).__name__}: {e}"[:120]]), flush=True)


def launched(pp: Any, torch: Any, case: Any, interpreted: bool) -> list[Any]:
    call = case.make(np.random.default_rng(0), 1.0)
    if any(isinstance(v, tuple) for v in call.args.values()):
        return [None, "takes a tuple"]
    given = {n: _tensor(torch, v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
    fn = case.kernel if interpreted else pp.kernel(case.kernel, report=None)
    options = {} if interpreted else call.options
    took = [_timed(fn, call.grid, {**given, **call.constexprs, **options}) for _ in range(1 + LATER)]
    return [took[0], min(took[1:])]


def _tensor(torch: Any, array: Any) -> Any:
    """An array as PyTorch has it, in memory of its own."""
    kind = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.copy().view(np.uint8).reshape(-1)).view(kind).reshape(array.shape)


def _timed(fn: Any, grid: Any, keywords: dict[str, Any]) -> float:
    start = time.perf_counter()
    fn[grid](**keywords)
    return time.perf_counter() - start


class Side:
    """The process of one side; started anew after a kernel that took too long."""

    def __init__(self, name: str, folder: Path) -> None:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        caches = {"PAELLAPY_CACHE_DIR": f"{folder}/{name}", "TRITON_CACHE_DIR": f"{folder}/{name}/triton"}
        interpreted = {"TRITON_INTERPRET": "1" if name == "interpreter" else "0"}
        self.name, self.settings = name, {**os.environ, **one_thread, **caches, **interpreted}
        self.errors = (folder / f"{name}.txt").open("w+")
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, kernel: int, longest_s: float) -> list[Any]:
        if self.process is None:
            command = [sys.executable, __file__, "--side", self.name]
            self.process = subprocess.Popen(
                command, bufsize=0, env=self.settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
            )
            if self._answer(0, STARTING_S) is None:
                self.errors.seek(0)
                raise SystemExit(f"{self.name} does not start: {self.errors.read()[-800:]}")
        found = self._answer(kernel, longest_s)
        if found is None:
            self.close()
            return [None, f"longer than {longest_s:g} s, or the process ended"]
        return found

    def _answer(self, kernel: int, longest_s: float) -> list[Any] | None:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{kernel}\n".encode())
        except BrokenPipeError:
            return None
        ends = time.monotonic() + longest_s
        while select.select([self.process.stdout], [], [], max(0, ends - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if line.startswith(b"["):  # other lines are what a kernel prints
                found: list[Any] = json.loads(line)
                return found
            if not line:
                return None
        return None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def summary(found: dict[str, dict[str, list[Any]]], of: int) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, by in found.items():
        ours, theirs = by["virtual"], by["interpreter"]
        both = ours[0] is not None and theirs[0] is not None
        cases[name] = {"first": theirs[0] / ours[0], "later": theirs[1] / ours[1], "virtual_s": ours} if both else by
    counted = [case for case in cases.values() if "first" in case]
    faster = {kind: statistics.median(case[kind] for case in counted) for kind in ("first", "later") if counted}
    return {"times_faster": faster, "kernels": len(counted), "tried": len(found), "of": of, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="every nth kernel of the corpus")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kernel after this time")
    parser.add_argument("--longest", type=float, default=60, help="seconds for a kernel's launches on one side")
    parser.add_argument("--side", choices=("virtual", "interpreter"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.side:
        return answer(given.side == "interpreter")
    from common import save

    names = [case.name for case in corpus()]
    chosen = range(1, len(names), given.every)
    ends = time.monotonic() + given.seconds
    found: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, Path(folder)) for name in ("virtual", "interpreter")]
        try:
            for number, kernel in enumerate(chosen, 1):
                if time.monotonic() > ends:
                    break
                found[names[kernel]] = {side.name: side.ask(kernel, given.longest) for side in sides}
                print(f"{number} of {len(chosen)}: {names[kernel]} {json.dumps(found[names[kernel]])}", flush=True)
                save("first_launch", summary(found, len(chosen)), None, given.out)
        finally:
            for side in sides:
                side.close()
    print({k: v for k, v in summary(found, len(chosen)).items() if k != "cases"})
    return None


if __name__ == "__main__":
    main()
