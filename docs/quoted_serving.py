"""Tables of the page about serving, from benchmarks/results."""

from __future__ import annotations

from typing import Any

import paper_report
from result_files import stored

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


def tables() -> dict[str, str]:
    return {"serving-demo": demo()}
