"""Tables of the page on faults, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def servers() -> str:
    """Every server that had faults or a load, in the order of the runs."""
    rows = []
    for name, found in campaigns().items():
        for each in found["servers"]:
            cells = [each[key] for key in ("requests", "faults", "seconds")]
            told = ["–" if cell is None else f"{cell:,.0f}" for cell in cells]
            machine = [each["commit"], each["date"], each["cpu"], str(each["cores"]), str(each["clients"])]
            rows.append([name, *machine, *told])
    head = ["GPU", "commit", "date", "processor", "cores", "clients", "checked requests", "kinds of faults", "seconds"]
    return paper_report.table(head, rows)


def recovery() -> str:
    """Every fault, and how long it was felt."""
    found = {name: {each["fault"]: each for each in every["faults"]} for name, every in campaigns().items()}
    rows = []
    for fault, each in found["virtual H200"].items():
        other = found["H200"].get(fault)
        rows.append([each["what"].split(":")[0].rstrip("."), _seconds(each), "–" if other is None else _seconds(other)])
    return paper_report.table(["fault", "virtual H200, s", "H200, s"], rows)


def longest_earlier_s() -> float:
    """The longest recovery of an earlier version, of faults that were measured again since."""
    return max(float(each["recovery_s"]) for found in campaigns().values() for each in found.get("earlier", ()))


def _seconds(fault: dict[str, Any]) -> str:
    return "not within 30" if fault["recovery_s"] is None else f"{fault['recovery_s']:.1f}"


def _machines() -> dict[str, dict[str, Any]]:
    """What calibration has found on a quiet machine and on a busy one, which a file of an earlier version lacks."""
    found = stored("trust_calibration")
    return {"quiet": found, "busy": found["busy"]} if "busy" in found else {"quiet": found}


def calibrated_on() -> str:
    """Machine and settings of the run, and the loads that once were refused too often."""
    found, machines = stored("trust_calibration"), _machines()
    on = json.loads((RESULTS / "trust_calibration.json").read_text())["on"]

    def cells(of: Callable[[dict[str, Any]], str]) -> list[str]:
        return [of(each) for each in machines.values()]

    def refused(each: dict[str, Any]) -> str:
        return str(4000 - each["first"]["8 clients of mlp, 4000 requests"]["outcomes"]["right"])

    rows = [
        ["processor, cores", *cells(lambda _: f"{on['cpu']}, {found['cores']}")],
        ["commit", *cells(lambda _: on["commit"])],
        ["programs that keep a core busy each", *cells(lambda each: str(each.get("programs", 0)))],
        ["seconds of each load", *cells(lambda each: f"{_played_s(each):.0f}")],
        ["capacity, requests a second", *cells(lambda each: f"{each['capacity_per_s']:,.0f}")],
        ["refused requests that would have been late, all loads (aim: 0.8)", *cells(_share)],
        ["40 requests for `cnn` at once: refused",
         *cells(lambda each: str(each["first"]["40 requests for cnn at once, refused"]))],
        ["8 clients of `mlp`, 4,000 requests: refused", *cells(refused)],
    ]  # fmt: skip
    return paper_report.table(["", *machines], rows)


def _share(found: dict[str, Any]) -> str:
    """Of the refused requests: the part that would have been late."""
    return "–" if found["rightly_refused"] is None else f"{found['rightly_refused']:.2f}"


def _played_s(found: dict[str, Any]) -> float:
    load, each = next(iter(found["loads"].items()))
    return float(each["requests"] / (float(load) * found["capacity_per_s"]))


def calibration() -> str:
    rows = []
    for machine, found in _machines().items():
        for factor, each in found["loads"].items():
            shares = [each[key] for key in ("in_time_with_admission", "in_time_without", "late_though_let_in")]
            told = ["–" if share is None else f"{share:.3f}" for share in shares]
            rows.append([machine, factor, f"{each['refused']:.3f}", _share(each), *told])
    head = ["machine", "load ÷ capacity", "refused", "refused requests late when let in", "in time with admission",
            "in time without", "late though let in"]  # fmt: skip
    return paper_report.table(head, rows)


def late_shares() -> list[float]:
    """Of the requests that were let in, near capacity and above: the part that was late."""
    loads = stored("trust_calibration")["loads"].items()
    return [each["late_though_let_in"] for factor, each in loads if float(factor) >= 0.8]


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
        "trust-servers": servers(),
        "trust-recovery": recovery(),
        "trust-calibrated-on": calibrated_on(),
        "trust-calibration": calibration(),
        "trust-others": others(),
    }
