"""Requests for real models, after Paella's experiments: a load sweep, overload, light load, high priority.

    python benchmarks/paper.py run [--only sweep,light] [--seeds 0-4] [--seconds 1] [--budget 300]
    python benchmarks/paper.py run --points 'fig11|slack|1.5|4000' 'fig11|streams|1.5|4000' --against CHECKOUT
    python benchmarks/paper.py twin      # the sweep in simulated time, from the profiles of the last run
    python benchmarks/paper.py report    # tables and picture of docs/results.md

Points that this commit has measured are not run again, each is stored as soon as it is measured, and `--budget` stops
after that many seconds: the benchmark can run in pieces. All systems get the same arrivals, and every output is
compared with that of the module in eager mode. `--quick` uses models that a CPU can compute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from engine_load import Loaded, Setup, lognormal_gaps
from harness import Points, arguments, commit, dumps, finish, in_turns, medians, ranged, save, stored
from models import FIG11, TINY, VARIANTS, Kind

import paellapy as pp
from paellapy.instrument.env import CONNECTIONS as QUEUES
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import load_profiles, save_profiles
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import TraceWorkload

RATES = (1000, 2000, 2500, 3000, 4000, 5000, 6000, 7000)
BATCHED_RATES = (1000, 2000, 3000, 4000, 5000, 6000, 8000, 12000, 16000)
HP_RATE = 250.0
MOST_PAUSE_US = 2500.0  # a load generator that stood still for longer has not offered the load it should have
RUN_AGAIN = 2
THINK_NS = 20_000  # between an answer and the next request of a light load: less than any client takes
TUNING = Tuning.for_part("h200")
BATCHES = (1, 2, 4, 8, 16, 32)
PARTITIONED = {"partitions": 8, "quantum_us": TUNING.partitions_quantum_us}
SETUPS = {
    "plain": Setup(), "defaults": Setup(queues=8), "batched": Setup(BATCHES, 5, by_share=True),
    "batcher": Setup(BATCHES, 1), "windows": Setup(**PARTITIONED),
    "batched_windows": Setup(BATCHES, 5, by_share=True, **PARTITIONED),
}  # fmt: skip
LIMIT = TUNING.demand_limit
SYSTEMS: dict[str, tuple[str, str, float | None]] = {  # setup, policy, what jobs may demand together
    "one stream": ("plain", "serial", None), "streams": ("defaults", "streams", None),
    "streams, 32 queues": ("plain", "streams", None), "srpt": ("plain", "srpt", LIMIT),
    "slack": ("plain", "slack", LIMIT),
    "dynamic batcher": ("batcher", "streams", None), "slack, batches": ("batched", "slack", LIMIT),
    "hrrn, batches": ("batched", "hrrn", LIMIT), "slack, windows": ("windows", "slack", LIMIT),
    "hrrn, batches, windows": ("batched_windows", "hrrn", LIMIT),
}  # fmt: skip
MPS = ("MPS, 100 % each", "MPS, 25 % each")  # stored; measured by a script of an earlier commit


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a name to find its result by, what must be loaded for it, and how to do it."""

    name: str
    seed: int
    kinds: tuple[Kind, ...]
    setup: Setup
    priorities: tuple[int, ...]
    run: Callable[[Loaded], dict[str, Any]]


def requests(share: Any, seed: int, sigma: float, rate: float, seconds: float) -> tuple[Any, Any, Any]:
    """When which model is asked for, and with which input: the same for every system."""
    rng = np.random.default_rng(seed)
    n = max(20, int(rate * seconds))
    at = lognormal_gaps(rng, rate, sigma, n)
    return at, rng.choice(len(share), n, p=share).astype(np.int64), rng.integers(0, VARIANTS, n)


def sweep(o: Any) -> Iterator[Point]:
    """Load swept to saturation and beyond."""
    for seed, sigma, (system, (setup, policy, active)) in product(o.seeds, ("1.5", "2.0"), SYSTEMS.items()):
        rates = RATES if SETUPS[setup].batch == (1,) else BATCHED_RATES
        for rate in (50, 100) if o.quick else rates:
            if system == "one stream" and rate > 2000:
                continue

            def run(
                loaded: Loaded, s: int = seed, g: str = sigma, r: int = rate, p: str = policy, a: Any = active
            ) -> Any:
                offered = requests(loaded.share, s, float(g), r, o.seconds)
                done = loaded.offer(p, *offered, a)
                return {**loaded.summary(done), "pause_us": done.generator_pause_ns / 1e3}

            yield Point(f"fig11|{system}|{sigma}|{rate}", seed, o.kinds, SETUPS[setup], (0,) * len(o.kinds), run)


def saturation(o: Any) -> Iterator[Point]:
    """As many requests as the system takes: so many that those a policy puts off fill the queue before the half."""
    for seed, (system, (setup, policy, active)) in product(o.seeds, SYSTEMS.items()):
        many = len(SETUPS[setup].batch) > 1
        n = 60 if o.quick else 40_000 if many else 3_000 if policy == "serial" else 12_000

        def run(loaded: Loaded, s: int = seed, p: str = policy, a: Any = active, n: int = n, m: bool = many) -> Any:
            return {"throughput": loaded.saturate(p, a, n, 2048 if m else 96, s).steady_throughput}

        yield Point(f"saturation|{system}", seed, o.kinds, SETUPS[setup], (0,) * len(o.kinds), run)


def beyond(o: Any) -> Iterator[Point]:
    """More than the GPU can do, with deadlines at four times the time alone: the rest is refused when it comes."""
    # The generator copies inputs itself, up to about 25,000 a second.
    loads = {"slack": (10_000, 14_000), "slack, batches": (16_000, 20_000, 24_000)}
    for seed, (system, rates) in product(o.seeds, loads.items()):
        setup, policy, active = SYSTEMS[system]
        for rate in (200,) if o.quick else rates:

            def run(loaded: Loaded, r: int = rate, s: int = seed, p: str = policy, a: Any = active) -> dict[str, Any]:
                due = [int(4 * ns) for ns in loaded.alone_ns]
                offered = requests(loaded.share, s, 1.5, r, o.seconds)
                done = loaded.offer(p, *offered, a, deadline_ns=due, may_fail=True, admission=True)
                let_in = done.status != codes.QUEUE_FULL
                late = let_in & ((done.status != codes.OK) | (done.latency_ns > np.array(due)[done.model]))
                return {**loaded.summary(done), "let_in": int(let_in.sum()), "late": int(late.sum())}

            yield Point(f"beyond|{system}|{rate}", seed, o.kinds, SETUPS[setup], (0,) * len(o.kinds), run)


def light(o: Any) -> Iterator[Point]:
    """One request at a time, against a copy of its inputs and one launch of the same graph."""
    n, rounds = (20, 1) if o.quick else (80, 7)

    def once(loaded: Loaded, m: int) -> dict[str, float]:
        at, model, which = np.zeros(n, np.int64), np.full(n, m, np.int64), np.arange(n, dtype=np.int64) % VARIANTS
        one = loaded.offer("paella", at, model, which, outstanding=1, think_ns=THINK_NS)
        times = {"engine_us": one.latency_ns}
        for name, copied in (("graph_us", True), ("launch_us", False)):
            on_gpu = loaded.engine.device.name.startswith("cuda")
            alone = loaded.alone_ns[m : m + 1].repeat(n)
            times[name] = loaded.generator.alone_ns(m, n, copied, THINK_NS) if on_gpu else alone
        us = {name: float(np.median(each[n // 4 :])) / 1e3 for name, each in times.items()}
        return {**us, "ratio": us["engine_us"] / us["graph_us"]}

    def run(loaded: Loaded) -> dict[str, Any]:
        found = {}
        for m, kind in enumerate(o.kinds):  # in turns: the GPU's clock is not the same from one moment to the next
            found[kind.label] = medians([once(loaded, m) for _ in range(rounds)])
        return found

    yield Point("light", 0, o.kinds, SETUPS["plain"], (0,) * len(o.kinds), run)


def best_effort(o: Any) -> Iterator[Point]:
    """resnet50 at batch 1, 250 a second, beside a job of large batches that asks again at once."""
    high = TINY[0] if o.quick else Kind("resnet50")
    low = (Kind("tiny4", items=4),) if o.quick else (Kind("resnet50", items=64), Kind("vgg19", items=32))
    systems = {
        "alone": ("streams", (0, 0), 0), "streams": ("streams", (0, 0), 1), "stream priorities": ("streams", (1, 0), 1),
        "gate": ("priority", (1, 0), 1), "gate, two best-effort jobs": ("priority", (1, 0), 2),
    }  # fmt: skip
    for seed, kind, (name, (policy, priorities, jobs)) in product(o.seeds, low, systems.items()):

        def run(loaded: Loaded, p: str = policy, s: int = seed, k: int = jobs) -> dict[str, Any]:
            both = loaded.beside(p, s, 20.0 if o.quick else HP_RATE, 2 * o.seconds, [0], [1] * k)
            found = {"hp_p99_us": both["p99_us"], "be_per_s": both["low_per_s"]}
            for count in (1, 2):  # in one piece each, as with the GPU to itself; two fill each other's gaps
                alone = loaded.loops("streams", [1] * count, 0.5 * o.seconds)["per_s"][loaded.kinds[1].label]
                found[f"be_share_{count}"] = found["be_per_s"] / alone
            return found

        yield Point(f"best_effort|{kind.label}|{name}", seed, (high, kind), Setup(instances=4), priorities, run)


EXPERIMENTS: dict[str, Callable[[Any], Iterator[Point]]] = {
    "light": light, "sweep": sweep, "saturation": saturation, "beyond": beyond, "best_effort": best_effort
}  # fmt: skip


def undisturbed(point: Point, loaded: Loaded) -> dict[str, Any]:
    """Its result; a run in which the load generator stood still is made again."""
    for _ in range(RUN_AGAIN + 1):
        found = point.run(loaded)
        if found.pop("pause_us", 0.0) <= MOST_PAUSE_US:
            break
    return found


def run(o: Any) -> None:
    results: dict[str, Any] = {"outputs": 0, "wrong": 0, "alone_us": {}, "points": {}, **stored("paper", o.out)}
    points, began = Points(results["points"]), time.monotonic()
    chosen = o.only.split(",") if o.only else EXPERIMENTS
    todo = [p for name in chosen for p in EXPERIMENTS[name](o) if not points.has(p.name, p.seed)]
    todo = [p for p in todo if not o.points or p.name in o.points]
    queues = o.queues or int(os.environ[QUEUES])
    if not o.queues:  # CUDA reads the number when a process first uses a GPU: other numbers need their own process
        for number in {p.setup.queues for p in todo} - {queues}:
            command = [sys.executable, *sys.argv, "--budget", str(o.budget / 2), "--queues", str(number)]
            subprocess.run(command, check=True, env={**os.environ, QUEUES: str(number)})
            results.update(stored("paper", o.out))
            points = Points(results["points"])
    # Loading costs more than running: all points of an engine run in a row.
    groups: dict[Any, list[Point]] = {}
    for point in todo:
        if point.setup.queues == queues:
            groups.setdefault((point.kinds, point.setup, point.priorities), []).append(point)
    device, references = pp.Device(o.device), {}
    for (kinds, setup, priorities), group in groups.items():
        if time.monotonic() - began > o.budget:
            break
        try:
            loaded = Loaded(o.device, kinds, setup, priorities, references)
        except (PaellaError, RuntimeError) as e:  # others may still load
            print(f"{setup}: {type(e).__name__}: {e}")
            continue
        for m, kind in enumerate(kinds):  # one for all systems: as it was measured first
            loaded.alone_ns[m] = 1e3 * results["alone_us"].setdefault(kind.label, loaded.alone_ns[m] / 1e3)
        for name, each in SETUPS.items():
            if each == setup and kinds == o.kinds:
                (o.out / "profiles").mkdir(parents=True, exist_ok=True)
                save_profiles(o.out / "profiles" / f"{name}.json", loaded.profiles())
        for point in group:
            if time.monotonic() - began > o.budget:
                break
            found = undisturbed(point, loaded)
            if point.name == "light":
                results["light"] = {"commit": commit(), **found}
            else:
                points.add(point.name, point.seed, found)
            results["outputs"] += loaded.checked
            results["wrong"] += loaded.wrong
            loaded.checked = loaded.wrong = 0
            save("paper", results, device, o.out, **quoted(results))
            print(f"{time.monotonic() - began:6.1f} s  {point.name}, seed {point.seed}", flush=True)
        loaded.close()
    print(f"{results['outputs']:,} outputs checked, {results['wrong']} wrong")


# -- in simulated time


def twin(o: Any) -> None:
    """The points of the sweep with the recorded profiles, and how far p50, p99 and throughput are off."""
    results, folder = stored("paper", o.out), o.out / "profiles"
    light = {name: each for name, each in results["light"].items() if name != "commit"}
    copy = {name: max(0.0, each["graph_us"] - each["launch_us"]) * 1e3 for name, each in light.items()}
    found: dict[str, list[float]] = {}
    for name, point in results["points"].items():
        kind, system, *rest = name.split("|")
        if kind != "fig11" or system not in SYSTEMS or not (folder / f"{SYSTEMS[system][0]}.json").exists():
            continue
        setup, policy, active = SYSTEMS[system]
        profiles = load_profiles(folder / f"{setup}.json")
        if setup == "batcher":  # what fills the GPU is not seen with one instance each
            seen = {each.name: each for each in load_profiles(folder / "batched.json")}
            profiles = [replace(p, demand=seen[p.name].demand, together=seen[p.name].together) for p in profiles]
        names = [each.name for each in profiles]
        share = np.array([next(k.share for k in (*FIG11, *TINY) if k.label == each) for each in names])
        alone = np.array([1e3 * results["alone_us"][each] for each in names])
        copy_ns = np.array([copy.get(each, 0.0) for each in names])
        if float(rest[1]) >= 0.9 * statistics.median(results["points"][f"saturation|{system}"]["throughput"]):
            continue
        for k, seed in enumerate(point["seeds"]):
            at, model, _ = requests(share / share.sum(), seed, float(rest[0]), float(rest[1]), o.seconds)
            at = at + copy_ns[model]
            order = np.argsort(at, kind="stable")
            rows = zip(at[order].tolist(), model[order].tolist(), strict=True)
            load = TraceWorkload(tuple((t / 1e9, names[m], None, None, 0) for t, m in rows))
            limit = {"demand": active} if active else {}
            part = SETUPS[setup]
            jobs = simulate(profiles, load, policy, queues=part.queues, sm_partitions=part.partitions, **limit).jobs
            jobs = jobs[jobs["status"] == codes.OK]
            slow = (jobs["finish_ns"] - jobs["arrival_ns"] + copy_ns[jobs["model"]]) / alone[jobs["model"]]
            figures = {
                "p50_slowdown": np.quantile(slow, 0.5), "p99_slowdown": np.quantile(slow, 0.99),
                "throughput": len(jobs) / float(jobs["finish_ns"].max()) * 1e9,
            }  # fmt: skip
            for figure, value in figures.items():
                error = abs(float(value) / point[figure][k] - 1)
                found.setdefault(f"{system}|below 90 %|{figure}", []).append(error)
    summary = {
        name: {"median": statistics.median(e), "most": max(e), "n": len(e), "within": sum(x <= 0.2 for x in e) / len(e)}
        for name, e in found.items()
    }
    rows = []
    for system in dict.fromkeys(name.split("|")[0] for name in summary):
        cells = [summary[f"{system}|below 90 %|{figure}"] for figure in ("p50_slowdown", "p99_slowdown", "throughput")]
        rows.append([system, *(f"{v['median']:.0%} (at most {v['most']:.0%}); {v['within']:.0%}" for v in cells)])
    head = ["system", "p50 slowdown", "p99 slowdown", "throughput"]
    title = "simulated against measured: error at median (most); share within 20 %"
    finish(o, "paper_twin", summary, title, [head, *rows], table="twin")


# -- tables and picture


class Report:
    """Figures of stored points. Ratios are of the same seed, and only between points of one commit."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.points, self.light = results["points"], results.get("light", {})

    def ratios(self, name: str, base: str, figure: str) -> list[float]:
        ours, theirs = self.points.get(name), self.points.get(base)
        if not ours or not theirs or ours["commit"] != theirs["commit"]:
            return []
        known = dict(zip(theirs["seeds"], theirs[figure], strict=True))
        return [value / known[seed] for seed, value in zip(ours["seeds"], ours[figure], strict=True) if seed in known]

    def sustained(self, system: str, sigma: str) -> dict[int, float]:
        """For each seed, the highest load with 99 % of the requests in time, interpolated between those that ran."""
        start = f"fig11|{system}|{sigma}|"
        rates = sorted(int(name.rpartition("|")[2]) for name in self.points if name.startswith(start))
        runs = [self.points[f"{start}{rate}"] for rate in rates]
        shares = [dict(zip(run["seeds"], run["within_4x"], strict=True)) for run in runs]
        found = {}
        for seed in sorted(set.intersection(*map(set, shares))) if shares else ():
            share = [each[seed] for each in shares]
            k = max((k for k, each in enumerate(share) if each >= 0.99), default=-1)
            found[seed] = 0.0 if k < 0 else float(rates[k])
            if 0 <= k < len(rates) - 1:
                found[seed] += (share[k] - 0.99) / (share[k] - share[k + 1]) * (rates[k + 1] - rates[k])
        return found

    def load(self, system: str, base: str = "streams", sigma: str = "1.5") -> list[float]:
        commits = [{p["commit"] for name, p in self.points.items() if name.startswith(f"fig11|{each}|{sigma}|")}
                   for each in (system, base)]  # fmt: skip
        ours, other = self.sustained(system, sigma), self.sustained(base, sigma)
        return [ours[seed] / other[seed] for seed in ours if other.get(seed)] if commits[0] == commits[1] else []

    def slower(self, system: str) -> list[float]:
        return self.ratios(f"fig11|{system}|1.5|4000", "fig11|streams|1.5|4000", "p99_slowdown")

    def full(self, system: str) -> list[float]:
        ours, streams = (self.points.get(f"saturation|{each}") for each in (system, "streams"))
        if not ours or not streams or ours["commit"] != streams["commit"]:
            return []
        return [statistics.median(ours["throughput"]) / statistics.median(streams["throughput"])]

    def aims(self) -> Iterator[list[str]]:
        one, many = ("slack", "slack, windows"), ("hrrn, batches", "hrrn, batches, windows")
        given: list[tuple[str, str, list[list[float]]]] = [
            ("load with 99 % in time ÷ streams, `slack`", "≥ 1.4", [self.load(each) for each in one]),
            ("p99 slowdown at 4000/s ÷ streams, `slack`", "≤ 0.40", [self.slower(each) for each in one]),
            ("throughput at saturation ÷ streams, `slack`", "≥ 1.02", [self.full(each) for each in one]),
            ("load with 99 % in time ÷ streams, batched `hrrn`", "≥ 2.0", [self.load(each) for each in many]),
            ("the same ÷ a dynamic batcher", "≥ 1.25", [self.load(each, "dynamic batcher") for each in many]),
            ("throughput at saturation ÷ streams, batched `hrrn`", "≥ 2.2", [self.full(each) for each in many]),
            ("p99 slowdown at 4000/s ÷ streams, batched `hrrn`", "≤ 0.33", [self.slower(each) for each in many]),
            ("light load: latency ÷ a copy and one launch, slowest model", "≤ 1.01",
             [[max(each["ratio"] for name, each in self.light.items() if name != "commit")] if self.light else []]),
        ]  # fmt: skip
        for kind, most in (("resnet50 x64", "1.10"), ("vgg19 x32", "1.20")):
            name = f"best_effort|{kind}|gate, two best-effort jobs"
            p99 = self.ratios(name, f"best_effort|{kind}|alone", "hp_p99_us")
            given.append((f"p99 of high priority ÷ alone, beside two {kind}", f"≤ {most}", [p99]))
            share = self.points.get(name, {}).get("be_share_1", [])
            given.append((f"their throughput ÷ that of one, {kind}", "≥ 0.85", [share]))
        runs = [p for name, p in self.points.items() if name.startswith("beyond|")]
        good = [w * o / a for p in runs for w, o, a in zip(p["within_4x"], p["offered"], p["answered"], strict=True)]
        given.append(("answered in time beyond saturation, worst point", "≥ 0.99", [[min(good)] if good else []]))
        for what, aim, reached in given:
            cells, digits = [], 3 if what.startswith("light") else 2
            for values in reached:
                value = round(statistics.median(values), digits) if values else None
                met = value is None or (value >= float(aim[2:]) if aim[0] == "≥" else value <= float(aim[2:]))
                cells.append("–" if value is None else f"{value:.{digits}f}{'' if met else ', missed'}")
            yield [what, aim, *cells, *["–"] * (2 - len(cells))]

    def sweep(self) -> Iterator[list[str]]:
        def times(values: list[float]) -> str:
            return f"; {statistics.median(values):.2f}×" if values else ""

        for system in (*list(SYSTEMS)[:3], *MPS, *list(SYSTEMS)[3:]):
            loads = [(list(self.sustained(system, each).values()), self.load(system, "streams", each))
                     for each in ("1.5", "2.0")]  # fmt: skip
            at, full = self.points.get(f"fig11|{system}|1.5|4000"), self.points.get(f"saturation|{system}")
            slower, most = self.slower(system), self.full(system)
            yield [
                system, *(ranged(found, 0) + times(ratio) if found else "–" for found, ratio in loads),
                ranged(at["p99_slowdown"], 1) if at else "–", ranged(slower) if slower else "–",
                f"{statistics.median(full['throughput']):,.0f}/s" if full else "–", f"{most[0]:.2f}" if most else "–",
            ]  # fmt: skip

    def beyond(self) -> Iterator[list[str]]:
        for name, p in self.points.items():
            if name.startswith("beyond|"):
                answered, late = 100 * np.divide(p["answered"], p["offered"]), 100 * np.divide(p["late"], p["let_in"])
                yield [*name.split("|")[1:], ranged(answered.tolist(), 1), ranged(p["p99_slowdown"]),
                       ranged((100 - late).tolist(), 1), ranged(p["throughput"], 0)]  # fmt: skip

    def priority(self) -> Iterator[list[str]]:
        for name, p in self.points.items():
            if name.startswith("best_effort|"):
                _, kind, system = name.split("|")
                times = self.ratios(name, f"best_effort|{kind}|alone", "hp_p99_us")
                shares = [ranged(p[f"be_share_{n}"]) if system != "alone" else "–" for n in (1, 2)]
                yield [kind, system, ranged(p["hp_p99_us"], 0), ranged(times) if times else "–", *shares]

    def picture(self, path: Path) -> None:
        """Share in time and p99 slowdown by offered load: a panel for each system, with streams in grey."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        shown, columns = [name for name in SYSTEMS if name not in ("one stream", "streams")], 4
        rows = (("within_4x", 100.0, "% within 4× alone"), ("p99_slowdown", 1.0, "p99 slowdown"))
        with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(10, 5.8), layout="constrained")
            axes = figure.subplots(4, columns, sharex=True, sharey="row")
            for (k, system), (row, (which, scale, label)) in product(enumerate(shown), enumerate(rows)):
                ax = axes[2 * (k // columns) + row, k % columns]
                for name, colour in (("streams", "#999999"), (system, "#0072B2")):
                    start = f"fig11|{name}|1.5|"
                    rates = sorted(int(p[len(start) :]) for p in self.points if p.startswith(start))
                    values = [np.array(self.points[f"{start}{rate}"][which]) * scale for rate in rates]
                    ax.plot(rates, [np.median(v) for v in values], "o-", ms=2.5, lw=1.3, color=colour)
                    low, high = [v.min() for v in values], [v.max() for v in values]
                    ax.fill_between(rates, low, high, color=colour, alpha=0.2, lw=0)
                ax.set(ylabel=label if k % columns == 0 else "", xlim=(0, 16_500))
                if row == 0:
                    ax.set(title=system, ylim=(0, 104))
                    ax.axhline(99, color="#bbbbbb", lw=0.7, ls=":")
                else:
                    ax.set(yscale="log", ylim=(1, 120), xlabel="requests offered a second")
            figure.savefig(path, dpi=150)


# Systems whose load with 99 % in time README.md shows.
QUOTED = {
    "streams": "streams", "queues": "streams, 32 queues", "mps": "MPS, 25 % each", "batcher": "dynamic batcher",
    "unpartitioned": "hrrn, batches", "ours": "hrrn, batches, windows",
}  # fmt: skip


def quoted(results: dict[str, Any]) -> dict[str, Any]:
    report = Report(results)
    us = [[name, *(f"{v[key]:.1f}" for key in ("launch_us", "graph_us", "engine_us")), f"{v['ratio']:.3f}"]
          for name, v in report.light.items() if name != "commit"]  # fmt: skip
    loads = ("requests/s with 99 % in time, σ = 1.5; ÷ streams", "σ = 2.0; ÷ streams")
    tables = {
        "aims": [["figure", "aim", "reached", "with SM partitions"], *report.aims()],
        "sweep": [["system", *loads, "p99 slowdown at 4000/s", "÷ streams", "saturation", "÷ streams"],
                  *report.sweep()],
        "beyond": [["system", "offered/s", "% answered", "p99 slowdown of answered", "% of admitted within 4×",
                    "answered/s"], *report.beyond()],
        "light": [["model", "one graph launch, µs", "with the copy of its inputs", "through the engine",
                   "÷ copy and launch, median of rounds"], *us],
        "priority": [["best effort", "system", "high priority's p99, µs", "÷ alone", "best effort ÷ one job alone",
                      "÷ two alone"], *report.priority()],
    }  # fmt: skip
    ours = {"load.hrrn-windows": report.load("hrrn, batches, windows"), "load.batcher": report.load("dynamic batcher")}
    figures = {name: f"{statistics.median(each):.1f}" for name, each in ours.items() if each}
    for name, system in QUOTED.items():
        if found := report.sustained(system, "1.5"):
            figures[f"rate.{name}"] = f"{statistics.median(found.values()):,.0f}"
    return {"tables": tables, "figures": figures}


def compared(results: Any) -> dict[str, float]:
    """Of a run: the median of each point's main figures, for `--against`."""
    found: dict[str, list[float]] = {}
    for name, point in results["points"].items():
        start = name if "seeds" in point else name.rpartition("|")[0]  # earlier versions had a point for each seed
        for key in ("p99_slowdown", "throughput", "hp_p99_us", "be_per_s"):
            found.setdefault(f"{start}, {key}", []).extend(np.atleast_1d(point.get(key, [])).tolist())
    return {name: statistics.median(values) for name, values in found.items() if values}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seeds=range(5), seconds=1.0, rounds=1, against=True)
    parser.add_argument("step", choices=("run", "twin", "report"))
    parser.add_argument("--only", default="", help=f"experiments to run, of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--points", nargs="+", default=[], help="names of the only points to run")
    parser.add_argument("--budget", type=float, default=3600.0, help="stop after this many seconds")
    parser.add_argument("--queues", type=int, default=0, help="hardware queues of this process, set by its parent")
    o = parser.parse_args()
    o.kinds = TINY if o.quick else FIG11
    if o.step == "twin":
        twin(o)
    elif o.step == "report":
        path = o.out / "paper.json"
        content = json.loads(path.read_text())
        path.write_text(dumps({**content, **quoted(content["results"])}) + "\n")
        Report(content["results"]).picture(Path(__file__).parents[1] / "docs" / "results_fig11.png")
    elif o.against:
        given = ["run", "--device", o.device, "--seconds", str(o.seconds), "--budget", str(o.budget)]
        given += ["--seeds", f"{o.seeds[0]}-{o.seeds[-1]}", *(["--only", o.only] if o.only else [])]
        given += [*(["--quick"] if o.quick else []), *(["--points", *o.points] if o.points else [])]
        found = in_turns(o, __file__, "paper", compared, *given)
        print(save("paper_against", found, pp.Device(o.device), o.out))
    else:
        run(o)


if __name__ == "__main__":
    main()
