"""Public Triton kernels, unmodified, from installed packages: are they correct on the virtual GPU, with every pass?

    pip install --editable '.[public]'
    python benchmarks/public_kernels.py                  # on the virtual GPU: against PyTorch, and all passes assembled
    python benchmarks/public_kernels.py --gpu            # on a GPU: the same bits with and without reporting
    python benchmarks/public_kernels.py --gpu --ranges   # the same, and with ranges inserted
    python benchmarks/public_kernels.py --only liger.rope,fla.chunk_gla
    python benchmarks/public_kernels.py --only more      # the smaller packages
    GEMS_VENDOR=nvidia python benchmarks/public_kernels.py --only flag_gems --no-passes
    GEMS_VENDOR=nvidia python benchmarks/public_kernels.py --gpu --parallel 8     # shared among processes

The package's own code computes an operator and its gradients; launches `kernel[grid](…)` of its kernels are redirected
through `pp.kernel`. Tuners use their first configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import arguments, finish, need_gpu, run_at_once, save, show, stored
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction, KernelInterface

import paellapy as pp
from paellapy.instrument.kernels.triton_source import TritonSource
from paellapy.instrument.ptx.descriptor import PassConfig

# Every pass alone or with others: what a kernel may be built with.
VARIANTS = {
    "count": PassConfig("count"),
    "trace": PassConfig("trace"),
    "notify, sliced": PassConfig("notify", sliced=True),
    "trace, sliced, preemptible": PassConfig("trace", sliced=True, preempt=True),
    "trace with ranges": PassConfig("trace"),
    "trace with ranges, sliced, preemptible": PassConfig("trace", sliced=True, preempt=True),
}


class Kernels:
    """The kernels that were launched, each as a pp.kernel, and the specialisations that passes have been tried on.

    `ranges`: the kernels are launched with ranges.
    """

    def __init__(self, ranges: bool = False) -> None:
        self.wrapped: dict[int, Any] = {}
        self._ranges = ranges
        self._tried: set[tuple[int, Any]] = set()
        self._originals: list[Any] = []  # so that no number is given to another kernel

    def of(self, fn: Any) -> Any:
        if id(fn) not in self.wrapped:
            self._originals.append(fn)
            inner = fn
            while not isinstance(inner, JITFunction):
                if isinstance(inner, Autotuner):
                    inner.configs = inner.configs[:1]
                inner = inner.fn
            taken = fn
            while not isinstance(taken, (JITFunction, Autotuner, Heuristics)):
                taken = taken.fn  # a cache of launches of the package's own
            self.wrapped[id(fn)] = pp.kernel(_ranged(taken) if self._ranges else taken, report=None)
        return self.wrapped[id(fn)]

    def untried(self) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        """The name of each new specialisation, its source, and a function that makes the source with ranges."""
        for number, kernel in self.wrapped.items():
            for key, launcher in list(kernel._launchers.items()):
                if (number, key) not in self._tried:
                    self._tried.add((number, key))
                    finish = inspect.getclosurevars(launcher._draft._finish).nonlocals
                    ranged = functools.partial(_with_ranges, kernel._jit, finish["work"])
                    yield kernel.name, launcher._draft.source, ranged


def _ranged(fn: Any) -> Any:
    from corpus.ranged import with_ranges

    return with_ranges(fn)


def _with_ranges(fn: JITFunction, work: Any) -> Any:
    return TritonSource(_ranged(fn))._finished(dataclasses.replace(work, marked=True))


@contextlib.contextmanager
def through(kernels: Kernels) -> Iterator[None]:
    """`fn[grid]` of every Triton kernel launches its pp.kernel instead."""
    with contextlib.ExitStack() as stack:
        for kind in (KernelInterface, JITFunction):
            if "__getitem__" in kind.__dict__:
                stack.enter_context(mock.patch.object(kind, "__getitem__", lambda fn, grid: kernels.of(fn)[grid]))
        yield


@contextlib.contextmanager
def host_code_of_a_gpu() -> Iterator[None]:
    """What the packages' host code asks PyTorch of its GPU, answered for the virtual one; tensors stay on the CPU."""
    part = pp.Device.current()
    facts = types.SimpleNamespace(name=part.title, multi_processor_count=part.sm_count, major=9, minor=0)
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_properties": lambda *_: facts, "get_device_capability": lambda *_: part.capability,
        "get_device_name": lambda *_: part.title,
    }  # fmt: skip
    # What a package gives to torch.compile runs as it is: the compiler would look for the GPU itself.
    with mock.patch.multiple(torch.cuda, **answers), torch.compiler.set_stance("force_eager"):
        yield


def computed(operator: Any, given: dict[str, Any], case: Any) -> list[torch.Tensor]:
    """Outputs, and the gradients of all inputs that have one."""
    varied = {n for n, v in given.items() if case.grad and v.is_floating_point() and n not in case.constant}
    given = {n: v.clone().requires_grad_(n in varied) for n, v in given.items()}
    out = operator(**given)
    outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
    found = [o.detach().clone() for o in outs]
    if case.grad:
        weights = [torch.linspace(0.5, 1.5, o.numel(), device=o.device).view(o.shape).to(o.dtype) for o in outs]
        torch.autograd.backward([o for o in outs if o.requires_grad],
                                [w for o, w in zip(outs, weights, strict=True) if o.requires_grad])  # fmt: skip
        found += [v.grad.clone() for v in given.values() if v.requires_grad and v.grad is not None]
    return found


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, of the largest value wanted."""
    if len(found) != len(wanted):
        return float("inf")
    errors = [0.0]
    for f, w in zip(found, wanted, strict=True):
        f, w = (torch.view_as_real(x) if x.is_complex() else x for x in (f, w))
        f, w = f.double().cpu().reshape(-1), w.double().cpu().reshape(-1)
        if f.shape != w.shape:
            return float("inf")
        scale = w[w.isfinite()].abs().max().clamp(min=1e-6) if w.isfinite().any() else 1.0
        differ = ~((f == w) | (f.isnan() & w.isnan()))  # infinite where PyTorch's are
        f, w = f[differ], w[differ]
        if not differ.any():
            continue
        if not torch.isfinite(f).all():
            return float("inf")
        errors.append(float((f - w).abs().max() / scale))
    return max(errors)


def on_virtual(case: Any, kernels: Kernels) -> dict[str, Any]:
    given = case.inputs(torch.Generator().manual_seed(0))
    began = time.perf_counter()
    try:
        wanted = computed(case.reference, given, case)
        with through(kernels), host_code_of_a_gpu():
            found = computed(case.operator(), given, case)
    except pp.PaellaError as e:
        return {"result": "refused", "why": str(e).splitlines()[0][:300]}
    except Exception as e:
        return {"result": "crashed", "why": f"{type(e).__name__}: {e}".splitlines()[0][:300]}
    error = worst(found, wanted)
    row: dict[str, Any] = {"result": "right" if error <= case.tolerance else "wrong", "error": error}
    return {**row, "compared": len(wanted), "seconds": round(time.perf_counter() - began, 2)}


def through_passes(kernels: Kernels) -> dict[str, Any]:
    """Every variant of every specialisation launched since the last call, assembled by ptxas."""
    names, built, refused, failed = set(), 0, {}, {}
    for name, source, ranged in kernels.untried():
        names.add(name)
        for variant, config in VARIANTS.items():
            try:
                (ranged() if "ranges" in variant else source).build(config)
                built += 1
            except pp.InstrumentError as e:
                refused[f"{name}: {variant}"] = str(e)[:200]
            except Exception as e:
                failed[f"{name}: {variant}"] = f"{type(e).__name__}: {e}"[:200]
    return {"kernels": sorted(names), "variants": built, "variants_refused": refused, "variants_failed": failed}


Note = Callable[[str, dict[str, Any]], None]


def on_gpu(chosen: dict[str, Any], ranges: bool, note: Note) -> None:
    tuned: set[int] = set()
    run = Autotuner.run

    def first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in tuned:
            tuned.add(id(self))
            self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = first_config
    torch.compiler.set_stance("force_eager")  # only the packages' own kernels
    plain = {}
    for name, case in chosen.items():
        given = {n: v.cuda() for n, v in case.inputs(torch.Generator().manual_seed(0)).items()}
        try:
            plain[name] = [computed(case.operator(), given, case) for _ in range(2)]
        except Exception as e:
            note(name, {"result": "does not run plain", "why": f"{type(e).__name__}: {e}"[:300]})
    for found in gc.get_objects():  # kernels that were compiled plain are compiled anew, so that they can report
        if isinstance(found, JITFunction):
            found.device_caches.clear()
        elif type(found).__name__ == "LibEntry":  # FlagGems has a cache of its own
            for cache in found.kernel_cache:
                cache.clear()
    if not ranges:
        pp.instrument_torch()  # else a pp.kernel with ranges launches each kernel
    for name, both in plain.items():
        given = {n: v.cuda() for n, v in chosen[name].inputs(torch.Generator().manual_seed(0)).items()}
        try:
            with through(Kernels(ranges=True)) if ranges else contextlib.nullcontext(), pp.trace() as t:
                found = computed(chosen[name].operator(), given, chosen[name])
            note(name, _compared(found, both, t))
        except Exception as e:
            note(name, {"result": "crashed", "why": f"{type(e).__name__}: {e}"[:300]})


def _compared(found: list[Any], plain: list[list[Any]], t: Any) -> dict[str, Any]:
    def same(a: list[Any], b: list[Any]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    once = 0
    for launch in t.launches:
        blocks = np.sort(t.blocks["block"][t.blocks["launch"] == launch["launch"]])
        once += np.array_equal(blocks, np.arange(launch["blocks"]))
    row = {"launches": len(t.launches), "every_block_once": once, "kernels": sorted(set(t.kernels))}
    row |= {"ranges": len(t.ranges), "blocks": len(t.blocks)} if len(t.ranges) else {}
    if not same(*plain):  # atomic sums in any order: the plain kernel has other bits each time, too
        return {**row, "result": "bits vary plain too"}
    return {**row, "result": "same bits" if same(found, plain[0]) else "other bits"}


def on_cpu(chosen: dict[str, Any], passes: bool, note: Note) -> None:
    kernels = Kernels()
    with pp.Device("virtual:H200"):
        for name, case in chosen.items():
            note(name, on_virtual(case, kernels) | (through_passes(kernels) if passes else {}))


def found_by(o: Any, chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each operator's row: from this process, or from `--parallel` processes that share the operators."""
    rows: dict[str, dict[str, Any]] = {}

    def note(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        print(name, {k: v for k, v in row.items() if k != "kernels"}, flush=True)
        if o.rows:
            with o.rows.open("a") as file:
                print(json.dumps([name, row]), file=file)

    if o.parallel < 2:
        on_gpu(chosen, o.ranges, note) if o.gpu else on_cpu(chosen, not o.no_passes, note)
        return rows
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(n)) for n in range(o.parallel)]
        same = [*sys.argv[1:], "--parallel", "1"]
        shares = [["--share", f"{n}/{len(files)}", "--rows", str(file)] for n, file in enumerate(files)]
        run_at_once([[sys.executable, __file__, *same, *share] for share in shares], o.seconds)
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    lost = {"result": "crashed", "why": "its process ended, or took too long"}
    return dict.fromkeys(chosen, lost) | dict(map(json.loads, lines))


def gpu_table(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """Of the runs with reports, and with reports and ranges."""
    kinds = {
        "same bits as plain": "same bits", "other bits in every plain run too (atomic sums)": "bits vary plain too",
        "other bits": "other bits", "failed": "crashed", "refused by the package itself": "does not run plain",
    }  # fmt: skip
    rows = [[title, *(run.get("results", {}).get(kind, 0) for run in runs)] for title, kind in kinds.items()]
    sums = {"kernels": "kernels", "launches": "launches", "launches with every block exactly once": "every_block_once",
            "ranges": "ranges"}  # fmt: skip
    rows += [[title, *(f"{run[key]:,}" if key in run else "–" for run in runs)] for title, key in sums.items()]
    return [["operators", "reporting", "reporting with ranges"], *rows]


def versions(rows: dict[str, Any]) -> dict[str, str]:
    packages = {"liger": "liger-kernel", "fla": "fla-core"}
    return {p: metadata.version(packages.get(p, p)) for p in sorted({name.partition(".")[0] for name in rows})}


def main() -> None:
    parser = arguments(__doc__, seconds=3600.0)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--ranges", action="store_true", help="on a GPU: with ranges inserted")
    parser.add_argument("--only", default="", help="names, or parts of names, separated by commas; or `more`")
    parser.add_argument("--parallel", type=int, default=1, help="processes that share the operators")
    parser.add_argument("--share", help="be the first of two such processes: 0/2")
    parser.add_argument("--rows", type=Path, help="file for the rows of such a process")
    parser.add_argument("--no-passes", action="store_true", help="skip assembling the variants, the longest part")
    o = parser.parse_args()
    from corpus.public import SMALLER, cases

    warnings.simplefilter("ignore")
    parts = list(SMALLER) if o.only == "more" else [part for part in o.only.split(",") if part]
    chosen = {n: c for n, c in cases().items() if not parts or any(part in n for part in parts)}
    if o.share:
        first, _, of = o.share.partition("/")
        chosen = dict(list(chosen.items())[int(first) :: int(of)])
        found_by(o, chosen)
        return
    if o.gpu:
        device = need_gpu("bits with and without reporting")
        rows = found_by(o, chosen)
        ran = [row for row in rows.values() if "launches" in row]
        found: dict[str, Any] = {"results": dict(Counter(row["result"] for row in rows.values()))}
        found["kernels"] = len({kernel for row in ran for kernel in row["kernels"]})
        for key in ("launches", "every_block_once", *(("ranges", "blocks") if o.ranges else ())):
            found[key] = sum(row.get(key, 0) for row in ran)
        found["packages"] = versions(rows)
        found["other"] = {n: row.get("why", row["result"]) for n, row in rows.items() if row["result"] != "same bits"}
        names = ("public_kernels_gpu", "public_kernels_ranges")
        runs = [found if ranges == o.ranges else stored(name, o.out) for ranges, name in enumerate(names)]
        finish(o, names[o.ranges], found, "bits", gpu_table(runs), device, table="public-gpu")
        return
    rows = found_by(o, chosen)
    kinds = ("right", "refused", "wrong", "crashed")
    total = {kind: sum(row["result"] == kind for row in rows.values()) for kind in kinds}
    total["kernels"] = len({kernel for row in rows.values() for kernel in row.get("kernels", ())})
    total["variants"] = sum(row.get("variants", 0) for row in rows.values())
    for key in ("variants_refused", "variants_failed"):
        total[key] = sum(len(row.get(key, ())) for row in rows.values())
    group = f"_{o.only.replace(',', '_')}" if o.only else ""  # some operators are a result of their own
    figures = {f"public{group}.{name}": str(total[name]) for name in ("right", "kernels", "variants") if total[name]}
    figures[f"public{group}.operators"] = str(len(rows))
    show("public kernels", ["", "number"], list(total.items()))
    not_right = {n: r["result"] for n, r in rows.items() if r["result"] != "right"}
    total |= {"packages": versions(rows), "not_right": not_right}
    with pp.Device("virtual:H200") as device:
        print(save(f"public_kernels{group}", total, device, o.out, figures=figures))


if __name__ == "__main__":
    main()
