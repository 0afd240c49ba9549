"""First and later launches on the virtual GPU against Triton's interpreter: kernels of tests/corpus, in one run.

    python benchmarks/first_launch.py [--every 3] [--seconds 600] [--longest 60]

Each side runs in its own process, and both run kernel after kernel. The virtual GPU begins with empty caches on disk
(Triton's and ours), so its first launch compiles; the interpreter (TRITON_INTERPRET=1) compiles nothing. Each side
first launches a kernel that is not counted, so that imports are not measured. A kernel that takes too long on a side is
ended there and not counted.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, environment, save, show

LATER = 4  # launches after the first, of which the fastest counts
STARTING_S = 300  # a side's imports, and the loops that the virtual GPU compiles once


def corpus() -> list[Any]:
    from corpus import TRITON_CASES

    return [case for case in TRITON_CASES if case.evaluable]


def answer(interpreted: bool) -> None:
    """Reads numbers of kernels; writes the seconds of each one's first and fastest later launch, as a line of JSON."""
    import torch

    import paellapy as pp

    def tensor(array: Any) -> Any:
        kind = getattr(torch, array.dtype.name)
        return torch.from_numpy(array.copy().view(np.uint8).reshape(-1)).view(kind).reshape(array.shape)

    def launched(case: Any) -> list[Any]:
        call = case.make(np.random.default_rng(0), 1.0)
        if any(isinstance(v, tuple) for v in call.args.values()):
            return [None, "takes a tuple"]
        given = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
        fn = case.kernel if interpreted else pp.kernel(case.kernel, report=None)
        keywords = {**given, **call.constexprs, **({} if interpreted else call.options)}
        took = []
        for _ in range(1 + LATER):
            start = time.perf_counter()
            fn[call.grid](**keywords)
            took.append(time.perf_counter() - start)
        return [took[0], min(took[1:])]

    chosen = corpus()
    with pp.Device("virtual:h200"):
        for line in sys.stdin:
            try:
                print(json.dumps(launched(chosen[int(line)])), flush=True)
            except Exception as e:
                print(json.dumps([None, f"{type(e).__name__}: {e}"[:120]]), flush=True)


class Side:
    """The process of one side; started anew after a kernel that took too long."""

    def __init__(self, name: str, folder: Path) -> None:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        caches = {"PAELLAPY_CACHE_DIR": f"{folder}/{name}", "TRITON_CACHE_DIR": f"{folder}/{name}/triton"}
        interpreted = {"TRITON_INTERPRET": "1" if name == "interpreter" else "0"}
        self.name, self.env = name, environment(**one_thread, **caches, **interpreted)
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, kernel: int, longest_s: float) -> list[Any]:
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            self.process = subprocess.Popen([sys.executable, __file__, "--side", self.name], env=self.env, **pipes)
            if self._answer(0, STARTING_S) is None:
                raise SystemExit(f"{self.name} does not start")
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


def main() -> None:
    parser = arguments(__doc__, seconds=3600.0)
    parser.add_argument("--every", type=int, default=1, help="every nth kernel of the corpus")
    parser.add_argument("--longest", type=float, default=60, help="seconds for a kernel's launches on one side")
    parser.add_argument("--side", choices=("virtual", "interpreter"), help="be the process of one side")
    o = parser.parse_args()
    if o.side:
        answer(o.side == "interpreter")
        return
    cases = corpus()
    chosen, ends = range(1, len(cases), o.every), time.monotonic() + o.seconds
    rows, tried = [], 0
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, Path(folder)) for name in ("virtual", "interpreter")]
        try:
            for kernel in chosen:
                if time.monotonic() < ends:
                    ours, theirs = (side.ask(kernel, o.longest) for side in sides)
                    tried += 1
                    if ours[0] is not None and theirs[0] is not None:
                        rows.append([cases[kernel].name, theirs[0] / ours[0], theirs[1] / ours[1]])
        finally:
            for side in sides:
                side.close()
    show("the interpreter's time ÷ the virtual GPU's", ["kernel", "first launch", "later"], rows)
    faster = {kind: statistics.median(row[k] for row in rows) for k, kind in ((1, "first"), (2, "later")) if rows}
    results = {"times_faster": faster, "kernels": len(rows), "tried": tried, "of": len(chosen)}
    figures = {"first.kernels": str(len(rows))}
    if rows:
        figures |= {"first.first": f"{faster['first']:.1f}", "first.later": f"{faster['later']:.0f}"}
    print(save("first_launch", results, folder=o.out, figures=figures))


if __name__ == "__main__":
    main()
