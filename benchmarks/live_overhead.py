"""The cost of monitoring: an engine's throughput with and without `pp.live`, in turns, and the monitor's own CPU time.

Every round measures without, with, and without again; the ratio of the two runs without shows the machine's noise. If
the noise exceeds the difference, use `thread_cpu_share` and `note_cpu_share`: the CPU time of the monitoring thread and
of reading every completion, as shares of one core.

python benchmarks/live_overhead.py [--device cuda] [--seconds 1] [--rounds 30] writes results/live_overhead*.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.core import codes, tables
from paellapy.scheduler.engine.monitor import Monitor

HZ = 6.0


class Load:
    """Clients that ask one after the other, each model in turn, until the end of the block."""

    def __init__(self, engine: pp.Engine, clients: int) -> None:
        self._engine, self._stop = engine, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(k,)) for k in range(clients)]

    def _ask(self, k: int) -> None:
        names, images = list(self._engine.models), demo.held_out()[0]
        while not self._stop.is_set():
            self._engine.infer_sync(names[k % len(names)], {"image": images[k % len(images)]})
            k += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def per_s(self, seconds: float) -> float:
        core = self._engine.state.core[0]
        before, began = int(core["done_ok"]), time.perf_counter()
        time.sleep(seconds)
        return (int(core["done_ok"]) - before) / (time.perf_counter() - began)


def looked_at(engine: pp.Engine, load: Load, seconds: float) -> dict[str, float]:
    """Throughput while a widget looks; how often it did, and the CPU time that its thread took for it."""
    times: list[tuple[float, float]] = []

    def note(change: Any) -> None:
        json.dumps(change["new"])  # as a kernel would, on the way to the browser
        times.append((time.perf_counter(), time.thread_time()))

    view = pp.live(engine, hz=HZ)
    view.observe(note, "snapshot")
    per_s = load.per_s(seconds)
    view.close()
    (first, busy), (last, busier) = times[0], times[-1]
    return {"per_s": per_s, "hz": (len(times) - 1) / (last - first), "cpu_share": (busier - busy) / (last - first)}


def note_us(engine: pp.Engine) -> float:
    """What the look adds to every request: seeing its completion."""
    monitor = Monitor(engine)
    monitor.start()
    entries = np.zeros(1, tables.COMPLETION)
    now = time.monotonic_ns()
    entries["batch"] = 1
    entries["deadline_ns"], entries["arrival_ns"], entries["finish_ns"] = codes.NEVER, now - 1_000_000, now
    entry = entries[0]
    for k in range(100):  # the first few batches are the slowest so far, and kept
        entry["started_ns"] = k
        monitor._note(entry)
    monitor.snapshot()
    best = min(_timed(lambda: [monitor._note(entry) for _ in range(2000)]) for _ in range(7)) / 2000
    monitor.stop()
    return best * 1e6


def _timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of every measurement")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    with pp.Engine(options.device) as engine:
        for name in demo.names():
            engine.load(demo.load(name))
        each_us = note_us(engine)
        without: list[float] = []
        again: list[float] = []
        looked: list[dict[str, float]] = []
        turns = [
            lambda: without.append(load.per_s(options.seconds)),
            lambda: looked.append(looked_at(engine, load, options.seconds)),
            lambda: again.append(load.per_s(options.seconds)),
        ]
        with Load(engine, options.clients) as load:
            load.per_s(2.0)  # until caches are warm
            for k in range(options.rounds):
                for turn in turns[k % 3 :] + turns[: k % 3]:  # so that drift favours none
                    turn()
        pairs = [(row["per_s"], other) for row, other in zip(looked, without, strict=True)]  # neighbours in time

        def median(what: str) -> float:
            return statistics.median(row[what] for row in looked)

        results = {
            "clients": options.clients,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "without_per_s": round(statistics.median(without), 1),
            "with_per_s": round(median("per_s"), 1),
            "ratio": round(statistics.median(a / b for a, b in pairs), 4),
            "control_ratio": round(statistics.median(a / b for a, b in zip(again, without, strict=True)), 4),
            "hz": round(median("hz"), 2),
            "thread_cpu_share": round(median("cpu_share"), 5),
            "note_us_per_request": round(each_us, 3),
            "note_cpu_share": round(each_us * 1e-6 * median("per_s"), 5),
            "runs": {"without": without, "again": again, "with": looked},
        }
        suffix = "" if engine.device.name.startswith("virtual") else "_cuda"
        path = save(f"live_overhead{suffix}", results, engine.device, options.folder)
    shown = {key: value for key, value in results.items() if key != "runs"}
    print(json.dumps(shown, indent=1), path, sep="\n")


if __name__ == "__main__":
    main()
