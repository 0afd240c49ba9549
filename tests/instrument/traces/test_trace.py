"""What a finished trace answers, checked against slow and obvious ways to the same numbers."""

from __future__ import annotations

import base64
import struct
import tempfile
import zlib
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, LAUNCH, WORK, Records
from paellapy.instrument.traces.trace import FORMAT_VERSION, DeviceFacts, Trace

pytestmark = pytest.mark.quick

EPOCH = 1_780_000_000_000_000_000
TOY = DeviceFacts("toy", n_sm=3, max_warps_per_sm=64, compute_capability=(9, 0), versions={"driver": "580"})
NAMES = ("gemm", "add<int>", "gemm")
WARPS = (4, 1, 8, 16)

Row = tuple[int, int, int, int, int]  # launch, block, sm, start, duration


def make(rows: list[Row], **counts: int) -> Trace:
    """Launches 1 to 4, of kernels 0, 1, 2 and 0; times from EPOCH on."""
    launches = np.zeros(4, LAUNCH)
    launches["launch"] = [1, 2, 3, 4]
    launches["kernel"] = [0, 1, 2, 0]
    launches["warps"] = WARPS
    launches["grid"] = [[2, 1, 1], [6, 1, 1], [3, 2, 1], [2, 3, 4]]
    launches["blocks"] = [2, 6, 6, 24]
    launches["submit_ns"] = EPOCH - 1000
    blocks = np.zeros(len(rows), BLOCK)
    for i, (launch, block, sm, start, duration) in enumerate(rows):
        blocks[i] = (launch, launches["kernel"][launch - 1], sm, block, 0, EPOCH + start, EPOCH + start + duration)
    return Trace(blocks, launches, NAMES, TOY, **counts)


times = st.one_of(st.integers(0, 20), st.integers(0, 10**6), st.integers(0, 10**11))
schedules = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 2), times, times), max_size=25).map(
    make
)


def assert_same(a: Trace, b: Trace) -> None:
    np.testing.assert_array_equal(a.blocks, b.blocks)
    np.testing.assert_array_equal(a.launches, b.launches)
    assert (a.blocks.dtype, a.launches.dtype) == (b.blocks.dtype, b.launches.dtype)
    assert (a.kernels, a.device, a.dropped, a.unfinished) == (b.kernels, b.device, b.dropped, b.unfinished)


def warps_of(blocks: Records) -> list[int]:
    return [WARPS[launch - 1] for launch in blocks["launch"]]


def test_blocks_are_sorted_by_start_then_sm_and_cannot_be_changed() -> None:
    trace = make([(1, 0, 2, 50, 5), (1, 1, 0, 10, 5), (2, 0, 1, 50, 1)])
    assert trace.blocks["sm"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError):
        trace.blocks["sm"] = 0


# -- occupancy and residency


@given(schedules, st.integers(1, 30), st.sampled_from([None, 0, 1, "gemm"]))
def test_occupancy_integrates_to_durations_times_warps(trace: Trace, bins: int, kernel: str | int | None) -> None:
    seen = trace.occupancy(bins, kernel=kernel)
    chosen = trace.blocks if kernel is None else trace.select(kernel=kernel).blocks
    expected = np.zeros(TOY.n_sm)
    np.add.at(expected, chosen["sm"], (chosen["end_ns"] - chosen["start_ns"]) * np.array(warps_of(chosen), np.int64))
    total = (seen.resident * np.diff(seen.edges_ns)).sum(axis=1) * TOY.max_warps_per_sm
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-6)


@given(schedules, st.integers(1, 6), times, times)
def test_occupancy_of_every_bin_is_the_exact_mean(trace: Trace, bins: int, start: int, length: int) -> None:
    seen = trace.occupancy(bins, EPOCH + start, EPOCH + start + length)
    edges = seen.edges_ns.tolist()
    assert (edges[0], edges[-1], len(edges)) == (EPOCH + start, EPOCH + start + length, bins + 1)
    for sm in range(TOY.n_sm):
        for i, (left, right) in enumerate(pairwise(edges)):
            area = sum(
                warps * max(0, min(int(b["end_ns"]), right) - max(int(b["start_ns"]), left))
                for b, warps in zip(trace.blocks, warps_of(trace.blocks), strict=True)
                if b["sm"] == sm
            )
            mean = Fraction(area, (right - left) * TOY.max_warps_per_sm) if right > left else 0
            assert seen.resident[sm, i] == pytest.approx(float(mean), rel=1e-9, abs=1e-12)


def test_occupancy_needs_bins_and_a_forward_window() -> None:
    for arguments in ({"bins": 0}, {"start_ns": 5, "end_ns": 4}):
        with failing(TraceError, field="bins"):
            make([]).occupancy(**arguments)


@given(schedules, st.sampled_from([None, "gemm"]))
def test_residency_agrees_with_counting_at_every_event(trace: Trace, kernel: str | None) -> None:
    seen = trace.residency(kernel)
    chosen = trace.blocks if kernel is None else trace.select(kernel=kernel).blocks
    spans = [(int(b["sm"]), int(b["start_ns"]), int(b["end_ns"])) for b in chosen]
    events = sorted({t for _, s, e in spans for t in (s, e)})
    for sm in range(TOY.n_sm):
        mine = [(s, e) for m, s, e in spans if m == sm]
        # A block shorter than a tick of the clock is there at its instant.
        most = max((sum(s <= t < e or s == t == e for s, e in mine) for t in events), default=0)
        pieces = [(sum(s <= a and b <= e for s, e in mine), b - a) for a, b in pairwise(events)]
        length = max(sum(d for _, d in pieces), 1)
        assert seen.max_blocks[sm] == most
        assert seen.busy_ns[sm] == sum(d for n, d in pieces if n)
        assert seen.mean_blocks[sm] == pytest.approx(sum(n * d for n, d in pieces) / length)


# -- summary and select


def test_summary_tells_a_half_empty_second_wave() -> None:
    # Launch 2 of `add<int>`: 6 blocks of 1 warp, 100 ns each. One block a time on SMs 0 and 1, so SM 0 runs dry at 200
    # of 400 ns while SM 1 works off the rest.
    rows = [(2, 0, 0, 0, 100), (2, 1, 1, 0, 100), (2, 2, 0, 100, 100), (2, 3, 1, 100, 100), (2, 4, 1, 200, 100)]
    (kernel,) = make([*rows, (2, 5, 1, 300, 100)]).summary().kernels
    assert (kernel.kernel, kernel.launches, kernel.blocks) == ("add<int>", 1, 6)
    assert (kernel.mean_ns, kernel.median_ns, kernel.max_ns, kernel.span_ns) == (100, 100, 100, 400)
    assert kernel.occupancy == pytest.approx(1 / 64)
    assert kernel.tail_share == pytest.approx(0.5)


def test_waves_count_what_all_sms_hold_at_once_however_many_blocks_were_there() -> None:
    # An SM of 9.0 holds 32 blocks of 1 warp, and 4 of 16 warps: 3 SMs hold 96 and 12.
    rows = [(launch, block, 0, block, 1) for launch, n in ((2, 6), (4, 24)) for block in range(n)]
    waves = {k.kernel: k.waves for k in make(rows).summary().kernels}
    assert waves == {"add<int>": pytest.approx(6 / 96), "gemm": pytest.approx(24 / 12)}


def test_waves_on_a_part_of_unknown_limits_are_counted_from_the_most_blocks_seen() -> None:
    known = make([(2, 0, 0, 0, 100), (2, 1, 0, 0, 100), (2, 2, 1, 0, 100)])
    unknown = DeviceFacts("unknown", 3, 64, (99, 9))
    (kernel,) = Trace(known.blocks, known.launches, known.kernels, unknown).summary().kernels
    assert kernel.waves == pytest.approx(6 / (3 * 2))


def test_summary_counts_every_replay_and_measures_tails_within_one() -> None:
    once = [(2, 0, 0, 0, 100), (2, 1, 1, 0, 50), (2, 2, 2, 0, 50)]
    replays = [(a, b, c, start + 10**9 * i, d) for i in range(4) for a, b, c, start, d in once]
    summary = make(replays[1:-1]).summary()  # the first and the last record of the trace were lost
    (kernel,) = summary.kernels
    assert kernel.launches == 4
    assert "10 blocks, 4 launches of 1 kernel in" in summary.title
    assert kernel.tail_share == pytest.approx((0 + 50 + 50 + 50) / (50 + 100 + 100 + 100))
    assert kernel.occupancy == pytest.approx(1 / 64)


@given(
    st.integers(3, 6),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), min_size=3, max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_replays_are_told_apart_with_records_lost_at_either_end(
    replays: int, work: list[tuple[int, int]], lost_first: int, lost_last: int
) -> None:
    once = sorted((offset, block, duration) for block, (offset, duration) in enumerate(work))
    rows = [(1, block, block % 3, 1000 * i + offset, d) for i in range(replays) for offset, block, d in once]
    (kernel,) = make(rows[lost_first : len(rows) - lost_last]).summary().kernels
    assert kernel.launches == replays


def test_summary_prints_plainly_with_rich_and_as_html() -> None:
    from rich.console import Console

    trace = make([(1, 0, 0, 0, 1500), (2, 0, 1, 0, 40)], dropped=3)
    text = str(trace.summary())
    assert "3 dropped" in text
    assert "1.50 µs" in text
    console = Console(width=80)
    with console.capture() as printed:
        console.print(trace.summary())
    assert "add<int>" in printed.get()
    assert "1.50 µs" in printed.get()
    assert printed.get().startswith("Trace toy: 2 blocks, 2 launches of 2 kernels in 1.50 µs, 3 dropped,")
    markup = trace._repr_html_()
    assert markup == trace.summary()._repr_html_()
    assert markup.startswith("<table><caption>Trace toy: 2 blocks")
    assert "<th>waves</th>" in markup
    assert "<td>add&lt;int&gt;</td>" in markup
    assert "<td>1.50 µs</td>" in markup


def test_repr_is_one_useful_line() -> None:
    trace = make([(1, 0, 0, 0, 2_500_000)], dropped=7, unfinished=1)
    assert repr(trace) == "<Trace toy: 1 block, 1 launch of 1 kernel in 2.50 ms, 7 dropped, 1 unfinished>"


@given(schedules, st.integers(0, 30), st.integers(0, 30))
def test_select_by_time_keeps_what_was_resident(trace: Trace, start: int, length: int) -> None:
    first, last = EPOCH + start, EPOCH + start + length
    part = trace.select(start_ns=first, end_ns=last)
    np.testing.assert_array_equal(part.occupancy(7, first, last).resident, trace.occupancy(7, first, last).resident)
    assert all(b["start_ns"] < last and (b["end_ns"] > first or b["start_ns"] >= first) for b in part.blocks)
    assert set(part.launches["launch"]) == set(part.blocks["launch"])


def test_select_by_kernel_and_launch() -> None:
    trace = make([(1, 0, 0, 0, 5), (2, 0, 0, 1, 5), (3, 0, 0, 2, 5), (4, 0, 0, 3, 5)], dropped=2)
    assert trace.select(kernel="gemm").blocks["launch"].tolist() == [1, 3, 4]
    assert trace.select(kernel=0).launches["launch"].tolist() == [1, 4]
    assert trace.select(kernel=0, launch=4).blocks["launch"].tolist() == [4]
    assert trace.select(launch=2).kernels == NAMES
    assert trace.select(launch=2).dropped == 2
    trace.unseen = ("other",)
    assert trace.select(launch=2).unseen == ("other",)
    with failing(TraceError, field="kernel", given="gem"):
        trace.select(kernel="gem")
    with failing(TraceError, field="launch", given=9):
        trace.select(launch=9)


# -- the file


def saved(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "some.trace"
    trace.save(path)
    return path


full = st.integers(-(2**63), 2**63 - 1)


@given(schedules, st.lists(st.tuples(full, full, st.integers(0, 2**32 - 1)), max_size=5), st.integers(0, 2**40))
def test_what_is_saved_comes_back_exactly(trace: Trace, extremes: list[tuple[int, int, int]], dropped: int) -> None:
    more = np.zeros(len(extremes), BLOCK)
    for i, (a, b, block) in enumerate(extremes):
        more[i] = (1, 0, 1, block, block, min(a, b), max(a, b))
    launches = trace.launches.copy()
    launches["submit_ns"][0] = extremes[0][0] if extremes else 0
    launches["stream"] = np.arange(4) * (2**62 - 1)
    trace = Trace(np.concatenate([trace.blocks, more]), launches, NAMES, TOY, dropped, 5)
    with tempfile.TemporaryDirectory() as folder:
        assert_same(Trace.load(saved(trace, Path(folder))), trace)


def test_a_hundred_thousand_blocks_fit_well_under_a_megabyte(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    n = 100_000
    blocks = np.zeros(n, BLOCK)
    blocks["launch"] = 1
    blocks["sm"] = rng.integers(0, 132, n)
    blocks["block"] = np.arange(n)
    blocks["start_ns"] = EPOCH + np.cumsum(rng.integers(0, 8, n)) * 32
    blocks["end_ns"] = blocks["start_ns"] + rng.integers(300, 1500, n) * 32
    launches = make([]).launches
    device = DeviceFacts("toy", 132, 64, (9, 0))
    assert saved(Trace(blocks, launches, NAMES, device), tmp_path).stat().st_size < 700_000


GOLDEN = (
    "iVBBRUxMQQoBAAAA3wAAAEIBAAAAAAAA9bPWfXsiYmxvY2tzIjogMiwgImxhdW5jaGVzIjogNCwgImtlcm5lbHMiOiBbImdlbW0i"
    "LCAiYWRkPGludD4iLCAiZ2VtbSJdLCAiZGV2aWNlIjogeyJuYW1lIjogInRveSIsICJuX3NtIjogMywgIm1heF93YXJwc19wZXJf"
    "c20iOiA2NCwgImNvbXB1dGVfY2FwYWJpbGl0eSI6IFs5LCAwXSwgInZlcnNpb25zIjogeyJkcml2ZXIiOiAiNTgwIn19LCAiZHJv"
    "cHBlZCI6IDIsICJ1bmZpbmlzaGVkIjogMX14nGNiY0AAFiDmY0AFQPkUhgwGZYaVDOkMhgxcDAwnGMQZVoDVAgETEKCoZ2JiBlEc"
    "rHwCDEQAFg5WRiYGsCFshFVj08+ggsw3AOIfQJwMxBlArAzEK4E4HYgNiTAPAGvCB8c="
)


def test_files_of_format_1_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "old.trace"
    path.write_bytes(base64.b64decode(GOLDEN))
    assert_same(Trace.load(path), make([(1, 0, 0, 0, 5), (4, 7, 2, 3, 10**10)], dropped=2, unfinished=1))


def test_a_truncated_file_is_named_as_such(tmp_path: Path) -> None:
    path = saved(make([(1, 0, 0, 0, 5)]), tmp_path)
    content = path.read_bytes()
    for length in range(8, len(content)):
        path.write_bytes(content[:length])
        with failing(TraceError, field="length"):
            Trace.load(path)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = saved(make([(1, 0, 0, 0, 5)]), tmp_path)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
        with pytest.raises(TraceError):
            Trace.load(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    for content in (b"", b"PK\x03\x04 an archive", b"\x80\x04\x95 a pickle"):
        path.write_bytes(content)
        with failing(TraceError, field="magic"):
            Trace.load(path)
    with failing(TraceError, field="file"):
        Trace.load(tmp_path / "missing")


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = saved(make([]), tmp_path)
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    path.write_bytes(content)
    with failing(TraceError, field="version", given=3):
        Trace.load(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"blocks": -1, "launches": 0}',
        b'{"blocks": 1e99, "launches": 0}',
        b'{"blocks": 99999999999999999999, "launches": 0}',
        b'{"blocks": 0, "launches": 0, "kernels": [], "device": {"compute_capability": [9, 0]}}',
        b'{"blocks": 0, "launches": 0, "kernels": [], "dropped": 0, "unfinished": 0, "device": {"name": "",'
        b'"n_sm": "9", "max_warps_per_sm": 1, "compute_capability": [9, 0], "versions": {}}}',
        b'{"blocks": 0, "launches": 0, "kernels": [], "dropped": 0, "unfinished": 0, "device": {"name": "",'
        b'"n_sm": -1, "max_warps_per_sm": 1, "compute_capability": [9, 0], "versions": {}}}',
    ],
)
def test_a_wrong_header_with_a_right_checksum_is_an_error_of_ours(header: bytes, tmp_path: Path) -> None:
    body = header + zlib.compress(b"")
    preamble = struct.pack("<8sIIQI", b"\x89PAELLA\n", 1, len(header), len(body), zlib.crc32(body))
    path = tmp_path / "forged"
    path.write_bytes(preamble + body)
    with pytest.raises(TraceError):
        Trace.load(path)


# -- edges


@pytest.mark.parametrize(
    "trace", [make([]), Trace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), TOY)], ids=["launches", "nothing"]
)
def test_an_empty_trace_works_everywhere(trace: Trace, tmp_path: Path) -> None:
    n_sm = trace.device.n_sm
    seen = trace.occupancy(5)
    assert seen.resident.tolist() == [[0.0] * 5] * n_sm
    assert seen.edges_ns.tolist() == [0] * 6
    assert trace.occupancy(2, start_ns=EPOCH).edges_ns.tolist() == [EPOCH] * 3
    assert trace.residency().max_blocks.tolist() == [0] * n_sm
    assert trace.residency().mean_blocks.tolist() == [0] * n_sm
    assert trace.summary().kernels == ()
    assert "0 blocks" in str(trace.summary())
    assert "0 blocks" in repr(trace)
    assert trace._repr_html_().startswith("<table>")
    assert len(trace.select(start_ns=0, end_ns=9).blocks) == 0
    assert_same(Trace.load(saved(trace, tmp_path)), trace)


def test_a_trace_handed_out_early_can_be_filled_later() -> None:
    early, late = make([]), make([(1, 0, 0, 0, 5)])
    early.fill(late.blocks, late.launches, late.kernels, TOY, 4, 2)
    assert_same(early, make([(1, 0, 0, 0, 5)], dropped=4, unfinished=2))
    assert early.residency().max_blocks.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [("launch", 9, "blocks"), ("kernel", 3, "kernels"), ("sm", 3, "sm"), ("end_ns", 0, "end_ns")],
)
def test_inconsistent_blocks_are_refused(field: str, value: int, wrong: str) -> None:
    trace = make([(1, 0, 0, 0, 5)])
    blocks = trace.blocks.copy()
    blocks[field] = value
    with failing(TraceError, field=wrong):
        Trace(blocks, trace.launches, NAMES, TOY)


def test_a_launch_listed_twice_is_refused() -> None:
    launches = make([]).launches
    with failing(TraceError, field="launches"):
        Trace(np.zeros(0, BLOCK), np.concatenate([launches, launches[:1]]), NAMES, TOY)


def test_other_arrays_are_refused() -> None:
    with failing(TraceError, field="dtype"):
        Trace(np.zeros(3), make([]).launches, NAMES, TOY)


# ---- two traces side by side -----------------------------------------------------------------------------------------


@given(schedules, schedules)
def test_every_kernel_of_two_traces_is_compared(a: Trace, b: Trace) -> None:
    found = a.compare(b)
    here, there = ({k.kernel: k for k in t.summary().kernels} for t in (a, b))
    assert len(str(found).splitlines()) >= 1 + len(found.kernels)
    if len(here) == len(there) == 1:
        assert [(k.first, k.second) for k in found.kernels] == [(*here.values(), *there.values())]
    else:
        assert {k.kernel: (k.first, k.second) for k in found.kernels} == {
            name: (here.get(name), there.get(name)) for name in {*here, *there}
        }


def test_bytes_are_compared_where_they_are_known() -> None:
    a, b = (make([(1, 0, 0, 0, 10), (3, 0, 1, 0, 20)]) for _ in range(2))
    b.work = np.zeros(1, WORK)
    b.work["launch"], b.work["bytes"], b.work["wasted_bytes"] = 3, 100, 28
    (found,) = a.compare(b).kernels
    assert (found.first_bytes, found.second_bytes) == (0, 128)
    (again,) = b.compare(b).kernels
    assert again.first_bytes == again.second_bytes == 128
    assert again.first == found.first
