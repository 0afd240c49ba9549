"""Fits the virtual GPU's timing profile to measurements of the real part, and reports how well it then predicts."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from common import save
from corpus import TRITON_CASES
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import paellapy as pp
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.costs import CostModel, LoneBlock
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import PROFILES, Timing
from paellapy.instrument.triton_ir.cost import SHARES

Array = NDArray[Any]
RECORDED_SCALE = 1.0  # kernels' factors come from this size; larger ones are predicted
FITTED = ("block_overhead_ns", "cycle_ns", "fetch_ns")


def inputs_of(case: Any, scale: float, seed: int = 0) -> Any:
    """The arguments of a kernel of the corpus: the same ones wherever it is launched."""
    return case.make(np.random.default_rng([zlib.crc32(case.name.encode()), seed]), scale)


class Launch:
    """One measured launch and what the evaluator counted for it."""

    def __init__(self, device: Any, row: dict[str, Any], case: Any) -> None:
        call = inputs_of(case, row["scale"], row.get("seed", 0))
        kernel = pp.kernel(case.kernel, report=None)
        values, key, options = kernel._bind(device, (), {**call.args, **call.constexprs, **call.options})
        launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
        self.row, self.case, self.launcher = row, case, launcher
        self.values = launcher.pick(values)
        grid = (*call.grid, 1, 1)[:3]
        self.cost = launcher.evaluate(values, grid, 0, int(np.prod(grid)))
        self.label = launcher.compiled.source.metadata["label"]

    @functools.cached_property
    def features(self) -> Array:
        """What the time of a launch of less than a wave is a sum of: itself, its longest block's cycles, its code."""
        lone = LoneBlock.of(self.launcher.compiled, self.launcher.program.facts.loops)
        if lone is None:
            raise SystemExit(f"the machine code of {self.label} is not understood: profiles are fitted for Hopper")
        return np.array([1.0, float(lone.cycles_of(self.cost).max()), lone.fetched])

    def predict(self, model: CostModel) -> dict[str, float]:
        """Span, block time and mean residency on the virtual part."""
        compiled, threads = self.launcher.compiled, self.launcher.threads
        sim = SmModel(model.part, timing=model.timing)
        cost = model.block_cost(compiled, self.cost, self.values, threads, self.launcher.program.facts)
        blocks = len(self.cost) * compiled.source.cluster
        cluster = compiled.source.cluster
        kernel = Kernel(blocks, threads, compiled.registers, compiled.shared_bytes, cost, cluster=cluster)
        sim.launch(sim.stream(), kernel)
        sim.run()
        seen = sim.blocks()
        lived = seen["end_ns"] - seen["start_ns"]
        span = int(seen["end_ns"].max() - seen["start_ns"].min())
        return {"span_ns": span, "block_ns": float(np.median(lived)), "resident_blocks": float(lived.sum() / span)}


def fit_cycles(launches: Sequence[Launch], model: CostModel) -> dict[str, float]:
    """Non-negative, least absolute relative error, by reweighted coordinate descent: quick for three unknowns."""
    # From the first start to the last end, as users see it: blocks of one grid do not all start at once.
    measured = np.array([entry.row["span_ns"] for entry in launches])
    queued = np.array([model.timing.sector_update_ns * float(e.cost["pressure"].sum()) / SHARES for e in launches])
    matrix = np.array([entry.features for entry in launches]) / measured[:, None]
    target = np.maximum(measured - queued, 0.05 * measured) / measured
    found = np.zeros(matrix.shape[1])
    weights = np.ones(len(target))
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
    for launch in launches:
        if launch.row["scale"] != RECORDED_SCALE:
            continue
        low, high = 0.02, 50.0
        for _ in range(30):  # the launch's time grows with the factor: bisect
            middle = (low * high) ** 0.5
            predicted = launch.predict(replace(model, factors={launch.label: middle}))["span_ns"]
            low, high = (middle, high) if predicted < launch.row["span_ns"] else (low, middle)
        factors[launch.label] = round((low * high) ** 0.5, 3)
    return factors


def errors(launches: Sequence[Launch], model: Callable[[Launch], CostModel]) -> dict[str, dict[str, float]]:
    found = {}
    for launch in launches:
        predicted = launch.predict(model(launch))
        found[f"{launch.case.name} ×{launch.row['scale']:g}"] = {
            "measured_us": launch.row["span_ns"] / 1e3,
            "predicted_us": predicted["span_ns"] / 1e3,
            "time_error": predicted["span_ns"] / launch.row["span_ns"] - 1,
            "resident_error": predicted["resident_blocks"] / launch.row["resident_blocks"] - 1,
        }
    return found


def summary(found: dict[str, dict[str, float]], name: str) -> dict[str, float]:
    sizes = np.abs([row[name] for row in found.values()])
    return {"median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9)), "n": len(sizes)}


def counted(
    results: dict[str, Any], part: str, large_works: Callable[[Any], Any]
) -> tuple[Any, list[Launch], dict[str, Any]]:
    """The virtual part, and what the evaluator counts for the launches and large kernels that were measured."""
    device = pp.Device(f"virtual:{part}")
    cases = {c.name: c for c in TRITON_CASES if c.evaluable}
    rows = [r for r in results["kernels"] if r["case"] in cases]
    with device:
        launches = [Launch(device, r, cases[r["case"]]) for r in track(rows, description="counting")]
        works = {name: _work_launch(device, work) for name, work in large_works(device).items()}
    return device, launches, works


def fit_and_report(
    measured: dict[str, Any], part: str, large_works: Callable[[Any], Any], pairs: Sequence[tuple[str, str]]
) -> None:
    """Fits, writes the profile, and reports what it predicts right and wrong."""
    results = measured["results"]
    device, launches, works = counted(results, part, large_works)
    rates = replace(_rates(device.part, results["alone"], works), sector_update_ns=turn_ns(launches))
    base = CostModel(device.part, rates)
    recorded = [entry for entry in launches if entry.row["scale"] == RECORDED_SCALE]

    def fitted(chosen: Array) -> CostModel:
        found = fit_cycles([entry for entry, c in zip(recorded, chosen, strict=True) if c], base)
        return replace(base, timing=replace(base.timing, **found))

    model = fitted(np.ones(len(recorded), bool))
    names = np.array([entry.case.name for entry in recorded])
    without = {name: fitted(names != name) for name in track(names, description="cross-validation")}
    unknown = errors(launches, lambda entry: without[entry.case.name])
    model = replace(model, factors=factors_of(track(launches, description="factors"), model))
    larger = [entry for entry in launches if entry.row["scale"] != RECORDED_SCALE]
    known = errors(larger, lambda _: model)
    overlap = _pairs(model, works, results, pairs)
    about = {
        "part": part, "recorded_on": measured["on"]["device"], "date": measured["on"]["date"],
        "versions": measured["on"]["versions"], "kernels": dict(sorted(model.factors.items())),
    }  # fmt: skip
    PROFILES.mkdir(exist_ok=True)
    model.timing.save(PROFILES / f"{part}.json", **about)
    report = {
        "known kernels, sizes not recorded": {n: summary(known, n) for n in ("time_error", "resident_error")},
        "unknown kernels": {n: summary(unknown, n) for n in ("time_error", "resident_error")},
        "concurrent kernels": overlap,
        "kernels": known,
        "kernels without their factor": unknown,
    }
    print("written to", save(f"calibration_error_{part}", report))
    _print(report)


def check_and_report(
    measured: dict[str, Any], part: str, large_works: Callable[[Any], Any], pairs: Sequence[tuple[str, str]]
) -> None:
    """What the profile as it is predicts of launches that nothing was fitted to."""
    results = measured["results"]
    device, launches, works = counted(results, part, large_works)
    model = CostModel.for_part(device.part)
    known = errors(launches, lambda _: model)
    plain = errors(launches, lambda _: replace(model, factors={}))
    report = {
        "known kernels, sizes not recorded": {n: summary(known, n) for n in ("time_error", "resident_error")},
        "unknown kernels": {n: summary(plain, n) for n in ("time_error", "resident_error")},
        "concurrent kernels": _pairs(model, works, results, pairs),
        "kernels": known,
        "kernels without their factor": plain,
        "recorded on": measured["on"],
    }
    seeds = sorted({each.row["seed"] for each in launches})
    print("written to", save(f"calibration_check{'_'.join(map(str, seeds))}_{part}", report))
    _print(report)


def _work_launch(device: Any, work: Any) -> tuple[Any, Any, Any, Any]:
    """Launcher, grid, values and the cost of one block of a large kernel: its blocks all cost the same."""
    fn, grid, args, keywords = work
    kernel = pp.kernel(fn, report=None)
    values, key, options = kernel._bind(device, args, keywords)
    launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
    wide = (*grid, 1, 1)[:3]
    cost = np.repeat(launcher.evaluate(values, wide, 0, 1), int(np.prod(wide)))
    return launcher, wide, launcher.pick(values), cost


def _rates(part: Any, alone: dict[str, float], works: dict[str, Any]) -> Timing:
    """Efficiencies from kernels that do little else than stream (add) or multiply (gemm); the rest as it was.

    That is, the times per kind of wait, by which events of ranges are placed within their block.
    """
    timing = Timing.for_part(part)
    streamed = float((works["add"][3]["bytes_loaded"] + works["add"][3]["bytes_stored"]).sum())
    multiplied = float(works["gemm"][3]["dot_flops"].sum())
    return replace(
        timing,
        bandwidth_efficiency=round(streamed / alone["add"] / part.bandwidth_gbps, 3),
        tensor_efficiency=round(multiplied / alone["gemm"] / part.fp16_tensor_tflops / 1e3, 3),
    )


def _simulate(model: CostModel, works: dict[str, Any], names: Sequence[str]) -> tuple[float, float]:
    """Total time of kernels launched together, and when the last one starts after the first."""
    sim = SmModel(model.part, timing=model.timing)
    handles = []
    for i, name in enumerate(names):
        launcher, _, values, cost = works[name]
        compiled = launcher.compiled
        blocks = model.block_cost(compiled, cost, values, launcher.threads, launcher.program.facts)
        kernel = Kernel(len(cost), launcher.threads, compiled.registers, compiled.shared_bytes, blocks)
        handles.append(sim.launch(sim.stream(), kernel, trace=False, submit_ns=i * model.part.launch_ns))
    sim.run()
    begin = sim.start_ns(handles[0])
    return max(sim.finish_ns(h) for h in handles) - begin, sim.start_ns(handles[-1]) - begin


def _pairs(model: CostModel, works: dict[str, Any], results: dict[str, Any], pairs: Any) -> dict[str, Any]:
    """Two kernels on two streams: their total relative to running one after the other, measured and predicted."""
    found = {}
    alone = {name: _simulate(model, works, [name])[0] for name in works}
    for a, b in pairs:
        measured = results["together"][f"{a} + {b}"]["total_ns"]
        total, _ = _simulate(model, works, [a, b])
        found[f"{a} + {b}"] = {
            "measured_us": measured / 1e3,
            "predicted_us": total / 1e3,
            "error": total / measured - 1,
            "measured_overlap": 1 - measured / (results["alone"][a] + results["alone"][b]),
            "predicted_overlap": 1 - total / (alone[a] + alone[b]),
        }
    for name, ns in alone.items():
        measured = results["alone"][name]
        found[f"{name} alone"] = {"measured_us": measured / 1e3, "predicted_us": ns / 1e3, "error": ns / measured - 1}
    return found


def _print(report: dict[str, Any]) -> None:
    console = Console(width=110)
    for title in ("known kernels, sizes not recorded", "unknown kernels"):
        for what, s in report[title].items():
            console.print(f"{title}: {what} median {s['median']:.1%}, p90 {s['p90']:.1%} of {s['n']}")
    table = Table(title="worst of the known kernels, and concurrent kernels")
    for column in ("what", "measured µs", "predicted µs", "error"):
        table.add_column(column, justify="right")
    worst = sorted(report["kernels"].items(), key=lambda item: -abs(item[1]["time_error"]))[:14]
    for name, r in worst:
        table.add_row(name, f"{r['measured_us']:.2f}", f"{r['predicted_us']:.2f}", f"{r['time_error']:+.0%}")
    for name, r in report["concurrent kernels"].items():
        table.add_row(name, f"{r['measured_us']:.0f}", f"{r['predicted_us']:.0f}", f"{r['error']:+.0%}")
    console.print(table)
