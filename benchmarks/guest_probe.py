"""Where the latency of requests beside a gated script comes from, request by request; and ways to hold the script back.

    python benchmarks/guest_probe.py                 on a GPU without MPS
    python benchmarks/guest_probe.py --device virtual:h200 --small      to try it, without times of the GPU

The requests and the script are those of guest.py. All ways are measured in turn beside one start of the script. For
the slowest requests it prints, in µs: when they were posted, when the gate closed and the first kernel began, all from
the arrival; when the script last passed the gate, was held and had an empty stream, from the closing; and how long each
part of the model ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import guest_probe_client as gpc
import guest_probe_gate as gpg
import numpy as np
from background_jobs import Load, make_engine, served
from common import RESULTS, save
from guest import SCRIPT, Script
from guest_probe_client import SITES, Client, Keeper, Way

from paellapy.instrument.device import launch_hook

WAYS = (
    Way("gated"),
    Way("always closed", closed=True),
    Way("early", early=True),
    Way("ack", early=True, ack_us=200),
    Way("whole", whole=True),
    Way("ack, whole", early=True, ack_us=200, whole=True),
    Way("2 in flight", in_flight=2),
    Way("2 in flight, early, ack", in_flight=2, early=True, ack_us=200, whole=True),
    Way("keep", early=True, keep=True, whole=True),
    Way("linger 1000", early=True, linger_us=1000, whole=True),
    Way("ack, keep, linger 300", early=True, ack_us=200, keep=True, whole=True, linger_us=300),
)
COLUMNS = ("latency", "others", "since last", "posted", "closed", "last pass", "held", "drained", "first stamp",
           *(f"part {k}" for k in range(1, SITES)), "answer")  # fmt: skip


class Probed(Script):
    """The script behind a gate that writes to a file."""

    def __init__(self, small: bool, path: str) -> None:
        self._path = path
        super().__init__(True, small)

    def _start(self, line: list[str]) -> subprocess.Popen[str]:
        line = [sys.executable, str(Path(gpg.__file__)), *line[line.index(str(SCRIPT)) :]]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PROBE": self._path})


def runs_of(rows: Any, offset: int) -> list[Any]:
    """Complete runs of the model: their stamps on the host's clock, from the ring's rows."""
    found: list[Any] = []
    for instance in np.unique(rows[:, 2]):
        part = rows[rows[:, 2] == instance]
        part = part[np.argsort(part[:, 0], kind="stable")]
        sites = (part[:, 1] - 33) // 2
        for at in np.flatnonzero(sites == 0):
            if at + SITES <= len(part) and (sites[at : at + SITES] == np.arange(SITES)).all():
                found.append(part[at : at + SITES, 0] - offset)
    return sorted(found, key=lambda each: int(each[-1]))


def details(run: dict[str, Any], rows: Any, offset: int, log: Any) -> list[dict[str, float]]:
    """For every request, in µs: each part of its latency, and the events around it relative to its arrival."""
    stamps = runs_of(rows, offset) if rows is not None else []
    ends = np.array([each[-1] for each in stamps], np.int64)
    changes = run["changes"]
    closes = changes[changes[:, 1] == 1][:, 0]
    opens = changes[changes[:, 1] == 0][:, 0]
    out = []
    for k in range(len(run["arrival"])):
        arrival, finish, posted = (int(run[each][k]) for each in ("arrival", "finish", "posted"))
        one: dict[str, float] = {"latency": finish - arrival, "posted": posted - arrival}
        others = (run["arrival"] < arrival) & (run["finish"] > arrival)
        later = (run["arrival"] > arrival) & (run["arrival"] < finish)
        overlapping = int(others.sum() + later.sum())
        before = run["finish"][run["finish"] < arrival]
        one["since last"] = arrival - int(before.max()) if len(before) else -1
        at = np.searchsorted(ends, finish + 10_000) - 1  # the clocks agree within some µs
        if len(ends) and at >= 0 and finish - ends[at] < 300_000:
            each = stamps[at]
            one["first stamp"] = int(each[0]) - arrival
            one["on GPU"] = int(each[-1] - each[0])
            for j in range(1, SITES):
                one[f"part {j}"] = int(each[j] - each[j - 1])
            one["answer"] = finish - int(each[-1])
        close = closes[closes <= finish]
        if len(close):
            last = int(close[-1])
            one["closed"] = last - arrival
            opened = opens[opens <= last]
            one["was open for"] = last - int(opened[-1]) if len(opened) else -1
            within = log[(log[:, 1] >= last) & (log[:, 1] <= finish)] if len(log) else log
            if len(within):
                one["last pass"], one["held"] = int(within[0, 0]) - last, int(within[0, 1]) - last
                if within[0, 2]:
                    one["drained"] = int(within[0, 2]) - last
        out.append({"others": overlapping, **{name: round(value / 1e3, 1) for name, value in one.items()}})
    return out


def table(rows: list[dict[str, float]]) -> str:
    lines = [" ".join(f"{each:>11}" for each in COLUMNS)]
    lines += [" ".join(f"{row[each]:11.0f}" if each in row else f"{'–':>11}" for each in COLUMNS) for row in rows]
    return "\n".join(lines)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({each for row in rows for each in row})
    return {name: round(float(np.median([row[name] for row in rows if name in row])), 1) for name in names}


def summary(runs: list[dict[str, Any]], rows: list[dict[str, float]], speeds: list[float]) -> dict[str, Any]:
    """Times of requests in µs, except where named otherwise."""
    by_seed = [(run["finish"] - run["arrival"]) / 1e6 for run in runs]
    quantiles = {f"p{p}_ms": round(float(np.percentile(np.concatenate(by_seed), p)), 3) for p in (10, 50, 90, 98)}
    slow = sorted(rows, key=lambda each: -each["latency"])[: max(1, len(rows) // 50)]
    return {
        **quantiles, "all_p99_ms": round(float(np.percentile(np.concatenate(by_seed), 99)), 3),
        "p99_ms": [round(float(np.percentile(each, 99)), 3) for each in by_seed],
        "requests": len(rows), "wrong": sum(run["wrong"] for run in runs),
        "steps_per_s": [round(speed, 1) for speed in speeds],
        "median": medians(rows), "slow_median": medians(slow), "slowest": slow,
    }  # fmt: skip


class Probe:
    def __init__(self, engine: Any, args: argparse.Namespace, path: str) -> None:
        self._engine, self._args, self._gpu = engine, args, not args.small
        self._file = np.memmap(path, np.uint64, "r+", shape=(gpg.SIZE,))
        load = Load(engine)
        load(99, 0.3)
        self._client = Client(engine, load, Keeper() if self._gpu else None)
        self._client(Way("warm"), 98, 0.3)
        self.results: dict[str, Any] = {}

    def once(self, way: Way, seed: int, script: Script | None, words: Any) -> tuple[Any, list[Any], float]:
        """One run: its times, the details of its requests, and the script's speed."""
        file, at = self._file, 0
        if words is not None:  # the script waits meanwhile, or the clocks could not be compared
            words[launch_hook.IN_FLIGHT], at = way.in_flight, int(words.ctypes.data)
            words[launch_hook.CLOSED_UNTIL_NS] = time.monotonic_ns() + 1_000_000_000
        offset, first = (gpc.gpu_minus_host_ns(), int(gpc.count.item())) if self._gpu else (0, 0)
        if words is not None:
            words[launch_hook.CLOSED_UNTIL_NS] = 0
            time.sleep(0.05)
        file[gpg.COUNT] = 0
        since = time.monotonic()
        run = self._client(way, seed, self._args.seconds, at, int(file.ctypes.data) + 8 * gpg.EMPTY)
        until = time.monotonic()
        held = min(int(file[gpg.COUNT]), gpg.ROWS)
        log = np.array(file[gpg.LOG :], np.uint64).astype(np.int64).reshape(-1, gpg.ROW)[:held]
        stamps = None
        if self._gpu:
            stamps = gpc.ring.cpu().numpy()[np.arange(first, int(gpc.count.item())) % gpc.RING]
        speed = script.speed(since, until) if script is not None else 0.0
        return run, details(run, stamps, offset, log), speed

    def note(self, name: str, found: list[Any]) -> None:
        rows = [row for _, each, _ in found for row in each]
        result = summary([run for run, _, _ in found], rows, [speed for _, _, speed in found])
        self.results[name] = result
        keys = ("p50_ms", "p98_ms", "all_p99_ms", "p99_ms", "steps_per_s", "wrong")
        print(f"{name}: " + " ".join(f"{k}={result[k]}" for k in keys))
        print(table([result["median"], result["slow_median"], *result["slowest"][:5]]), flush=True)
        save(self._args.name, self.results, self._engine.device, self._args.folder)

    def alone(self, name: str) -> None:
        self.note(name, [self.once(Way(name), seed, None, None) for seed in range(self._args.seeds)])

    def by_itself(self, script: Script, words: Any) -> None:
        """The script without requests: its speed, and the driver's functions that it calls."""
        time.sleep(1.0)
        before, since = np.array(self._file[gpg.CALLS : gpg.LOG]), time.monotonic()
        time.sleep(self._args.seconds)
        counted = np.array(self._file[gpg.CALLS : gpg.LOG]) - before
        until = time.monotonic()
        speed = script.speed(since, until)
        made = max(1.0, speed * (until - since))
        self.results["script"] = {
            "steps_per_s": round(speed, 1),
            "calls_per_step": {n: round(float(c) / made, 2) for n, c in zip(gpg.ALL, counted, strict=False) if c},
            "pointers_into_driver": int(self._file[gpg.POINTERS]), "cells": int(words[launch_hook.CELLS]),
        }  # fmt: skip
        print(self.results["script"], flush=True)

    def beside(self, script: Script) -> None:
        words = next(iter(self._engine.guests._guests.values())).words
        self.by_itself(script, words)
        ways = [way for way in WAYS if way.name in self._args.ways.split(";")]
        found: dict[str, list[Any]] = {way.name: [] for way in ways}
        for seed in range(self._args.seeds):
            for way in ways:
                found[way.name].append(self.once(way, seed, script, words))
        for name, runs in found.items():
            self.note(name, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default=";".join(each.name for each in WAYS), help="ways, separated by ;")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="guest_probe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, make_engine(args.device) as engine:
        path = Path(folder) / "words"
        np.zeros(gpg.SIZE, np.uint64).tofile(path)
        engine.load(served(True) if args.small else gpc.stamped())
        probe = Probe(engine, args, str(path))
        probe.alone("alone")
        script = Probed(args.small, str(path))
        try:
            probe.beside(script)
        finally:
            script.end()
        probe.alone("alone again")


if __name__ == "__main__":
    main()
