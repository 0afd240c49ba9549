"""Tables of the page on faults, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import paper_report
from result_files import RESULTS, stored

OUTCOMES = ("right", "refused", "dropped", "wrong", "lost", "500")


def campaigns() -> dict[str, Any]:
    return {"virtual H200": stored("trust_campaign"), "H200": stored("trust_campaign_h200")}


def load() -> str:
    """What became of the checked requests."""
    rows = []
    for name, found in campaigns().items():
        outcomes = found["load"]["outcomes"]
        seconds = "–" if found["seconds"] is None else f"{found['seconds']:.0f}"
        counts = [f"{outcomes.get(each, 0):,}" for each in OUTCOMES]
        rows.append([name, str(len(found["servers"])), seconds, f"{found['load']['requests']:,}", *counts])
    head = ["GPU", "servers", "seconds", "checked requests", "right", "refused, or past a deadline",
            "connection ended", "wrong", "without an answer", "answered with 500"]  # fmt: skip
    return paper_report.table(head, rows)


def recovery() -> str:
    """Every fault, and how long it was felt."""
    found = {name: {each["fault"]: each for each in every["faults"]} for name, every in campaigns().items()}
    rows = []
    for fault, each in found["virtual H200"].items():
        other = found["H200"].get(fault)
        rows.append([each["what"].split(":")[0].rstrip("."), _seconds(each), "–" if other is None else _seconds(other)])
    return paper_report.table(["fault", "virtual H200, s", "H200, s"], rows)


def _seconds(fault: dict[str, Any]) -> str:
    return "not within 30" if fault["recovery_s"] is None else f"{fault['recovery_s']:.1f}"


def calibrations() -> dict[str, Any]:
    return {"A": stored("trust_calibration"), "B": stored("trust_calibration_8_cores")}


def calibrated_on() -> str:
    """Machine and settings of the two runs, and the loads that once were refused too often."""
    found = calibrations()
    files = ("trust_calibration", "trust_calibration_8_cores")
    on = [json.loads((RESULTS / f"{name}.json").read_text())["on"] for name in files]
    facts = {
        "stored as": [f"`{name}.json`" for name in files],
        "processor": [each["cpu"] for each in on],
        "cores": [str(each.get("cores", "not stored")) for each in found.values()],
        "commit": [each["commit"] for each in on],
        "seconds of each load": [f"{_played_s(each):.0f}" for each in found.values()],
        "capacity, requests a second": [f"{each['capacity_per_s']:,.0f}" for each in found.values()],
        "refused requests that would have been late, all loads (aim: 0.8)": [
            f"{each['rightly_refused']:.2f}" for each in found.values()
        ],
        "40 requests for `cnn` at once: refused": [
            str(each["first"]["40 requests for cnn at once, refused"]) for each in found.values()
        ],
        "8 clients of `mlp`, 4,000 requests: refused": [
            str(4000 - each["first"]["8 clients of mlp, 4000 requests"]["outcomes"]["right"]) for each in found.values()
        ],
    }
    return paper_report.table(["run", *found], [[name, *values] for name, values in facts.items()])


def _played_s(found: dict[str, Any]) -> float:
    load, each = next(iter(found["loads"].items()))
    return float(each["requests"] / (float(load) * found["capacity_per_s"]))


def calibration() -> str:
    rows = []
    for run, found in calibrations().items():
        for factor, each in found["loads"].items():
            right = each["rightly_refused"]
            rows.append(
                [
                    run, factor, f"{each['refused']:.3f}", f"{max(0.0, 1 - 1 / float(factor)):.3f}",
                    "–" if right is None else f"{right:.2f}", f"{each['in_time_with_admission']:.3f}",
                    f"{each['in_time_without']:.3f}", f"{each['late_though_let_in']:.3f}",
                ]
            )  # fmt: skip
    head = ["run", "load ÷ capacity", "refused", "excess over capacity", "refused requests late when let in",
            "in time with admission", "in time without", "late though let in"]  # fmt: skip
    return paper_report.table(head, rows)


def late_shares() -> list[float]:
    """Of the requests that were let in, near capacity and above: the part that was late."""
    return [each["late_though_let_in"] for each in _near_capacity()]


def _near_capacity() -> Iterator[dict[str, Any]]:
    for found in calibrations().values():
        yield from (each for factor, each in found["loads"].items() if float(factor) >= 0.8)


def others() -> str:
    malformed, many, soak = stored("trust_malformed"), stored("trust_connections"), stored("trust_soak")
    drift = soak["drift"]
    answered = sum(soak["outcomes"].values())
    rows = [
        ["malformed requests; answered with 500", f"{malformed['requests']:,}; {malformed['of_500']}"],
        ["of them in time on one way only; another status; same status, other words",
         f"{malformed['in_time_on_one_way']}; {malformed['differ_in_status']}; "
         f"{malformed['differ'] - malformed['differ_in_status']}"],
        ["open connections; bytes each", f"{many['connections']:,}; {many['bytes_per_connection']:,}"],
        ["soak: seconds; requests", f"{soak['samples'][-1]['s']:,.0f}; {answered:,}"],
        ["soak: drift of memory, descriptors, p50",
         ", ".join(f"{100 * drift[key]:+.1f} %" for key in ("memory_bytes", "descriptors", "p50_ms"))],
    ]  # fmt: skip
    return paper_report.table(["", ""], rows)


def tables() -> dict[str, str]:
    return {
        "trust-load": load(),
        "trust-recovery": recovery(),
        "trust-calibrated-on": calibrated_on(),
        "trust-calibration": calibration(),
        "trust-others": others(),
    }
