"""Figures of one model for the monitor: its throughput, latencies, batches, and where its weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.manage import weights_state
from paellapy.scheduler.core.state import State

if TYPE_CHECKING:
    from paellapy.scheduler.backends.launches import LoadedModel

RATE_S = 2.0  # period for throughput

# Upper bounds of the latency histogram: eight per decade, from 10 µs to 100 s.
EDGES_MS = tuple(round(0.01 * 10 ** (k / 8), 5) for k in range(57))


class Recent(NamedTuple):
    """Columns of the completions in the recent period."""

    model: Any
    status: Any
    finish_ns: Any
    latency_ms: Any
    batch: Any


def model_facts(
    state: State, row: int, loaded: LoadedModel, recent: Recent, now_ns: int, window_s: float, gpu_share: float
) -> dict[str, Any]:
    """The current figures of one model, as numbers, strings, lists and dicts only."""
    model = loaded.model
    mine = recent.model == row
    done = mine & (recent.status == codes.OK)
    latency_ms = recent.latency_ms[done]
    latency_ms.sort()
    answered = len(latency_ms)
    rate_s = min(RATE_S, window_s)
    lanes = state.lane[loaded.lane_rows]
    running = int(lanes["live"][(lanes["state"] == codes.RUNNING) & (lanes["issued"] > 0)].sum())
    live = max(int(state.model["live"][row]), running)
    expired = int(np.count_nonzero(mine & (recent.status == codes.EXPIRED)))
    judged = answered + expired
    target = model.target_ms
    within = None if target is None or not judged else np.searchsorted(latency_ms, target, "right") / judged
    # Every request of a batch records how many requests ran with it.
    requests = np.bincount(recent.batch[done])
    batches = {size: n / size for size, n in enumerate(requests.tolist()) if n and size}
    return {
        "name": model.name,
        "target_ms": target,
        "alone_ms": round(loaded.profiles[0].whole_ns * 1e-6, 5),
        "per_s": round(int(np.count_nonzero(recent.finish_ns[done] >= now_ns - int(rate_s * 1e9))) / rate_s, 2),
        "completed": int(state.model["completed"][row]),
        "gpu_share": round(gpu_share, 5),
        "waiting": live - running,
        "running": running,
        "recent": answered,
        "expired": expired,
        "within_target": None if within is None else round(float(within), 5),
        "latency_ms": _quantiles(latency_ms),
        "histogram": _histogram(latency_ms),
        "max_batch": model.max_batch,
        "mean_batch": round(answered / sum(batches.values()), 2) if batches else None,
        "batches": {size: round(n, 2) for size, n in batches.items()},
        "weights": _weights(state, row),
    }


def _weights(state: State, row: int) -> dict[str, Any] | None:
    """Where the model's weights are, and how many bytes of them are on the GPU; None where all weights stay there.
    """
    if not state.residency["managed"][0]:
        return None
    w = state.weights[row].copy()
    total = int(w["bytes"])
    if not total:  # the weights of a background job belong to its owner
        return None
    there = min(1.0, int(w["arrived"]) * int(w["chunk_bytes"]) / total) if w["stage"] == codes.COMING else 0.0
    return {
        "state": weights_state(state, row),
        "bytes": int(w["bytes"]),
        "there": 1.0 if w["stage"] == codes.HERE else round(there, 3),
    }


def _quantiles(values: Any) -> dict[str, float] | None:
    """Quantiles of sorted values: the same as `np.quantile`, at a fifth of its cost."""
    if not len(values):
        return None
    found = np.interp([q * (len(values) - 1) for q in (0.5, 0.95, 0.99)], np.arange(len(values)), values)
    return {name: round(value, 4) for name, value in zip(("p50", "p95", "p99"), found.tolist(), strict=True)}


def _histogram(values: Any) -> list[int]:
    """Counts of sorted values per bound of EDGES_MS, and one count for values above the last bound."""
    below = np.searchsorted(values, EDGES_MS, "right")
    found: list[int] = np.diff(below, prepend=0, append=len(values)).tolist()
    return found
