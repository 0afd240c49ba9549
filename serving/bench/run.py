"""One run of the load generator, in this process or in several."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.client import BenchError
from paellapy.serving.bench.load import Bench, Outcome, Progress, Target, summarize
from paellapy.serving.bench.targets import EngineTarget, HttpTarget
from paellapy.serving.preflight import loop_factory

# Several client processes, for servers that are faster than one core can load.


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
        raise BenchError(f"{to_share} requests cannot be shared among {clients} client processes: use fewer processes")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for part in shares(load, clients):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(url, part, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _expect(pipe, "ready")
        begin = time.perf_counter() + 0.05  # the same clock in all processes
        for pipe in pipes:
            pipe.send(begin)
        return _follow(pipes, progress)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for pipe in pipes:
            pipe.close()


def _follow(pipes: list[Connection], progress: Progress | None) -> list[Run]:
    done: dict[int, Run] = {}
    latest = dict.fromkeys(range(len(pipes)), (0.0, 0, 0))
    while len(done) < len(pipes):
        for pipe in wait([pipe for k, pipe in enumerate(pipes) if k not in done]):
            k = next(k for k, each in enumerate(pipes) if each is pipe)
            kind, value = _receive(pipes[k])
            if kind == "done":
                done[k] = value
            elif kind == "failed":
                raise BenchError(value)
            else:
                latest[k] = value
                if progress is not None:
                    said = list(latest.values())
                    progress(max(s[0] for s in said), sum(s[1] for s in said), sum(s[2] for s in said))
    return [done[k] for k in range(len(pipes))]


def _expect(pipe: Connection, what: str) -> None:
    kind, value = _receive(pipe)
    if kind != what:
        raise BenchError(str(value))


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "failed", "a client process ended before its run was complete"
    return found


def _client(url: str, load: Load, pipe: Connection) -> None:
    """A client process: prepares, reports that, waits for the start, and sends its results."""

    def begin() -> float:
        pipe.send(("ready", None))
        moment: float = pipe.recv()
        return moment

    def progress(*values: float) -> None:
        pipe.send(("progress", values))

    bench = Bench(HttpTarget(url, load), load, progress)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(bench.run(begin))
    except BenchError as e:
        pipe.send(("failed", str(e)))
        return
    pipe.send(("done", (bench.outcomes, bench.seconds, bench.late_s)))


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
