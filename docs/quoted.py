"""Figures in the prose of README.md and the pages, each tied to the file that it comes from.

    python docs/quoted.py        writes them anew

A figure is followed by a comment with its name, which nobody sees: 2.3<!--=load.hrrn-windows-->. Tables between
`<!-- table: name -->` and `<!-- end -->` are made here too.
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import paper_report  # noqa: E402
import quoted_beside  # noqa: E402
import quoted_cluster  # noqa: E402
import quoted_kernels  # noqa: E402
import quoted_scheduling  # noqa: E402
import quoted_serving  # noqa: E402
import quoted_sharing  # noqa: E402
import quoted_trust  # noqa: E402
from result_files import RESULTS, stored  # noqa: E402

MARK = re.compile(r"([\d][\d.,]*)<!--=([\w.%/, -]+)-->")


@functools.cache
def sweep() -> paper_report.Series:
    return paper_report.series(stored("paper")["points"], "fig11")


def load(system: str, base: str = "streams", sigma: str = "1.5") -> float:
    """Load with 99 % in time ÷ another system's, median over the seeds."""
    ours, other = (paper_report.sustained(sweep(), each, sigma) for each in (system, base))
    return float(np.median([ours[seed] / other[seed] for seed in ours]))


def slower(system: str) -> float:
    """p99 slowdown at 4000/s ÷ streams', median over the seeds."""
    both = (sweep()[each, "1.5", "4000"] for each in (system, "streams"))
    ours, streams = ({p["seed"]: p["p99_slowdown"] for p in points} for points in both)
    return float(np.median([ours[seed] / streams[seed] for seed in ours]))


def full(system: str) -> float:
    found = paper_report.series(stored("paper")["points"], "saturation")
    most, streams = (float(np.median([p["throughput"] for p in found[each,]])) for each in (system, "streams"))
    return most / streams


def high_priority(beside: str) -> tuple[float, float]:
    """p99 ÷ alone, and best effort ÷ one job alone, with two best-effort jobs behind a gate."""
    points = stored("paper")["points"]
    found = [points[f"best_effort|{beside}|gate, two best-effort jobs|{k}"] for k in range(5, 10)]
    alone = [points[f"best_effort|{beside}|alone|{k}"]["hp_p99_us"] for k in range(5, 10)]
    p99 = [p["hp_p99_us"] / a for p, a in zip(found, alone, strict=True)]
    return float(np.median(p99)), float(np.median([p["be_share_1"] for p in found]))


def aims() -> str:
    """What the project aimed at before it measured, and what it reached: plain, and with windows of SMs."""
    points = stored("paper")["points"]
    one, many, batcher = ("slack", "slack, windows"), ("hrrn, batches", "hrrn, batches, windows"), "dynamic batcher"
    rows = [
        _aim("load with 99 % in time ÷ streams, `slack`", "≥ 1.4", [load(each) for each in one]),
        _aim("p99 slowdown at 4000/s ÷ streams, `slack`", "≤ 0.40", [slower(each) for each in one]),
        _aim("throughput at saturation ÷ streams, `slack`", "≥ 1.02", [full(each) for each in one]),
        _aim("load with 99 % in time ÷ streams, batched `hrrn`", "≥ 2.0", [load(each) for each in many]),
        _aim("load with 99 % in time ÷ dynamic batcher, batched `hrrn`", "≥ 1.25", [load(n, batcher) for n in many]),
        _aim("throughput at saturation ÷ streams, batched `hrrn`", "≥ 2.2", [full(each) for each in many]),
        _aim("p99 slowdown at 4000/s ÷ streams, batched `hrrn`", "≤ 0.33", [slower(each) for each in many]),
        _aim("light load: latency ÷ a copy and one launch, slowest model", "≤ 1.01",
             [max(each["ratio"] for each in points["light"].values())]),
    ]  # fmt: skip
    for beside, most in (("resnet50 x64", 1.10), ("vgg19 x32", 1.20)):
        p99, share = high_priority(beside)
        rows.append(_aim(f"p99 of high priority ÷ alone, beside two {beside}", f"≤ {most:.2f}", [p99]))
        rows.append(_aim(f"throughput of these two ÷ one of them alone, {beside}", "≥ 0.85", [share]))
    beyond = [p for key, p in points.items() if key.startswith("beyond|")]
    in_time = min(p["within_4x"] * p["offered"] / p["answered"] for p in beyond)
    rows.append(_aim("answered in time beyond saturation, worst point", "≥ 0.99", [in_time]))
    return paper_report.table(["figure", "aim", "reached", "with windows of SMs"], rows)


def _aim(what: str, aim: str, reached: list[float]) -> list[str]:
    """A value that misses its aim is said to."""
    sign, limit = aim.split()
    cells = []
    for each in reached:
        value = round(each, 3 if len(limit) > 4 or what.startswith("light") else 2)
        good = value >= float(limit) if sign == "≥" else value <= float(limit)
        cells.append(f"{value:.3f}" if what.startswith("light") else f"{value:.2f}")
        cells[-1] += "" if good else ", missed"
    return [what, aim, *cells, *["–"] * (2 - len(cells))]


def costs() -> str:
    kinds = ("count", "trace", "notify", "one counter")
    rows = [
        [name, f"{row['plain_us']:.1f}", *(f"{row[kind]['ratio']:.3f}" for kind in kinds)]
        for name, row in stored("report_cost").items()
    ]
    head = ["kernel", "plain, µs", "`count`", "`trace`", "`notify`", "all blocks on one counter"]
    return paper_report.table(head, rows)


def first_use() -> str:
    """CPU-seconds of what a new user does first, and with empty caches ÷ those of the version before the rooms."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for each in stored("cold_start")["medians"]:
        found.setdefault(each["task"], {})[each["caches"]] = each
    rows = [
        [
            task,
            *(f"{by[caches]['this_cpu_s']:.2f}" if caches in by else "–" for caches in ("empty", "filled")),
            f"{by['empty']['ratio']:.2f}",
            {"import paellapy": "≤ 0.70", "first simulate": "≤ 0.20"}.get(task, "≤ 0.25" if "engine" in task else "–"),
        ]
        for task, by in found.items()
    ]
    return paper_report.table(["task", "empty caches, s", "filled caches, s", "empty caches ÷ before", "aim"], rows)


def first_use_parts() -> str:
    """CPU-seconds of the parts of a first use with empty caches."""
    found: dict[str, dict[str, float]] = stored("cold_start")["parts"]
    names = sorted({name for by in found.values() for name in by}, key=lambda name: (name == "rest", name))
    rows = [[name, *(f"{by[name]:.1f}" if by.get(name) else "–" for by in found.values())] for name in names]
    return paper_report.table(["part", *(f"{task}, s" for task in found)], rows)


def model_loads() -> str:
    """Seconds that models take to load on the H200, and their parts; "before" is the version before the rooms."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for each in stored("model_loading")["medians"]:
        found.setdefault((each["model"], each["caches"]), {})[each["tree"]] = each
    rows = []
    for (model, caches), by in sorted(found.items()):
        parts = sorted(by["this"]["phases_s"].items(), key=lambda part: -part[1])
        told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts[:4])
        rows.append([f"`{model}`", caches, f"{by['base']['s']:.2f}", f"{by['this']['s']:.2f}", told])
    return paper_report.table(["model", "caches", "before, s", "now, s", "longest parts, s"], rows)


def load_ratio(caches: str) -> float:
    """The time to load all models ÷ that of the version before the rooms."""
    total = {"this": 0.0, "base": 0.0}
    for each in stored("model_loading")["medians"]:
        total[each["tree"]] += each["s"] if each["caches"] == caches else 0.0
    return total["this"] / total["base"]


def gap_us(when: str) -> float:
    """Between two kernels of a graph, before and after kernels on a second stream."""
    return float(stored("kernel_gaps")["cases"]["and 7 on another"][when]) / 1e3


def alone_ms() -> list[float]:
    return [model["alone_us"] / 1e3 for model in stored("engine_h200")["models"].values()]


def tuned(name: str) -> float:
    path = ROOT / "instrument" / "device" / "profiles" / "h200.tuning.toml"
    (found,) = (part[name] for part in tomllib.loads(path.read_text()).values() if name in part)
    return float(found["value"])


@functools.cache
def tables() -> dict[str, str]:
    ours = {"aims": aims(), "costs": costs(), "cold-start": first_use(), "cold-parts": first_use_parts()}
    ours["model-loads"] = model_loads()
    others = quoted_scheduling.tables() | quoted_cluster.tables() | quoted_sharing.tables()
    others |= quoted_trust.tables() | quoted_beside.tables() | quoted_kernels.tables() | quoted_serving.tables()
    return ours | paper_report.tables(RESULTS / "paper.json") | others


def unknown_kernels() -> dict[str, float]:
    """Errors of kernel times on the virtual GPU, each kernel by a profile fitted without it."""
    found: dict[str, float] = stored("calibration_error_h200")["unknown kernels"]["time_error"]
    return found


def gate_speed() -> Any:
    return stored("guest_speed")["one process"]


def _language(*kinds: str) -> str:
    """How many of Triton's language tests have one of these outcomes."""
    found = stored("triton_language_tests")["total"]
    return f"{sum(found[kind] for kind in kinds):,}"


FIGURES: dict[str, Callable[[], str]] = {
    "training.seeds": lambda: str(quoted_beside.requests()[0]),
    "memory.compared": lambda: f"{quoted_beside.compared():,}",
    "memory.requests": lambda: str(stored("more_models")["default"]["requests"]),
    "memory.processes": lambda: str(stored("more_models")["processes"]["processes"]),
    "training.requests": lambda: str(quoted_beside.requests()[1]),
    "load.hrrn-windows": lambda: f"{load('hrrn, batches, windows'):.1f}",
    "load.batcher": lambda: f"{load('dynamic batcher'):.1f}",
    "loads.empty": lambda: f"{load_ratio('empty'):.2f}",
    "loads.filled": lambda: f"{load_ratio('filled'):.2f}",
    "gate.added": lambda: f"{stored('gate_cost')['added_ns'][0]:.0f}",
    "gate.launch": lambda: f"{np.median(stored('gate_cost')['launches']['straight_ns']) / 1e3:.1f}",
    "gate.speed": lambda: f"{100 * gate_speed()['gated_speed']:.0f}",
    "gate.speed-low": lambda: f"{100 * gate_speed()['gated_speed_95'][0]:.0f}",
    "gate.speed-high": lambda: f"{100 * gate_speed()['gated_speed_95'][1]:.0f}",
    "gate.p99": lambda: f"{quoted_beside.gated_at_all():.2f}",
    "launch": lambda: f"{stored('launch_overhead')['pp.kernel, count']['ratio']:.2f}",
    "gap.short": lambda: f"{gap_us('before_ns'):.1f}",
    "gap.long": lambda: f"{gap_us('after_ns'):.1f}",
    "gap.added": lambda: f"{gap_us('after_ns') - gap_us('before_ns'):.1f}",
    "live.hz": lambda: f"{stored('live_overhead')['hz']:.1f}",
    "live.thread": lambda: f"{100 * stored('live_overhead')['thread_cpu_share']:.1f}",
    "live.request": lambda: f"{stored('live_overhead')['note_us_per_request']:.1f}",
    "demo.eight-workers": lambda: f"{quoted_serving.per_s('8') / quoted_serving.per_s('one'):.1f}",
    "demo.http-least": lambda: f"{min(quoted_serving.http_us()):.0f}",
    "demo.http-most": lambda: f"{max(quoted_serving.http_us()):.0f}",
    "engine.shortest": lambda: f"{min(alone_ms()):.2f}",
    "engine.longest": lambda: f"{max(alone_ms()):.1f}",
    "demand.limit": lambda: f"{tuned('demand_limit'):.1f}",
    "demand.most": lambda: f"{tuned('most_demand'):.1f}",
    "first.kernels": lambda: str(stored("first_launch")["kernels"]),
    "first.first": lambda: f"{stored('first_launch')['times_faster']['first']:.1f}",
    "first.later": lambda: f"{stored('first_launch')['times_faster']['later']:.0f}",
    "fidelity.median": lambda: f"{100 * unknown_kernels()['median']:.1f}",
    "fidelity.p90": lambda: f"{100 * unknown_kernels()['p90']:.1f}",
    "public.right": lambda: str(stored("public_kernels")["total"]["right"]),
    "public.kernels": lambda: str(stored("public_kernels")["total"]["kernels"]),
    "public.variants": lambda: str(stored("public_kernels")["total"]["variants"]),
    "trust.late-least": lambda: f"{100 * min(quoted_trust.late_shares()):.1f}",
    "trust.late-most": lambda: f"{100 * max(quoted_trust.late_shares()):.1f}",
    "trust.twice-earlier": lambda: f"{quoted_trust.longest_earlier_s():.1f}",
    "language.share": lambda: f"{100 * stored('triton_language_tests')['passed_of_the_others']:.1f}",
    "language.passed": lambda: _language("passed"),
    "language.ran": lambda: _language("passed", "refused", "failed"),
    "language.skipped": lambda: _language("skipped by the test"),
    "language.excluded": lambda: _language("looks at the compiler's output or asks the CUDA driver"),
    "language.refused": lambda: _language("refused"),
    "language.failed": lambda: _language("failed"),
}


def updated(page: str) -> str:
    """The page with every figure and every table as the result files have them."""
    page = paper_report.filled(page, tables())
    return MARK.sub(lambda found: f"{FIGURES[found[2]]()}<!--={found[2]}-->", page)


def main() -> None:
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = page.read_text()
        if (new := updated(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
