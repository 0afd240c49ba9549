"""`t.to_chrome(path)`: the JSON format of chrome://tracing, which many tools read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import timeline

_SMS, _STREAMS, _REQUESTS = 0, 1, 2  # "processes" of the format; lanes are their "threads"
_LANES_PER_SM = timeline.LANES_PER_SM
_WARPS = 1 << 26  # thread numbers from here on are lanes of single warps


def to_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace as Chrome's JSON: SMs and streams as processes, lanes as threads, and counters.

    The format's times are µs as floats. They count from `origin_ns`, stored in the file's `otherData`, so they stay
    exact.
    """
    path = Path(path)
    spans = timeline.request_spans(trace)
    origin = min([trace.span_ns[0], *(span.start_ns for span in spans)])
    events = [*_names(trace), *_blocks(trace, origin), *_launches(trace, origin), *_counters(trace, origin)]
    events += _requests(spans, origin)
    events += _ranges(trace, origin)
    for mark in timeline.deadline_marks(trace):
        at = {"pid": _REQUESTS, "tid": mark.lane, "ts": (mark.time_ns - origin) / 1000}
        events.append({"ph": "i", "s": "t", "name": mark.name, "cat": "request", **at})
    other = {"origin_ns": str(origin), "device": trace.device.name, "dropped": trace.dropped}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}))
    return path


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for process, name in ((_SMS, trace.device.name), (_STREAMS, "streams")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    used = np.unique(trace.blocks["sm"].astype(np.int64) * _LANES_PER_SM + timeline.block_lanes(trace))
    for thread in used.tolist():
        sm, lane = divmod(thread, _LANES_PER_SM)
        yield _thread(_SMS, thread, f"SM {sm}, lane {lane}")
    slices = timeline.launch_slices(trace)
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        suffix = f", lane {lane}" if lane else ""
        yield _thread(_STREAMS, stream * _LANES_PER_SM + lane, f"stream {stream}{suffix}")


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _blocks(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    b = trace.blocks
    thread = b["sm"].astype(np.int64) * _LANES_PER_SM + timeline.block_lanes(trace)
    columns = (b[name].tolist() for name in ("kernel", "block", "launch", "start_ns", "end_ns"))
    for tid, kernel, block, launch, start, end in zip(thread.tolist(), *columns, strict=True):
        yield _slice(_SMS, tid, trace.kernels[kernel], start - origin, end - start, block=block, launch=launch)


def _ranges(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    """Ranges inside their blocks; ranges of single warps in lanes of their own."""
    warps = timeline.range_warps(trace)
    for track in warps:
        name = f"SM {track.sm}, lane {track.lane}, warp {track.warp}"
        yield _thread(_SMS, _WARPS + (track.place << 6 | track.warp), name)
    for r in timeline.range_slices(trace):
        thread = r.place if r.warp is None else _WARPS + (r.place << 6 | r.warp)
        yield _slice(_SMS, thread, r.name, r.start_ns - origin, r.end_ns - r.start_ns, block=r.block, launch=r.launch)


def _launches(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    s = timeline.launch_slices(trace)
    rows = trace.launches[np.searchsorted(trace.launches["launch"], s.launch)]
    for i, row in enumerate(rows):
        start, end = int(s.start_ns[i]), int(s.end_ns[i])
        tid = int(s.stream[i]) * _LANES_PER_SM + int(s.lane[i])
        numbers = {"launch": int(row["launch"]), "blocks": int(s.blocks[i])}
        yield _slice(_STREAMS, tid, trace.kernels[row["kernel"]], start - origin, end - start, **numbers)


def _counters(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    for name, counter in (
        ("occupancy", timeline.occupancy(trace)),
        ("resident blocks", timeline.resident_blocks(trace)),
        ("queue depth", timeline.queue_depth(trace)),
        ("requests running", timeline.requests_running(trace)),
    ):
        if counter is None:
            continue
        for time, value in zip((counter.time_ns - origin).tolist(), counter.value.tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": _SMS, "ts": time / 1000, "args": {name: value}}


def _requests(spans: Sequence[timeline.Span], origin: int) -> Iterator[dict[str, Any]]:
    if spans:
        yield {"ph": "M", "name": "process_name", "pid": _REQUESTS, "args": {"name": "requests"}}
    for lane in sorted({span.lane for span in spans}):
        yield _thread(_REQUESTS, lane, f"lane {lane}")
    for s in spans:
        yield _slice(_REQUESTS, s.lane, s.name, s.start_ns - origin, s.end_ns - s.start_ns, **s.numbers)


def _slice(process: int, thread: int, kernel: str, start_ns: int, ns: int, **arguments: int) -> dict[str, Any]:
    return {"ph": "X", "name": kernel, "cat": kernel, "pid": process, "tid": thread, "ts": start_ns / 1000,
            "dur": ns / 1000, "args": arguments}  # fmt: skip
