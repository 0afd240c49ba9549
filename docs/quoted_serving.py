"""Tables of the page about serving, from benchmarks/results."""

from __future__ import annotations

import json
from typing import Any

import paper_report
from result_files import RESULTS, stored

_SERVERS = {"engine": "engine, no HTTP", "one": "one process", "1": "1 worker"}


def _us(of: dict[str, float]) -> str:
    return f"{1e3 * of['p50']:.0f} / {1e3 * of['p99']:.0f}"


def demo() -> str:
    """The demo models served on a GPU: one client, many clients, and many clients of an earlier version."""
    found: dict[str, Any] = stored("serving_demo")["found"]
    before = stored("serving_demo")["before"]["found"]
    rows = []
    for server, measured in found.items():
        many, earlier = measured["many"], before.get(server)
        rows.append([
            _SERVERS.get(server, f"{server} workers"),
            *(_us(measured[model]) for model in ("mlp", "cnn", "transformer")),
            f"{many['per_s']:,.0f}", f"{many['p50']:.2f} / {many['p99']:.2f}",
            f"{earlier['many']['per_s']:,.0f}" if earlier else "–",
        ])  # fmt: skip
    head = ["", "`mlp`, µs", "`cnn`, µs", "`transformer`, µs", "requests a second", "ms", "requests a second before"]
    return paper_report.table(head, rows)


def per_s(server: str) -> float:
    return float(stored("serving_demo")["found"][server]["many"]["per_s"])


def http_us() -> list[float]:
    """The time that HTTP adds to the engine's own for one client, in the median, for each model."""
    found = stored("serving_demo")["found"]
    return [1e3 * (found["one"][m]["p50"] - found["engine"][m]["p50"]) for m in ("mlp", "cnn", "transformer")]


def against() -> str:
    """Servers of this version beside those of an earlier one: ratios of requests a second and of CPU time."""
    found = stored("serving_floor_against")["now ÷ before"]
    kinds = list(next(iter(found.values())))

    def cell(ratios: dict[str, Any]) -> str:
        rounds = ratios["rounds_per_s"]
        return f"{ratios['per_s']:.2f} ({min(rounds):.2f}–{max(rounds):.2f}) / {ratios['cpu']:.2f}"

    rows = [[label, *(cell(by_kind[kind]) for kind in kinds)] for label, by_kind in found.items()]
    return paper_report.table(["", *(_SERVERS.get(kind, f"{kind} workers") for kind in kinds)], rows)


def against_on() -> str:
    found = stored("serving_floor_against")
    on = json.loads((RESULTS / "serving_floor_against.json").read_text())["on"]
    rows = [
        ["processor, cores", f"{on['cpu']}, {found['cores']}"],
        ["commits: now, before", f"{on['commit']}, {found['before']}"],
        ["rounds, seconds of each load", f"{found['rounds']}, {found['seconds']:.1f}"],
    ]
    return paper_report.table(["", ""], rows)


def tables() -> dict[str, str]:
    return {"serving-demo": demo(), "serving-against": against(), "serving-against-on": against_on()}
