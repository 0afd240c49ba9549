"""What an engine counts: requests by outcome, latencies, batches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler import state as st

if TYPE_CHECKING:
    from scheduler.engine import Engine

_RECENT = 4096  # latencies kept per model


class ModelStats:
    """One model's counts. Latencies are those of the latest requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcomes = np.zeros(len(st.STATUS), np.int64)
        self.batched = 0  # sum over completed requests of their batch's size
        self._latency_ns = np.zeros(_RECENT, np.int64)
        self._wait_ns = np.zeros(_RECENT, np.int64)

    def note(self, entry: Any) -> None:
        status = int(entry["status"])
        if status == st.OK:
            at = int(self.outcomes[st.OK]) % _RECENT
            arrival = int(entry["arrival_ns"])
            self._latency_ns[at] = int(entry["finish_ns"]) - arrival
            self._wait_ns[at] = int(entry["started_ns"]) - arrival
            self.batched += int(entry["batch"])
        self.outcomes[status] += 1

    def snapshot(self) -> dict[str, Any]:
        done = int(self.outcomes[st.OK])
        found: dict[str, Any] = {
            "completed": done,
            "cancelled": int(self.outcomes[st.CANCELLED]),
            "expired": int(self.outcomes[st.EXPIRED]),
            "refused": int(self.outcomes[[st.QUEUE_FULL, st.DRAINING, st.NO_MODEL]].sum()),
            "failed": int(self.outcomes[st.FAILED]),
            "mean_batch": self.batched / done if done else 0.0,
        }
        recent = min(done, _RECENT)
        for name, values in (("latency_ms", self._latency_ns), ("wait_ms", self._wait_ns)):
            quantiles = np.quantile(values[:recent], (0.5, 0.95, 0.99)) * 1e-6 if recent else (0.0, 0.0, 0.0)
            found[name] = dict(zip(("p50", "p95", "p99"), map(float, quantiles), strict=True))
        return found


class Stats:
    """Counts of all models, by their row in the core. `note` runs where completions are read."""

    def __init__(self) -> None:
        self._models: dict[int, ModelStats] = {}
        self._lock = threading.Lock()
        self._since = time.monotonic()

    def open(self, row: int, name: str) -> None:
        """A row may have belonged to another model before: it starts anew."""
        with self._lock:
            self._models[row] = ModelStats(name)

    def note(self, entry: Any) -> None:
        if entry["request"] >= 0 and (found := self._models.get(int(entry["model"]))):
            found.note(entry)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._since

    def snapshot(self, engine: Engine) -> dict[str, Any]:
        g = engine.state.g
        with self._lock:
            rows = list(self._models.items())
        loaded = engine.loaded_rows()
        return {
            "device": engine.device.title,
            "policy": engine.policy,
            "uptime_s": self.uptime_s,
            "live": int(g[st.LIVE]),
            "queued": int(g[st.QUEUED_N]),
            "active": int(g[st.ACTIVE_N]),
            "launches": int(g[st.LAUNCHES]),
            "whole_launches": int(g[st.WHOLE_LAUNCHES]),
            "segments": int(g[st.SEGMENTS_DONE]),
            "decisions": int(g[st.DECISIONS]),
            "preemptions": int(g[st.PREEMPTIONS]),
            "bad_ranks": int(g[st.BAD_RANKS]),
            "memory": {
                "budget_bytes": engine.memory.budget_bytes,
                "held_bytes": engine.memory.held_bytes,
            },
            "models": {
                each.name: {
                    **each.snapshot(),
                    "lanes": len(loaded[row].lanes),
                    "memory_bytes": loaded[row].reservation.total_bytes,
                    "gpu_ms": float(engine.state.model["used_ns"][row]) * 1e-6,
                    "live": int(engine.state.model["live"][row]),
                }
                for row, each in rows
                if row in loaded
            },
        }
