"""One run of the load generator, in this process or in several."""

from __future__ import annotations

import asyncio
from typing import Any

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.client import BenchError
from paellapy.serving.bench.engine import EngineTarget
from paellapy.serving.bench.http import HttpTarget
from paellapy.serving.bench.load import Bench, Progress, Target, summarize
from paellapy.serving.bench.processes import run_processes
from paellapy.serving.process_settings import loop_factory


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
