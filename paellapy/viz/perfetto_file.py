"""`t.to_perfetto(path)`: a file for ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import timeline
from paellapy.viz.needs import need
from paellapy.viz.requests import has_requests

_SEQUENCE = 1
_GPU, _STREAMS, _COUNTERS = 1, 2, 16  # numbers of tracks; SMs and lanes follow from _SM_TRACKS on
_SM_TRACKS = 1 << 20
_LANES_PER_SM = timeline.LANES_PER_SM
_STREAM_TRACKS, _REQUESTS, _WARP_TRACKS = 1 << 40, 1 << 41, 1 << 42


def to_perfetto(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace for ui.perfetto.dev: the GPU, its SMs, and one track for each block resident at a time.

    Kernels are categories; launches are slices of their streams; occupancy and resident blocks are counters. An
    engine's trace also has its requests, with their segments inside, their deadlines, and the queue's depth. Times are
    the trace's.
    """
    need("perfetto", "to_perfetto()")
    protos = need("perfetto.protos.perfetto.trace.perfetto_trace_pb2", "to_perfetto()")
    path = Path(path)
    spans = timeline.request_spans(trace)
    marks = timeline.deadline_marks(trace)
    named = [*(span.name for span in spans), *(mark.name for mark in marks)]
    file = _Writer(protos, [*trace.kernels, "request", *named, *trace.ranges.names])
    for uuid, parent, name, rank in _tracks(trace):
        file.track(uuid, parent, name, rank)
    _blocks(file, trace)
    _ranges(file, trace)
    _launches(file, trace)
    for lane in sorted({span.lane for span in spans}):
        file.track(_REQUESTS + 1 + lane, _REQUESTS, f"lane {lane}", lane)
    _requests(file, spans)
    for mark in marks:
        file.instant(_REQUESTS + 1 + mark.lane, mark.time_ns, file.number[mark.name], file.number["request"])
    _counters(file, trace)
    path.write_bytes(file.trace.SerializeToString())
    return path


def _counters(file: _Writer, trace: Trace) -> None:
    found = [
        ("occupancy", "%", timeline.occupancy(trace), 100.0),
        ("resident blocks", "blocks", timeline.resident_blocks(trace), 1.0),
        ("queue depth", "requests", timeline.queue_depth(trace), 1.0),
        ("requests running", "requests", timeline.requests_running(trace), 1.0),
    ]
    for i, (name, unit, counter, scale) in enumerate(found):
        if counter is not None:
            file.track(_COUNTERS + i, _GPU, name, 0).counter.unit_name = unit
            for time, value in zip(counter.time_ns.tolist(), (counter.value * scale).tolist(), strict=True):
                file.count(_COUNTERS + i, time, value)


def _tracks(trace: Trace) -> Iterator[tuple[int, int, str, int]]:
    """Each track with its parent, name, and position among its siblings."""
    yield _GPU, 0, trace.device.name, 0
    slices = timeline.launch_slices(trace)
    yield _STREAMS, _GPU, "streams", 1
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        suffix = f", lane {lane}" if lane else ""
        yield _stream_track(stream, lane), _STREAMS, f"stream {stream}{suffix}", stream * _LANES_PER_SM + lane
    if has_requests(trace):
        yield _REQUESTS, _GPU, "requests", 1
    used = np.unique(trace.blocks["sm"].astype(np.int64) * _LANES_PER_SM + timeline.block_lanes(trace))
    for sm in np.unique(trace.blocks["sm"]).tolist():
        yield _SM_TRACKS + sm * _LANES_PER_SM, _GPU, f"SM {sm}", 2 + sm
    for place in used.tolist():
        sm, lane = divmod(place, _LANES_PER_SM)
        yield _lane_track(sm, lane), _SM_TRACKS + sm * _LANES_PER_SM, f"SM {sm}, lane {lane}", lane


def _lane_track(sm: int, lane: int) -> int:
    return _SM_TRACKS + sm * _LANES_PER_SM + lane + 1


def _stream_track(stream: int, lane: int) -> int:
    return _STREAM_TRACKS + stream * _LANES_PER_SM + lane


def _blocks(file: _Writer, trace: Trace) -> None:
    b = trace.blocks
    lane = timeline.block_lanes(trace)
    track = _SM_TRACKS + b["sm"].astype(np.int64) * _LANES_PER_SM + lane + 1
    columns = (b[name].tolist() for name in ("kernel", "block", "launch", "start_ns", "end_ns"))
    number = [file.number[name] for name in trace.kernels]
    for on, k, block, launch, start, end in zip(track.tolist(), *columns, strict=True):
        kernel = number[k]
        file.begin(on, start, kernel, kernel, block=block, launch=launch)
        file.end(on, end)


def _ranges(file: _Writer, trace: Trace) -> None:
    """Ranges inside their blocks; ranges of single warps on tracks of their own below."""
    for t in timeline.range_warps(trace):
        file.track(_warp_track(t.place, t.warp), _lane_track(t.sm, t.lane), f"warp {t.warp}", t.warp)
    for r in timeline.range_slices(trace):
        sm, lane = divmod(r.place, _LANES_PER_SM)
        track = _lane_track(sm, lane) if r.warp is None else _warp_track(r.place, r.warp)
        number = file.number[r.name]
        file.begin(track, r.start_ns, number, number, block=r.block, launch=r.launch)
        file.end(track, r.end_ns)


def _warp_track(place: int, warp: int) -> int:
    return _WARP_TRACKS + (place << 6 | warp)


def _launches(file: _Writer, trace: Trace) -> None:
    s = timeline.launch_slices(trace)
    rows = trace.launches[np.searchsorted(trace.launches["launch"], s.launch)]
    for i, row in enumerate(rows):
        track = _stream_track(int(s.stream[i]), int(s.lane[i]))
        numbers = {name: int(row[name]) for name in ("launch", "warps", "registers", "shared_bytes")}
        kernel = file.number[trace.kernels[row["kernel"]]]
        file.begin(track, int(s.start_ns[i]), kernel, kernel, blocks=int(s.blocks[i]), **numbers)
        file.end(track, int(s.end_ns[i]))


def _requests(file: _Writer, spans: Sequence[timeline.Span]) -> None:
    category = file.number["request"]
    open_: list[tuple[int, int]] = []  # track and end of each slice around the next one
    for span in spans:
        track = _REQUESTS + 1 + span.lane
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
