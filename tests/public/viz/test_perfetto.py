"""What other tools read from a trace's file equals the trace."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from viz_traces import EPOCH, MIX, NAMES, WARPS, engine_trace, make, schedules

from paellapy.instrument.traces.trace import Trace

pytestmark = pytest.mark.quick


class Parsed:
    """A file as a viewer reads it: tracks by process and thread, with a stack of open slices on each."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text())
        events, self.other = written["traceEvents"], written["otherData"]
        self.origin = int(self.other["origin_ns"])
        named = {(e["name"], e["pid"], e.get("tid")): e["args"] for e in events if e["ph"] == "M"}
        self.processes = {pid: args["name"] for (name, pid, _), args in named.items() if name == "process_name"}
        threads = {(pid, tid): args["name"] for (name, pid, tid), args in named.items() if name == "thread_name"}
        self.slices: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)  # by process
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.instants = [(threads[e["pid"], e["tid"]], e["name"], self.time(e["ts"])) for e in events if e["ph"] == "i"]
        for e in events:
            if e["ph"] == "C":
                self.counters[e["name"]].append((self.time(e["ts"]), *e["args"].values()))
        stack: dict[tuple[int, int], list[int]] = defaultdict(list)  # ends of the slices around the next one
        complete = [e for e in events if e["ph"] == "X"]
        for e in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
            track, start = (e["pid"], e["tid"]), self.time(e["ts"])
            end = start + round(e["dur"] * 1000)
            while stack[track] and stack[track][-1] <= start:
                stack[track].pop()
            assert not stack[track] or end <= stack[track][-1], "slices of a track overlap without being nested"
            found = {"name": e["name"], "category": e["cat"], "start": start, "end": end, "depth": len(stack[track])}
            self.slices[self.processes[e["pid"]]].append((threads[track], {**found, **e["args"]}))
            stack[track].append(end)

    def time(self, us: float) -> int:
        return self.origin + round(us * 1000)


def parsed(trace: Trace) -> Parsed:
    with tempfile.TemporaryDirectory() as folder:
        return Parsed(trace.to_perfetto(Path(folder) / "some.json"))


def rows_of(trace: Trace) -> Counter[tuple[Any, ...]]:
    b = trace.blocks
    names = [trace.kernels[k] for k in b["kernel"]]
    columns = (b[name].tolist() for name in ("launch", "block", "sm", "start_ns", "end_ns"))
    return Counter(zip(names, *columns, strict=True))


@given(schedules)
@settings(max_examples=50)
def test_the_file_has_every_block_once_on_its_sm_without_overlap(trace: Trace) -> None:
    found = []
    for process, slices in parsed(trace).slices.items():
        if process.startswith("SM "):
            for _, s in slices:
                assert (s["category"], s["depth"]) == (s["name"], 0)
                found.append((s["name"], s["launch"], s["block"], int(process[3:]), s["start"], s["end"]))
    assert Counter(found) == rows_of(trace)


@given(schedules)
@settings(max_examples=50)
def test_counters_are_what_is_resident(trace: Trace) -> None:
    file = parsed(trace)
    b = trace.blocks
    warps = np.array([WARPS[launch - 1] for launch in b["launch"]], np.int64)
    times = sorted(set(b["start_ns"].tolist()) | set(b["end_ns"].tolist()))
    for name, weight, scale in (("resident blocks", np.ones(len(b)), 1), ("occupancy", warps, 100 / (3 * 64))):
        counted = file.counters[name]
        assert [time for time, _ in counted] == times
        for time, value in counted:
            there = (b["start_ns"] <= time) & (time < b["end_ns"])
            assert value == pytest.approx(weight[there].sum() * scale)


def test_streams_show_each_launch_from_first_start_to_last_end() -> None:
    slices = parsed(make([*MIX, (3, 0, 2, 6000, 10)])).slices["streams"]
    launches = {s["launch"]: (track, s) for track, s in slices}
    assert {k: (v[0].partition(",")[0], v[1]["start"] - EPOCH, v[1]["end"] - EPOCH, v[1]["blocks"], v[1]["warps"])
            for k, v in launches.items()} == {
        1: ("stream 0", 0, 8000, 4, 4),
        2: ("stream 0", 5000, 8000, 3, 8),
        3: ("stream 1", 6000, 6010, 1, 16),
    }  # fmt: skip


def test_replays_of_a_launch_are_slices_of_their_own() -> None:
    again = [(launch, block, sm, start + 10_000, ns) for launch, block, sm, start, ns in MIX]
    slices = [s for _, s in parsed(make([*MIX, *again])).slices["streams"]]
    assert [(s["launch"], s["start"] - EPOCH, s["blocks"]) for s in sorted(slices, key=lambda s: s["start"])] == [
        (1, 0, 4), (2, 5000, 3), (1, 10_000, 4), (2, 15_000, 3),
    ]  # fmt: skip


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
    file = parsed(engine_trace())
    found = [
        (int(track.removeprefix("lane ")), s["depth"], s["name"], s["start"] - EPOCH, s["end"] - EPOCH)
        for track, s in file.slices["requests"]
    ]
    assert sorted(found) == sorted(REQUESTS)
    assert {s["request"] for _, s in file.slices["requests"] if not s["depth"]} == {1, 2, 3}
    depth = [(time - EPOCH, value) for time, value in file.counters["queue depth"]]
    assert depth == [(-2000, 1), (-1000, 2), (-500, 0), (1000, 1), (3000, 0)]
    running = [(time - EPOCH, value) for time, value in file.counters["requests running"]]
    assert running == [(-500, 2), (8500, 0)]


def test_deadlines_are_marked_and_missed_ones_say_so() -> None:
    file = parsed(engine_trace())
    marks = [("lane 2", "deadline", 3000), ("lane 0", "deadline missed", 6000), ("lane 1", "deadline", 9000)]
    assert sorted((lane, name, time - EPOCH) for lane, name, time in file.instants) == sorted(marks)
    late = {s["request"]: s["late_ns"] for _, s in file.slices["requests"] if not s["depth"]}
    assert late == {1: 2500, 2: 0, 3: 0}


def test_the_file_says_what_was_recorded() -> None:
    file = parsed(make(MIX, dropped=5))
    assert file.other == {"origin_ns": str(EPOCH), "device": "toy", "dropped": 5}
    blocks = {time - EPOCH: value for time, value in file.counters["resident blocks"]}
    assert blocks == {0: 3, 4000: 2, 5000: 3, 5500: 4, 6000: 3, 7500: 2, 8000: 0}
    assert {s["name"] for slices in file.slices.values() for _, s in slices} == set(NAMES[:2])


def test_an_empty_trace_makes_an_empty_file() -> None:
    file = parsed(make([]))
    assert not file.slices
    assert not file.counters
    assert set(file.processes.values()) == {"toy", "streams"}
