"""Statistics of an engine: requests by outcome, latencies, batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State


def model_stats(state: State, row: int) -> dict[str, Any]:
    """One model's counts over all front ends. Latencies are of the latest requests."""
    outcomes = state.outcome[row]
    done = int(outcomes[codes.OK])
    found: dict[str, Any] = {
        "completed": done,
        "cancelled": int(outcomes[codes.CANCELLED]),
        "expired": int(outcomes[codes.EXPIRED]),
        "refused": int(outcomes[[codes.QUEUE_FULL, codes.DRAINING, codes.NO_MODEL]].sum()),
        "failed": int(outcomes[[codes.FAILED, codes.FAULTED, codes.SUSPECTED]].sum()),
        "mean_batch": int(outcomes[-1]) / done if done else 0.0,
    }
    recent = state.recent_ns[row, : min(done, codes.RECENT)]
    for k, name in enumerate(("latency_ms", "wait_ms")):
        quantiles = np.quantile(recent[:, k], (0.5, 0.95, 0.99)) * 1e-6 if done else (0.0, 0.0, 0.0)
        found[name] = dict(zip(("p50", "p95", "p99"), map(float, quantiles), strict=True))
    return found


def core_stats(state: State) -> dict[str, Any]:
    """Counts of the core itself."""
    core = state.core[0]
    return {
        "live": int(core["live"]),
        "queued": int(core["queued"] + core["kept_out"] + state.client["aside"].sum()),
        "active": int(core["active"]),
        "gpu_ms": float(core["gpu_ns"]) * 1e-6,  # time in which the GPU was busy
        "launches": int(core["launches"]),
        "launch_ms": float(core["launch_ns"]) * 1e-6,  # time that the loop spent in the driver
        "longest_launch_ms": float(core["longest_launch_ns"]) * 1e-6,  # the longest of these launches
        # the longest time until the copier had inputs in their slot
        "longest_copy_ms": float(core["longest_copy_ns"]) * 1e-6,
        "whole_launches": int(core["whole_launches"]),
        "confined_launches": int(core["confined_launches"]),  # launches confined to a window of SMs
        "segments": int(core["segments_done"]),
        "decisions": int(core["decisions"]),
        "preemptions": int(core["preemptions"]),
        "bad_ranks": int(core["bad_ranks"]),
    }


def live_stats(state: State, row: int) -> dict[str, Any]:
    """`gpu_ms`: the model's part of the GPU's busy time; `alone_ms`: the time its work would take alone."""
    model = state.model[row]
    return {
        "gpu_ms": float(model["gpu_ns"]) * 1e-6, "alone_ms": float(model["used_ns"]) * 1e-6, "live": int(model["live"])
    }  # fmt: skip


def sizes_state(state: State, row: int) -> dict[str, list[int]]:
    """Batch sizes of a model: captured, to be captured later, and failed."""
    sizes = state.size[row, : int(state.model["n_sizes"][row])]
    there, failed = sizes["segments"] > 0, sizes["capture"] == codes.GIVEN_UP
    kinds = {"captured": there, "later": ~there & ~failed, "failed": ~there & failed}
    return {kind: sizes["batch"][which].tolist() for kind, which in kinds.items()}


def loaded_stats(state: State, loaded: LoadedModel) -> dict[str, Any]:
    """Counts of a model in this process's engine, and the lanes and memory it holds."""
    return {
        **model_stats(state, loaded.row),
        **live_stats(state, loaded.row),
        "lanes": len(loaded.lanes),
        "memory_bytes": loaded.reservation.total_bytes,
        "load_s": dict(loaded.load_s),
        "sizes": sizes_state(state, loaded.row),
        "size_errors": {batch: why for batch, why in list(loaded.later.items()) if why},
    }
