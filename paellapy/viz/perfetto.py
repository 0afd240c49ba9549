"""`t.to_perfetto(path)`: a trace as tracks, slices and counters in one JSON file.

It is the format of chrome://tracing, which ui.perfetto.dev and many other tools open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import Records
from paellapy.instrument.traces.summary import runs
from paellapy.instrument.traces.trace import Trace
from paellapy.viz.data import LANES_PER_SM, block_lanes, lanes, range_slices, requests_of


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
    seen = requests_of(trace)
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
    seen = requests_of(trace)
    if seen is None:
        return []
    late = seen.late
    names = ("deadline", "deadline missed")
    return [Mark(int(seen.lane[i]), names[int(late[i])], int(seen.jobs["deadline_ns"][i])) for i in seen.due.tolist()]


def queue_depth(trace: Trace) -> Counter | None:
    """Requests that have arrived and are not yet launched."""
    seen = requests_of(trace)
    return None if seen is None else _present(seen.jobs["arrival_ns"], seen.launch_ns, _each(seen.jobs))


def requests_running(trace: Trace) -> Counter | None:
    """Requests that are launched and have not ended."""
    seen = requests_of(trace)
    if seen is None:
        return None
    ran = seen.jobs["start_ns"] >= 0
    return _present(seen.launch_ns[ran], seen.jobs["end_ns"][ran], _each(seen.jobs[ran]))


def _each(rows: Records) -> NDArray[np.int64]:
    return np.ones(len(rows), np.int64)


# "Processes" of the format, in the order in which a viewer shows them; their "threads" are lanes.
_GPU, _STREAMS, _REQUESTS, _SMS = 0, 1, 2, 3
_WARPS = 1 << 16  # threads from here on are single warps of a lane


def to_perfetto(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace for ui.perfetto.dev, chrome://tracing and other readers of Chrome's JSON.

    Each SM has a track for every block that is resident at a time. Launches are slices of their streams; occupancy and
    resident blocks are counters. An engine's trace also has its requests, with their segments inside, their deadlines,
    and the depth of the queue. The format's times are µs as floats. They count from `origin_ns`, stored in the file's
    `otherData`, so they stay exact.
    """
    path = Path(path)
    spans = request_spans(trace)
    origin = min([trace.span_ns[0], *(span.start_ns for span in spans)])
    events = [*_counters(trace, origin), *_launches(trace, origin), *_requests(trace, spans, origin)]
    events += [*_blocks(trace, origin), *_ranges(trace, origin)]
    other = {"origin_ns": str(origin), "device": trace.device.name, "dropped": trace.dropped}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}))
    return path


def _process(process: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}


def _thread(process: int, thread: int, name: str, rank: int | None = None) -> Iterator[dict[str, Any]]:
    at = {"ph": "M", "pid": process, "tid": thread}
    yield {**at, "name": "thread_name", "args": {"name": name}}
    yield {**at, "name": "thread_sort_index", "args": {"sort_index": thread if rank is None else rank}}


def _slice(
    process: int, thread: int, name: str, start_ns: int, ns: int, numbers: dict[str, int], category: str = ""
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category or name, "pid": process, "tid": thread, "ts": start_ns / 1000,
            "dur": ns / 1000, "args": numbers}  # fmt: skip


def _counters(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    yield from _process(_GPU, trace.device.name)
    for name, unit, counter, scale in (
        ("occupancy", "%", occupancy(trace), 100),
        ("resident blocks", "blocks", resident_blocks(trace), 1),
        ("queue depth", "requests", queue_depth(trace), 1),
        ("requests running", "requests", requests_running(trace), 1),
    ):
        if counter is None:
            continue
        for time, value in zip((counter.time_ns - origin).tolist(), (counter.value * scale).tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": _GPU, "ts": time / 1000, "args": {unit: value}}


def _launches(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    slices = launch_slices(trace)
    yield from _process(_STREAMS, "streams")
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        yield from _thread(_STREAMS, stream * LANES_PER_SM + lane, f"stream {stream}{f', lane {lane}' if lane else ''}")
    rows = trace.launches[np.searchsorted(trace.launches["launch"], slices.launch)]
    for i, row in enumerate(rows):
        start, end = int(slices.start_ns[i]), int(slices.end_ns[i])
        numbers = {name: int(row[name]) for name in ("launch", "warps", "registers", "shared_bytes")}
        numbers["blocks"] = int(slices.blocks[i])
        thread = int(slices.stream[i]) * LANES_PER_SM + int(slices.lane[i])
        yield _slice(_STREAMS, thread, trace.kernels[row["kernel"]], start - origin, end - start, numbers)


def _requests(trace: Trace, spans: list[Span], origin: int) -> Iterator[dict[str, Any]]:
    if not spans:
        return
    yield from _process(_REQUESTS, "requests")
    for lane in sorted({span.lane for span in spans}):
        yield from _thread(_REQUESTS, lane, f"lane {lane}")
    for s in spans:
        yield _slice(_REQUESTS, s.lane, s.name, s.start_ns - origin, s.end_ns - s.start_ns, s.numbers, "request")
    for mark in deadline_marks(trace):
        at = {"pid": _REQUESTS, "tid": mark.lane, "ts": (mark.time_ns - origin) / 1000}
        yield {"ph": "i", "s": "t", "name": mark.name, "cat": "request", **at}


def _blocks(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    b = trace.blocks
    lane = block_lanes(trace)
    for sm in np.unique(b["sm"]).tolist():
        yield from _process(_SMS + sm, f"SM {sm}")
    for place in np.unique(b["sm"].astype(np.int64) * LANES_PER_SM + lane).tolist():
        sm, number = divmod(place, LANES_PER_SM)
        yield from _thread(_SMS + sm, number, f"lane {number}", number << 6)
    columns = (b[name].tolist() for name in ("sm", "kernel", "block", "launch", "start_ns", "end_ns"))
    for thread, sm, kernel, block, launch, start, end in zip(lane.tolist(), *columns, strict=True):
        numbers = {"block": block, "launch": launch}
        yield _slice(_SMS + sm, thread, trace.kernels[kernel], start - origin, end - start, numbers)


def _ranges(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    """Ranges inside their blocks; ranges of single warps on tracks of their own below."""
    slices = range_slices(trace)
    for place, warp in sorted({(r.place, r.warp) for r in slices if r.warp is not None}):
        sm, lane = divmod(place, LANES_PER_SM)
        name = f"lane {lane}, warp {warp}"
        yield from _thread(_SMS + sm, _warp_thread(lane, warp), name, (lane << 6) + warp + 1)
    for r in slices:
        sm, lane = divmod(r.place, LANES_PER_SM)
        thread = lane if r.warp is None else _warp_thread(lane, r.warp)
        numbers = {"block": r.block, "launch": r.launch}
        yield _slice(_SMS + sm, thread, r.name, r.start_ns - origin, r.end_ns - r.start_ns, numbers)


def _warp_thread(lane: int, warp: int) -> int:
    return _WARPS + (lane << 6 | warp)
