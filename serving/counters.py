"""What the front end counts of every model: from the engine's completions, and from its own answers."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import Any

from scheduler import state as st
from serving.registry import Registry

# Seconds, from 50 µs: a small model takes less than a millisecond, which the usual buckets cannot tell apart.
TIME_BUCKETS = (
    50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3,
    10e-3, 15e-3, 20e-3, 30e-3, 50e-3, 75e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """Counts by upper bound. A plain one: recording is on every request's way, reading is for the scrape."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them.

        >>> h = Histogram((1, 2)); h.observe(1.5); h.buckets()
        [('1.0', 0), ('2.0', 1), ('+Inf', 1)]
        """
        found: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            found.append((str(bound), seen))
        return found


class ModelCounters:
    """One model, since the server started."""

    def __init__(self) -> None:
        # Items: what the engine ran. A request has one or more.
        self.items = self.batches = 0
        self.queue_ns = self.compute_ns = 0
        self.by_batch: dict[int, list[int]] = {}  # size of the batch: batches, their time
        self.target_misses = 0
        self._latest: dict[int, int] = {}  # lane: start of its latest batch
        # Requests: what clients sent.
        self.answered = self.failed = self.left = 0
        self.answered_ns = self.failed_ns = 0
        self.last_ms = 0
        self.refused: Counter[str] = Counter()
        self.request_s, self.queue_s, self.compute_s = (Histogram(TIME_BUCKETS) for _ in range(3))
        self.batch_size = Histogram(BATCH_BUCKETS)

    def note_item(self, entry: Any, target_ns: float | None) -> None:
        """The engine has completed an item."""
        arrival, started, finish = int(entry["arrival_ns"]), int(entry["started_ns"]), int(entry["finish_ns"])
        queue_ns, compute_ns = max(0, started - arrival), finish - started
        self.items += 1
        self.queue_ns += queue_ns
        self.compute_ns += compute_ns
        self.queue_s.observe(queue_ns * 1e-9)
        self.compute_s.observe(compute_ns * 1e-9)
        if target_ns is not None and finish - arrival > target_ns:
            self.target_misses += 1
        lane = int(entry["lane"])
        if self._latest.get(lane) != started:  # the first of its batch
            self._latest[lane] = started
            batch = int(entry["batch"])
            self.batches += 1
            self.batch_size.observe(batch)
            sums = self.by_batch.setdefault(batch, [0, 0])
            sums[0] += 1
            sums[1] += compute_ns

    def note_answer(self, elapsed_ns: int) -> None:
        self.answered += 1
        self.answered_ns += elapsed_ns
        self.request_s.observe(elapsed_ns * 1e-9)
        self.last_ms = time.time_ns() // 1_000_000

    def note_failure(self, elapsed_ns: int, reason: str | None) -> None:
        """`reason` is that of a refusal; None: the client's own mistake, or ours."""
        self.failed += 1
        self.failed_ns += elapsed_ns
        if reason is not None:
            self.refused[reason] += 1


class Counters:
    """Counters of all models by name; they outlive an unload."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.models: dict[str, ModelCounters] = {}
        self.close = registry.engine.watch(self._note)

    def of(self, name: str) -> ModelCounters:
        found = self.models.get(name)
        if found is None:
            found = self.models[name] = ModelCounters()
        return found

    def _note(self, entry: Any) -> None:
        """Runs where completions are read: usually in the loop's thread."""
        if entry["request"] < 0 or entry["status"] != st.OK:
            return
        model = self._registry.by_row.get(int(entry["model"]))
        if model is not None:
            target_ms = model.target_ms
            self.of(model.name).note_item(entry, None if target_ms is None else target_ms * 1e6)
