"""What other tools read from a trace's files equals the trace: parsed back with Perfetto's own protos, and as JSON."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from viz_traces import EPOCH, MIX, NAMES, WARPS, engine_trace, make, schedules

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import exporters

protos = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="the extra `viz` is not installed"
)


class Parsed:
    """A Perfetto file as its viewer reads it: packets in order of time, and a stack of open slices on each track."""

    def __init__(self, path: Path) -> None:
        packets = protos.Trace.FromString(path.read_bytes()).packet
        self.tracks = {p.track_descriptor.uuid: p.track_descriptor for p in packets if p.HasField("track_descriptor")}
        interned = packets[0].interned_data
        names = {n.iid: n.name for n in interned.event_names}
        categories = {n.iid: n.name for n in interned.event_categories}
        arguments = {n.iid: n.name for n in interned.debug_annotation_names}
        self.slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.instants: list[tuple[str, str, int]] = []
        stack: dict[int, list[dict[str, Any]]] = defaultdict(list)
        events = [p for p in packets if p.HasField("track_event")]
        for p in sorted(events, key=lambda p: p.timestamp):
            event, track = p.track_event, p.track_event.track_uuid
            assert track in self.tracks
            if event.type == event.TYPE_SLICE_BEGIN:
                assert not stack[track] or self.path(track)[1] == "requests", "slices of a track overlap"
                given = {arguments[a.name_iid]: a.int_value for a in event.debug_annotations}
                (category,) = event.category_iids
                stack[track].append({"name": names[event.name_iid], "category": categories[category],
                                     "start": p.timestamp, **given})  # fmt: skip
            elif event.type == event.TYPE_SLICE_END:
                done = stack[track].pop()
                self.slices[track].append({**done, "depth": len(stack[track]), "end": p.timestamp})
            elif event.type == event.TYPE_INSTANT:
                self.instants.append((self.path(track)[-1], names[event.name_iid], p.timestamp))
            else:
                self.counters[self.tracks[track].name].append((p.timestamp, event.double_counter_value))
        assert not any(stack.values()), "a slice never ends"

    def path(self, track: int) -> list[str]:
        """Names from the GPU down to a track."""
        found = self.tracks[track]
        return [*(self.path(found.parent_uuid) if found.parent_uuid else []), found.name]

    def of(self, second: str) -> list[tuple[int, dict[str, Any]]]:
        """Slices below the GPU's tracks whose name starts with this text."""
        return [(t, s) for t, all_ in self.slices.items() for s in all_ if self.path(t)[1].startswith(second)]


def perfetto(trace: Trace) -> Parsed:
    with tempfile.TemporaryDirectory() as folder:
        return Parsed(trace.to_perfetto(Path(folder) / "some.pftrace"))


def chrome(trace: Trace) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(trace.to_chrome(Path(folder) / "some.json").read_text())


def rows_of(trace: Trace) -> Counter[tuple[Any, ...]]:
    b = trace.blocks
    names = [trace.kernels[k] for k in b["kernel"]]
    columns = (b[name].tolist() for name in ("launch", "block", "sm", "start_ns", "end_ns"))
    return Counter(zip(names, *columns, strict=True))


@given(schedules)
@settings(max_examples=50)
def test_perfetto_has_every_block_once_on_its_sm_without_overlap(trace: Trace) -> None:
    parsed = perfetto(trace)
    found = []
    for track, s in parsed.of("SM"):
        gpu, sm, lane = parsed.path(track)
        assert (gpu, lane.partition(",")[0]) == ("toy", sm)
        assert s["category"] == s["name"]
        found.append((s["name"], s["launch"], s["block"], int(sm.removeprefix("SM ")), s["start"], s["end"]))
    assert Counter(found) == rows_of(trace)


@given(schedules)
@settings(max_examples=50)
def test_perfetto_counters_are_what_is_resident(trace: Trace) -> None:
    parsed = perfetto(trace)
    b = trace.blocks
    warps = np.array([WARPS[launch - 1] for launch in b["launch"]], np.int64)
    times = sorted(set(b["start_ns"].tolist()) | set(b["end_ns"].tolist()))
    for name, weight, scale in (("resident blocks", np.ones(len(b)), 1), ("occupancy", warps, 100 / (3 * 64))):
        counted = parsed.counters[name]
        assert [time for time, _ in counted] == times
        for time, value in counted:
            there = (b["start_ns"] <= time) & (time < b["end_ns"])
            assert value == pytest.approx(weight[there].sum() * scale)


def test_perfetto_streams_show_each_launch_from_first_start_to_last_end() -> None:
    parsed = perfetto(make([*MIX, (3, 0, 2, 6000, 10)]))
    launches = {s["launch"]: (parsed.path(t)[-1], s) for t, s in parsed.of("streams")}
    assert {k: (v[0].partition(",")[0], v[1]["start"] - EPOCH, v[1]["end"] - EPOCH, v[1]["blocks"], v[1]["warps"])
            for k, v in launches.items()} == {
        1: ("stream 0", 0, 8000, 4, 4),
        2: ("stream 0", 5000, 8000, 3, 8),
        3: ("stream 1", 6000, 6010, 1, 16),
    }  # fmt: skip


def test_replays_of_a_launch_are_slices_of_their_own() -> None:
    again = [(launch, block, sm, start + 10_000, ns) for launch, block, sm, start, ns in MIX]
    slices = exporters.launch_slices(make([*MIX, *again]))
    assert slices.launch.tolist() == [1, 2, 1, 2]
    assert (slices.start_ns - EPOCH).tolist() == [0, 5000, 10_000, 15_000]
    assert slices.blocks.tolist() == [4, 3, 4, 3]


@given(schedules)
@settings(max_examples=50)
def test_chrome_has_the_same_blocks_at_the_same_times(trace: Trace) -> None:
    written = chrome(trace)
    origin = int(written["otherData"]["origin_ns"])
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    on_thread: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    found = []
    for e in written["traceEvents"]:
        if e["ph"] == "X":
            start, end = origin + round(e["ts"] * 1000), origin + round(e["ts"] * 1000) + round(e["dur"] * 1000)
            thread = threads[e["pid"], e["tid"]]
            on_thread[e["pid"], e["tid"]].append((start, end))
            if thread.startswith("SM"):
                sm = int(thread.partition(",")[0].removeprefix("SM "))
                found.append((e["name"], e["args"]["launch"], e["args"]["block"], sm, start, end))
    assert Counter(found) == rows_of(trace)
    for slices in on_thread.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(slices))


REQUESTS = [  # lane, depth, name, from, to
    (0, 0, "bert", -2000, 8500),
    (0, 1, "queued", -2000, -500),
    (0, 1, "segment 0", 0, 4900),
    (0, 1, "segment 1", 5000, 8000),
    (1, 0, "bert", -1000, 8500),
    (1, 1, "queued", -1000, -500),
    (1, 1, "segment 0", 0, 4900),
    (1, 1, "segment 1", 5000, 8000),
    (2, 0, "resnet", 1000, 3000),
    (2, 1, "queued", 1000, 3000),
]


def test_requests_hold_their_wait_and_their_segments() -> None:
    parsed = perfetto(engine_trace())
    found = [
        (int(parsed.path(t)[-1].removeprefix("lane ")), s["depth"], s["name"], s["start"] - EPOCH, s["end"] - EPOCH)
        for t, s in parsed.of("requests")
    ]
    assert sorted(found) == sorted(REQUESTS)
    assert {s["request"] for _, s in parsed.of("requests") if not s["depth"]} == {1, 2, 3}
    depth = [(time - EPOCH, value) for time, value in parsed.counters["queue depth"]]
    assert depth == [(-2000, 1), (-1000, 2), (-500, 0), (1000, 1), (3000, 0)]
    running = [(time - EPOCH, value) for time, value in parsed.counters["requests running"]]
    assert running == [(-500, 2), (8500, 0)]


def test_deadlines_are_marked_and_missed_ones_say_so() -> None:
    parsed = perfetto(engine_trace())
    marks = [("lane 2", "deadline", 3000), ("lane 0", "deadline missed", 6000), ("lane 1", "deadline", 9000)]
    assert [(lane, name, time - EPOCH) for lane, name, time in parsed.instants] == marks
    late = {s["request"]: s["late_ns"] for _, s in parsed.of("requests") if not s["depth"]}
    assert late == {1: 2500, 2: 0, 3: 0}
    written = chrome(engine_trace())
    origin = int(written["otherData"]["origin_ns"]) - EPOCH
    found = [(f"lane {e['tid']}", e["name"], origin + round(e["ts"] * 1000)) for e in written["traceEvents"]
             if e["ph"] == "i"]  # fmt: skip
    assert sorted(found) == sorted(marks)


def test_chrome_has_the_requests_too() -> None:
    written = chrome(engine_trace())
    origin = int(written["otherData"]["origin_ns"]) - EPOCH
    found = [(e["tid"], e["name"], origin + round(e["ts"] * 1000), origin + round((e["ts"] + e["dur"]) * 1000))
             for e in written["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]  # fmt: skip
    assert found == [(lane, name, start, end) for lane, _, name, start, end in REQUESTS]


def test_chrome_counters_and_facts() -> None:
    written = chrome(make(MIX, dropped=5))
    assert written["otherData"] == {"origin_ns": str(EPOCH), "device": "toy", "dropped": 5}
    blocks = {e["ts"]: e["args"]["resident blocks"] for e in written["traceEvents"] if e["name"] == "resident blocks"}
    assert blocks == {0.0: 3, 4.0: 2, 5.0: 3, 5.5: 4, 6.0: 3, 7.5: 2, 8.0: 0}
    assert {e["name"] for e in written["traceEvents"] if e["ph"] == "X"} == set(NAMES[:2])


def test_an_empty_trace_makes_empty_files() -> None:
    parsed = perfetto(make([]))
    assert not parsed.slices
    assert not parsed.counters
    assert [e["ph"] for e in chrome(make([]))["traceEvents"]] == ["M", "M"]
