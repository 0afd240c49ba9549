"""The tables of docs/results.md, from paper.json and paper_twin.json."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parent.parent / "docs"
BASELINES = (
    "one stream", "eager, 1 thread", "eager, 8 threads", "streams", "streams, 32 queues", "MPS, 100 % each",
    "MPS, 25 % each", "kernel by kernel, srpt", "dynamic batcher",
)  # fmt: skip
ENOUGH = 0.99  # of the requests within four times their time alone
SIGMA = "1.5"

Series = dict[tuple[str, ...], list[Any]]  # a point's name less the seed → one entry per seed


def series(points: dict[str, Any], kind: str) -> Series:
    found: Series = defaultdict(list)
    for key, value in points.items():
        name, *rest = key.split("|")
        if name == kind:
            found[tuple(rest[:-1])].append({**value, "seed": int(rest[-1])})
    return found


def same_requests(runs: list[Any], others: list[Any]) -> list[tuple[Any, Any]]:
    """Points of one run with the same seed: only those are compared."""
    known = {(p["seed"], p["commit"]): p for p in others}
    return [(p, known[at]) for p in runs if (at := (p["seed"], p["commit"])) in known]


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and least to most where there are several seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def sustained(sweep: Series, system: str, sigma: str) -> dict[int, float]:
    """For each seed, the highest offered load at which enough requests are in time, between the loads that were run."""
    rates = sorted(int(key[2]) for key in sweep if key[:2] == (system, sigma))
    shares = [{p["seed"]: p["within_4x"] for p in sweep[system, sigma, str(rate)]} for rate in rates]
    found = {}
    for seed in sorted(set.intersection(*map(set, shares))) if shares else ():
        share = [each[seed] for each in shares]
        enough = [k for k, each in enumerate(share) if each >= ENOUGH]
        k = enough[-1] if enough else None
        if k is None:
            found[seed] = 0.0
        elif k == len(rates) - 1:
            found[seed] = float(rates[k])
        else:
            part = (share[k] - ENOUGH) / (share[k] - share[k + 1])
            found[seed] = rates[k] + part * (rates[k + 1] - rates[k])
    return found


def commits(sweep: Series, *start: str) -> set[str]:
    """With which the points were measured whose names begin so: only those of one run are compared."""
    return {p["commit"] for key, runs in sweep.items() if key[: len(start)] == start for p in runs}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def fig11_text(points: dict[str, Any]) -> str:
    sweep, full = series(points, "fig11"), series(points, "saturation")
    known = {key[0] for key in sweep}
    systems = [name for name in BASELINES if name in known] + sorted(known.difference(BASELINES))
    sigmas = sorted({key[1] for key in sweep})
    base = {sigma: sustained(sweep, "streams", sigma) for sigma in sigmas}
    most_of_streams = [p["throughput"] for p in full.get(("streams",), [])]
    rows = []
    for system in systems:
        row = [system]
        for sigma in sigmas:
            loads = sustained(sweep, system, sigma)
            times = [load / base[sigma][seed] for seed, load in loads.items() if base[sigma].get(seed)]
            if commits(sweep, system, sigma) != commits(sweep, "streams", sigma):
                times = []
            ratio = f"; {np.median(times):.2f}×" if times else ""
            row.append(spread(list(loads.values()), 0) + ratio if loads else "–")
        at = sweep.get((system, SIGMA, "4000"), [])
        both = same_requests(at, sweep.get(("streams", SIGMA, "4000"), []))
        row.append(spread([p["p99_slowdown"] for p in at], 1) if at else "–")
        ratios = [p["p99_slowdown"] / streams["p99_slowdown"] for p, streams in both]
        row.append(spread(ratios) if ratios else "–")
        most = [p["throughput"] for p in full.get((system,), [])]
        row.append(f"{np.median(most):,.0f}/s" if most else "–")
        same = commits(full, system) == commits(full, "streams")
        row.append(spread([m / float(np.median(most_of_streams)) for m in most]) if most and same else "–")
        rows.append(row)
    loads_at = [f"requests/s with 99 % in time, σ = {sigma}; ÷ streams" for sigma in sigmas]
    return table(["system", *loads_at, "p99 slowdown at 4000/s", "÷ streams", "saturation", "÷ streams"], rows)


def let_in_in_time(runs: list[Any]) -> str:
    """What expired counts too; earlier runs did not store it."""
    if not all("late" in p for p in runs):
        return "–"
    return spread([100 * (1 - p["late"] / max(1, p["let_in"])) for p in runs], 1)


def beyond_text(points: dict[str, Any]) -> str:
    rows = [
        [system, f"{int(rate):,}/s", spread([100 * p["answered"] / p["offered"] for p in runs], 1),
         spread([p["p99_slowdown"] for p in runs]),
         spread([100 * p["within_4x"] * p["offered"] / max(1, p["answered"]) for p in runs], 1),
         let_in_in_time(runs), spread([p["throughput"] for p in runs], 0)]
        for (system, rate), runs in series(points, "beyond").items()
    ]  # fmt: skip
    head = ["system", "offered", "% answered", "p99 slowdown of answered", "% of answered within 4×",
            "% of admitted within 4×", "answered/s"]  # fmt: skip
    return table(head, rows)


def light_text(points: dict[str, Any]) -> str:
    rows = [
        [
            m, f"{v['launch_us']:.1f}", f"{v['graph_us']:.1f}", f"{v['turns_us']:.1f}" if "turns_us" in v else "–",
            f"{v['engine_us']:.1f}", f"{v['ratio']:.3f}",
        ]
        for m, v in points["light"].items()
    ]  # fmt: skip
    head = ["model", "one graph launch, µs", "with the copy of its inputs", "two instances in turn",
            "through the engine", "÷ copy and launch, median of rounds"]  # fmt: skip
    return table(head, rows)


def best_effort_text(points: dict[str, Any]) -> str:
    found = series(points, "best_effort")
    rows = []
    for (beside, system), runs in found.items():
        times = [p["hp_p99_us"] / a["hp_p99_us"] for p, a in same_requests(runs, found[beside, "alone"])]
        shares = ("–", "–")
        if system != "alone":
            shares = tuple(spread([p[f"be_share_{jobs}"] for p in runs]) for jobs in (1, 2))
        rows.append(
            [
                beside, system, spread([p["hp_p99_us"] for p in runs], 0),
                spread(times) if times else "–", *shares,
            ]
        )  # fmt: skip
    head = ["best effort", "system", "high priority's p99, µs", "÷ alone", "best effort ÷ one job alone", "÷ two alone"]
    return table(head, rows)


def active_text(points: dict[str, Any]) -> str:
    found = series(points, "active")
    columns = list(dict.fromkeys(key[:3] for key in found))
    rows = []
    for setting in dict.fromkeys(key[3] for key in found):
        row = [setting]
        for column in columns:
            runs = found.get((*column, setting), [])
            share = 100 * float(np.mean([p["within_4x"] for p in runs])) if runs else np.nan
            row.append(f"{share:.1f} % / {np.median([p['p99_slowdown'] for p in runs]):.1f}" if runs else "–")
        rows.append(row)
    return table(["at once", *(f"{policy}, {kind}, {rate}/s" for kind, policy, rate in columns)], rows)


def fig12_text(points: dict[str, Any]) -> str:
    found = series(points, "fig12")
    models = list(next(iter(found.values()))[0]["p99_us"])
    rows = []
    for (threshold,), runs in found.items():
        label = "off" if float(threshold) >= 1e6 else f"{float(threshold):g} ms"
        rows.append([label, *(spread([p["p99_us"].get(m, np.nan) / 1e3 for p in runs]) for m in models)])
    return table(["fairness threshold", *(f"{m}, p99 ms" for m in models)], rows)


def disb_text(points: dict[str, Any]) -> str:
    rows = [
        [load, system, spread([p["rt_p50_us"] / 1e3 for p in runs]), spread([p["rt_p99_us"] / 1e3 for p in runs]),
         spread([p["be_per_s"] for p in runs], 1)]
        for (load, system), runs in sorted(series(points, "disb").items(), key=lambda each: each[0][0])
    ]  # fmt: skip
    return table(["load", "system", "real-time p50, ms", "p99, ms", "best effort, batches/s"], rows)


def twin_text(path: Path) -> str:
    summary = json.loads(path.read_text())["results"]["summary"]
    systems = list(dict.fromkeys(name.split("|")[0] for name in summary))
    rows = []
    for system in systems:
        row = [system]
        for figure in ("p50_slowdown", "p99_slowdown", "throughput"):
            v = summary.get(f"{system}|below 90 %|{figure}")
            row.append(f"{v['median']:.0%} (at most {v['most']:.0%}); {v['within']:.0%}" if v else "–")
        rows.append(row)
    return table(["system", "p50 slowdown", "p99 slowdown", "throughput"], rows)


def twin_beyond_text(path: Path) -> str:
    found: dict[tuple[str, str], list[Any]] = {}
    for each in json.loads(path.read_text())["results"].get("beyond", ()):
        _, system, rate, _ = each["point"].split("|")
        found.setdefault((system, rate), []).append(each)
    rows = []
    for (system, rate), runs in found.items():
        row = [system, f"{int(rate):,}/s"]
        for figure in ("let_in", "in_time"):
            for who in ("measured", "twin"):
                known = [100 * each[who][figure] for each in runs if who in each]
                row.append(spread(known, 1) if known else "–")
        rows.append(row)
    head = ["system", "offered", "% admitted, measured", "simulated", "% of admitted in time, measured", "simulated"]
    return table(head, rows) if rows else ""


def runs_text(measured: dict[str, str]) -> str:
    """Which points are of other runs than most, from the commit of each."""
    most = Counter(measured.values()).most_common(1)[0][0]
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key, commit in measured.items():
        kind, *rest = key.split("|")
        if commit != most:
            where = f"the sweep with σ = {rest[1]}" if kind == "fig11" else kind.replace("_", " ")
            found[commit][where].add(rest[0] if kind in ("fig11", "saturation") else "")
    lines = []
    for commit, kinds in found.items():
        of = (where + (f" ({'; '.join(sorted(who))})" if any(who) else "") for where, who in sorted(kinds.items()))
        lines.append(f"at {commit} {', '.join(of)}")
    others = f" Others, compared only within their commit: {'; '.join(lines)}."
    return f"Most points were measured at commit {most}.{others}" if lines else ""


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "sweep": ("fig11", fig11_text), "beyond": ("beyond", beyond_text), "jobs": ("active", active_text),
    "light": ("light", light_text), "priority": ("best_effort", best_effort_text), "fairness": ("fig12", fig12_text),
    "disb": ("disb", disb_text),
}  # fmt: skip


def tables(path: Path) -> dict[str, str]:
    """What stands between the markers of docs/results.md, by name."""
    stored = json.loads(path.read_text())
    points, on = dict(stored["results"]["points"]), stored["on"]
    known = stored["results"].get("commits", {})
    # Of earlier points it was not kept how many outputs were compared: those of the requests that were answered.
    outputs = stored["results"].get("outputs", {})
    compared = sum(outputs.get(key, each.get("answered", 0)) for key, each in points.items())
    unknown = "unknown" if known else on["commit"]  # where points had none yet, all were of one run
    measured = {key: known.get(key, value.get("commit", unknown)) for key, value in points.items()}
    for key, commit in measured.items():
        if key != "light":  # whose entries are models
            points[key] = {**points[key], "commit": commit}
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items() if version)
    found = {
        "machine": f"{on['device']}, {on['date']}, {versions}. At least {compared:,} outputs were compared with the "
        f"modules' own; {stored['results']['wrong']} were wrong.",
        "runs": runs_text(measured) or "All points are of one run.",
    }
    found |= {
        name: make(points) for name, (kind, make) in TABLES.items() if any(key.split("|")[0] == kind for key in points)
    }
    twin = path.with_name("paper_twin.json")
    return found | ({"twin": twin_text(twin), "twin-beyond": twin_beyond_text(twin)} if twin.exists() else {})


def filled(page: str, found: dict[str, str]) -> str:
    """The page with each `<!-- table: name -->` … `<!-- end -->` written anew."""

    def fill(marked: re.Match[str]) -> str:
        text = found.get(marked[1])
        return marked[0] if text is None else f"<!-- table: {marked[1]} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def report(path: Path, docs: Path = DOCS) -> None:
    """Writes the tables of results.md anew, and its picture."""
    from paper_pictures import sweep_picture

    page = (DOCS / "results.md").read_text()
    (docs / "results.md").write_text(filled(page, tables(path)))
    sweep_picture(series(json.loads(path.read_text())["results"]["points"], "fig11"), docs / "results_fig11.png")
    print(docs / "results.md")
