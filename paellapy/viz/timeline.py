"""A trace as tracks, slices and counters, from which Perfetto's and Chrome's files are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import WHOLE_BLOCK, Records
from paellapy.instrument.traces.ranges import block_rows
from paellapy.instrument.traces.replays import runs
from paellapy.instrument.traces.trace import Trace
from paellapy.viz.gantt import lanes
from paellapy.viz.requests import requests

LANES_PER_SM = 1 << 8  # more than the blocks that any SM holds


@dataclass(frozen=True, slots=True, eq=False)
class LaunchSlices:
    """One row for each run of a launch, from its first start to its last end."""

    launch: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    blocks: NDArray[np.int64]
    stream: NDArray[np.int64]  # 0, 1, …: in the order of their handles
    lane: NDArray[np.int64]  # replays and graph branches may overlap within a stream


@dataclass(frozen=True, slots=True, eq=False)
class Counter:
    """A value that holds from each time until the next."""

    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


def block_lanes(trace: Trace) -> NDArray[np.int64]:
    """For each of `trace.blocks`, its lane on its SM."""
    return lanes(trace.blocks["sm"], trace.blocks["start_ns"], trace.blocks["end_ns"])


def launch_slices(trace: Trace) -> LaunchSlices:
    b = trace.blocks
    _, first, run = np.unique(runs(b), return_index=True, return_inverse=True)
    end = np.full(len(first), np.iinfo(np.int64).min)
    np.maximum.at(end, run, b["end_ns"])
    start = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(start, run, b["start_ns"])
    launch = b["launch"][first]
    _, numbers = np.unique(trace.launches["stream"], return_inverse=True)
    stream = numbers[np.searchsorted(trace.launches["launch"], launch)]
    order = np.argsort(start, kind="stable")
    launch, start, end, stream = launch[order], start[order], end[order], stream[order]
    blocks = np.bincount(run, minlength=len(first))[order]
    return LaunchSlices(launch, start, end, blocks, stream, lanes(stream, start, end))


def resident_blocks(trace: Trace) -> Counter:
    """Number of blocks on the GPU, at every time it changes."""
    return _counter(trace, np.ones(len(trace.blocks), np.int64))


def occupancy(trace: Trace) -> Counter:
    """Warps on the GPU / the most it can hold, at every time it changes."""
    warps = _counter(trace, trace.warps)
    return Counter(warps.time_ns, warps.value / (trace.device.n_sm * trace.device.max_warps_per_sm))


def _counter(trace: Trace, weight: NDArray[np.int64]) -> Counter:
    return _present(trace.blocks["start_ns"], trace.blocks["end_ns"], weight)


def _present(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], weight: NDArray[np.int64]) -> Counter:
    time, at = np.unique(np.concatenate((start_ns, end_ns)), return_inverse=True)
    step = np.bincount(at, np.concatenate((weight, -weight)), len(time))
    return Counter(time, np.cumsum(step))


@dataclass(frozen=True, slots=True)
class Span:
    """A slice of a request's lane. Overlapping slices of a lane are nested."""

    lane: int
    name: str
    start_ns: int
    end_ns: int
    numbers: dict[str, int]


def request_spans(trace: Trace) -> list[Span]:
    """Every request of an engine's trace, and inside it its wait and its segments, outer slices first."""
    seen = requests(trace)
    if seen is None:
        return []
    segments_of: dict[int, list[int]] = {}
    for job, segment in zip(seen.job_of.tolist(), seen.segment_of.tolist(), strict=True):
        segments_of.setdefault(job, []).append(segment)
    spans, launch_ns = [], seen.launch_ns
    for i, job in enumerate(seen.jobs):
        lane, arrival, end = int(seen.lane[i]), int(job["arrival_ns"]), int(job["end_ns"])
        start = int(launch_ns[i])
        numbers = {name: int(job[name]) for name in ("request", "batch", "priority", "client", "status")}
        if job["deadline_ns"] >= 0:
            numbers["late_ns"] = max(0, end - int(job["deadline_ns"]))
        spans.append(Span(lane, seen.models[job["model"]], arrival, end, numbers))
        spans.append(Span(lane, "queued", arrival, start, {}))
        at = start
        for s in sorted(segments_of.get(i, []), key=lambda s: int(seen.segments["start_ns"][s])):
            each = seen.segments[s]
            name = "whole program" if each["segment"] < 0 else f"segment {each['segment']}"
            # The engine's clock and the GPU's agree to within a step; a slice that sticks out would break the nesting.
            begin, stop = (min(max(int(each[t]), at), end) for t in ("start_ns", "end_ns"))
            spans.append(Span(lane, name, begin, stop, {"blocks": int(each["blocks"])}))
            at = stop
    return spans


@dataclass(frozen=True, slots=True)
class Mark:
    lane: int
    name: str
    time_ns: int


def deadline_marks(trace: Trace) -> list[Mark]:
    """Deadlines of requests, as far as no other request is in their lane by then; missed ones are named so."""
    seen = requests(trace)
    if seen is None:
        return []
    late = seen.late
    names = ("deadline", "deadline missed")
    return [Mark(int(seen.lane[i]), names[int(late[i])], int(seen.jobs["deadline_ns"][i])) for i in seen.due.tolist()]


def queue_depth(trace: Trace) -> Counter | None:
    """Requests that have arrived and are not yet launched."""
    seen = requests(trace)
    return None if seen is None else _present(seen.jobs["arrival_ns"], seen.launch_ns, _each(seen.jobs))


def requests_running(trace: Trace) -> Counter | None:
    """Requests that are launched and have not ended."""
    seen = requests(trace)
    if seen is None:
        return None
    ran = seen.jobs["start_ns"] >= 0
    return _present(seen.launch_ns[ran], seen.jobs["end_ns"][ran], _each(seen.jobs[ran]))


def _each(rows: Records) -> NDArray[np.int64]:
    return np.ones(len(rows), np.int64)


class RangeSlice(NamedTuple):
    """A range on the time line: in its block's lane or, for a single warp, below it."""

    name: str
    place: int  # SM and lane in one number, as the other tools' files need it
    warp: int | None
    block: int
    launch: int
    start_ns: int
    end_ns: int

    @property
    def lane(self) -> tuple[int, int]:
        """Its place, and its warp or -1: the order of lanes in a picture."""
        return self.place, -1 if self.warp is None else self.warp


class WarpTrack(NamedTuple):
    place: int
    sm: int
    lane: int
    warp: int


def range_slices(trace: Trace) -> list[RangeSlice]:
    """Ranges, outer ones before those inside them."""
    records = trace.ranges.records
    records = records[np.lexsort((records["depth"], records["start_ns"]))]
    if not len(records):
        return []
    lane = block_lanes(trace)[block_rows(records, trace.blocks)]
    place = (records["sm"].astype(np.int64) * LANES_PER_SM + lane).tolist()
    columns = (records[name].tolist() for name in ("range", "warp", "block", "launch", "start_ns", "end_ns"))
    return [
        RangeSlice(trace.ranges.names[r], at, None if warp == WHOLE_BLOCK else warp, block, launch, start, end)
        for at, r, warp, block, launch, start, end in zip(place, *columns, strict=True)
    ]


def range_warps(trace: Trace) -> list[WarpTrack]:
    """The warps that record ranges of their own, wherever they run."""
    found = {(r.place, r.warp) for r in range_slices(trace) if r.warp is not None}
    return [WarpTrack(place, *divmod(place, LANES_PER_SM), warp) for place, warp in sorted(found)]
