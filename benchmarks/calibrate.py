"""Measures how well the virtual GPU predicts the real one, and fits the profile it predicts with.

    python benchmarks/calibrate.py record              # on the GPU: times the corpus, writes calibration_PART.json
    python benchmarks/calibrate.py fit                 # anywhere: fits the timing profile, reports the error
    python benchmarks/calibrate.py record --fresh 1    # on the GPU: other sizes and other inputs
    python benchmarks/calibrate.py check --fresh 1     # anywhere: the error of the profile as it is, nothing fitted

`record` traces every corpus kernel at several sizes, and pairs of large kernels on two streams. `fit` runs the same
launches on the virtual twin and fits the waits and, at the smallest size, a factor per kernel. It reports two errors:
with the factors at the larger sizes, and without a kernel's factor, by waits fitted without that kernel. The timing's
other constants were set by hand on these same launches, so neither error is held out; the error of `check` is.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from harness import arguments, save, show, stored
from kernels import add, attention, gemm, layer_norm, softmax
from numpy.typing import NDArray
from rich.progress import track

import paellapy as pp
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.costs import CostModel, LoneBlock
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import PROFILES, Timing
from paellapy.instrument.triton_ir.cost import SHARES

Array = NDArray[Any]
SCALES, FRESH_SCALES = (1.0, 4.0, 16.0), (2.0, 6.0, 11.0, 24.0)
RECORDED_SCALE = 1.0  # kernels' factors come from this size; larger ones are predicted
REPEATS = 12
FITTED = ("block_overhead_ns", "cycle_ns", "fetch_ns")
PAIRS = (("add", "gemm"), ("gemm", "add"), ("softmax", "gemm"), ("add", "softmax"), ("attention", "add"),
         ("gemm", "attention"), ("layer norm", "gemm"), ("softmax", "layer norm"))  # fmt: skip


def inputs_of(case: Any, scale: float, seed: int) -> Any:
    """The arguments of a kernel of the corpus: the same ones wherever it is launched."""
    return case.make(np.random.default_rng([zlib.crc32(case.name.encode()), seed]), scale)


# -- on the GPU


def spans(trace: pp.Trace) -> dict[str, float]:
    """Medians over the launches but the first two, which meet cold caches: first start to last end, blocks' times."""
    rows = []
    for launch in np.unique(trace.blocks["launch"])[2:]:
        blocks = trace.blocks[trace.blocks["launch"] == launch]
        span = int(blocks["end_ns"].max() - blocks["start_ns"].min())
        lived = (blocks["end_ns"] - blocks["start_ns"]).astype(np.int64)
        rows.append((span, float(np.median(lived)), float(lived.sum() / max(span, 1))))
    return dict(zip(("span_ns", "block_ns", "resident_blocks"), np.median(rows, axis=0).tolist(), strict=True))


def measure_case(device: Any, case: Any, scale: float, seed: int) -> dict[str, Any]:
    from corpus import upload

    call = inputs_of(case, scale, seed)
    kernel = pp.kernel(case.kernel, report=None)
    args = {name: upload(device, value) for name, value in call.args.items()}
    with pp.trace(records_per_sm=1 << 15) as trace:
        for _ in range(REPEATS):
            kernel[call.grid](**args, **call.constexprs, **call.options)
            device.synchronize()
    return {"case": case.name, "scale": scale, "seed": seed, **spans(trace)}


def large_works(device: Any, seed: int) -> dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Kernels of a few hundred µs, long enough to overlap for sure."""
    n, rows, size, heads, length = (3 << 25, 50000, 5120, 160, 3072) if seed else (1 << 26, 65536, 4096, 256, 2048)
    f, h = device.empty, lambda *s: device.empty(s, np.float16)
    tiles = {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8}
    return {
        "add": (add, (n // 1024,), (f(n), f(n), f(n), n), {"B": 1024}),
        "softmax": (softmax, (rows,), (f((rows, 1000)), f((rows, 1000)), 1000), {"B": 1024}),
        "layer norm": (layer_norm, (rows,), (f((rows, 1000)), f((rows, 1000)), f(1000), f(1000), 1000, 1e-5),
                       {"B": 1024}),
        "gemm": (gemm, ((size // 128) ** 2,), (*(h(size, size) for _ in range(3)), size, size, size), tiles),
        "attention": (attention, (length // 128, heads), (*(h(heads, length, 64) for _ in range(4)), length, 0.125),
                      {"D": 64, "BM": 128, "BN": 64, "num_warps": 8}),
    }  # fmt: skip


def measure_pairs(device: Any, seed: int) -> dict[str, Any]:
    works = large_works(device, seed)
    kernels = {name: pp.kernel(work[0], report=None) for name, work in works.items()}

    def launch(name: str) -> None:
        _, grid, args, keywords = works[name]
        kernels[name][grid](*args, **keywords)

    alone, together = {}, {}
    for name in works:
        with pp.trace(records_per_sm=1 << 16) as trace:
            for _ in range(5):
                launch(name)
                device.synchronize()
        alone[name] = spans(trace)["span_ns"]
    streams = [device.stream(), device.stream()]
    for pair in PAIRS:
        totals = []
        for _ in range(4):
            with pp.trace(records_per_sm=1 << 16) as trace:
                for stream, name in zip(streams, pair, strict=True):
                    with stream:
                        launch(name)
            totals.append(int(trace.blocks["end_ns"].max()) - int(trace.blocks["start_ns"].min()))
        together[" + ".join(pair)] = {"total_ns": float(np.median(totals))}
    return {"alone": alone, "together": together}


def record(o: Any) -> None:
    from corpus import TRITON_CASES

    device = pp.Device("cuda")
    todo = [(case, scale) for case in TRITON_CASES for scale in (FRESH_SCALES if o.fresh else SCALES)
            if case.min_sm <= device.capability[0] * 10]  # fmt: skip
    with device:
        rows = [measure_case(device, case, scale, o.fresh) for case, scale in track(todo, description="kernels")]
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        print(save(name_of(o), {"kernels": columns, **measure_pairs(device, o.fresh)}, device, o.out))


def name_of(o: Any) -> str:
    return f"calibration_fresh{o.fresh}_{o.part}" if o.fresh else f"calibration_{o.part}"


# -- anywhere


class Launch:
    """One measured launch and what the evaluator counted for it."""

    def __init__(self, device: Any, row: dict[str, Any], case: Any) -> None:
        call = inputs_of(case, row["scale"], row["seed"])
        kernel = pp.kernel(case.kernel, report=None)
        values, key, options = kernel._bind(device, (), {**call.args, **call.constexprs, **call.options})
        self.launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
        self.row, self.case, self.values = row, case, self.launcher.pick(values)
        grid = (*call.grid, 1, 1)[:3]
        self.cost = self.launcher.evaluate(values, grid, 0, int(np.prod(grid)))
        self.label = self.launcher.compiled.source.metadata["label"]

    @functools.cached_property
    def features(self) -> Array:
        """What the time of a launch of less than a wave is a sum of: itself, its longest block's cycles, its code."""
        lone = LoneBlock.of(self.launcher.compiled, self.launcher.program.facts.loops)
        if lone is None:
            raise SystemExit(f"the machine code of {self.label} is not understood: profiles are fitted for Hopper")
        return np.array([1.0, float(lone.cycles_of(self.cost).max()), lone.fetched])

    def predict(self, model: CostModel) -> dict[str, float]:
        """Span and mean residency on the virtual part."""
        compiled, threads = self.launcher.compiled, self.launcher.threads
        sim, cluster = SmModel(model.part, timing=model.timing), compiled.source.cluster
        cost = model.block_cost(compiled, self.cost, self.values, threads, self.launcher.program.facts)
        blocks = len(self.cost) * cluster
        kernel = Kernel(blocks, threads, compiled.registers, compiled.shared_bytes, cost, cluster=cluster)
        sim.launch(sim.stream(), kernel)
        sim.run()
        seen = sim.blocks()
        span = int(seen["end_ns"].max() - seen["start_ns"].min())
        return {"span_ns": span, "resident_blocks": float((seen["end_ns"] - seen["start_ns"]).sum() / span)}


def fit_cycles(launches: Sequence[Launch], model: CostModel) -> dict[str, float]:
    """Non-negative, least absolute relative error, by reweighted coordinate descent: quick for three unknowns."""
    # From the first start to the last end, as users see it: blocks of one grid do not all start at once.
    measured = np.array([entry.row["span_ns"] for entry in launches])
    queued = np.array([model.timing.sector_update_ns * float(e.cost["pressure"].sum()) / SHARES for e in launches])
    matrix = np.array([entry.features for entry in launches]) / measured[:, None]
    target = np.maximum(measured - queued, 0.05 * measured) / measured
    found, weights = np.zeros(matrix.shape[1]), np.ones(len(target))
    for _ in range(60):
        for _ in range(200):
            for j in range(len(found)):
                rest = target - matrix @ found + matrix[:, j] * found[j]
                column = matrix[:, j] * weights
                found[j] = max(0.0, float(column @ rest) / max(float(column @ matrix[:, j]), 1e-12))
        weights = 1 / np.maximum(np.abs(matrix @ found - target), 0.03)
    return {name: round(float(value), 4) for name, value in zip(FITTED, found, strict=True)}


def turn_ns(launches: Sequence[Launch], least_turns: int = 2000) -> float:
    """The time of one turn of atomic updates: by the difference between a kernel's smallest and largest launch."""
    found = []
    for name in {entry.case.name for entry in launches}:
        sizes = [(float(e.cost["pressure"].sum()) / SHARES, e.row["span_ns"]) for e in launches if e.case.name == name]
        (turns, ns), (more_turns, more_ns) = min(sizes), max(sizes)
        if more_turns - turns >= least_turns:
            found.append((more_ns - ns) / (more_turns - turns))
    return round(float(np.median(found)), 3)


def factors_of(launches: Sequence[Launch], model: CostModel) -> dict[str, float]:
    """Per kernel: how much longer than estimated its blocks wait, by its launch's time at the recorded size."""
    factors = {}
    for launch in (each for each in launches if each.row["scale"] == RECORDED_SCALE):
        low, high = 0.02, 50.0
        for _ in range(30):  # the launch's time grows with the factor: bisect
            middle = (low * high) ** 0.5
            predicted = launch.predict(replace(model, factors={launch.label: middle}))["span_ns"]
            low, high = (middle, high) if predicted < launch.row["span_ns"] else (low, middle)
        factors[launch.label] = round((low * high) ** 0.5, 3)
    return factors


def errors(launches: Sequence[Launch], model: Callable[[Launch], CostModel]) -> dict[str, Array]:
    """Relative errors of the time and of the resident blocks, and the launches' scales."""
    found = [launch.predict(model(launch)) for launch in launches]
    relative = {key: [each[key] / launch.row[key] - 1 for each, launch in zip(found, launches, strict=True)]
                for key in ("span_ns", "resident_blocks")}  # fmt: skip
    scales = np.array([launch.row["scale"] for launch in launches])
    return {"time": np.array(relative["span_ns"]), "resident": np.array(relative["resident_blocks"]), "scale": scales}


def pair_errors(model: CostModel, device: Any, measured: dict[str, Any], seed: int) -> tuple[Array, dict[str, Any]]:
    """Of the total time of two kernels on two streams; and the large kernels with the costs of their blocks."""
    works = {name: _work(device, work) for name, work in large_works(device, seed).items()}
    found = []
    for pair, each in measured["together"].items():
        sim, handles = SmModel(model.part, timing=model.timing), []
        for i, name in enumerate(pair.split(" + ")):
            launcher, values, cost = works[name]
            compiled = launcher.compiled
            blocks = model.block_cost(compiled, cost, values, launcher.threads, launcher.program.facts)
            kernel = Kernel(len(cost), launcher.threads, compiled.registers, compiled.shared_bytes, blocks)
            handles.append(sim.launch(sim.stream(), kernel, trace=False, submit_ns=i * model.part.launch_ns))
        sim.run()
        total = max(sim.finish_ns(handle) for handle in handles) - sim.start_ns(handles[0])
        found.append(total / each["total_ns"] - 1)
    return np.array(found), works


def _work(device: Any, work: Any) -> tuple[Any, Any, Any]:
    """Launcher, values and the cost of one block of a large kernel: its blocks all cost the same."""
    fn, grid, args, keywords = work
    kernel = pp.kernel(fn, report=None)
    values, key, options = kernel._bind(device, args, keywords)
    launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
    wide = (*grid, 1, 1)[:3]
    return launcher, launcher.pick(values), np.repeat(launcher.evaluate(values, wide, 0, 1), int(np.prod(wide)))


def report(o: Any, name: str, lines: dict[str, Array], unknown: Array, head: str) -> None:
    def line(found: Array) -> dict[str, float]:
        return {"n": len(found), "median": float(np.median(abs(found))), "p90": float(np.quantile(abs(found), 0.9))}

    results = {**{title: line(found) for title, found in lines.items()}, "unknown kernels": line(unknown)}
    rows = [[f"{title} ({each['n']})", *(f"{100 * each[q]:.1f} %" for q in ("median", "p90"))]
            for title, each in results.items() if title != "unknown kernels"]  # fmt: skip
    heads = [f"{head} against measured (number)", "median error", "90 % below"]
    show(name, heads, rows)
    table = {"errors-fit" if o.step == "fit" else "errors-check": [heads, *rows]}
    both = {f"fidelity.{q}": f"{100 * results['unknown kernels'][q]:.1f}" for q in ("median", "p90")}
    print(save(name, results, folder=o.out, tables=table, figures=both if o.step == "fit" else None))


def fit_or_check(o: Any) -> None:
    from corpus import TRITON_CASES

    measured, device = stored(name_of(o), o.out), pp.Device(f"virtual:{o.part}")
    cases = {case.name: case for case in TRITON_CASES if case.evaluable}
    kernels = measured["kernels"]
    rows = [dict(zip(kernels, row, strict=True)) for row in zip(*kernels.values(), strict=True)]
    with device:
        launches = [Launch(device, row, cases[row["case"]]) for row in track(rows) if row["case"] in cases]
        if o.step == "check":
            model = CostModel.for_part(device.part)
            pairs, _ = pair_errors(model, device, measured, o.fresh)
            known, plain = (errors(launches, lambda _, m=m: m) for m in (model, replace(model, factors={})))
            largest = known["scale"] == max(FRESH_SCALES)
            lines = {
                "kernel time": known["time"], "kernel time, other sizes": known["time"][~largest],
                "kernel time, ×24": known["time"][largest], "resident blocks": known["resident"],
                "two kernels at once": pairs, "kernel time without the kernels' factors": plain["time"],
            }  # fmt: skip
            report(o, f"calibration_check{o.fresh}_{o.part}", lines, plain["time"], "predicted")
            return
        start = CostModel(device.part, Timing.for_part(device.part))
        _, works = pair_errors(start, device, measured, 0)
        # Efficiencies from kernels that do little else than stream (add) or multiply (gemm); the rest as it was.
        streamed = float((works["add"][2]["bytes_loaded"] + works["add"][2]["bytes_stored"]).sum())
        multiplied, alone, part = float(works["gemm"][2]["dot_flops"].sum()), measured["alone"], device.part
        rates = replace(
            start.timing, bandwidth_efficiency=round(streamed / alone["add"] / part.bandwidth_gbps, 3),
            tensor_efficiency=round(multiplied / alone["gemm"] / part.fp16_tensor_tflops / 1e3, 3),
            sector_update_ns=turn_ns(launches),
        )  # fmt: skip
        base = CostModel(part, rates)
        recorded = [entry for entry in launches if entry.row["scale"] == RECORDED_SCALE]

        def fitted(without: str = "") -> CostModel:
            chosen = [entry for entry in recorded if entry.case.name != without]
            return replace(base, timing=replace(base.timing, **fit_cycles(chosen, base)))

        others = {name: fitted(name) for name in track(dict.fromkeys(entry.case.name for entry in recorded))}
        unknown = errors(launches, lambda entry: others[entry.case.name])["time"]
        model = fitted()
        model = replace(model, factors=factors_of(track(launches, description="factors"), model))
        known = errors([entry for entry in launches if entry.row["scale"] != RECORDED_SCALE], lambda _: model)
        pairs, _ = pair_errors(model, device, measured, 0)
    on = json.loads((o.out / f"{name_of(o)}.json").read_text())["on"]
    about = {"part": o.part, "recorded_on": on["device"], "date": on["date"], "versions": on["versions"],
             "kernels": dict(sorted(model.factors.items()))}  # fmt: skip
    model.timing.save(PROFILES / f"{o.part}.json", **about)
    lines = {"kernel time": known["time"], "resident blocks": known["resident"], "two kernels at once": pairs,
             "kernel time without the kernels' factors": unknown}  # fmt: skip
    report(o, f"calibration_error_{o.part}", lines, unknown, "described")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("step", choices=("record", "fit", "check"))
    parser.add_argument("--part", default="h200")
    parser.add_argument("--fresh", type=int, default=0, metavar="SEED", help="other sizes, and inputs from this seed")
    o = parser.parse_args()
    if (o.step == "check" and not o.fresh) or (o.step == "fit" and o.fresh):
        parser.error(
            "fit takes the recording without --fresh, and check one with it: a fitted recording proves nothing"
        )
    record(o) if o.step == "record" else fit_or_check(o)


if __name__ == "__main__":
    main()
