"""`t.to_perfetto(path)`: a trace as tracks, slices and counters in one JSON file.

It is the format of chrome://tracing, which ui.perfetto.dev and many other tools open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import WHOLE_BLOCK
from paellapy.instrument.traces.summary import runs
from paellapy.instrument.traces.trace import Trace
from paellapy.viz.data import LANES_PER_SM, Requests, block_lanes, lanes, placed_ranges, requests_of

Event = dict[str, Any]

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
    seen = requests_of(trace)
    origin = trace.span_ns[0] if seen is None else min(trace.span_ns[0], int(seen.jobs["arrival_ns"].min()))
    events = [*_counters(trace, seen), *_launches(trace)]
    events += [] if seen is None else [*_requests(seen)]
    events += [*_blocks(trace), *_ranges(trace)]
    for each in events:
        if "ts" in each:
            each["ts"] = (each["ts"] - origin) / 1000
    other = {"origin_ns": str(origin), "device": trace.device.name, "dropped": trace.dropped}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}))
    return path


def _process(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}


def _thread(process: int, thread: int, name: str, rank: int | None = None) -> Iterator[Event]:
    at = {"ph": "M", "pid": process, "tid": thread}
    yield {**at, "name": "thread_name", "args": {"name": name}}
    yield {**at, "name": "thread_sort_index", "args": {"sort_index": thread if rank is None else rank}}


def _slice(
    process: int, thread: int, name: str, start_ns: int, end_ns: int, numbers: dict[str, int], category: str = ""
) -> Event:
    return {"ph": "X", "name": name, "cat": category or name, "pid": process, "tid": thread, "ts": start_ns,
            "dur": (end_ns - start_ns) / 1000, "args": numbers}  # fmt: skip


# -- counters: each value holds from its time until the next


def _counters(trace: Trace, seen: Requests | None) -> Iterator[Event]:
    yield from _process(_GPU, trace.device.name)
    b, whole = trace.blocks, trace.device.n_sm * trace.device.max_warps_per_sm
    yield from _counter("occupancy", "%", b["start_ns"], b["end_ns"], trace.warps, 100 / whole)
    yield from _counter("resident blocks", "blocks", b["start_ns"], b["end_ns"])
    if seen is not None:
        yield from _counter("queue depth", "requests", seen.jobs["arrival_ns"], seen.launch_ns)
        ran = seen.jobs["start_ns"] >= 0
        yield from _counter("requests running", "requests", seen.launch_ns[ran], seen.jobs["end_ns"][ran])


def _counter(
    name: str, unit: str, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64],
    weight: NDArray[np.int64] | None = None, scale: float = 1,
) -> Iterator[Event]:  # fmt: skip
    """The sum of what is there, at every time it changes."""
    weight = np.ones(len(start_ns), np.int64) if weight is None else weight
    time, at = np.unique(np.concatenate((start_ns, end_ns)), return_inverse=True)
    value = np.cumsum(np.bincount(at, np.concatenate((weight, -weight)), len(time))) * scale
    for ns, each in zip(time.tolist(), value.tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": _GPU, "ts": ns, "args": {unit: each}}


# -- slices


def _launches(trace: Trace) -> Iterator[Event]:
    """A slice for each run of a launch, from its first start to its last end."""
    b = trace.blocks
    _, first, run = np.unique(runs(b), return_index=True, return_inverse=True)
    start, end = (np.full(len(first), limit) for limit in (np.iinfo(np.int64).max, np.iinfo(np.int64).min))
    np.minimum.at(start, run, b["start_ns"])
    np.maximum.at(end, run, b["end_ns"])
    order = np.argsort(start, kind="stable")
    start, end, blocks = start[order], end[order], np.bincount(run, minlength=len(first))[order]
    which = np.searchsorted(trace.launches["launch"], b["launch"][first][order])
    stream = np.unique(trace.launches["stream"], return_inverse=True)[1][which]  # numbered in order of their handles
    lane = lanes(stream, start, end)  # replays and graph branches may overlap within a stream
    yield from _process(_STREAMS, "streams")
    for s, k in sorted(set(zip(stream.tolist(), lane.tolist(), strict=True))):
        yield from _thread(_STREAMS, s * LANES_PER_SM + k, f"stream {s}{f', lane {k}' if k else ''}")
    columns = (each.tolist() for each in (stream * LANES_PER_SM + lane, start, end, blocks))
    for row, place, begin, stop, n in zip(trace.launches[which], *columns, strict=True):
        numbers = {name: int(row[name]) for name in ("launch", "warps", "registers", "shared_bytes")}
        yield _slice(_STREAMS, place, trace.kernels[row["kernel"]], begin, stop, {**numbers, "blocks": n})


def _requests(seen: Requests) -> Iterator[Event]:
    """Every request, inside it its wait and its segments, and its deadline if no other request is in its lane then."""
    yield from _process(_REQUESTS, "requests")
    for lane in np.unique(seen.lane).tolist():
        yield from _thread(_REQUESTS, lane, f"lane {lane}")
    first = np.searchsorted(seen.job_of, np.arange(len(seen.jobs) + 1))
    for i, (job, lane, launched) in enumerate(zip(seen.jobs, seen.lane.tolist(), seen.launch_ns.tolist(), strict=True)):
        arrival, end = int(job["arrival_ns"]), int(job["end_ns"])
        numbers = {name: int(job[name]) for name in ("request", "batch", "priority", "client", "status")}
        if job["deadline_ns"] >= 0:
            numbers["late_ns"] = max(0, end - int(job["deadline_ns"]))
        yield _slice(_REQUESTS, lane, seen.models[job["model"]], arrival, end, numbers, "request")
        yield _slice(_REQUESTS, lane, "queued", arrival, launched, {}, "request")
        at = launched
        segments = seen.segments[seen.segment_of[first[i] : first[i + 1]]]
        for each in segments[np.argsort(segments["start_ns"], kind="stable")]:
            name = "whole program" if each["segment"] < 0 else f"segment {each['segment']}"
            # The engine's clock and the GPU's agree to within a step; a slice that sticks out would break the nesting.
            begin, at = (min(max(int(each[t]), at), end) for t in ("start_ns", "end_ns"))
            yield _slice(_REQUESTS, lane, name, begin, at, {"blocks": int(each["blocks"])}, "request")
    late = seen.late
    for i in seen.due.tolist():
        name = "deadline missed" if late[i] else "deadline"
        yield {"ph": "i", "s": "t", "name": name, "cat": "request", "pid": _REQUESTS, "tid": int(seen.lane[i]),
               "ts": int(seen.jobs["deadline_ns"][i])}  # fmt: skip


def _blocks(trace: Trace) -> Iterator[Event]:
    b, lane = trace.blocks, block_lanes(trace)
    for sm in np.unique(b["sm"]).tolist():
        yield from _process(_SMS + sm, f"SM {sm}")
    for place in np.unique(b["sm"].astype(np.int64) * LANES_PER_SM + lane).tolist():
        sm, number = divmod(place, LANES_PER_SM)
        yield from _thread(_SMS + sm, number, f"lane {number}", number << 6)
    columns = (b[name].tolist() for name in ("sm", "kernel", "block", "launch", "start_ns", "end_ns"))
    for thread, sm, kernel, block, launch, start, end in zip(lane.tolist(), *columns, strict=True):
        yield _slice(_SMS + sm, thread, trace.kernels[kernel], start, end, {"block": block, "launch": launch})


def _ranges(trace: Trace) -> Iterator[Event]:
    """Ranges inside their blocks; ranges of single warps on tracks of their own below."""
    records, place = placed_ranges(trace)
    of_warp = records["warp"] != WHOLE_BLOCK
    for at, warp in np.unique((place[of_warp], records["warp"][of_warp]), axis=1).T.tolist():
        sm, lane = divmod(at, LANES_PER_SM)
        name = f"lane {lane}, warp {warp}"
        yield from _thread(_SMS + sm, _warp_thread(lane, warp), name, (lane << 6) + warp + 1)
    columns = (records[name].tolist() for name in ("range", "sm", "warp", "block", "launch", "start_ns", "end_ns"))
    for at, r, sm, warp, block, launch, start, end in zip((place % LANES_PER_SM).tolist(), *columns, strict=True):
        thread = at if warp == WHOLE_BLOCK else _warp_thread(at, warp)
        yield _slice(_SMS + sm, thread, trace.ranges.names[r], start, end, {"block": block, "launch": launch})


def _warp_thread(lane: int, warp: int) -> int:
    return _WARPS + (lane << 6 | warp)
