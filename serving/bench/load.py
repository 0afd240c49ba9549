"""`paellapy bench`: load on a v2 endpoint or an engine, open-loop or closed-loop, as its clients measure it.

In an open-loop run, requests are sent at their times whether or not earlier ones are answered, and a request's latency
counts from the time at which it should be sent. A server that stalls therefore cannot lighten its own load, nor shorten
its latencies.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load, arrivals
from paellapy.serving.bench.client import BenchError
from paellapy.serving.bench.targets import EngineTarget, HttpTarget
from paellapy.serving.preflight import loop_factory

Progress = Callable[[float, int, int], None]  # seconds, counted requests, refused requests

PERCENTILES = (50, 90, 95, 99, 99.9, 99.99)
HALVES = 18  # times that the distance to 100 % is halved: down to 4 in a million
TICKS = 4  # points in each half
_NUMBER = re.compile(r"\d[\d.,e+-]*")  # numbers vary in a refusal's text; the rest is always the same
PAUSE_S = 0.1  # pause of a client that could not connect
PATIENCE_S = 120.0  # wait for answers after the load's end


class Target(Protocol):
    """A system under load."""

    @property
    def url(self) -> str: ...

    @property
    def targets_ms(self) -> dict[str, float]: ...

    async def prepare(self, rng: np.random.Generator) -> list[str]: ...

    async def ask(self, name: str, k: int, timeout_us: int | None, level: int | None) -> tuple[int, str, float]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """Results of one model: latencies of answered requests, and counts of the others."""

    latencies_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # refusals by text
    target_ms: float | None = None  # the model's own

    def add(self, other: Outcome) -> None:
        self.latencies_s += other.latencies_s
        self.refused_s += other.refused_s
        self.errors += other.errors
        self.reasons += other.reasons

    def summary(self, seconds: float, target_ms: float | None = None) -> dict[str, Any]:
        target_ms = self.target_ms if target_ms is None else target_ms
        found: dict[str, Any] = {
            "target_ms": target_ms,
            "answered": len(self.latencies_s),
            "answered_per_s": len(self.latencies_s) / seconds,
            "refused": len(self.refused_s),
            "errors": dict(self.errors),
            "refused_because": dict(self.reasons.most_common()),
        }
        if self.latencies_s:
            found["latency_ms"] = _milliseconds(self.latencies_s)
            found["latency_hdr"] = hdr(self.latencies_s)
            if target_ms is not None:
                found["within_target"] = float(np.mean(np.array(self.latencies_s) * 1e3 <= target_ms))
        if self.refused_s:
            found["refusal_ms"] = _milliseconds(self.refused_s)
        return found


def _milliseconds(times_s: list[float]) -> dict[str, float]:
    values = np.array(times_s) * 1e3
    return {
        "mean": float(values.mean()),
        **{f"p{p:g}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)},
        "max": float(values.max()),
    }


def hdr(times_s: list[float]) -> list[tuple[float, float]]:
    """(percentile, ms) as HDR histograms are plotted: the points get denser towards 100 %, as far as values allow.

    >>> hdr([0.001, 0.002, 0.003])[-1]
    (100.0, 3.0)
    """
    values = np.sort(np.array(times_s)) * 1e3
    distance = 0.5 ** (np.arange(HALVES * TICKS) / TICKS)
    wanted = np.concatenate([100.0 * (1 - distance[distance * len(values) >= 1]), [100.0]])
    found = np.percentile(values, wanted)
    return [(round(float(p), 6), round(float(v), 6)) for p, v in zip(wanted, found, strict=True)]


class Bench:
    """One client's run."""

    def __init__(self, target: Target, load: Load, progress: Progress | None = None) -> None:
        self.target, self.load, self._progress = target, load, progress
        self._rng = np.random.default_rng(load.seed)
        self.outcomes: dict[str, Outcome] = {}
        self._counted = self._refused = self._sent = 0
        self.late_s = 0.0  # largest delay of this client itself
        self.seconds = load.counted_s

    async def run(self, begin: Callable[[], float] = time.perf_counter) -> None:
        """Runs the load. `begin` is called once everything is prepared and returns the start time."""
        try:
            names = await self.target.prepare(self._rng)
            self.outcomes = {name: Outcome(target_ms=self.target.targets_ms.get(name)) for name in names}
            at = begin() + 0.01
            ticker = asyncio.create_task(self._tick(at))
            try:
                await (self._closed(names, at) if self.load.concurrency is not None else self._open(names, at))
            finally:
                ticker.cancel()
        finally:
            self.target.close()

    async def _open(self, names: list[str], begin: float) -> None:
        clock, count = time.perf_counter, begin + self.load.uncounted_s
        tasks: set[asyncio.Task[float]] = set()
        for each in arrivals(self.load, names, self._rng):
            at = begin + each.at_s
            if (wait := at - clock()) > 0:
                await asyncio.sleep(wait)
            elif at >= count:
                self.late_s = max(self.late_s, -wait)
            task = asyncio.create_task(self._one(each.model, each.timeout_us, each.level, at, at >= count))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await self._end(tasks, clock())

    async def _closed(self, names: list[str], begin: float) -> None:
        load, clock = self.load, time.perf_counter
        assert load.concurrency is not None
        count = begin + load.warmup_s
        end = count + load.duration_s

        async def client() -> None:
            while (now := clock()) < end:
                name = names[0] if len(names) == 1 else names[int(self._rng.integers(len(names)))]
                pause_s = await self._one(name, load.timeout_us, load.priority, now, now >= count)
                if pause_s:
                    await asyncio.sleep(min(pause_s, max(0.0, end - clock())))

        await self._end({asyncio.create_task(client()) for _ in range(load.concurrency)}, end)
        self.seconds = clock() - count

    async def _end(self, tasks: set[asyncio.Task[Any]], end: float) -> None:
        """Waits for answers until some time after the load's end: a server may never answer."""
        if not tasks:
            return
        left_s = max(0.0, end - time.perf_counter()) + PATIENCE_S
        done, silent = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        for each in done:
            each.result()

    async def _one(self, name: str, timeout_us: int | None, level: int | None, intended: float, counted: bool) -> float:
        """Sends one request. Returns the seconds a closed-loop client pauses: as told, or since no server was
        reachable.
        """
        self._sent += 1
        again_s = PAUSE_S
        try:
            status, said, again_s = await self.target.ask(name, self._sent, timeout_us, level)
        except (OSError, BenchError) as e:
            status, said = 0, str(e)
        except asyncio.CancelledError:  # counts always: a server that is silent from the start is no success
            self._counted += 1
            self.outcomes[name].errors[f"connection: no answer within {PATIENCE_S:.0f} s of the load's end"] += 1
            raise
        if not counted:
            return again_s
        took = time.perf_counter() - intended
        outcome = self.outcomes[name]
        self._counted += 1
        if status == 200:
            outcome.latencies_s.append(took)
        elif status in (429, 503):
            self._refused += 1
            outcome.refused_s.append(took)
            outcome.reasons[_NUMBER.sub("…", said)] += 1
        else:
            outcome.errors[f"{status or 'connection'}: {said}"] += 1
        return again_s

    async def _tick(self, begin: float) -> None:
        while self._progress is not None:
            self._progress(time.perf_counter() - begin, self._counted, self._refused)
            await asyncio.sleep(0.1)


def summarize(url: str, load: Load, runs: list[tuple[dict[str, Outcome], float, float]]) -> dict[str, Any]:
    """The contents of the JSON file, from the (outcomes, seconds, lateness) of every client."""
    outcomes: dict[str, Outcome] = {}
    everything = Outcome()
    for found, _, _ in runs:
        for name, each in found.items():
            outcomes.setdefault(name, Outcome(target_ms=each.target_ms)).add(each)
            everything.add(each)
    seconds = max(each[1] for each in runs)
    models = {name: each.summary(seconds, load.target_ms) for name, each in outcomes.items()}
    total = everything.summary(seconds, load.target_ms)
    judged = [each for each in models.values() if "within_target" in each]
    if judged and load.target_ms is None:  # each model's own target
        answered = sum(each["answered"] for each in judged)
        total["within_target"] = sum(each["within_target"] * each["answered"] for each in judged) / answered
    left_out = ("headers", "trace", "ca")  # secret, too long, and specific to this machine
    settings = {key: value for key, value in asdict(load).items() if key not in left_out}
    return {
        "url": url,
        "load": {**settings, "trace": len(load.trace) or None},
        "clients": len(runs),
        "seconds": seconds,
        "client_late_ms": max(each[2] for each in runs) * 1e3,
        "all": total,
        "models": models,
    }


# -- several client processes, for servers that are faster than one core can load

Run = tuple[dict[str, Outcome], float, float]  # outcomes, seconds, lateness


def shares(load: Load, clients: int) -> list[Load]:
    """Splits the load into equal parts.

    >>> [each.concurrency for each in shares(Load(concurrency=5), 2)]
    [3, 2]
    """
    parts = []
    for k in range(clients):
        own: dict[str, Any] = {"seed": load.seed * 1009 + k, "connections": -(-load.connections // clients)}
        if load.rate is not None:
            own["rate"] = load.rate / clients
        elif load.concurrency is not None:
            own["concurrency"] = (load.concurrency + clients - 1 - k) // clients
        else:
            own["trace"] = load.trace[k::clients]
        parts.append(replace(load, **own))
    return parts


def run_processes(url: str, load: Load, progress: Progress | None, clients: int) -> list[Run]:
    """Starts all clients at the same moment, and reports their progress until the last is done."""
    to_share = load.concurrency or len(load.trace) or clients
    if to_share < clients:
        said = f"{to_share} requests cannot be shared among {clients} client processes: use fewer processes"
        raise BenchError(said, field="clients", limit=to_share, given=clients)
    context = multiprocessing.get_context("spawn")
    begin, counts = context.Barrier(clients), context.Array("d", 3 * clients)
    with ProcessPoolExecutor(clients, context, _share, (begin, counts)) as pool:
        running = [pool.submit(_client, url, part, k) for k, part in enumerate(shares(load, clients))]
        left: set[Future[Run]] = set(running)
        while left and not any(each.exception() for each in running if each.done()):
            left = wait(left, timeout=0.1, return_when=FIRST_EXCEPTION).not_done
            if progress is not None:
                progress(max(counts[0::3]), int(sum(counts[1::3])), int(sum(counts[2::3])))
        if left:
            begin.abort()  # a client failed before the start: the others do not wait for it
        errors = [error for each in running if (error := each.exception()) is not None]
    if not errors:
        return [each.result() for each in running]
    if any(isinstance(each, BrokenProcessPool) for each in errors):
        raise BenchError("a client process ended before its run was complete")
    raise next((each for each in errors if isinstance(each, BenchError)), errors[0])


_shared: list[Any] = []  # in a client process: the barrier of the start, and the clients' progress


def _share(*given: Any) -> None:
    _shared[:] = given


def _client(url: str, load: Load, k: int) -> Run:
    """Runs in a client process."""
    begin, counts = _shared

    def all_begin() -> float:
        begin.wait()
        return time.perf_counter() + 0.05  # the same clock in all processes

    def progress(*values: float) -> None:
        counts[3 * k : 3 * k + 3] = values

    bench = Bench(HttpTarget(url, load), load, progress)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(bench.run(all_begin))
    return bench.outcomes, bench.seconds, bench.late_s


def run_bench(target: str | Engine, load: Load, progress: Progress | None = None, clients: int = 1) -> dict[str, Any]:
    """Runs the load on an endpoint's URL or an engine; returns a summary for JSON. `clients` is the number of
    processes.
    """
    load.check()
    if clients > 1:
        if not isinstance(target, str):
            raise BenchError("several client processes cannot share an engine of this process: give a URL")
        return summarize(target, load, run_processes(target, load, progress, clients))
    chosen: Target = HttpTarget(target, load) if isinstance(target, str) else EngineTarget(target, load)
    bench = Bench(chosen, load, progress)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(bench.run())
    return summarize(chosen.url, load, [(bench.outcomes, bench.seconds, bench.late_s)])
