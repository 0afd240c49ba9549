"""Facts about a running engine: its statistics, the requests that end, and traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.engine.hosting import Hosting
from paellapy.scheduler.engine.stats import core_stats, loaded_stats
from paellapy.scheduler.engine.tap import Tap
from paellapy.scheduler.engine.tracing import trace_engine
from paellapy.scheduler.models.lane_memory import MemoryPlan


class Observed(Hosting):
    """An engine that can be watched."""

    memory: MemoryPlan
    _tap: Tap | None
    _unwatch: Callable[[], None]  # stops the running trace from watching
    _since: float

    def stats(self) -> dict[str, Any]:
        """Counts and latencies so far, for the engine and for every model."""
        return {
            "device": self.device.title,
            "policy": self.policy,
            "tuning": self.tuning.note,
            "uptime_s": self.uptime_s,
            **core_stats(self.state),
            "memory": {"held_bytes": self.memory.held_bytes, **self.memory()},
            "models": {
                each.model.name: loaded_stats(self.state, each)
                for each in self.loaded_rows().values()
                if not each.model.stateful and each.model.name not in self._turns
            },
            "jobs": self.job_stats(),
            "tenants": self.tenants,
        }

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """A time (ns), and per SM up to that time: warp-ns of resident warps, ns with any. None if unknown.

        A virtual GPU knows these totals. On a real GPU only instrumented kernels report them
        (`paellapy.instrument.traces.live.counts`).
        """
        return self._backend.sm_totals()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher(entry)` (tables.COMPLETION) for every request that ends; call the returned function to stop.

        A request of this process is seen before its answer; requests of other processes are seen soon after theirs.
        """
        if self._tap is not None:
            return self._tap.watch(watcher)
        self._front.watchers.append(watcher)
        return lambda: self._front.watchers.remove(watcher)

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was created."""
        return time.monotonic() - self._since

    def trace(self, records_per_sm: int = 1 << 14) -> trace_engine:
        """Context manager: records all requests, segments and blocks that run inside it, on one clock."""
        self._check_open()
        return trace_engine(self, records_per_sm)

    def begin_trace(self, records_per_sm: int, note: Callable[[Any], None]) -> None:
        with self._loading:
            self._backend.begin_trace(records_per_sm, list(self._by_row.values()))
            self._unwatch = self.watch(note)

    def end_trace(self, note: Callable[[Any], None]) -> tuple[TracedBlocks, Callable[[Any], Any]]:
        with self._loading:
            recorded = self._backend.end_trace(list(self._by_row.values()))
            self._front.drain()
            if self._tap is not None:
                self._tap.look()
            self._unwatch()
        return recorded, self._backend.to_trace_ns

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Calls the function between two steps of the core, when it may change tables that the core reads."""
        self._backend.call(function)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, for the requests of this process only, several completions at a time (tables.COMPLETION)."""
        self._front.counters.append(counter)
        return lambda: self._front.counters.remove(counter)
