"""Tables of training beside serving, of scripts of other processes, and of more models than memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paper_report
from result_files import stored


def _ratio(points: Any, name: str, base: str) -> float:
    """p99 ÷ that alone, median over the seeds: each has the same arrivals in both."""
    return float(np.median(np.array(points[name]["p99_ms"]) / points[base]["p99_ms"]))


def _speed(points: Any, name: str) -> float:
    return float(np.median(points[name]["steps_per_s"]))


WHOLE = ("stream priorities", "streams")  # ways that launch a step as one graph


def _own_speed(points: Any, job: str, way: str) -> float | None:
    """Of the job by itself, cut or in one piece as it is there: the quickest time it was looked at."""
    start, end = f"{job}: ", ": job alone"
    alone = {name[len(start) : -len(end)]: speed for name, speed in points.items()
             if name.startswith(start) and name.endswith(end)}  # fmt: skip
    found = [speed for each, speed in alone.items() if speed and (each in WHOLE) == (way in WHOLE)]
    return max(found, default=None)


def training() -> str:
    points = stored("background")
    rows = [["aim", "", "≤ 1.07", "≤ 1.07", "", "≥ 0.80", "", ""]]
    for name, found in sorted(points.items(), key=lambda item: item[0].split(",")[0]):
        job, _, way = name.partition(": ")
        if ", " not in job or not isinstance(found, dict) or "steps_per_s" not in found:
            continue
        kind = job.split(",")[0]
        speed, plain = _speed(points, name), points[f"{kind}: plain loop"]
        own, whole = _own_speed(points, job, way), _own_speed(points, f"{kind}, one graph", "streams")
        p99 = [f"{_ratio(points, name, f'{job}: alone {when}'):.2f}" for when in ("before", "again")]
        p99.append(f"{np.median(found['p99_ms']):.2f}")
        ratios = ["–" if each is None else f"{speed / each:.2f}" for each in (own, whole, plain)]
        rows.append([job, way, *p99, *ratios])
    head = ["job, its segments", "policy", "p99 ÷ before the job", "p99 ÷ after it", "p99, ms", "steps ÷ the job alone",
            "steps ÷ the job alone as one graph", "steps ÷ the plain loop alone"]  # fmt: skip
    return paper_report.table(head, rows)


def facts() -> str:
    points = stored("background")
    rows = [["aim", "", "", "≤ 1.005", "≤ 1.005", "≤ 1.005", "", ""]]
    for name in points:
        kind, _, what = name.partition(": ")
        if what != "plain loop":
            continue
        steps = [each for each in points if each.startswith(f"{kind}, ") and each.endswith(": step")]
        job = steps[0].partition(": ")[0]
        alone = max(_own_speed(points, each, way) or 0.0
                    for each in (job, f"{kind}, one graph") for way in ("priority", "streams"))  # fmt: skip
        losses = stored("background_losses")[f"{kind}: losses"]["equal"]
        equal = f"{sum(losses)} of {len(losses)}"
        served = [f"{np.median(points[f'{job}: alone {when}']['p50_ms']):.2f}" for when in ("before", "again")]
        rows.append([kind, f"{alone / points[name]:.2f}", equal, *_paused(points, kind), ", ".join(served)])
    head = ["job", "captured steps ÷ the plain loop's, both alone", "seeds with all of 200 losses equal, bit for bit",
            "p50 while it is paused ÷ alone", "mean while it is paused ÷ alone", "p99 while it is paused ÷ alone",
            "requests while it is paused", "p50 of resnet50 alone, ms: before, after"]  # fmt: skip
    return paper_report.table(head, rows)


def _paused(points: Any, kind: str) -> list[str]:
    """p50, mean and p99 of requests beside a paused job ÷ without it, each the mean over the rounds with its standard
    error, and the number of requests. A later run has more requests.
    """
    name = f"{kind}: paused and alone"
    found, cells = stored("background_paused").get(name, points[name]), []
    for figure in ("p50_ms", "mean_ms", "p99_ms"):
        ratios = np.divide(*(found["rounds"][way][figure] for way in ("paused", "alone")))
        cells.append(f"{ratios.mean():.3f} ± {ratios.std(ddof=1) / len(ratios) ** 0.5:.3f}")
    return [*cells, f"{found['requests']['paused']:,}"]


def scripts() -> str:
    """A script of another process, free and behind the gate, without MPS and under it."""
    rows = [["aim behind a gate", "", "≤ 1.15", "", ""]]
    for file, under, names in (
        ("guest", "", {"free": "free", "gated": "gated"}),
        ("guest_probe", "", {"2 in flight": "gated, 2 in flight"}),
        ("guest_mps", " under MPS", {"free": "free", "gated": "gated"}),
    ):
        points = stored(file)
        for name, title in names.items():
            found, base = points[name + under], f"alone{under}"
            by_itself = found.get("steps_per_s_alone")
            speed = f"{_speed(points, name + under):.0f}, {'–' if by_itself is None else f'{by_itself:.0f}'}"
            ratios = [f"{each(points, name + under, base):.2f}" for each in (_p50, _ratio)]
            rows.append([title + under, *ratios, speed, f"`{file}.json`"])
    head = ["script", "p50 ÷ alone", "p99 ÷ alone", "steps per second beside requests, without", "stored as"]
    return paper_report.table(head, rows)


def _p50(points: Any, name: str, base: str) -> float:
    return float(np.median(points[name]["p50_ms"]) / np.median(points[base]["p50_ms"]))


WAYS = {
    "always closed": "the gate is never open",
    "gated": "as it is",
    "early": "A: the client closes the gate itself when a request is due",
    "whole": "B: requests are launched in one piece, also beside others",
    "ack": "A; then the engine waits, at most 0.2 ms, until the script's stream is empty (C)",
    "ack, whole": "A, B, C",
    "keep": "A, B; a small kernel keeps the engine's process on the GPU until the request is done (D)",
    "linger 1000": "A, B; the gate stays closed for 1 ms after a request",
    "ack, keep, linger 300": "A, B, C, D; the gate stays closed for 0.3 ms after a request",
    "2 in flight": "the script waits for the GPU after every two kernels (`--in-flight 2`)",
    "2 in flight, early, ack": "the same; A, B, C",
}


def ways() -> str:
    """Ways to hold a script back, in one run."""
    points = stored("guest_probe")
    rows = [
        [what, f"{_p50(points, name, 'alone'):.2f}", f"{_ratio(points, name, 'alone'):.2f}",
         f"{_speed(points, name):.0f}" if name != "always closed" else "0"]
        for name, what in WAYS.items()
    ]  # fmt: skip
    return paper_report.table(["way", "p50 ÷ alone", "p99 ÷ alone", "the script's steps per second"], rows)


def script_causes() -> str:
    """Where the time of requests beside a script goes."""
    points, rows = stored("guest_probe"), []
    for name, title in (("alone", "no script"), ("gated", "gated script"), ("2 in flight", "gated, 2 in flight")):
        for key, which in (("median", "median"), ("slow_median", "slowest 2 %, median")):
            found = points[name][key]
            times = (found["latency"], found["on GPU"], found["latency"] - found["on GPU"], found.get("drained"))
            rows.append([f"{title}, {which}", *("–" if us is None else f"{us:.0f}" for us in times)])
    head = ["requests", "latency, µs", "from the first to the last kernel, µs", "before and after that, µs",
            "from closing the gate until the script's stream was empty, µs"]  # fmt: skip
    return paper_report.table(head, rows)


def gate_cost() -> str:
    """What ways to hold launches back add to one, while they do not hold it."""
    found = stored("gate_cost")
    rows = [["open gate", "a function of the C library", f"{found['added_ns'][0]:.0f}"]]
    for key, way in (("added_ns", "open gate"), ("cupti_added_ns", "callback of CUPTI's")):
        if key in found.get("launches", {}):
            rows.append([way, "`cuLaunchKernel`", f"{found['launches'][key]:.0f}"])
    return paper_report.table(["way", "before", "added, ns"], rows)


def gated_at_all() -> float:
    """p99 of all requests beside a gated script ÷ that of all alone."""
    points = stored("guest")
    return float(points["gated"]["all_p99_ms"] / points["alone"]["all_p99_ms"])


def memory() -> str:
    found = stored("more_models")
    load, cold, default, lru = (found[each] for each in ("load", "cold", "default", "lru"))
    whole, bound = load["memory"]["budget_bytes"], np.array([row["of_bound"] for row in cold["rows"]])
    size = f"{load['models']}, {load['weights_bytes'] / 1e9:.1f} GB"
    rows = [
        ["models, their weights", size],
        ["memory for weights; with instances; ÷ all weights",
         f"{load['budget_bytes'] / 1e9:.1f} GB; {whole / 1e9:.1f} GB; "
         f"{load['budget_bytes'] / load['weights_bytes']:.2f}, {whole / load['weights_bytes']:.2f}"],
        [f"reload, part of the link's {found['link']['gbps']:.0f} GB/s (aim ≥ 0.85), median", f"{cold['of_link']:.2f}"],
        ["cold request ÷ the longer of copy and run (aim ≤ 1.2): median, least, most",
         f"{cold['of_bound']:.2f}, {bound.min():.2f}, {bound.max():.2f}"],
        ["cold requests above 1.2 times the longer of copy and run", f"{(bound > 1.2).sum()} of {len(bound)}"],
        *_timeline(cold["rows"]),
        ["requests that find their weights on the GPU: default, `lru`",
         f"{default['hit_rate']:.2f}, {lru['hit_rate']:.2f}"],
        ["p50 of all requests: default, `lru`", f"{default['p50_ms']:.1f} ms, {lru['p50_ms']:.1f} ms"],
        ["p99 of all requests: default, `lru`", f"{default['p99_ms']:.1f} ms, {lru['p99_ms']:.1f} ms"],
    ]  # fmt: skip
    ways = {"paellapy": cold["latency"], '`module.to("cuda")`': found["to_cuda"]["cold"],
            "a process for each model": found["processes"]["cold"]}  # fmt: skip
    for q in ("p50", "p99"):
        times = ", ".join(f"{each[f'{q}_ms']:.0f} ms" for each in ways.values())
        rows.append([f"{q} of cold requests: {', '.join(ways)}", times])
        ours, *theirs = (each[f"{q}_ms"] for each in ways.values())
        ratios = ", ".join(f"{each / ours:.1f}" for each in theirs)
        rows.append([f"{q} of cold requests ÷ paellapy's: {', '.join(list(ways)[1:])}", ratios])
    rows.append([f"cold requests measured: {', '.join(ways)}", ", ".join(str(each["n"]) for each in ways.values())])
    within = [f"{each['within_target']:.2f}" for each in (default, found["to_cuda"])]
    rows.append([f"requests within their target: {', '.join(list(ways)[:2])}", ", ".join(within)])
    cold_within = ", ".join(f"{each['within_target']:.2f}" for each in ways.values())
    rows.append([f"cold requests within their target: {', '.join(ways)}", cold_within])
    if "beside" in found:
        p99 = {when: each["p99_ms"] for when, each in found["beside"].items() if isinstance(each, dict)}
        ratio = f"{p99['beside'] / p99['alone']:.2f}"
        rows.append(["p99 of two models that stay, while others come and go ÷ alone, in turn (aim ≤ 1.10)", ratio])
    return paper_report.table(["", ""], rows)


def memory_cost() -> str:
    """An engine with an ample budget ÷ one without."""
    rows = []
    for name, each in stored("memory_cost")["ratios"].items():
        spread = f"{each['least_without']:.3f} to {each['most_without']:.3f}"
        rows.append([name, f"{each['median']:.3f}", f"{each['least']:.3f} to {each['most']:.3f}", spread])
    head = ["load, figure", "with a budget ÷ without, median of the rounds", "least to most",
            "without a budget: rounds ÷ their median"]  # fmt: skip
    return paper_report.table(head, rows)


def compared() -> int:
    """Outputs of the stored run that were compared with PyTorch's, without the cold models beside models that stay."""
    found = stored("more_models")
    beside = [each["n"] for each in found["beside"].values() if isinstance(each, dict)]
    return sum(found[part]["requests"] for part in ("default", "lru", "to_cuda")) + sum(beside)


def _timeline(cold: Any) -> list[list[str]]:
    """Of cold requests, where it was noted: what comes after the last weights."""
    if not all("segments_ms" in row for row in cold):
        return []
    ran = np.array([row["segments_ms"][-1][1] for row in cold])
    after, way = (ran - [row["all_there_ms"] for row in cold], [row["cold_ms"] for row in cold] - ran)
    return [
        ["cold request, from its last weights to its last segment's end: median, most",
         f"{np.median(after):.1f} ms, {after.max():.1f} ms"],
        ["cold request, the rest: way to the core and back, median", f"{np.median(way):.1f} ms"],
    ]  # fmt: skip


def operations() -> str:
    rows = []
    for name, title in (("memory_operations", "H200"), ("memory_operations_virtual", "virtual H200")):
        found = stored(name)
        held = sum(found["held_in_the_end"].values())
        counts = [found[each] for each in ("operations", "requests_beside", "brought", "evicted", "wrong", "failed")]
        free = [found[f"gpu_free_{when}"] for when in ("before", "after")]
        gb = "–" if None in free else ", ".join(f"{each / 1e9:.1f}" for each in free)
        rows.append([title, *(f"{each:,}" for each in counts), f"{held}", gb, f"`{name}.json`"])
    head = ["GPU", "operations", "requests of the other clients", "reloads", "evictions", "wrong answers",
            "failed reloads", "held in the end", "free on the GPU, GB: first, last", "stored as"]  # fmt: skip
    return paper_report.table(head, rows)


def requests() -> tuple[int, int]:
    """Of every point of the training runs: seeds, and requests of each."""
    found = stored("background")["alone"]
    return len(found["p99_ms"]), found["requests"] // len(found["p99_ms"])


def tables() -> dict[str, str]:
    found = {
        "training": training, "training-facts": facts, "scripts": scripts, "script-ways": ways,
        "script-causes": script_causes, "gate-cost": gate_cost, "memory-operations": operations,
        "more-models": memory, "memory-cost": memory_cost,
    }  # fmt: skip
    return {name: make() for name, make in found.items()}
