"""An engine's trace is kept whole: its requests, segments and models go into the file and come back."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viz_traces import EPOCH, MIX, NAMES, TOY, engine_trace, make

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import RANGE, WORK, Records
from paellapy.instrument.traces.summary import TracedRanges
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.backends.base import TracedBlocks, TracedPiece
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.tables import COMPLETION
from paellapy.scheduler.engine.trace import (
    JOB_RECORD,
    OWNER,
    SEGMENT_RECORD,
    EngineTrace,
    TracedEngine,
    fill_engine_trace,
)
from paellapy.scheduler.models.model import Model, TensorSpec


def numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[Records]:
    """Tables of any numbers at all, with models 0 to 2 and launches 1 to 3."""
    fields = []
    for name in dtype.names or ():
        limits = np.iinfo(dtype[name])
        low, high = {"model": (0, 2), "launch": (1, 3)}.get(name, (limits.min, limits.max))
        fields.append(st.integers(int(low), int(high)))
    return st.lists(st.tuples(*fields), max_size=12).map(lambda rows: np.array(rows, dtype))


def assert_same(a: Trace, b: Trace) -> None:
    assert isinstance(a, EngineTrace)
    assert isinstance(b, EngineTrace)
    for name in ("blocks", "launches", "jobs", "segments", "owners"):
        found, expected = getattr(a, name), getattr(b, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    for name in ("kernels", "device", "dropped", "unfinished", "models", "policy", "simulated"):
        assert getattr(a, name) == getattr(b, name)


@given(numbers(JOB_RECORD), numbers(SEGMENT_RECORD), numbers(OWNER), st.text(max_size=5), st.booleans())
@settings(max_examples=60)
def test_whatever_an_engine_knows_is_read_back_identical(
    jobs: Records, segments: Records, owners: Records, name: str, simulated: bool
) -> None:
    plain = make(MIX, dropped=3)
    trace = EngineTrace(plain.blocks, plain.launches, NAMES, TOY, 3)
    trace.know(jobs, segments, owners, ("bert", name, "x"), name, simulated)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.pptrace"
        trace.save(path)
        assert_same(Trace.load(path), trace)
        assert_same(EngineTrace.load(path), trace)


def test_plain_traces_keep_the_format_that_older_versions_read(tmp_path: Path) -> None:
    for trace, version in ((make(MIX), 1), (engine_trace(), 2)):
        trace.save(tmp_path / "some")
        assert struct.unpack_from("<I", (tmp_path / "some").read_bytes(), 8) == (version,)
    make(MIX).save(tmp_path / "plain")
    assert type(Trace.load(tmp_path / "plain")) is Trace


def changed(path: Path, change: Any) -> Path:
    """The file with another header and a correct checksum."""
    content = path.read_bytes()
    magic, version, header_bytes, _, _ = struct.unpack_from("<8sIIQI", content)
    meta = json.loads(content[28 : 28 + header_bytes])
    change(meta)
    header = json.dumps(meta).encode()
    body = header + content[28 + header_bytes :]
    path.write_bytes(struct.pack("<8sIIQI", magic, version, len(header), len(body), zlib.crc32(body)) + body)
    return path


def test_traces_of_other_versions_say_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "some"
    engine_trace().save(path)
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", 3)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"format 3, .* up to 2: upgrade paellapy"):
        Trace.load(path)
    engine_trace().save(path)
    with pytest.raises(TraceError, match="kind 'quantum': import paellapy first, or upgrade"):
        Trace.load(changed(path, lambda meta: meta.update(kind="quantum")))
    engine_trace().save(path)
    with pytest.raises(TraceError, match="layout"):
        Trace.load(changed(path, lambda meta: meta["tables"][0][2].__setitem__(0, ["number", "<u8"])))


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta["tables"].pop(),
        lambda meta: meta["tables"][0].__setitem__(1, -1),
        lambda meta: meta["tables"][0].__setitem__(1, 1 << 40),
        lambda meta: meta["tables"][1][2].__setitem__(0, ["model", "O"]),
        lambda meta: meta["tables"].append("x"),
        lambda meta: meta.pop("models"),
        lambda meta: meta.update(models=[]),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: Any, tmp_path: Path) -> None:
    engine_trace().save(tmp_path / "some")
    with pytest.raises(TraceError):
        Trace.load(changed(tmp_path / "some", change))


def test_a_window_keeps_the_requests_that_were_there() -> None:
    part = engine_trace().select(start_ns=EPOCH + 4950, end_ns=EPOCH + 5200)
    assert part.jobs["request"].tolist() == [1, 2]
    assert part.segments["segment"].tolist() == [1]
    assert part.owners["launch"].tolist() == [1, 2]
    assert part.models == ("bert", "resnet")
    assert part.model_of_launch().tolist() == [0, 0]


def test_lateness_counts_from_the_deadline() -> None:
    assert engine_trace().lateness_ns().tolist() == [2500, -500, 0]


def test_it_says_what_it_is() -> None:
    trace = engine_trace()
    assert repr(trace).endswith("0 unfinished, 3 requests under paella>")
    trace.know(trace.jobs, trace.segments, trace.owners, trace.models, "edf", True)
    assert repr(trace).endswith("3 requests under edf, simulated time>")


# -- what an engine makes of records


def model(name: str, target_ms: float | None = None) -> Model:
    spec = {"x": TensorSpec(1)}
    return Model(name, lambda *_: None, inputs=spec, outputs=spec, batch=(1, 2), target_ms=target_ms)


def completion(serial: int, row: int, instance: int, arrival: int, start: int, end: int, due: int = NEVER) -> Any:
    entry = np.zeros(1, COMPLETION)[0]
    entry["serial"], entry["model"], entry["instance"], entry["arrival_ns"] = serial, row, instance, arrival
    entry["started_ns"], entry["finish_ns"], entry["deadline_ns"] = start, end, due
    return entry


def filled(pieces: list[TracedPiece], entries: list[Any], whole: bool) -> EngineTrace:
    plain = make(MIX)
    trace = EngineTrace(plain.blocks[:0], plain.launches[:0], (), TOY)
    recorded = TracedBlocks(plain.blocks, plain.launches, plain.kernels, pieces)
    models = {7: model("bert", target_ms=0.002), 9: model("resnet")}
    engine = TracedEngine(models, {4: 7, 5: 9}, lambda ns: ns + EPOCH, "srpt", whole)
    fill_engine_trace(trace, recorded, entries, engine)
    return trace


ENTRIES = [completion(1, 7, 4, 0, 0, 9000), completion(2, 9, 5, 10, NEVER, 50, due=40)]
REPLAYED = [TracedPiece(4, 1, 0, (1,), True), TracedPiece(4, 1, 1, (2,), True), TracedPiece(4, 1, -1, (1, 2), True)]


def test_a_deadline_is_the_request_s_own_or_its_model_s_target() -> None:
    jobs = filled([], [*ENTRIES, completion(3, 9, 5, 20, 30, 60)], whole=False).jobs
    assert (jobs["deadline_ns"] - EPOCH).tolist() == [2000, 40, -1 - EPOCH]
    assert jobs["start_ns"].tolist() == [EPOCH, -1, EPOCH + 30]


@pytest.mark.parametrize(("whole", "expected"), [(False, [(0, 4), (1, 3)]), (True, [(-1, 7)])])
def test_replayed_graphs_show_as_what_the_policy_launches(whole: bool, expected: list[tuple[int, int]]) -> None:
    """A graph's replays have the same launch ids whether it ran in one piece or in segments."""
    trace = filled(REPLAYED, ENTRIES, whole)
    assert [(s["segment"], s["blocks"]) for s in trace.segments] == expected
    assert trace.segments["batch"].tolist() == [2] * len(expected)
    assert trace.owners.tolist() == [(1, 0, 4), (2, 0, 4)]
    assert trace.model_of_launch().tolist() == [0, 0, -1]


def test_what_ran_for_a_model_that_is_gone_is_nobody_s() -> None:
    trace = filled([TracedPiece(99, 0, 0, (1,), False)], ENTRIES, whole=False)
    assert not len(trace.segments)
    assert not len(trace.owners)


def test_ranges_and_work_of_a_backend_s_blocks_are_kept() -> None:
    plain = make(MIX)
    ranges = np.zeros(len(plain.blocks), RANGE)
    for column in ("launch", "block", "kernel", "sm", "start_ns", "end_ns"):
        ranges[column] = plain.blocks[column]
    work = np.zeros(len(plain.launches), WORK)
    work["launch"] = plain.launches["launch"]
    recorded = TracedBlocks(plain.blocks, plain.launches, plain.kernels, [], ranges=TracedRanges(ranges, ("load",)),
                            count_work=lambda: work)  # fmt: skip
    trace = EngineTrace(plain.blocks[:0], plain.launches[:0], (), TOY)
    fill_engine_trace(trace, recorded, [], TracedEngine({}, {}, lambda ns: ns, "srpt", False))
    assert len(trace.ranges) == len(plain.blocks)
    assert len(trace.work) == len(plain.launches)
    part = trace.select(launch=1)
    assert len(part.ranges) == (plain.blocks["launch"] == 1).sum()
    assert part.work["launch"].tolist() == [1]
