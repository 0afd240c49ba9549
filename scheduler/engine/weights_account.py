"""The account of weights that come and go: their places, hits and misses, and the moves so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.manage import hit_rate, weights_state
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.model import Model


def weights_account(state: State, models: Mapping[int, Model], store: HostStore) -> dict[str, Any]:
    """The core's and the store's figures, in total and for each model; `models` are by row."""
    r, w, starts = state.residency[0], state.weights, state.segment["chunks"][:, 0, 0]
    found = {}
    for row, model in models.items():
        one = w[row]
        found[model.name] = {
            "state": weights_state(state, row),
            "resident": model.resident,
            "stored": store.where(model.name),
            "weights_on_gpu_bytes": int(one["bytes"]) if one["stage"] in (codes.COMING, codes.HERE) else 0,
            "starts_with_bytes": min(int(one["bytes"]), int(starts[row]) * int(one["chunk_bytes"])),
            "hits": int(one["hits"]),
            "misses": int(one["misses"]),
            "brought": int(one["brought"]),
            "evicted": int(one["evicted"]),
            "reload_s": float(one["reload_ns"]) * 1e-9,
        }
    return {
        "host_budget_bytes": store.budget_bytes,
        "host_bytes": store.held_bytes,
        "file_bytes": store.file_bytes,
        "promoted": store.promoted,
        "promoted_bytes": store.promoted_bytes,
        "displaced": store.displaced,
        "hit_rate": hit_rate(state),
        "brought": int(r["brought"]),
        "brought_bytes": int(r["brought_bytes"]),
        "evicted": int(r["evicted"]),
        "evicted_bytes": int(r["evicted_bytes"]),
        "failed": int(r["failed"]),
        "reload_s": float(r["reload_ns"]) * 1e-9,
        "models": found,
    }
