"""The slowest requests of the last minute, with the times at which they waited, ran and finished."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.tracing import segment_times

KEPT = 8
PER_MODEL = 4  # a limit per model, so that one slow model does not hide the others
REMEMBERED_NS = 60 * 1_000_000_000
_CROWDED = 64  # number of candidates after which the list is pruned


class SlowRequest(NamedTuple):
    """A slow request. `lateness` is its latency ÷ the expected maximum; times are ns on the host's monotonic clock."""

    lateness: float
    entry: Any  # tables.COMPLETION
    segments: NDArray[np.int64]  # start and end of each segment
    whole: bool

    @property
    def batch(self) -> tuple[int, int]:
        """A key that is equal for requests that ran together."""
        lane, started = int(self.entry["lane"]), int(self.entry["started_ns"])
        return (lane, started) if self.entry["status"] == codes.OK else (codes.NONE, int(self.entry["serial"]))

    def describe(self, now_ns: int, name: str, target_ms: float | None) -> dict[str, Any]:
        """The request as JSON, with times in milliseconds since its arrival."""
        e = self.entry
        arrival, started, deadline = int(e["arrival_ns"]), int(e["started_ns"]), int(e["deadline_ns"])

        def ms(at_ns: int) -> float:
            # A step of the core has one timestamp, so a request that arrives during the step may seem to be launched
            # before its arrival.
            return round(max(0, at_ns - arrival) * 1e-6, 4)

        return {
            "request": int(e["serial"]),
            "model": name,
            "status": codes.STATUS[int(e["status"])],
            "batch": int(e["batch"]),
            "age_s": round((now_ns - int(e["finish_ns"])) * 1e-9, 2),
            "latency_ms": ms(int(e["finish_ns"])),
            "target_ms": target_ms,
            "lateness": round(self.lateness, 3),
            "deadline_ms": None if deadline >= codes.NEVER else ms(deadline),
            "started_ms": None if started >= codes.NEVER else ms(started),
            "segments_ms": [[ms(int(start)), ms(int(end))] for start, end in self.segments],
            "whole": self.whole,
        }


class SlowRequests:
    """Collects slow requests. `note` is called for every completion, one at a time, before its lane is reused."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._limit_ns = [math.inf] * len(state.model)
        self._found: list[SlowRequest] = []
        self._floor = [0.0] * len(state.model)

    def expect(self, model: int, limit_ns: float) -> None:
        """Sets the expected maximum latency of a model's requests that have no deadline of their own."""
        self._limit_ns[model] = limit_ns

    def note(self, entry: Any, model: int, arrival_ns: int, deadline_ns: int, finish_ns: int) -> None:
        limit = self._limit_ns[model]
        if deadline_ns < codes.NEVER:
            limit = min(limit, max(1, deadline_ns - arrival_ns))
        lateness = (finish_ns - arrival_ns) / limit
        if lateness <= self._floor[model]:
            return
        segments, whole = self._segments(entry)
        self._found = [*self._found, SlowRequest(lateness, entry.copy(), segments, whole)]
        if len(self._found) > _CROWDED:
            self._prune(finish_ns)

    def _segments(self, entry: Any) -> tuple[NDArray[np.int64], bool]:
        """When each segment of the request's lane ran."""
        lane = int(entry["lane"])
        if entry["status"] != codes.OK or lane < 0:
            return np.zeros((0, 2), np.int64), False
        times, whole = segment_times(self._state, lane)
        if not len(times) or times[0, 0] != entry["started_ns"]:  # the lane already runs another batch
            return np.zeros((0, 2), np.int64), False
        return times, whole

    def _prune(self, now_ns: int) -> None:
        recent = [each for each in self._found if now_ns - int(each.entry["finish_ns"]) < REMEMBERED_NS]
        recent.sort(key=lambda each: -each.lateness)
        # Keep one request per batch: the others ran with it and differ only in their arrival times.
        slowest = {each.batch: each for each in reversed(recent)}
        by_model: dict[int, list[SlowRequest]] = {}
        for each in sorted(slowest.values(), key=lambda each: -each.lateness):
            by_model.setdefault(int(each.entry["model"]), []).append(each)
        self._floor = [0.0] * len(self._floor)
        for model, found in by_model.items():
            if len(found) >= PER_MODEL:
                self._floor[model] = found[PER_MODEL - 1].lateness
        self._found = [each for found in by_model.values() for each in found[:PER_MODEL]]

    def slowest(self, now_ns: int) -> list[SlowRequest]:
        self._prune(now_ns)
        return sorted(self._found, key=lambda each: -each.lateness)[:KEPT]
