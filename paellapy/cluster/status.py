"""A router's view of its cluster, as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paellapy.cluster.router import Router
from paellapy.cluster.view import EngineView


def cluster_status(router: Router) -> dict[str, Any]:
    """The answer of `GET /v2/cluster`."""
    return {
        "ready": router.ready,
        "missing": router.missing(),
        "models": sorted(router.models),
        "router": {**asdict(router.counts), "in_flight": router.in_flight},
        "engines": [_engine(router, view) for view in router.views.values()],
    }


def _engine(router: Router, view: EngineView) -> dict[str, Any]:
    found = view.outlook
    said: dict[str, Any] = {
        "name": view.name, "url": view.member.url, "up": view.up, "outstanding": view.outstanding, "sent": view.sent,
    }  # fmt: skip
    if found is None:
        return {**said, "why": router.why_away(view.name), "models": {}}
    models = {
        name: {
            "state": each.state,
            "live": each.live,
            "predicted_ms": round(each.predicted_ms, 4),
            "estimate_ms": round(view.estimate_ms(name) or 0.0, 4),
        }
        for name, each in found.models.items()
    }
    if not view.up:
        said["why"] = "draining" if found.draining else router.why_away(view.name)
    return {
        **said, "draining": found.draining, "live": found.live, "held_bytes": found.held_bytes,
        "budget_bytes": found.budget_bytes, "models": models,
    }  # fmt: skip


def status_table(status: dict[str, Any], title: str) -> Any:
    """A rich table with a row for every engine."""
    from rich.table import Table

    table = Table(title=title)
    for column in ("engine", "state", "models", "live", "slowest\nms", "memory", "sent"):
        table.add_column(column)
    for each in status["engines"]:
        ready = [name for name, model in each["models"].items() if model["state"] == "READY"]
        late = max((each["models"][name]["estimate_ms"] for name in ready), default=0.0)
        memory = f"{each.get('held_bytes', 0) / 1e9:.2f}/{each.get('budget_bytes', 0) / 1e9:.0f} GB"
        state = "up" if each["up"] else each.get("why", "away")
        live, sent = str(each.get("live", 0)), str(each["sent"])
        table.add_row(each["name"], state, ", ".join(ready), live, f"{late:.2f}", memory, sent)
    return table
