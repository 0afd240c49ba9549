"""Points of background.py with the job in the process of the engine: under policies, streams, and paused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from background_jobs import (
    Load,
    Points,
    alone,
    beside,
    compare_losses,
    deterministic,
    plain_speed,
    rate_of,
    serving,
    trainee,
    where_of,
)

import paellapy as pp

# Policies that launch a job's step as one graph, with the priority of the job: they leave the order to the GPU.
WHOLE = {"stream priorities": -1, "streams": 0}
WARM_STEPS = 20  # of the plain loop, before it is measured
SETTLE_S = 0.2  # of requests that are not counted, after a job was loaded or has ended


class Part:
    """The engine, its load, and the points to measure."""

    def __init__(self, engine: pp.Engine, load: Load, points: Points, args: argparse.Namespace) -> None:
        self._engine, self._load, self._points, self._args = engine, load, points, args
        self._where = where_of(args)

    def _job(self, kind: str, **options: Any) -> Any:
        step, state = trainee(kind, self._where, self._args.small)
        return self._engine.background(step, name=kind, state=state, **options)

    def _between(self, title: str, measure: Callable[[], None]) -> None:
        """The points of one title, between requests alone before and after."""
        self._engine.set_policy("priority")
        self._points(f"{title}: alone before", lambda: alone(self._load, self._args))
        measure()
        self._engine.set_policy("priority")
        self._points(f"{title}: alone again", lambda: alone(self._load, self._args))

    def _beside(self, title: str, way: str, policy: str, job: Any) -> None:
        self._engine.set_policy(policy)
        self._points(f"{title}: {way}: job alone", lambda: rate_of(job, self._args.seconds))
        self._points(f"{title}: {way}", lambda: beside(self._load, job, self._args))

    def in_segments(self, kind: str, quantum_us: float) -> None:
        """A job of low priority, cut, under each policy that holds it back."""
        title = f"{kind}, {quantum_us:g} µs"

        def measure() -> None:
            job = self._job(kind, quantum_us=quantum_us)
            profile = self._engine.job_profile(kind)
            about = {"whole_ms": profile.alone_ns() * 1e-6, "segments": len(profile.sizes[1])}
            self._points(f"{title}: step", lambda: about)
            pp.save_profiles(self._args.folder / f"{self._args.name}-{kind}.profile.json", [profile])
            for policy in self._args.ways.split(","):
                self._beside(title, policy, policy, job)
            _end(job)

        self._between(title, measure)

    def one_graph(self, kind: str) -> None:
        title = f"{kind}, one graph"

        def measure() -> None:
            for way, priority in WHOLE.items():
                job = self._job(kind, priority=priority)
                self._beside(title, way, "streams", job)
                _end(job)

        self._between(title, measure)

    def paused(self, kind: str) -> None:
        self._engine.set_policy("priority")
        self._points(f"{kind}: paused and alone", lambda: self._compare_paused(kind))

    def _compare_paused(self, kind: str) -> dict[str, Any]:
        """Requests beside a paused job and without it, in the order alone, paused, paused, alone, and so on: a steady
        drift of the machine adds the same to both. Each round has the same arrivals in both.
        """
        found: dict[str, list[list[float]]] = {"alone": [], "paused": []}
        job: Any = None
        for seed in range(self._args.rounds):
            for loaded in (False, True) if seed % 2 == 0 else (True, False):
                job = self._paused_or_none(kind, job, loaded)
                found["paused" if loaded else "alone"].append(self._load(seed, self._args.seconds))
        self._paused_or_none(kind, job, False)
        rounds = {way: {name: [round(float(of(each)), 5) for each in times] for name, of in FIGURES.items()}
                  for way, times in found.items()}  # fmt: skip
        together = {way: {name: round(float(of(np.concatenate(times))), 5) for name, of in FIGURES.items()}
                    for way, times in found.items()}  # fmt: skip
        requests = {way: sum(map(len, times)) for way, times in found.items()}
        return {"requests": requests, "together": together, "rounds": rounds, "wrong": self._load.wrong}

    def _paused_or_none(self, kind: str, job: Any, loaded: bool) -> Any:
        """A paused job or none, as wanted, from the job that is there."""
        if loaded == (job is not None):
            return job
        if loaded:
            job = self._job(kind)
            job.pause()
        else:
            _end(job)
            job = None
        self._load(99, SETTLE_S)
        return job

    def plain(self, kind: str) -> None:
        """The loop as everybody writes it."""
        step, _ = trainee(kind, self._where, self._args.small)
        for _ in range(WARM_STEPS):
            step()
        self._points(f"{kind}: plain loop", lambda: plain_speed(step, self._where, self._args.seconds))

    def losses(self, kind: str) -> None:
        self._points(f"{kind}: losses", lambda: compare_losses(self._engine, kind, self._where, self._args))


FIGURES: dict[str, Callable[[Any], Any]] = {
    "mean_ms": np.mean,
    "p50_ms": lambda each: np.percentile(each, 50),
    "p99_ms": lambda each: np.percentile(each, 99),
}


def _end(job: Any) -> None:
    job.stop()
    job.join()
    if job.error is not None:
        raise job.error


def measure_all(args: argparse.Namespace) -> None:
    """The points of `args.part`, the most important ones first."""
    deterministic()
    kinds = args.jobs.split(",")
    first, *others = map(float, args.quanta.split(","))
    with serving(args) as (engine, load, points):
        part = Part(engine, load, points, args)
        if args.part == "first":
            points("alone", lambda: alone(load, args))
            for kind in kinds:
                part.in_segments(kind, first)
            for kind in kinds:
                part.one_graph(kind)
            return
        for measure in (part.paused, part.plain):
            for kind in kinds:
                measure(kind)
        for quantum in others:
            for kind in kinds:
                part.in_segments(kind, quantum)
        for kind in kinds:
            part.losses(kind)
