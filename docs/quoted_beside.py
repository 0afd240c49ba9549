"""Tables of training beside serving, of scripts of other processes, and of more models than memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paper_report
from result_files import stored


def _ratio(points: Any, name: str, base: str) -> float:
    """p99 ÷ that alone, median over the seeds: each has the same arrivals in both."""
    return float(np.median(np.array(points[name]["p99_ms"]) / points[base]["p99_ms"]))


def _speed(points: Any, name: str) -> float:
    return float(np.median(points[name]["steps_per_s"]))


def _own_speed(points: Any, job: str, way: str) -> float | None:
    """Of the job by itself, cut or in one piece as it is there: the quickest time it was looked at."""
    whole = "stream priorities"
    alone = {each: points.get(f"{job}: {each}: job alone") for each in ("priority", "tally", "reef", "orion", whole)}
    found = [speed for each, speed in alone.items() if speed is not None and (each == whole) == (way == whole)]
    return max(found, default=None) if way in alone else None


def training() -> str:
    points = stored("background")
    rows = []
    for name, found in points.items():
        job, _, way = name.partition(": ")
        if "µs" not in job or not isinstance(found, dict) or "steps_per_s" not in found:
            continue
        kind = job.split(",")[0]
        speed, plain = _speed(points, name), points[f"{kind}: plain loop"]
        own = _own_speed(points, job, way)
        p99 = [f"{_ratio(points, name, f'{job}: alone {when}'):.2f}" for when in ("before", "again")]
        rows.append([job, way, *p99, "–" if own is None else f"{speed / own:.2f}", f"{speed / plain:.2f}"])
    head = ["job, its segments", "policy", "p99 ÷ before the job", "p99 ÷ after it", "steps ÷ the job alone",
            "steps ÷ the plain loop alone"]  # fmt: skip
    return paper_report.table(head, rows)


def facts() -> str:
    points = stored("background")
    rows = []
    for name in points:
        kind, _, what = name.partition(": ")
        if what != "plain loop":
            continue
        steps = [each for each in points if each.startswith(f"{kind}, ") and each.endswith(": step")]
        job = steps[0].partition(": ")[0]
        alone = max(found for each, found in points.items() if each.startswith(job) and each.endswith("job alone"))
        losses = points.get(f"{kind}: losses", {"equal": []})["equal"]
        paused = [f"{_ratio(points, f'{job}: paused', f'{job}: alone {when}'):.2f}" for when in ("before", "again")]
        equal = f"{sum(losses)} of {len(losses)}" if losses else "not measured"
        rows.append([kind, f"{alone / points[name]:.2f}", equal, ", ".join(paused)])
    head = ["job", "captured steps ÷ the plain loop's, both alone", "seeds with all of 200 losses equal, bit for bit",
            "p99 while it is paused ÷ before, ÷ after"]  # fmt: skip
    return paper_report.table(head, rows)


def scripts() -> str:
    points = stored("guest")
    rows = []
    for name, found in points.items():
        if "steps_per_s" not in found:
            continue
        mps = " under MPS" if name.endswith(" under MPS") else ""
        free = points[("captured, free" if name.startswith("captured") else "free") + mps]
        p99, own = _ratio(points, name, f"alone{mps}"), free["steps_per_s_alone"]
        speeds = (found["steps_per_s_alone"] / own, _speed(points, name) / own)
        rows.append([name, f"{p99:.2f}", *(f"{each:.2f}" for each in speeds)])
    head = ["script", "p99 ÷ alone", "its speed without requests ÷ free", "its speed beside them ÷ free without"]
    return paper_report.table(head, rows)


def memory(name: str = "more_models") -> str:
    found = stored(name)
    load, cold, default, lru = (found[each] for each in ("load", "cold", "default", "lru"))
    rows = [
        ["models, their weights", f"{load['models']}, {load['weights_bytes'] / 1e9:.1f} GB"],
        ["room for weights", f"{load['budget_bytes'] / 1e9:.1f} GB"],
        [f"reload, part of the link's {found['link']['gbps']:.0f} GB/s, median", f"{cold['of_link']:.2f}"],
        ["cold request ÷ max(copy, run), median", f"{cold['of_bound']:.2f}"],
        ["requests that find their weights on the GPU: default, `lru`",
         f"{default['hit_rate']:.2f}, {lru['hit_rate']:.2f}"],
        ["p50 of all requests: default, `lru`", f"{default['p50_ms']:.1f} ms, {lru['p50_ms']:.1f} ms"],
        ["p99 of all requests: default, `lru`", f"{default['p99_ms']:.1f} ms, {lru['p99_ms']:.1f} ms"],
    ]  # fmt: skip
    if "beside" in found:
        ratio = found["beside"]["p99_ratio"]
        rows.append(["p99 of two models that stay, others coming and going ÷ without", f"{ratio:.2f}"])
    ours = cold.get("latency")
    for name, what in (("to_cuda", '`module.to("cuda")`'), ("processes", "a process for each model")):
        if ours is not None and name in found:
            rival = found[name]["cold"]
            rows.append([
                f"cold request with {what} ÷ ours: p50, p99",
                f"{rival['p50_ms'] / ours['p50_ms']:.1f}, {rival['p99_ms'] / ours['p99_ms']:.1f}",
            ])  # fmt: skip
    if "to_cuda" in found:
        both = f"{default['within_target']:.2f}, {found['to_cuda']['within_target']:.2f}"
        rows.append(['requests within 50 ms: ours, `module.to("cuda")`', both])
    return paper_report.table(["", ""], rows)


def tables() -> dict[str, str]:
    found = {"training": training, "training-facts": facts, "scripts": scripts, "more-models": memory}
    found["more-models-12"] = functools.partial(memory, "more_models_12")
    return {name: make() for name, make in found.items()}
