"""The papers' experiments on real models: Paella's figures 11 to 13, high priority beside best effort, DISB.

    python benchmarks/paper.py run [--only fig11,light] [--seeds 0-4] [--seconds 1] [--budget 300] [--out DIR]
    python benchmarks/paper.py report [--out DIR]        # plots, and docs/results.md

Points stored in DIR/paper.json are not run again; each point is stored, with the commit, as soon as it is measured; and
`--budget` stops after that many seconds. So the benchmark can run in pieces. All systems get the same arrivals, and
every output is compared with that of the module in eager mode. `--tiny` uses models that a CPU can compute: with
`--device virtual:h200` it shows that everything runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, SEEDS_HELP, commit, save, seeds
from engine_load import Run, lognormal_gaps, poisson
from paper_models import DISB, FIG11, FIG12, TINY, VARIANTS, Kind
from paper_runs import BATCHED, KERNELS, PLAIN, SETUPS, SYSTEMS, Loaded, Setup, System
from rich.progress import Progress

import paellapy as pp
from paellapy.instrument.env import CONNECTIONS as QUEUES
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import save_profiles
from paellapy.scheduler.policies.builtin import paella_with
from paellapy.scheduler.policies.policy import Policy, find_policy

RATES = (1000, 2000, 2500, 3000, 4000, 5000, 6000, 7000)
BATCHED_RATES = (1000, 2000, 3000, 4000, 5000, 6000, 8000, 12000, 16000)
THRESHOLDS_MS = (0.0, 1.0, 3.0, 10.0, 30.0, 1e6)
HP_RATE = 250.0
MOST_PAUSE_US = 2500.0  # a load generator that stood still for longer has not offered the load it should have
RUN_AGAIN = 2
THINK_NS = 20_000  # between an answer and the next request of a light load: less than any client takes


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a name to find its result by, what must be loaded for it, and how to do it."""

    key: str
    kinds: tuple[Kind, ...]
    setup: Setup
    priorities: tuple[int, ...]
    run: Callable[[Loaded], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Options:
    seeds: range
    seconds: float
    tiny: bool
    sigmas: tuple[float, ...] = (1.5, 2.0)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    rates: tuple[int, ...] = ()  # of fig11, where they are not to be all


def fig11(o: Options) -> Iterator[Point]:
    """Load swept to saturation and beyond."""
    kinds = TINY if o.tiny else FIG11
    rates = (50, 100) if o.tiny else RATES
    batched = (100, 200) if o.tiny else BATCHED_RATES
    for seed, sigma, name in itertools.product(o.seeds, o.sigmas, o.systems):
        system = SYSTEMS[name]
        if system.setup != KERNELS or seed == o.seeds[0]:
            for rate in rates if system.setup.batch == (1,) else batched:
                if (name == "one stream" and rate > 2000) or (o.rates and rate not in o.rates):
                    continue
                run = fig11_run(system, sigma, rate, seed, o.seconds)
                yield Point(f"fig11|{name}|{sigma}|{rate}|{seed}", kinds, system.setup, (0,) * len(kinds), run)


def fig11_run(system: System, sigma: float, rate: float, seed: int, seconds: float) -> Callable[[Loaded], Any]:
    def run(loaded: Loaded) -> dict[str, Any]:
        at, model, which = fig11_requests(loaded.share, seed, sigma, rate, seconds)
        return {**loaded.summary(loaded.offer(system.policy, at, model, which, system.active)), "seconds": seconds}

    return run


def active(o: Options) -> Iterator[Point]:
    """How many jobs at once: fixed numbers against what they demand together."""
    kinds = TINY if o.tiny else FIG11
    settings: tuple[int | float, ...] = (4, 6, 8, 12, 16, 1.0, 1.5, 2.0, 2.5, 3.0)
    plain = (PLAIN, "srpt", (100,) if o.tiny else (4000, 5000))
    batched = (BATCHED, "hrrn", (100,) if o.tiny else (4000, 6000))
    for seed, (setup, policy, rates) in itertools.product(o.seeds, (plain, batched)):
        for rate, setting in itertools.product(rates, settings):
            run = fig11_run(System(setup, policy, setting), 1.5, rate, seed, o.seconds)
            batches = "batches" if setup == BATCHED else "plain"
            kind = f"{setting} jobs" if isinstance(setting, int) else f"demand {setting}"
            yield Point(f"active|{batches}|{policy}|{rate}|{kind}|{seed}", kinds, setup, (0,) * len(kinds), run)


def fig11_requests(share: Any, seed: int, sigma: float, rate: float, seconds: float) -> tuple[Any, Any, Any]:
    """When which model is asked for, and with which input: the same for every system."""
    rng = np.random.default_rng(seed)
    n = max(20, int(rate * seconds))
    at = lognormal_gaps(rng, rate, sigma, n)
    return at, rng.choice(len(share), n, p=share).astype(np.int64), rng.integers(0, VARIANTS, n)


def saturation(o: Options) -> Iterator[Point]:
    """As many requests as the system takes."""
    kinds = TINY if o.tiny else FIG11
    for seed in o.seeds:
        for name in o.systems:
            system = SYSTEMS[name]
            many = len(system.setup.batch) > 1

            def run(loaded: Loaded, which: System = system, s: int = seed, m: bool = many) -> Any:
                # So many that the requests a policy puts off fill the queue in less than half of the run.
                n = 40_000 if m else 3_000 if which.policy == "serial" else 12_000
                n = 60 if o.tiny else n
                done = loaded.saturate(which, n, 2048 if m else 96, s)
                return {**loaded.summary(done), "throughput": done.steady_throughput}

            if system.setup != KERNELS or seed == o.seeds[0]:
                yield Point(f"saturation|{name}|{seed}", kinds, system.setup, (0,) * len(kinds), run)


def beyond(o: Options) -> Iterator[Point]:
    """More than the GPU can do, with deadlines at four times the time alone: the rest is refused when it comes."""
    kinds = TINY if o.tiny else FIG11
    # The generator copies inputs itself, up to about 25,000 a second.
    loads = ((PLAIN, "slack", (10_000, 14_000)), (BATCHED, "slack, batches", (16_000, 20_000, 24_000)))
    for seed, (setup, name, rates) in itertools.product(o.seeds, loads):
        for rate in (200,) if o.tiny else rates:

            def run(loaded: Loaded, r: int = rate, s: int = seed, which: System = SYSTEMS[name]) -> dict[str, Any]:
                at, model, input_number = fig11_requests(loaded.share, s, 1.5, r, o.seconds)
                due = [int(4 * ns) for ns in loaded.alone_ns]
                done = loaded.offer(
                    which.policy, at, model, input_number, which.active, deadline_ns=due, may_fail=True, admission=True
                )
                return {**loaded.summary(done), **who_was_late(done, np.array(due))}

            yield Point(f"beyond|{name}|{rate}|{seed}", kinds, setup, (0,) * len(kinds), run)


def who_was_late(done: Run, due_ns: Any) -> dict[str, Any]:
    """Of those that were let in; what expired was not answered, and is late too. When they came (at first nothing is
    known of how predictions do), of which model they were, and in batches of how many: [late, all] each.
    """
    let_in = done.status != codes.QUEUE_FULL
    late = let_in & ((done.status != codes.OK) | (done.latency_ns > due_ns[done.model]))
    since = done.arrival_ns - done.arrival_ns.min()
    found: dict[str, Any] = {"let_in": int(let_in.sum()), "late": int(late.sum())}
    for name, by in (("tenth", since * 10 // (since.max() + 1)), ("model", done.model), ("batch", done.batch)):
        kinds = np.unique(by[let_in])
        found[f"late_by_{name}"] = {int(k): [int((each & (by == k)).sum()) for each in (late, let_in)] for k in kinds}
    return found


def light(o: Options) -> Iterator[Point]:
    """One request at a time, against a copy of its inputs and one launch of the same graph."""
    kinds = TINY if o.tiny else FIG11
    n, rounds = (20, 1) if o.tiny else (80, 7)

    def once(loaded: Loaded, m: int) -> dict[str, float]:
        which = np.arange(n, dtype=np.int64) % VARIANTS
        at, model = np.zeros(n, np.int64), np.full(n, m, np.int64)
        one = loaded.offer("paella", at, model, which, outstanding=1, think_ns=THINK_NS)
        times = {"engine_us": one.latency_ns}
        if loaded.engine.device.name.startswith("cuda"):
            # Two instances in turn, as where requests overlap: what changing between their memory costs.
            for name, copied, instances in (("graph_us", True, 1), ("launch_us", False, 1), ("turns_us", True, 2)):
                times[name] = loaded.generator.alone_ns(m, 0, n, copied, instances, THINK_NS)
        else:
            times |= dict.fromkeys(("graph_us", "launch_us", "turns_us"), loaded.alone_ns[m : m + 1].repeat(n))
        us = {name: float(np.median(each[n // 4 :])) / 1e3 for name, each in times.items()}
        return {**us, "ratio": us["engine_us"] / us["graph_us"]}

    def run(loaded: Loaded) -> dict[str, Any]:
        found = {}
        for m, kind in enumerate(kinds):
            # In turns: the GPU's clock is not the same from one moment to the next.
            each = [once(loaded, m) for _ in range(rounds)]
            found[kind.label] = {name: float(np.median([e[name] for e in each])) for name in each[0]}
            found[kind.label]["ratios"] = [e["ratio"] for e in each]
        return found

    yield Point("light", kinds, PLAIN, (0,) * len(kinds), run)


def fig12(o: Options) -> Iterator[Point]:
    """Two models, the short one asked for twenty times as often: what the fairness threshold does to each."""
    kinds = TINY if o.tiny else FIG12
    rate = 60 if o.tiny else 5000
    for seed, threshold in itertools.product(o.seeds, THRESHOLDS_MS):

        def run(loaded: Loaded, s: int = seed, t: float = threshold) -> dict[str, Any]:
            rng = np.random.default_rng(s)
            n = max(20, int(rate * o.seconds))
            at = lognormal_gaps(rng, rate, 1.5, n)
            return loaded.summary(loaded.offer(paella_with(t), at, *loaded.mix(rng, n)))

        yield Point(f"fig12|{threshold:g}|{seed}", kinds, PLAIN, (0, 0), run)


def best_effort(o: Options) -> Iterator[Point]:
    """resnet50 at batch 1, 250 a second, beside a job of large batches that asks again at once."""
    hp = TINY[0] if o.tiny else Kind("resnet50")
    beside = (Kind("tiny4", items=4),) if o.tiny else (Kind("resnet50", items=64), Kind("vgg19", items=32))
    setup = Setup((1,), 4)
    fine = Setup((1,), 4, quantum_us=70.0)
    two_ahead = replace(find_policy("priority"), max_in_flight=2)
    systems: dict[str, tuple[Setup, str | Policy, tuple[int, int], int]] = {
        "alone": (setup, "streams", (0, 0), 0),
        "streams": (setup, "streams", (0, 0), 1),
        "stream priorities": (setup, "streams", (1, 0), 1),
        "gate": (setup, "priority", (1, 0), 1),
        "gate, two best-effort jobs": (setup, "priority", (1, 0), 2),
        "gate, 70 µs, two best-effort jobs": (fine, "priority", (1, 0), 2),
        "gate, two segments ahead": (setup, two_ahead, (1, 0), 1),
        "gate, two segments ahead, two best-effort jobs": (setup, two_ahead, (1, 0), 2),
        "gate, 70 µs, two segments ahead": (fine, two_ahead, (1, 0), 1),
        "gate, 70 µs, two segments ahead, two best-effort jobs": (fine, two_ahead, (1, 0), 2),
    }
    for seed, be, (name, (how, policy, priorities, loops)) in itertools.product(o.seeds, beside, systems.items()):

        def run(loaded: Loaded, p: str | Policy = policy, s: int = seed, k: int = loops) -> dict[str, Any]:
            rng = np.random.default_rng(s)
            rate = 20.0 if o.tiny else HP_RATE
            n = max(20, int(rate * o.seconds * 2))
            at = poisson(rng, rate, n)
            room = 100_000
            both = loaded.offer(
                p, at, np.zeros(n, np.int64), rng.integers(0, VARIANTS, n), loops=[1] * k, until_ns=0, loop_room=room
            )
            us = both.latency_ns[:n] / 1e3
            found = {"hp_p50_us": float(np.quantile(us, 0.5)), "hp_p99_us": float(np.quantile(us, 0.99))}
            found["be_per_s"] = (len(both.model) - n) / both.took_ns * 1e9
            none = np.zeros(0, np.int64)
            for jobs in (1, 2):  # in one piece each, as with the GPU to itself; two fill each other's gaps
                alone = loaded.offer(
                    "streams", none, none, none, loops=[1] * jobs, until_ns=int(0.5e9 * o.seconds), loop_room=room
                )
                found[f"be_alone_{jobs}_per_s"] = len(alone.model) / alone.took_ns * 1e9
                found[f"be_share_{jobs}"] = found["be_per_s"] / found[f"be_alone_{jobs}_per_s"]
            return found

        yield Point(f"best_effort|{be.label}|{name}|{seed}", (hp, be), how, priorities, run)


def disb(o: Options) -> Iterator[Point]:
    """DISB A to E: real-time clients beside best-effort ones in closed loops."""
    real = {k.name: k for k in DISB}
    s5 = TINY if o.tiny else DISB
    vgg, res = (TINY[0], TINY[1]) if o.tiny else (real["vgg19"], real["resnet152"])
    # What is real-time and what best effort, at which rate (None: a closed loop), and with which arrivals.
    loads: dict[str, tuple[tuple[Kind, ...], tuple[Kind, ...], float | None, str]] = {
        "A": ((vgg,), (res,), 100.0, "uniform"),
        "B": ((vgg,), (res,), None, "loop"),
        "C": ((vgg,), s5, 100.0, "uniform"),
        "D": (s5, s5, 20.0, "uniform"),
        "E": (s5, s5, 20.0, "poisson"),
    }
    systems = {"streams": ("streams", 0), "stream priorities": ("streams", 1), "priority": ("priority", 1)}
    for seed, (name, (rt, be, rate, kind)), (system, (policy, high)) in itertools.product(
        o.seeds, loads.items(), systems.items()
    ):
        kinds = (*rt, *(Kind(k.name, items=2 if o.tiny else 8) for k in be if "bert" not in k.name))
        priorities = (*(high for _ in rt), *(0 for _ in kinds[len(rt) :]))

        def run(
            loaded: Loaded, p: str = policy, s: int = seed, r: float | None = rate, a: str = kind, m: int = len(rt)
        ) -> dict[str, Any]:
            rng = np.random.default_rng(s)
            seconds = 2 * o.seconds
            be_loops = list(range(m, len(loaded.kinds)))
            if r is None:
                at = model = np.zeros(0, np.int64)
                loops, until = [0, *be_loops], int(seconds * 1e9)
            else:
                per = max(4, int(r * seconds))
                times = [
                    poisson(rng, r, per) if a == "poisson" else (np.arange(per) * (1e9 / r)).astype(np.int64) + 1
                    for _ in range(m)
                ]
                at, model = np.concatenate(times), np.repeat(np.arange(m), per)
                order = np.argsort(at, kind="stable")
                at, model, loops, until = at[order], model[order], be_loops, 0
            which = rng.integers(0, VARIANTS, len(at))
            done = loaded.offer(p, at, model, which, loops=loops, until_ns=until, loop_room=200_000)
            is_rt = done.model < m
            us = done.latency_ns / 1e3
            return {
                "rt_p50_us": float(np.quantile(us[is_rt], 0.5)), "rt_p99_us": float(np.quantile(us[is_rt], 0.99)),
                "rt_per_s": float(is_rt.sum() / done.took_ns * 1e9),
                "be_per_s": float((~is_rt).sum() / done.took_ns * 1e9),
                "rt_p99_slowdown": float(np.quantile((done.latency_ns / loaded.alone_ns[done.model])[is_rt], 0.99)),
            }  # fmt: skip

        yield Point(f"disb|{name}|{system}|{seed}", kinds, Setup((1,), 2), priorities, run)


EXPERIMENTS: dict[str, Callable[[Options], Iterator[Point]]] = {
    "light": light, "saturation": saturation, "active": active, "fig11": fig11, "beyond": beyond,
    "best_effort": best_effort, "fig12": fig12, "disb": disb,
}  # fmt: skip


def run_undisturbed(point: Point, loaded: Loaded) -> dict[str, Any]:
    """A point's result; again where the load generator stood still. What the core did is the engine's own affair."""
    found = point.run(loaded)
    again = 0
    while found.get("generator_pause_us", 0.0) > MOST_PAUSE_US and again < RUN_AGAIN:
        again += 1
        found = {**point.run(loaded), "run_again": again}
    return found


def run(args: argparse.Namespace) -> None:
    sigmas = tuple(float(each) for each in args.sigma.split(","))
    systems = tuple(SYSTEMS) if args.systems is None else tuple(args.systems.split(";"))
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise SystemExit(f"no system {unknown[0]!r}; there are {'; '.join(SYSTEMS)}")
    rates = tuple(int(each) for each in args.rates.split(",")) if args.rates else ()
    if wrong := sorted(set(rates) - set(RATES) - set(BATCHED_RATES)):
        raise SystemExit(f"no rate {wrong[0]} in the sweep, which has {RATES}, and with batches {BATCHED_RATES}")
    options = Options(args.seeds, args.seconds, args.tiny, sigmas, systems, rates)
    folder = args.out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "paper.json"
    done: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    chosen = args.only.split(",") if args.only else list(EXPERIMENTS)
    began, measured = time.monotonic(), commit()
    points = [p for name in chosen for p in EXPERIMENTS[name](options) if p.key not in done.get("points", {})]
    queues = args.queues or int(os.environ[QUEUES])
    if not args.queues:
        # CUDA reads the number when a process first uses a GPU: other numbers need processes of their own.
        for number in {p.setup.queues for p in points} - {queues}:
            command = [sys.executable, *sys.argv, "--budget", str(args.budget / 2), "--queues", str(number)]
            subprocess.run(command, check=True, env={**os.environ, QUEUES: str(number)})
            done = json.loads(path.read_text())["results"]
    points = [p for p in points if p.setup.queues == queues and p.key not in done.get("points", {})]
    device = pp.Device(args.device)
    results = {"points": {}, "commits": {}, "outputs": {}, "checked": 0, "wrong": 0, "alone_us": {}, **done}
    # Loading costs more than running: everything that needs the same engine runs in a row.
    groups: dict[Any, list[Point]] = {}
    for point in points:
        groups.setdefault((point.kinds, point.setup, point.priorities), []).append(point)
    references: dict[str, Any] = {}
    where = "cuda" if args.device.startswith("cuda") else "cpu"
    with Progress(transient=True) as progress:
        task = progress.add_task("points", total=len(points))
        for (kinds, setup, priorities), group in groups.items():
            if time.monotonic() - began > args.budget:
                break
            progress.update(task, description=f"loading {len(kinds)} models")
            try:
                for kind in kinds:
                    if kind.label not in references:
                        references[kind.label] = kind.expected(where)
                loaded = Loaded(args.device, kinds, setup, priorities, references)
                for m, kind in enumerate(kinds):  # one for all systems: as it was measured first
                    loaded.alone_ns[m] = 1e3 * results["alone_us"].setdefault(kind.label, loaded.alone_ns[m] / 1e3)
                for name, each in SETUPS.items():
                    if each == setup and kinds in (FIG11, TINY):
                        save_profiles(folder / f"paper_profiles_{name}.json", loaded.profiles())
                for point in group:
                    if time.monotonic() - began > args.budget:
                        break
                    checked, wrong = loaded.checked, loaded.wrong
                    before = loaded.pace()
                    results["points"][point.key] = run_undisturbed(point, loaded)
                    if point.key != "light":  # whose entries are models
                        results["points"][point.key] |= {"gpu_before": before, "gpu_after": loaded.pace()}
                    results["commits"][point.key] = measured
                    results["outputs"][point.key] = loaded.checked - checked
                    results["checked"] += loaded.checked - checked
                    results["wrong"] += loaded.wrong - wrong
                    save("paper", results, device, folder)
                    progress.update(task, advance=1, description=point.key)
                loaded.close()
            except (PaellaError, RuntimeError) as e:  # other engines may still work; this one is left as it is
                progress.console.print(f"{setup} of {', '.join(k.label for k in kinds)}: {type(e).__name__}: {e}")
    left = sum(p.key not in results["points"] for p in points)
    print(f"{len(points) - left} points in {time.monotonic() - began:.0f} s, {left} left; ", end="")
    print(f"{results['checked']:,} outputs checked, {results['wrong']} wrong; {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "report"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help=f"experiments to run, of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--seeds", type=seeds, default=range(5), help=SEEDS_HELP)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of offered load per point")
    parser.add_argument("--budget", type=float, default=3600.0, help="stop after this many seconds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sigma", default="1.5,2.0", help="spread of fig11's lognormal gaps")
    parser.add_argument("--rates", default="", help="run only these rates of fig11")
    parser.add_argument("--systems", help=f"systems of fig11 and saturation, separated by ;: {'; '.join(SYSTEMS)}")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--queues", type=int, default=0, help=argparse.SUPPRESS)  # of this process: it was told so
    args = parser.parse_args()
    if args.step == "run":
        run(args)
    else:
        from paper_report import report

        report((args.out or RESULTS) / "paper.json")


if __name__ == "__main__":
    main()
