"""First and later launches on the virtual GPU against Triton's interpreter: kernels of tests/corpus, in one run.

    python benchmarks/first_launch.py [--every 3] [--seconds 600] [--longest 60]

Each side runs in its own process, and both run kernel after kernel; CPU time counts. The virtual GPU begins with empty
caches on disk (Triton's and ours), so its first launch compiles; the interpreter (TRITON_INTERPRET=1) compiles nothing.
Each side first launches a kernel that is not counted, so that imports are not measured. A kernel that takes too long on
a side is ended there and not counted.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from harness import arguments, environment, save, show

LATER = 4  # launches after the first, of which the fastest counts


def answer(interpreted: bool, o: Any) -> None:
    """Writes the name and the seconds of each kernel's first and fastest later launch, as lines of JSON."""
    import torch
    from corpus import TRITON_CASES

    import paellapy as pp

    def tensor(array: Any) -> Any:
        kind = getattr(torch, array.dtype.name)
        return torch.from_numpy(array.copy().view(np.uint8).reshape(-1)).view(kind).reshape(array.shape)

    def stop(*_: Any) -> None:
        raise TimeoutError

    def launched(case: Any) -> list[float]:
        call = case.make(np.random.default_rng(0), 1.0)
        given = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
        fn = case.kernel if interpreted else pp.kernel(case.kernel, report=None)
        keywords = {**given, **call.constexprs, **({} if interpreted else call.options)}
        took = []
        for _ in range(1 + LATER):
            start = time.process_time()
            fn[call.grid](**keywords)
            took.append(time.process_time() - start)
        return [took[0], min(took[1:])]

    signal.signal(signal.SIGALRM, stop)  # blocks that wait for each other never end in the interpreter
    cases, ends = [case for case in TRITON_CASES if case.evaluable], time.monotonic() + o.seconds
    with pp.Device("virtual:h200"):
        for case in (cases[0], *cases[1 :: o.every]):
            if time.monotonic() < ends:
                with contextlib.suppress(Exception):
                    signal.alarm(o.longest)
                    print(json.dumps([case.name, *launched(case)]), flush=True)
                signal.alarm(0)


def side(name: str, o: Any) -> dict[str, tuple[float, float]]:
    """The kernels that ran in one side's process, without the first."""
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        env = environment(PAELLAPY_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton", **one_thread,
                          TRITON_INTERPRET="1" if name == "interpreter" else "0")  # fmt: skip
        command = [sys.executable, __file__, "--side", name, "--every", str(o.every), "--longest", str(o.longest)]
        said = subprocess.check_output([*command, "--seconds", str(o.seconds / 2)], env=env, text=True)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('["')]  # others are kernels' own
    return {case: (first, later) for case, first, later in lines[1:]}


def main() -> None:
    parser = arguments(__doc__, seconds=3600.0)
    parser.add_argument("--every", type=int, default=1, help="every nth kernel of the corpus")
    parser.add_argument("--longest", type=int, default=60, help="seconds for a kernel's launches on one side")
    parser.add_argument("--side", choices=("virtual", "interpreter"), help="be the process of one side")
    o = parser.parse_args()
    if o.side:
        answer(o.side == "interpreter", o)
        return
    ours, theirs = side("virtual", o), side("interpreter", o)
    rows = [[name, *(b / a for a, b in zip(ours[name], theirs[name], strict=True))] for name in ours if name in theirs]
    show("the interpreter's time ÷ the virtual GPU's", ["kernel", "first launch", "later"], rows)
    faster = {kind: statistics.median(row[k] for row in rows) for k, kind in ((1, "first"), (2, "later"))}
    slower = {row[0]: row[1] for row in rows if row[1] < 1 / 1.2}  # than the interpreter at the first launch
    results = {"times_faster": faster, "kernels": len(rows), "tried": len(ours), "first_slower": slower}
    figures = {"first.kernels": str(len(rows)), "first.first": f"{faster['first']:.1f}",
               "first.later": f"{faster['later']:.0f}"}  # fmt: skip
    print(save("first_launch", results, folder=o.out, figures=figures))


if __name__ == "__main__":
    main()
