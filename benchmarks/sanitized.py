"""The kernels of tests/corpus in one variant, each launched once: the process that sanitize.py runs under a tool."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ranged import inserted_cuda, with_ranges

import paellapy as pp

VARIANTS = ("plain", "count", "trace", "ranges", "notify", "sliced", "preemptible")
CASES = ("triton", "cuda")
_TRACED = ("trace", "ranges")
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
        if variant in _TRACED:
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

    for case in TRITON_CASES:
        if variant in _PARTS and not case.sliceable:
            continue
        call = case.make(np.random.default_rng(0), 0.1)
        given = {n: pp.array(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
        if any(isinstance(v, tuple) for v in given.values()):
            continue
        kernel = pp.kernel(with_ranges(case.kernel) if variant == "ranges" else case.kernel, report=_report(variant))
        keywords = {**given, **call.constexprs, **call.options}
        yield Launch(case.name, kernel, call.grid, call.grid, keywords=keywords)


def cuda_launches(variant: str) -> Iterator[Launch]:
    """CUDA C kernels: made from a `cupy.RawKernel` where CuPy is installed, from their text elsewhere."""
    from corpus import CUDA_CASES

    for case in CUDA_CASES:
        if not (case.launchable and case.instrumentable) or (variant in _PARTS and not case.sliceable):
            continue
        call = case.make(np.random.default_rng(0), 0.1)
        text = inserted_cuda(case.source, case.entry) if variant == "ranges" else case.source
        kernel = _cuda_kernel(text, case.name_expression or case.entry, case.options, _report(variant))
        given = [pp.array(v) if isinstance(v, np.ndarray) else v for v in call.args]
        yield Launch(case.name, kernel, (call.grid, call.block, call.shared_bytes), call.grid, given)


def _report(variant: str) -> Any:
    return variant if variant in ("count", "notify") else None


def _cuda_kernel(text: str, name: str, options: tuple[str, ...], report: Any) -> Any:
    if importlib.util.find_spec("cupy") is None:
        return pp.kernel(source=text, name=name, options=options, report=report)
    import cupy

    return pp.kernel(cupy.RawKernel(text, name, options=options), report=report)


def run_corpus(cases: str, variant: str, seconds: float) -> None:
    """Launches each kernel once. The last line names the kernels that ran."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    launches = {"triton": triton_launches, "cuda": cuda_launches}[cases](variant)
    began, ran = time.perf_counter(), []  # of the second kernel: the first one opens the device, slowly under a tool
    for launch in launches:
        if time.perf_counter() - began > seconds:
            break
        try:
            launch(variant)
        except pp.PaellaError as e:
            print(f"refused {launch.name}: {e}".splitlines()[0])
            continue
        ran.append(launch.name)
        if len(ran) == 1:
            began = time.perf_counter()
    print("RAN", *ran)
