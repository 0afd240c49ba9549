"""Arrival times and models of the load generator's requests: random gaps, or a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.sim.workload import MOST_SIGMA, TraceWorkload
from paellapy.serving.bench.client import BenchError
from paellapy.serving.protocol import DEFAULT_LEVEL

Arrivals = Literal["poisson", "lognormal", "even"]

ARRIVALS: dict[str, Arrivals] = {"poisson": "poisson", "lognormal": "lognormal", "even": "even"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `level` is the protocol's priority: 1 goes first."""

    at_s: float
    model: str
    timeout_us: int | None = None
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The load, given as one of three: `rate` in requests per second, `concurrency` of waiting clients, or a
    `trace`.
    """

    models: tuple[str, ...] = ()  # empty: all models that are ready
    rate: float | None = None
    concurrency: int | None = None
    trace: tuple[Arrival, ...] = ()
    speed: float = 1.0  # factor by which a trace is played faster
    arrivals: Arrivals = "poisson"
    sigma: float = 1.5  # of the logarithm of lognormal gaps
    duration_s: float = 10.0
    warmup_s: float = 1.0  # load before the measurement; a trace has none
    items: int = 1  # per request
    binary: bool = True
    timeout_us: int | None = None
    priority: int | None = None
    target_ms: float | None = None  # only for the report: the share of answers within it
    connections: int = 512
    seed: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    ca: str | None = None  # PEM file of certificates to trust

    def check(self) -> None:
        if sum(each is not None for each in (self.rate, self.concurrency, self.trace or None)) != 1:
            said = "give exactly one of a rate (open-loop), a concurrency (closed-loop) and a trace"
            raise BenchError(said, field="load")
        above_zero = {
            "rate": self.rate, "concurrency": self.concurrency, "speed": self.speed, "duration": self.duration_s,
            "items": self.items, "connections": self.connections, "timeout_us": self.timeout_us,
            "target_ms": self.target_ms,
        }  # fmt: skip
        for name, value in above_zero.items():
            if value is not None and not 0 < value < math.inf:
                raise BenchError(f"{name} is {value}: give a number above zero", field=name, given=value)
        for name, least in (("warmup", self.warmup_s), ("seed", self.seed)):
            if not 0 <= least < math.inf:
                raise BenchError(f"{name} is {least}: give zero or more", field=name, given=least)
        if not 0 <= self.sigma <= MOST_SIGMA:
            said = f"sigma is {self.sigma}: give a number from 0 (even gaps) to {MOST_SIGMA:g}"
            raise BenchError(said, field="sigma", given=self.sigma)

    @property
    def counted_s(self) -> float:
        return self.trace[-1].at_s / self.speed if self.trace else self.duration_s

    @property
    def uncounted_s(self) -> float:
        return 0.0 if self.trace else self.warmup_s


def gaps(load: Load, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Seconds between arrivals, with a mean of 1 / rate."""
    assert load.rate is not None
    if load.arrivals == "poisson":
        unit = rng.exponential(1.0, n)
    elif load.arrivals == "lognormal":
        unit = rng.lognormal(-(load.sigma**2) / 2, load.sigma, n)
    else:
        unit = np.ones(n)
    return unit / load.rate


def arrivals(load: Load, names: list[str], rng: np.random.Generator) -> Iterator[Arrival]:
    """All requests of an open-loop run in order of time, including those of the warm-up."""
    if load.trace:
        for each in load.trace:
            yield Arrival(each.at_s / load.speed, each.model, each.timeout_us or load.timeout_us, each.level)
        return
    at, end = 0.0, load.uncounted_s + load.counted_s
    while True:
        which = rng.integers(len(names), size=1024)
        for gap, k in zip(gaps(load, rng, 1024).tolist(), which.tolist(), strict=True):
            at += gap
            if at >= end:
                return
            yield Arrival(at, names[k], load.timeout_us, load.priority)


def read_trace(path: str | Path) -> tuple[Arrival, ...]:
    """Reads a CSV file in the format of `paellapy simulate` (t in s, model, deadline in ms, priority), or JSON lines.

    Times count from the first request. Priorities in the file are the engine's: larger ones go first.
    """
    try:
        is_json = Path(path).suffix in (".jsonl", ".json", ".ndjson")
        rows = _lines(Path(path)) if is_json else TraceWorkload.from_csv(path).rows
    except OSError as e:
        raise BenchError(f"{path}: {e.strerror}", field="trace") from None
    except UnicodeDecodeError as e:
        raise BenchError(f"{path} is not a text file of JSON lines: {e}", field="trace") from None
    if not rows:
        raise BenchError(f"{path} has no requests: give one request per line", field="trace")
    first = rows[0][0]
    return tuple(
        Arrival(
            at - first,
            model,
            None if deadline_ms is None else int(deadline_ms * 1e3),
            None if priority is None else max(1, DEFAULT_LEVEL - priority),
        )
        for at, model, deadline_ms, priority, _ in rows
    )


def _lines(path: Path) -> tuple[tuple[float, str, float | None, int | None, int], ...]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                row: dict[str, Any] = json.loads(line)
                deadline, priority = row.get("deadline"), row.get("priority")
                found.append((float(row["t"]), str(row["model"]), None if deadline is None else float(deadline),
                              None if priority is None else int(priority), 0))  # fmt: skip
            except (ValueError, TypeError, KeyError, AttributeError):
                said = f'{path}, line {number}: write {{"t": seconds, "model": "name"}}'
                raise BenchError(said, field="trace", line=number) from None
    return tuple(sorted(found, key=lambda each: each[0]))
