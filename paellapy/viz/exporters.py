"""A trace as tracks, slices and counters, from which Perfetto's and Chrome's files are written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import WHOLE_BLOCK, Records
from paellapy.instrument.traces.summary import block_rows, runs
from paellapy.instrument.traces.trace import Trace
from paellapy.viz.data import lanes
from paellapy.viz.palette import need
from paellapy.viz.requests import has_requests, requests

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


# `t.to_chrome(path)`: the JSON format of chrome://tracing, which many tools read.


_SMS, _STREAMS, _REQUESTS = 0, 1, 2  # "processes" of the format; lanes are their "threads"
_LANES_PER_SM = LANES_PER_SM
_WARPS = 1 << 26  # thread numbers from here on are lanes of single warps


def to_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace as Chrome's JSON: SMs and streams as processes, lanes as threads, and counters.

    The format's times are µs as floats. They count from `origin_ns`, stored in the file's `otherData`, so they stay
    exact.
    """
    path = Path(path)
    spans = request_spans(trace)
    origin = min([trace.span_ns[0], *(span.start_ns for span in spans)])
    events = [*_names(trace), *_blocks(trace, origin), *_launches(trace, origin), *_counters(trace, origin)]
    events += _requests(spans, origin)
    events += _ranges(trace, origin)
    for mark in deadline_marks(trace):
        at = {"pid": _REQUESTS, "tid": mark.lane, "ts": (mark.time_ns - origin) / 1000}
        events.append({"ph": "i", "s": "t", "name": mark.name, "cat": "request", **at})
    other = {"origin_ns": str(origin), "device": trace.device.name, "dropped": trace.dropped}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}))
    return path


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for process, name in ((_SMS, trace.device.name), (_STREAMS, "streams")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    used = np.unique(trace.blocks["sm"].astype(np.int64) * _LANES_PER_SM + block_lanes(trace))
    for thread in used.tolist():
        sm, lane = divmod(thread, _LANES_PER_SM)
        yield _thread(_SMS, thread, f"SM {sm}, lane {lane}")
    slices = launch_slices(trace)
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        suffix = f", lane {lane}" if lane else ""
        yield _thread(_STREAMS, stream * _LANES_PER_SM + lane, f"stream {stream}{suffix}")


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _blocks(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    b = trace.blocks
    thread = b["sm"].astype(np.int64) * _LANES_PER_SM + block_lanes(trace)
    columns = (b[name].tolist() for name in ("kernel", "block", "launch", "start_ns", "end_ns"))
    for tid, kernel, block, launch, start, end in zip(thread.tolist(), *columns, strict=True):
        yield _slice(_SMS, tid, trace.kernels[kernel], start - origin, end - start, block=block, launch=launch)


def _ranges(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    """Ranges inside their blocks; ranges of single warps in lanes of their own."""
    warps = range_warps(trace)
    for track in warps:
        name = f"SM {track.sm}, lane {track.lane}, warp {track.warp}"
        yield _thread(_SMS, _WARPS + (track.place << 6 | track.warp), name)
    for r in range_slices(trace):
        thread = r.place if r.warp is None else _WARPS + (r.place << 6 | r.warp)
        yield _slice(_SMS, thread, r.name, r.start_ns - origin, r.end_ns - r.start_ns, block=r.block, launch=r.launch)


def _launches(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    s = launch_slices(trace)
    rows = trace.launches[np.searchsorted(trace.launches["launch"], s.launch)]
    for i, row in enumerate(rows):
        start, end = int(s.start_ns[i]), int(s.end_ns[i])
        tid = int(s.stream[i]) * _LANES_PER_SM + int(s.lane[i])
        numbers = {"launch": int(row["launch"]), "blocks": int(s.blocks[i])}
        yield _slice(_STREAMS, tid, trace.kernels[row["kernel"]], start - origin, end - start, **numbers)


def _counters(trace: Trace, origin: int) -> Iterator[dict[str, Any]]:
    for name, counter in (
        ("occupancy", occupancy(trace)),
        ("resident blocks", resident_blocks(trace)),
        ("queue depth", queue_depth(trace)),
        ("requests running", requests_running(trace)),
    ):
        if counter is None:
            continue
        for time, value in zip((counter.time_ns - origin).tolist(), counter.value.tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": _SMS, "ts": time / 1000, "args": {name: value}}


def _requests(spans: Sequence[Span], origin: int) -> Iterator[dict[str, Any]]:
    if spans:
        yield {"ph": "M", "name": "process_name", "pid": _REQUESTS, "args": {"name": "requests"}}
    for lane in sorted({span.lane for span in spans}):
        yield _thread(_REQUESTS, lane, f"lane {lane}")
    for s in spans:
        yield _slice(_REQUESTS, s.lane, s.name, s.start_ns - origin, s.end_ns - s.start_ns, **s.numbers)


def _slice(process: int, thread: int, kernel: str, start_ns: int, ns: int, **arguments: int) -> dict[str, Any]:
    return {"ph": "X", "name": kernel, "cat": kernel, "pid": process, "tid": thread, "ts": start_ns / 1000,
            "dur": ns / 1000, "args": arguments}  # fmt: skip


# `t.to_perfetto(path)`: a file for ui.perfetto.dev.


_SEQUENCE = 1
_GPU, _PERFETTO_STREAMS, _COUNTERS = 1, 2, 16  # numbers of tracks; SMs and lanes follow from _SM_TRACKS on
_SM_TRACKS = 1 << 20
_STREAM_TRACKS, _PERFETTO_REQUESTS, _WARP_TRACKS = 1 << 40, 1 << 41, 1 << 42


def to_perfetto(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace for ui.perfetto.dev: the GPU, its SMs, and one track for each block resident at a time.

    Kernels are categories; launches are slices of their streams; occupancy and resident blocks are counters. An
    engine's trace also has its requests, with their segments inside, their deadlines, and the queue's depth. Times are
    the trace's.
    """
    need("perfetto", "to_perfetto()")
    protos = need("perfetto.protos.perfetto.trace.perfetto_trace_pb2", "to_perfetto()")
    path = Path(path)
    spans = request_spans(trace)
    marks = deadline_marks(trace)
    named = [*(span.name for span in spans), *(mark.name for mark in marks)]
    file = _Writer(protos, [*trace.kernels, "request", *named, *trace.ranges.names])
    for uuid, parent, name, rank in _tracks(trace):
        file.track(uuid, parent, name, rank)
    _perfetto_blocks(file, trace)
    _perfetto_ranges(file, trace)
    _perfetto_launches(file, trace)
    for lane in sorted({span.lane for span in spans}):
        file.track(_PERFETTO_REQUESTS + 1 + lane, _PERFETTO_REQUESTS, f"lane {lane}", lane)
    _perfetto_requests(file, spans)
    for mark in marks:
        file.instant(_PERFETTO_REQUESTS + 1 + mark.lane, mark.time_ns, file.number[mark.name], file.number["request"])
    _perfetto_counters(file, trace)
    path.write_bytes(file.trace.SerializeToString())
    return path


def _perfetto_counters(file: _Writer, trace: Trace) -> None:
    found = [
        ("occupancy", "%", occupancy(trace), 100.0),
        ("resident blocks", "blocks", resident_blocks(trace), 1.0),
        ("queue depth", "requests", queue_depth(trace), 1.0),
        ("requests running", "requests", requests_running(trace), 1.0),
    ]
    for i, (name, unit, counter, scale) in enumerate(found):
        if counter is not None:
            file.track(_COUNTERS + i, _GPU, name, 0).counter.unit_name = unit
            for time, value in zip(counter.time_ns.tolist(), (counter.value * scale).tolist(), strict=True):
                file.count(_COUNTERS + i, time, value)


def _tracks(trace: Trace) -> Iterator[tuple[int, int, str, int]]:
    """Each track with its parent, name, and position among its siblings."""
    yield _GPU, 0, trace.device.name, 0
    slices = launch_slices(trace)
    yield _PERFETTO_STREAMS, _GPU, "streams", 1
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        suffix = f", lane {lane}" if lane else ""
        yield _stream_track(stream, lane), _PERFETTO_STREAMS, f"stream {stream}{suffix}", stream * _LANES_PER_SM + lane
    if has_requests(trace):
        yield _PERFETTO_REQUESTS, _GPU, "requests", 1
    used = np.unique(trace.blocks["sm"].astype(np.int64) * _LANES_PER_SM + block_lanes(trace))
    for sm in np.unique(trace.blocks["sm"]).tolist():
        yield _SM_TRACKS + sm * _LANES_PER_SM, _GPU, f"SM {sm}", 2 + sm
    for place in used.tolist():
        sm, lane = divmod(place, _LANES_PER_SM)
        yield _lane_track(sm, lane), _SM_TRACKS + sm * _LANES_PER_SM, f"SM {sm}, lane {lane}", lane


def _lane_track(sm: int, lane: int) -> int:
    return _SM_TRACKS + sm * _LANES_PER_SM + lane + 1


def _stream_track(stream: int, lane: int) -> int:
    return _STREAM_TRACKS + stream * _LANES_PER_SM + lane


def _perfetto_blocks(file: _Writer, trace: Trace) -> None:
    b = trace.blocks
    lane = block_lanes(trace)
    track = _SM_TRACKS + b["sm"].astype(np.int64) * _LANES_PER_SM + lane + 1
    columns = (b[name].tolist() for name in ("kernel", "block", "launch", "start_ns", "end_ns"))
    number = [file.number[name] for name in trace.kernels]
    for on, k, block, launch, start, end in zip(track.tolist(), *columns, strict=True):
        kernel = number[k]
        file.begin(on, start, kernel, kernel, block=block, launch=launch)
        file.end(on, end)


def _perfetto_ranges(file: _Writer, trace: Trace) -> None:
    """Ranges inside their blocks; ranges of single warps on tracks of their own below."""
    for t in range_warps(trace):
        file.track(_warp_track(t.place, t.warp), _lane_track(t.sm, t.lane), f"warp {t.warp}", t.warp)
    for r in range_slices(trace):
        sm, lane = divmod(r.place, _LANES_PER_SM)
        track = _lane_track(sm, lane) if r.warp is None else _warp_track(r.place, r.warp)
        number = file.number[r.name]
        file.begin(track, r.start_ns, number, number, block=r.block, launch=r.launch)
        file.end(track, r.end_ns)


def _warp_track(place: int, warp: int) -> int:
    return _WARP_TRACKS + (place << 6 | warp)


def _perfetto_launches(file: _Writer, trace: Trace) -> None:
    s = launch_slices(trace)
    rows = trace.launches[np.searchsorted(trace.launches["launch"], s.launch)]
    for i, row in enumerate(rows):
        track = _stream_track(int(s.stream[i]), int(s.lane[i]))
        numbers = {name: int(row[name]) for name in ("launch", "warps", "registers", "shared_bytes")}
        kernel = file.number[trace.kernels[row["kernel"]]]
        file.begin(track, int(s.start_ns[i]), kernel, kernel, blocks=int(s.blocks[i]), **numbers)
        file.end(track, int(s.end_ns[i]))


def _perfetto_requests(file: _Writer, spans: Sequence[Span]) -> None:
    category = file.number["request"]
    open_: list[tuple[int, int]] = []  # track and end of each slice around the next one
    for span in spans:
        track = _PERFETTO_REQUESTS + 1 + span.lane
        # A slice of a request that is not inside the last one comes after it.
        while open_ and (open_[-1][0] != track or open_[-1][1] <= span.start_ns):
            file.end(*open_.pop())
        file.begin(track, span.start_ns, file.number[span.name], category, **span.numbers)
        open_.append((track, span.end_ns))
    for track, end in reversed(open_):
        file.end(track, end)


class _Writer:
    """Packets of one sequence. Names are sent once and then referred to by number: a trace has few names and many
    blocks.
    """

    ARGUMENTS = ("block", "launch", "blocks", "warps", "registers", "shared_bytes", "request", "batch", "priority",
                 "client", "status", "late_ns")  # fmt: skip

    def __init__(self, protos: Any, names: Sequence[str]) -> None:
        self.trace = protos.Trace()
        event, packet = protos.TrackEvent, protos.TracePacket
        self._begin, self._end, self._counter = event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END, event.TYPE_COUNTER
        self._instant = event.TYPE_INSTANT
        self._flags = packet.SEQ_NEEDS_INCREMENTAL_STATE
        self._explicit = protos.TrackDescriptor.EXPLICIT
        self.number = {name: i for i, name in enumerate(dict.fromkeys(names), 1)}
        self._argument = {name: i for i, name in enumerate(self.ARGUMENTS, 1)}
        first = self.trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        first.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        for name, i in self.number.items():
            first.interned_data.event_names.add(iid=i, name=name)
            first.interned_data.event_categories.add(iid=i, name=name)
        for name, i in self._argument.items():
            first.interned_data.debug_annotation_names.add(iid=i, name=name)

    def track(self, uuid: int, parent: int, name: str, rank: int) -> Any:
        track = self.trace.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
        track.uuid, track.name = uuid, name
        if parent:
            track.parent_uuid = parent
        track.sibling_order_rank = rank
        track.child_ordering = self._explicit
        return track

    def begin(self, track: int, time_ns: int, name: int, category: int, **arguments: int) -> None:
        event = self._event(track, time_ns, self._begin)
        event.name_iid = name
        event.category_iids.append(category)
        for argument, value in arguments.items():
            event.debug_annotations.add(name_iid=self._argument[argument], int_value=value)

    def instant(self, track: int, time_ns: int, name: int, category: int) -> None:
        event = self._event(track, time_ns, self._instant)
        event.name_iid = name
        event.category_iids.append(category)

    def end(self, track: int, time_ns: int) -> None:
        self._event(track, time_ns, self._end)

    def count(self, track: int, time_ns: int, value: float) -> None:
        self._event(track, time_ns, self._counter).double_counter_value = value

    def _event(self, track: int, time_ns: int, kind: int) -> Any:
        packet = self.trace.packet.add(
            trusted_packet_sequence_id=_SEQUENCE, sequence_flags=self._flags, timestamp=time_ns
        )
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event
