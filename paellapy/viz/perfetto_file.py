"""`t.to_perfetto(path)`: a file for ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from instrument.trace import Trace
from paellapy.viz import timeline
from paellapy.viz.needs import need

_SEQUENCE = 1
_GPU, _COUNTERS, _STREAMS = 1, 2, 3  # tracks; SMs and lanes follow from _SM_TRACKS on
_SM_TRACKS = 1 << 20
_LANES_PER_SM = 1 << 8  # more than any SM holds blocks


def to_perfetto(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes the trace for ui.perfetto.dev: GPU, SMs, one track for each block that is resident at a time.

    Kernels are categories; launches are slices of their streams; occupancy and resident blocks are counters. Times are
    those of the trace.
    """
    need("perfetto", "to_perfetto()")
    protos = need("perfetto.protos.perfetto.trace.perfetto_trace_pb2", "to_perfetto()")
    path = Path(path)
    file = _Writer(protos, trace.kernels)
    for uuid, parent, name, rank in _tracks(trace):
        file.track(uuid, parent, name, rank)
    _blocks(file, trace)
    _launches(file, trace)
    for uuid, name, unit, counter in (
        (_COUNTERS + 10, "occupancy", "%", timeline.occupancy(trace)),
        (_COUNTERS + 11, "resident blocks", "", timeline.resident_blocks(trace)),
    ):
        file.counter_track(uuid, _GPU, name, unit)
        scale = 100.0 if unit == "%" else 1.0
        for time, value in zip(counter.time_ns.tolist(), (counter.value * scale).tolist(), strict=True):
            file.count(uuid, time, value)
    path.write_bytes(file.trace.SerializeToString())
    return path


def _tracks(trace: Trace) -> Iterator[tuple[int, int, str, int]]:
    """Track, its parent, name, and place among its siblings."""
    yield _GPU, 0, trace.device.name, 0
    slices = timeline.launch_slices(trace)
    yield _STREAMS, _GPU, "streams", 1
    for stream, lane in sorted(set(zip(slices.stream.tolist(), slices.lane.tolist(), strict=True))):
        suffix = f", lane {lane}" if lane else ""
        yield _stream_track(stream, lane), _STREAMS, f"stream {stream}{suffix}", stream * _LANES_PER_SM + lane
    used = np.unique(trace.blocks["sm"].astype(np.int64) * _LANES_PER_SM + timeline.block_lanes(trace))
    for sm in np.unique(trace.blocks["sm"]).tolist():
        yield _SM_TRACKS + sm * _LANES_PER_SM, _GPU, f"SM {sm}", 2 + sm
    for place in used.tolist():
        sm, lane = divmod(place, _LANES_PER_SM)
        yield _lane_track(sm, lane), _SM_TRACKS + sm * _LANES_PER_SM, f"SM {sm}, lane {lane}", lane


def _lane_track(sm: int, lane: int) -> int:
    return _SM_TRACKS + sm * _LANES_PER_SM + lane + 1


def _stream_track(stream: int, lane: int) -> int:
    return (1 << 40) + stream * _LANES_PER_SM + lane


def _blocks(file: _Writer, trace: Trace) -> None:
    b = trace.blocks
    lane = timeline.block_lanes(trace)
    track = _SM_TRACKS + b["sm"].astype(np.int64) * _LANES_PER_SM + lane + 1
    columns = (b[name].tolist() for name in ("kernel", "block", "launch", "start_ns", "end_ns"))
    for on, kernel, block, launch, start, end in zip(track.tolist(), *columns, strict=True):
        file.slice(on, kernel, start, end, block=block, launch=launch)


def _launches(file: _Writer, trace: Trace) -> None:
    s = timeline.launch_slices(trace)
    rows = trace.launches[np.searchsorted(trace.launches["launch"], s.launch)]
    for i, row in enumerate(rows):
        track = _stream_track(int(s.stream[i]), int(s.lane[i]))
        numbers = {name: int(row[name]) for name in ("warps", "registers", "shared_bytes")}
        file.slice(track, int(row["kernel"]), int(s.start_ns[i]), int(s.end_ns[i]), launch=int(row["launch"]),
                   blocks=int(s.blocks[i]), **numbers)  # fmt: skip


class _Writer:
    """Packets of one sequence. Names are sent once and referred to by number: a trace has few names and many blocks."""

    ARGUMENTS = ("block", "launch", "blocks", "warps", "registers", "shared_bytes")

    def __init__(self, protos: Any, kernels: tuple[str, ...]) -> None:
        self.trace = protos.Trace()
        event, packet = protos.TrackEvent, protos.TracePacket
        self._begin, self._end, self._counter = event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END, event.TYPE_COUNTER
        self._flags = packet.SEQ_NEEDS_INCREMENTAL_STATE
        self._explicit = protos.TrackDescriptor.EXPLICIT
        first = self.trace.packet.add()
        first.trusted_packet_sequence_id = _SEQUENCE
        first.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        for i, name in enumerate(kernels, 1):
            first.interned_data.event_names.add(iid=i, name=name)
            first.interned_data.event_categories.add(iid=i, name=name)
        for i, name in enumerate(self.ARGUMENTS, 1):
            first.interned_data.debug_annotation_names.add(iid=i, name=name)
        self._argument = {name: i for i, name in enumerate(self.ARGUMENTS, 1)}

    def track(self, uuid: int, parent: int, name: str, rank: int) -> Any:
        track = self.trace.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
        track.uuid, track.name = uuid, name
        if parent:
            track.parent_uuid = parent
        track.sibling_order_rank = rank
        track.child_ordering = self._explicit
        return track

    def counter_track(self, uuid: int, parent: int, name: str, unit: str) -> None:
        counter = self.track(uuid, parent, name, 0).counter
        counter.unit_name = unit or "blocks"

    def slice(self, track: int, kernel: int, start_ns: int, end_ns: int, **arguments: int) -> None:
        event = self._event(track, start_ns, self._begin)
        event.name_iid = kernel + 1
        event.category_iids.append(kernel + 1)
        for name, value in arguments.items():
            event.debug_annotations.add(name_iid=self._argument[name], uint_value=value)
        self._event(track, end_ns, self._end)

    def count(self, track: int, time_ns: int, value: float) -> None:
        self._event(track, time_ns, self._counter).double_counter_value = value

    def _event(self, track: int, time_ns: int, kind: int) -> Any:
        packet = self.trace.packet.add(
            trusted_packet_sequence_id=_SEQUENCE, sequence_flags=self._flags, timestamp=time_ns
        )
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event
