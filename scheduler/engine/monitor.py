"""Monitors a running engine: `snapshot()` has all data of the dashboard and the live widget, as plain JSON.

    monitor = Monitor(engine)
    with monitor:
        ...
        monitor.snapshot()["models"][0]["latency_ms"]["p99"]

Between `start` and `stop` the monitor sees every completion; otherwise it costs nothing.
"""

from __future__ import annotations

import importlib.util
import math
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paellapy.instrument.traces.live import counts
from paellapy.instrument.versions import versions
from paellapy.scheduler.core import codes, tables
from paellapy.scheduler.core.tenants import tenant_numbers, tenant_stats
from paellapy.scheduler.engine.gpu_use import RESOURCES
from paellapy.scheduler.engine.monitor_gpu import GpuTimes
from paellapy.scheduler.engine.monitor_models import EDGES_MS, Recent, model_facts
from paellapy.scheduler.engine.monitor_slow import SlowRequests
from paellapy.scheduler.engine.monitor_sms import SmSampler
from paellapy.scheduler.policies.policy import BUILT_IN, Policy, PolicyError, policy_names

if TYPE_CHECKING:
    from paellapy.scheduler.backends.launches import LoadedModel
    from paellapy.scheduler.engine.engine import Engine

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
    """The first sentence of each policy's file. The files are read: importing them would compile every policy."""
    spec = importlib.util.find_spec(BUILT_IN)
    folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path()
    found = {}
    for name in policy_names():
        said = re.match(r'"""(.*?)(?:"""|\n\n)', (folder / f"{name}.py").read_text(encoding="utf-8"), re.S)
        found[name] = said[1].replace("\n", " ").replace("`", "") if said else ""
    return found
