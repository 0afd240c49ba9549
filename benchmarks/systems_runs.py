"""Runs of the published systems on an engine: closed loops, and requests beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_load import Run, poisson
from numpy.typing import NDArray
from paper_models import VARIANTS, Kind
from paper_runs import Loaded

from paellapy.scheduler.core import codes

NONE = np.zeros(0, np.int64)
ROOM = 400_000  # requests of closed loops


@dataclass(frozen=True, slots=True)
class Options:
    seeds: Sequence[int]
    seconds: float
    tiny: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Models that are loaded together, and the points that are measured on them."""

    name: str
    kinds: tuple[Kind, ...]
    priorities: tuple[int, ...]
    points: Callable[[Loaded, Options], Iterator[tuple[str, Callable[[], Any]]]]
    instances: int = 3
    quantum_us: float = 100.0


def between_steps(loaded: Loaded, change: Callable[[], None]) -> None:
    loaded.engine._between_steps(change)


def loops(loaded: Loaded, policy: Any, which: Sequence[int], seconds: float, **more: Any) -> dict[str, Any]:
    """Closed loops; what each model had of the GPU: as time alone of what it completed, and by the core's account."""
    state, rows = loaded.engine.state, [each.row for each in loaded.generator.loaded]

    def look() -> NDArray[np.float64]:
        model = state.model[rows]
        return np.array([*model["used_ns"], *model["gpu_ns"], state.core["gpu_ns"][0]])

    before = look()
    run = loaded.offer(policy, NONE, NONE, NONE, loops=list(which), until_ns=int(seconds * 1e9), loop_room=ROOM, **more)
    had, n = look() - before, len(rows)
    names = [kind.label for kind in loaded.kinds]
    return {
        "alone_share": dict(zip(names, (had[:n] / run.took_ns).tolist(), strict=True)),
        "gpu_share": dict(zip(names, (had[n : 2 * n] / run.took_ns).tolist(), strict=True)),
        "accounted": float(had[n : 2 * n].sum() / max(had[-1], 1.0)),
        "busy": float(had[-1] / run.took_ns),
        "per_s": {name: float((run.model == m).sum() / run.took_ns * 1e9) for m, name in enumerate(names)},
    }


def beside(
    loaded: Loaded, policy: Any, seed: int, rate: float, seconds: float, high: Sequence[int], low: Sequence[int],
    arrivals: str = "poisson", active: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Requests for each of `high` at this rate (0: a closed loop of the first), beside loops of `low`."""
    rng = np.random.default_rng(seed)
    at = model = NONE
    loops_of, until = list(low), 0
    if rate:
        n = max(8, int(rate * seconds))
        even = (np.arange(n) * (1e9 / rate)).astype(np.int64) + 1
        times = [poisson(rng, rate, n) if arrivals == "poisson" else even + int(1e9 / rate / len(high) * k)
                 for k in range(len(high))]  # fmt: skip
        at, model = np.concatenate(times), np.repeat(np.array(high, np.int64), n)
        order = np.argsort(at, kind="stable")
        at, model = at[order], model[order]
    else:
        loops_of, until = [high[0], *low], int(seconds * 1e9)
    which = rng.integers(0, VARIANTS, len(at))
    run = loaded.offer(policy, at, model, which, active, loops=loops_of, until_ns=until, loop_room=ROOM)
    return {**latencies(loaded, run, high), "low_per_s": float(np.isin(run.model, low).sum() / run.took_ns * 1e9)}


def latencies(loaded: Loaded, run: Run, high: Sequence[int]) -> dict[str, Any]:
    mine = np.isin(run.model, high) & (run.status == codes.OK)
    us, slow = run.latency_ns[mine] / 1e3, (run.latency_ns / loaded.alone_ns[run.model])[mine]
    return {
        "n": int(mine.sum()),
        "p50_us": float(np.quantile(us, 0.5)),
        "p99_us": float(np.quantile(us, 0.99)),
        "p99_slowdown": float(np.quantile(slow, 0.99)),
        "high_per_s": float(mine.sum() / run.took_ns * 1e9),
        "longest_launch_us": run.longest_launch_ns / 1e3,
    }
