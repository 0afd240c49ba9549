"""Models and loads for simulations."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.workload import TraceWorkload, Workload


def net(name: str = "net", us: float = 50.0, segments: int = 4, blocks: int = 66, **more: Any) -> ModelProfile:
    segment = SegmentProfile(us * 1e3, blocks, blocks * 8, blocks * 8192, 0, 5)
    return ModelProfile(name, {1: [segment] * segments}, **more)


def requests(*at: tuple[float, str]) -> TraceWorkload:
    """Requests at these times, in seconds, for these models."""
    return TraceWorkload(tuple((seconds, name, None, None, 0) for seconds, name in at))


def burst(n: int, name: str = "net", seconds: float = 1e-6) -> TraceWorkload:
    """Requests that come at the same time."""
    return requests(*[(seconds, name)] * n)


def together(*loads: Workload) -> Workload:
    return reduce(add, loads)
