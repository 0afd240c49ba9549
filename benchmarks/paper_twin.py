"""The sweep of `paper.py` on the virtual twin: the same requests, with the profiles recorded on the GPU.

    python benchmarks/paper_twin.py [--out DIR]

Reads paper.json and paper_profiles_*.json, simulates every point of figure 11, and reports how far p50, p99 and
throughput are from the measured ones, below 90 % of saturation and above. Then it simulates the loads above saturation
with admission, and reports how many requests are admitted and how many of these are in time.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, commit, save
from paper import fig11_requests
from paper_models import FIG11, TINY
from paper_runs import KERNELS, SETUPS, SYSTEMS, System
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paellapy.scheduler.core.codes import OK, QUEUE_FULL
from paellapy.scheduler.core.profiles import load_profiles
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import TraceWorkload

FIGURES = ("p50_slowdown", "p99_slowdown", "throughput")


def simulated(
    profiles: list[Any], system: System, at: Any, model: Any, alone_ns: dict[str, float], copy_ns: dict[str, float]
) -> dict[str, float]:
    """`copy_ns`: what it takes to put a request's inputs where the GPU reads them, as measured at light load."""
    names = [each.name for each in profiles]
    copy = np.array([copy_ns.get(name, 0.0) for name in names])
    at = at + copy[model]
    order = np.argsort(at, kind="stable")
    at, model = at[order], model[order]
    rows = tuple((t / 1e9, names[m], None, None, 0) for t, m in zip(at.tolist(), model.tolist(), strict=True))
    by = "demand" if isinstance(system.active, float) else "active"
    limit = {by: system.active} if system.active else {}
    windows = system.setup.windows
    result = simulate(
        profiles, TraceWorkload(rows), system.policy, queues=system.setup.queues, sm_partitions=windows, **limit
    )
    done = result.jobs[result.jobs["status"] == OK]
    alone = np.array([alone_ns[each.name] for each in profiles])  # by what slowdowns were measured too
    slow = (done["finish_ns"] - done["arrival_ns"] + copy[done["model"]]) / alone[done["model"]]
    return {
        "p50_slowdown": float(np.quantile(slow, 0.5)),
        "p99_slowdown": float(np.quantile(slow, 0.99)),
        "throughput": len(done) / (float(done["finish_ns"].max()) / 1e9),
    }


def admitted(profiles: list[Any], system: System, at: Any, model: Any, alone_ns: dict[str, float]) -> dict[str, float]:
    """With deadlines at four times the time alone; what expires was let in, and is late."""
    names = [each.name for each in profiles]
    due_ns = np.array([4 * alone_ns[name] for name in names])
    each = zip(at.tolist(), model.tolist(), strict=True)
    rows = tuple((t / 1e9, names[m], due_ns[m] / 1e6, None, 0) for t, m in each)
    jobs = simulate(
        profiles, TraceWorkload(rows), system.policy, demand=system.active, queues=system.setup.queues, admission=True
    ).jobs
    let_in = jobs[jobs["status"] != QUEUE_FULL]
    in_time = (let_in["status"] == OK) & (let_in["finish_ns"] - let_in["arrival_ns"] <= due_ns[let_in["model"]])
    return {"let_in": len(let_in) / len(jobs), "in_time": float(in_time.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    folder = parser.parse_args().out or RESULTS
    commit()  # of now, whatever is edited while this runs
    measured = json.loads((folder / "paper.json").read_text())["results"]
    profiles = {
        name: load_profiles(folder / f"paper_profiles_{name}.json")
        for name in SETUPS
        if (folder / f"paper_profiles_{name}.json").exists()
    }
    if "batcher" in profiles and "batched" in profiles:  # what fills the GPU is not seen with one instance each
        seen = {each.name: each for each in profiles["batched"]}
        profiles["batcher"] = [
            replace(each, demand=seen[each.name].demand, together=seen[each.name].together)
            for each in profiles["batcher"]
        ]
    kinds = {kind.label: kind for kind in (*FIG11, *TINY)}
    for name, found in profiles.items():  # in fp16; earlier runs did not store it
        profiles[name] = [replace(p, input_bytes=p.input_bytes or 2 * math.prod(kinds[p.name].shape)) for p in found]
    alone_ns = {name: us * 1e3 for name, us in measured["alone_us"].items()}
    light = measured["points"].get("light", {})
    copy_ns = {name: max(0.0, each["graph_us"] - each["launch_us"]) * 1e3 for name, each in light.items()}
    limit = saturation_rates(measured["points"])

    def requests(name: str, seed: str, sigma: float, rate: str, seconds: float) -> tuple[Any, Any]:
        share = np.array([kinds[p.name].share for p in profiles[name]])
        return fig11_requests(share / share.sum(), int(seed), sigma, float(rate), seconds)[:2]

    setup_names = {setup: name for name, setup in SETUPS.items()}
    rows = []
    keys = [key for key in measured["points"] if key.startswith("fig11|")]
    for key in track(keys, description="simulating"):
        _, which, sigma, rate, seed = key.split("|")
        if which not in SYSTEMS or which not in limit:  # processes, which the twin does not have
            continue
        system = SYSTEMS[which]
        name = setup_names[system.setup]
        if system.setup == KERNELS or name not in profiles:
            continue
        real = measured["points"][key]
        at, model = requests(name, seed, float(sigma), rate, real["seconds"])
        twin = simulated(profiles[name], system, at, model, alone_ns, copy_ns)
        rows.append(
            {
                "point": key, "system": which, "load": float(rate) / limit[which],
                **{f: {"measured": real[f], "twin": twin[f], "error": twin[f] / real[f] - 1} for f in FIGURES},
            }
        )  # fmt: skip
    beyond = []
    for key in track([key for key in measured["points"] if key.startswith("beyond|")], description="with admission"):
        _, which, rate, seed = key.split("|")
        system, real = SYSTEMS[which], measured["points"][key]
        name = setup_names[system.setup]
        if name not in profiles:
            continue
        at, model = requests(name, seed, 1.5, rate, real["offered"] / float(rate))
        found = {"point": key, "twin": admitted(profiles[name], system, at, model, alone_ns)}
        if "let_in" in real:
            in_time = 1 - real["late"] / real["let_in"]
            found["measured"] = {"let_in": real["let_in"] / real["offered"], "in_time": in_time}
        beyond.append(found)
    report: dict[str, Any] = {"points": rows, "summary": {}, "beyond": beyond}
    table = Table(title="the virtual twin against the GPU: size of the error", box=None)
    for column in ("system", "load", "figure", "median", "most", "within 20 %", "points"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system in dict.fromkeys(r["system"] for r in rows):
        for title, below in (("below 90 %", True), ("beyond", False)):
            for figure in FIGURES:
                chosen = [r for r in rows if r["system"] == system and (r["load"] < 0.9) == below]
                errors = np.abs([r[figure]["error"] for r in chosen])
                if not len(errors):
                    continue
                found = {
                    "median": float(np.median(errors)), "most": float(errors.max()),
                    "within": float((errors <= 0.2).mean()), "n": len(errors),
                }  # fmt: skip
                report["summary"][f"{system}|{title}|{figure}"] = found
                shown = (f"{found[name]:.0%}" for name in ("median", "most", "within"))
                table.add_row(system, title, figure, *shown, str(found["n"]))
    Console().print(table)
    print(save("paper_twin", report, None, folder))


def saturation_rates(points: dict[str, Any]) -> dict[str, float]:
    """Requests a second each system reached when it got as many as it would take."""
    found: dict[str, list[float]] = {}
    for key, point in points.items():
        if key.startswith("saturation|"):
            found.setdefault(key.split("|")[1], []).append(point["throughput"])
    return {system: float(np.median(each)) for system, each in found.items()}


if __name__ == "__main__":
    main()
