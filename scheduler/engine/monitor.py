"""Monitors a running engine: `snapshot()` has all data of the dashboard and the live widget, as plain JSON.

    monitor = Monitor(engine)
    with monitor:
        ...
        monitor.snapshot()["models"][0]["latency_ms"]["p99"]

Between `start` and `stop` the monitor sees every completion; otherwise it costs nothing.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Device
from paellapy.instrument.env import versions
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.traces.session import Counts, counts
from paellapy.scheduler.core import codes, tables
from paellapy.scheduler.core.residency import weights_state
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.tenants import tenant_numbers, tenant_stats
from paellapy.scheduler.engine.stats import RESOURCES
from paellapy.scheduler.engine.trace import segment_times
from paellapy.scheduler.policies.policy import Policy, PolicyError, shipped

if TYPE_CHECKING:
    from paellapy.scheduler.backends.base import LoadedModel
    from paellapy.scheduler.engine.engine import Engine


# The GPU time that models and tenants used in the last seconds, by the core's account.


SPAN_NS = 2_000_000_000


class GpuTimes:
    """Reads the core's counts with every snapshot; shares cover about the last two seconds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._read: deque[tuple[int, float, tuple[Table, Table]]] = deque()

    def look(self, now_ns: int) -> None:
        s = self._state
        had = s.model["gpu_ns"].copy(), s.client["gpu_ns"].copy()
        self._read.append((now_ns, float(s.core["gpu_ns"][0]), had))
        while len(self._read) > 2 and self._read[1][0] <= now_ns - SPAN_NS:
            self._read.popleft()

    @property
    def busy(self) -> float:
        """The fraction of time in which the GPU was busy."""
        (since, before, _), (now, after, _) = self._read[0], self._read[-1]
        return min((after - before) / max(now - since, 1), 1.0)

    def of_model(self, row: int) -> float:
        return self._share(0, row)

    def of_tenant(self, number: int) -> float:
        return self._share(1, number)

    def _share(self, whose: int, row: int) -> float:
        first, last = self._read[0], self._read[-1]
        had = last[2][whose][row] - first[2][whose][row]
        # A model that was loaded again counts from zero.
        return float(np.clip(had / max(last[0] - first[0], 1), 0.0, 1.0))


# Figures of one model for the monitor: its throughput, latencies, batches, and where its weights are.


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
    instances = state.instance[loaded.instance_rows]
    running = int(instances["live"][(instances["state"] == codes.RUNNING) & (instances["issued"] > 0)].sum())
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
    """Where the model's weights are, and how many bytes of them are on the GPU; None where all weights stay there."""
    if not state.residency["managed"][0]:
        return None
    w = state.weights[row].copy()
    total = int(w["bytes"])
    if not total:  # the weights of a background job belong to its owner
        return None
    there = min(1.0, int(w["arrived"]) * int(w["chunk_bytes"]) / total) if w["location"] == codes.LOADING else 0.0
    return {
        "state": weights_state(state, row),
        "bytes": int(w["bytes"]),
        "there": 1.0 if w["location"] == codes.RESIDENT else round(there, 3),
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


# The slowest requests of the last minute, with the times at which they waited, ran and finished.


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
        instance, started = int(self.entry["instance"]), int(self.entry["started_ns"])
        return (instance, started) if self.entry["status"] == codes.OK else (codes.NONE, int(self.entry["serial"]))

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
    """Collects slow requests. `note` is called for every completion, one at a time, before its instance is reused."""

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
        """When each segment of the request's instance ran."""
        instance = int(entry["instance"])
        if entry["status"] != codes.OK or instance < 0:
            return np.zeros((0, 2), np.int64), False
        times, whole = segment_times(self._state, instance)
        if not len(times) or times[0, 0] != entry["started_ns"]:  # the instance already runs another batch
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


# Samples the occupancy of each SM on a GPU that does not report it exactly, by reading counters many times a second.
#
# Kernels take microseconds, so one sample shows only a moment. A sample that is taken while this process is busy shows
# a GPU that the process has not fed for a while.


_PERIOD_S = 0.0097  # a period that is in step with nothing else; one sample takes about 50 µs


class SmSampler:
    """A thread that samples periodically. `take` returns the mean of the samples since the last call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._n = 0
        self._occupancy: Any = 0.0
        self._busy: Any = 0.0
        self._thread = threading.Thread(target=self._run, name="paellapy-sms", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_PERIOD_S):
            try:
                seen = counts(self._device)
            except PaellaError:  # the GPU is gone; the code that uses it reports the error
                return
            self.add(seen)

    def add(self, seen: Counts) -> None:
        with self._lock:
            self._n += 1
            self._occupancy = self._occupancy + seen.occupancy
            self._busy = self._busy + (seen.resident_blocks > 0)

    def take(self) -> tuple[Any, Any] | None:
        """For each SM, its occupancy and the fraction of time with any block; None without a new sample."""
        with self._lock:
            n, occupancy, busy = self._n, self._occupancy, self._busy
            self._n, self._occupancy, self._busy = 0, 0.0, 0.0
        return (np.asarray(occupancy) / n, np.asarray(busy) / n) if n else None

    def close(self) -> None:
        self._end.set()
        self._thread.join()


RECENT_S = 10.0  # period for latencies and batch sizes
_RING = 1 << 14  # completions kept
_SLACK = 256  # entries of the ring that may be overwritten while it is read
# a request without target or deadline counts as late after this multiple of its time alone, as in `edf`
ALONE_TIMES = 4.0

_REQUEST, _STATUS, _MODEL, _ARRIVAL, _DEADLINE, _FINISH = map(
    (tables.COMPLETION.names or ()).index, ("request", "status", "model", "arrival_ns", "deadline_ns", "finish_ns")
)


class Monitor:
    """Observes one engine for one kind of viewer. `snapshot` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ring = np.zeros(_RING, tables.COMPLETION)
        self._seen = self._first = 0  # number of completions so far, and the first of them in the recent period
        self._since_ns = 0
        self._slow = SlowRequests(engine.state)
        self._gpu_times = GpuTimes(engine.state)
        self._own: dict[str, Policy] = {}  # policies from outside the package, by name
        self._about = _descriptions()
        self._lock = threading.Lock()
        self._unwatch: Any = None
        self._last_use: tuple[float, Any, Any] | None = None
        self._counted = False
        self._sampler: SmSampler | None = None

    def start(self) -> None:
        with self._lock:
            if self._unwatch is None:
                self._seen, self._first, self._since_ns = 0, 0, time.monotonic_ns()
                self._last_use = self.engine.sm_totals()
                if self._last_use is None:
                    self._sampler = SmSampler(self.engine.device)
                self._expect()
                self._unwatch = self.engine.watch(self._note)

    def stop(self) -> None:
        with self._lock:
            if self._unwatch is not None:
                self._unwatch()
                self._unwatch = None
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_policy(self, name: str) -> None:
        """Sets a policy by name: one of the package's, or one that this engine has used."""
        self._remember()
        if name not in self._choices():
            raise PolicyError(f"no policy named {name!r}: choose one of {', '.join(self._choices())}")
        self.engine.set_policy(self._own.get(name, name))

    def _note(self, entry: Any) -> None:
        # Runs for every request: one conversion to plain numbers is cheaper than three reads of the record.
        values = entry.item()
        if values[_REQUEST] < 0:
            return
        self._ring[self._seen % _RING] = entry
        self._seen += 1
        if values[_STATUS] == codes.OK or values[_STATUS] == codes.EXPIRED:
            self._slow.note(entry, values[_MODEL], values[_ARRIVAL], values[_DEADLINE], values[_FINISH])

    def _expect(self) -> None:
        for row, loaded in self.engine.loaded_rows().items():
            self._slow.expect(row, _limit_ns(loaded))

    # -- the snapshot

    def snapshot(self) -> dict[str, Any]:
        """The engine's current state and its last seconds, as numbers, strings, lists and dicts only."""
        with self._lock:
            return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        engine = self.engine
        now_ns = time.monotonic_ns()
        loaded = engine.loaded_rows()
        self._expect()
        self._gpu_times.look(now_ns)
        recent, window_s = self._recent(now_ns)
        failure = engine.failure
        held = engine.occupancy()
        facts, busy = partial(model_facts, engine.state), self._gpu_times.of_model
        models = [facts(row, loaded[row], recent, now_ns, window_s, busy(row)) for row in sorted(loaded)]
        of_row = {row: (each.model.name, each.model.target_ms) for row, each in loaded.items()}
        slow = [each for each in self._slow.slowest(now_ns) if int(each.entry["model"]) in of_row]
        return {
            "time_s": round(time.time(), 3),
            "version": versions()["paellapy"],
            "device": engine.device.title,
            "virtual": engine.device.name.startswith("virtual"),
            "state": "failed" if failure is not None else "closed" if engine.closed else "running",
            "failure": None if failure is None else engine.failure_text,
            "uptime_s": round(engine.uptime_s, 1),
            "window_s": round(window_s, 2),
            "policy": self._policy(),
            "sms": self._sms(now_ns),
            "resources": [
                {"name": what, **{k: round(float(getattr(getattr(held, what), k)), 1) for k in _USE}}
                for what in RESOURCES
            ],
            "queue": {
                "requests": held.requests,
                "unplaced": held.requests_queued,
                "running": sum(each["running"] for each in models),
                "jobs_on_gpu": held.jobs_on_gpu,
                "jobs_active": held.jobs_active,
                "jobs_waiting": held.jobs_waiting,
                "max_active": int(engine.state.core["max_active"][0]),
            },
            "per_s": round(sum(each["per_s"] for each in models), 2),
            "memory": {"held_bytes": engine.memory.held_bytes, "budget_bytes": engine.memory.budget_bytes},
            "edges_ms": EDGES_MS,
            "models": models,
            "language_models": [{"name": name, **about} for name, about in engine.text_stats().items()],
            "jobs": [{"name": name, **facts} for name, facts in engine.job_stats().items()],
            "gpu_busy": round(self._gpu_times.busy, 5),
            "tenants": [
                {"name": name, **tenant_stats(engine.state, k), "gpu_share": round(self._gpu_times.of_tenant(k), 5)}
                for name, k in tenant_numbers(engine.state).items()
            ],
            "slow": [each.describe(now_ns, *of_row[int(each.entry["model"])]) for each in slow],
        }

    def _recent(self, now_ns: int) -> tuple[Recent, float]:
        """Completions of the recent period, and its length."""
        seen = self._seen
        lost = seen - _RING + _SLACK > self._first
        first = self._first = max(self._first, seen - _RING + _SLACK)
        rows = self._ring[np.arange(first, seen) % _RING]
        window_s = min(RECENT_S, max(1e-3, (now_ns - self._since_ns) * 1e-9))
        if lost and len(rows):  # the ring has overflowed: the period shrinks to the entries that remain
            window_s = min(window_s, max(1e-3, (now_ns - int(rows["finish_ns"].min())) * 1e-9))
        finish = rows["finish_ns"]
        inside = finish >= now_ns - int(window_s * 1e9)
        self._first += int(inside.argmax()) if inside.any() else len(rows)
        finish, model, status, arrival, batch = (
            rows[name][inside] for name in ("finish_ns", "model", "status", "arrival_ns", "batch")
        )
        return Recent(model, status, finish, (finish - arrival) * 1e-6, batch), window_s

    def _policy(self) -> dict[str, Any]:
        self._remember()
        choices = self._choices()
        return {
            "current": self.engine.policy,
            "choices": [{"name": name, "about": self._about.get(name, "a policy of your own")} for name in choices],
        }

    def _remember(self) -> None:
        current = self.engine.current_policy
        if current.name not in self._about:
            self._own[current.name] = current

    def _choices(self) -> list[str]:
        return [*self._about, *self._own]

    def _sms(self, now_ns: int) -> dict[str, Any]:
        """For each SM since the last snapshot: resident warps ÷ maximum, and the fraction of time with any warp."""
        device = self.engine.device
        totals = self.engine.sm_totals()
        found: dict[str, Any] = {"count": device.sm_ids, "max_warps": device.limits.warps}
        if totals is None:
            return found | self._sampled()
        before, self._last_use = self._last_use, totals
        elapsed = totals[0] - before[0] if before is not None else 0.0
        if before is None or elapsed <= 0:
            return found | {"source": "exact", "occupancy": [0.0] * device.sm_ids, "busy": [0.0] * device.sm_ids}
        occupancy = (totals[1] - before[1]) / (elapsed * device.limits.warps)
        busy = (totals[2] - before[2]) / elapsed
        return found | {"source": "exact", "occupancy": _listed(occupancy), "busy": _listed(busy)}

    def _sampled(self) -> dict[str, Any]:
        """The same from the counters of instrumented kernels; empty where no kernel has reported."""
        if self.engine.failure is not None or self.engine.closed:
            return {"source": "none", "occupancy": None, "busy": None}
        now = counts(self.engine.device)
        self._counted = self._counted or bool(now.started.any())
        if not self._counted:
            return {"source": "none", "occupancy": None, "busy": None}
        seen = self._sampler.take() if self._sampler is not None else None
        occupancy, busy = seen or (now.occupancy, now.resident_blocks > 0)
        return {"source": "sampled", "occupancy": _listed(occupancy), "busy": _listed(busy)}


_USE = ("capacity", "resident", "pending")


def _limit_ns(loaded: LoadedModel) -> float:
    if loaded.model.stateful:  # nobody waits for a step of a background job
        return math.inf
    target_ms = loaded.model.target_ms
    return loaded.profiles[0].whole_ns * ALONE_TIMES if target_ms is None else target_ms * 1e6


def _listed(values: Any) -> list[float]:
    found: list[float] = np.clip(values, 0.0, 1.0).round(6).tolist()
    return found


def _descriptions() -> dict[str, str]:
    """The first paragraph of each policy's docstring."""
    said = {name: inspect.getdoc(each.rank) or "" for name, each in shipped().items()}
    return {name: text.partition("\n\n")[0].replace("\n", " ").replace("`", "") for name, text in said.items()}
