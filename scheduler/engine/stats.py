"""Statistics of an engine: requests by outcome, latencies, batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.core_loop import CoreLoop


def model_stats(state: State, row: int) -> dict[str, Any]:
    """One model's counts over all producers. Latencies are of the latest requests."""
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
        "queued": int(core["queued"] + core["held_back"]),
        "active": int(core["active"]),
        "gpu_ms": float(core["gpu_ns"]) * 1e-6,  # time in which the GPU was busy
        "launches": int(core["launches"]),
        "launch_ms": float(core["launch_ns"]) * 1e-6,  # time that the loop spent in the driver
        "longest_launch_ms": float(core["longest_launch_ns"]) * 1e-6,  # the longest of these launches
        # the longest time until the copier had inputs in their slot
        "longest_copy_ms": float(core["longest_copy_ns"]) * 1e-6,
        "whole_launches": int(core["whole_launches"]),
        "confined_launches": int(core["confined_launches"]),  # launches confined to an SM partition
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
    """Counts of a model in this process's engine, and the instances and memory it holds."""
    return {
        **model_stats(state, loaded.row),
        **live_stats(state, loaded.row),
        "instances": len(loaded.instances),
        "memory_bytes": loaded.reservation.total_bytes,
        "load_s": dict(loaded.load_s),
        "sizes": sizes_state(state, loaded.row),
        "size_errors": {batch: why for batch, why in list(loaded.later.items()) if why},
    }


# The GPU's current occupancy by the core's account, readable from any thread while the core runs.


RESOURCES = ("blocks", "warps", "registers", "shared_bytes", "issue")


@dataclass(frozen=True, slots=True)
class Use:
    """Use of one resource. `issue` is in kernels per second."""

    capacity: float
    resident: float  # of the running segments
    pending: float  # of the segments launched behind them

    @property
    def share(self) -> float:
        return self.resident / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of all resources, and where the jobs are. `fullest` names the limiting resource."""

    blocks: Use
    warps: Use
    registers: Use
    shared_bytes: Use
    issue: Use
    jobs_on_gpu: int
    jobs_active: int
    jobs_waiting: int
    requests: int
    requests_queued: int

    @property
    def share(self) -> float:
        """Use of the fullest resource; above 1 when more is launched than fits."""
        return max(float(getattr(self, name).share) for name in RESOURCES)

    @property
    def fullest(self) -> str:
        return max(RESOURCES, key=lambda name: float(getattr(self, name).share))


def occupancy(state: State) -> GpuUse:
    """The current account."""
    gpu = state.gpu[0]
    uses = {
        what: Use(*(float(gpu[f"{kind}_{what}"]) for kind in ("capacity", "resident", "pending"))) for what in RESOURCES
    }
    return GpuUse(
        **uses,
        jobs_on_gpu=int(state.core["flight"][0]),
        jobs_active=int(state.core["active"][0]),
        jobs_waiting=int(state.core["ready"][0] + state.core["awaiting_admit"][0]),
        requests=int(state.core["live"][0]),
        requests_queued=int(state.core["queued"][0] + state.core["held_back"][0]),
    )


LOOK_S = 0.01  # completions of other processes are seen at most this late
_SLACK = 256  # entries of the log that may be overwritten while it is read


class CompletionLog:
    """Passes completions (tables.COMPLETION) to watchers.

    Where other processes submit too (`shared`), the core writes all completions into a log while anybody watches, and a
    thread reads it.
    """

    def __init__(self, core: CoreLoop, shared: bool) -> None:
        self._core, self._state, self._shared = core, core.state, shared
        self._watchers: list[Callable[[Any], None]] = []  # of the shared log
        self._seen = 0
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Adds a watcher; call the returned function to remove it."""
        if not self._shared:
            return self._core.ring.watch(watcher)
        with self._lock:
            if not self._watchers:
                self._seen = int(self._state.core["log_tail"][0])
                self._state.core["logs_completions"][0] = 1
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="paellapy-log", daemon=True)
                self._thread.start()
            self._watchers.append(watcher)
        return lambda: self._leave(watcher)

    def _leave(self, watcher: Callable[[Any], None]) -> None:
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._state.core["logs_completions"][0] = 0
                self._stop.set()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_S):
            self._look()

    def flush(self) -> None:
        """Passes all completions so far to the watchers."""
        self._core.ring.drain()
        if self._shared:
            self._look()

    def _look(self) -> None:
        with self._lock:
            ring = self._state.completion_log
            tail = int(self._state.core["log_tail"][0])
            first = max(self._seen, tail - len(ring) + _SLACK)
            self._seen = tail
            for entry in ring[np.arange(first, tail) & (len(ring) - 1)]:
                for watcher in self._watchers:
                    watcher(entry)
