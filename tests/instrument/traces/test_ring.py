"""Rings as a device would leave them, decoded back into the schedule they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, LAUNCH, RING_RECORD, Records
from paellapy.instrument.traces.ring import Mark, decode

pytestmark = pytest.mark.quick


US, MS, S = 1_000, 1_000_000, 1_000_000_000
EPOCH = 1_780_000_000 * S  # %globaltimer counts from 1970 on most parts

Row = tuple[int, int, int, int, int]  # launch, block, sm, start_ns, end_ns


@dataclass
class Device:
    """Reserves slots in order of call and writes records in order of end, as the instrumented blocks do."""

    n_sm: int
    capacity: int
    started: list[Row] = field(default_factory=list)
    submits: dict[int, int] = field(default_factory=dict)

    def run(self, launch: int, sm: int, start_ns: int, duration_ns: int) -> None:
        self.started.append((launch, len(self.started), sm, start_ns, start_ns + duration_ns))

    def tails(self, at_ns: int | None = None) -> np.ndarray[Any, np.dtype[np.uint32]]:
        sms = [sm for _, _, sm, start, _ in self.started if at_ns is None or start < at_ns]
        return np.bincount(sms, minlength=self.n_sm).astype(np.uint32)

    def read(self, at_ns: int | None = None) -> tuple[Records, set[Row]]:
        """The rings when they are read at `at_ns`, and the blocks whose records they still hold."""
        rings = np.zeros((self.n_sm, self.capacity), RING_RECORD)
        tails = [0] * self.n_sm
        writes = []
        for row in self.started:
            sm = row[2]
            if at_ns is None or row[4] < at_ns:
                writes.append((row[4], sm, tails[sm] % self.capacity, row))
            tails[sm] += 1
        seen: dict[tuple[int, int], Row] = {}
        for _, sm, slot, row in sorted(writes):
            launch, block, _, start, end = row
            rings[sm, slot] = (start % 2**32, end % 2**32, block, launch)
            seen[sm, slot] = row
        return rings, set(seen.values())

    def launches(self) -> Records:
        out = np.zeros(len(self.submits), LAUNCH)
        out["launch"] = list(self.submits)
        out["submit_ns"] = list(self.submits.values())
        out["kernel"] = out["launch"] % 3
        return out


def rows(blocks: Records) -> list[Row]:
    names = ("launch", "block", "sm", "start_ns", "end_ns")
    return list(zip(*(blocks[name].tolist() for name in names), strict=True))


sms = st.integers(0, 2)
jitter = st.integers(-5 * US, 5 * US)


@given(
    st.lists(
        st.tuples(
            sms,
            st.one_of(st.integers(0, 50 * US), st.integers(0, 3_900 * MS)),  # replay: time since the SM's last start
            st.integers(0, 4_200 * MS),
            jitter,
        ),
        max_size=60,
    ),
    st.integers(0, 2**32),
)
def test_replays_over_minutes_keep_their_times(work: list[tuple[int, int, int, int]], phase: int) -> None:
    device = Device(3, 64, submits={1: EPOCH + phase})
    last = [EPOCH + phase + 10 * US] * 3
    for sm, gap, duration, wobble in work:
        last[sm] += gap
        device.run(1, sm, last[sm] + wobble, duration)
    rings, held = device.read()
    blocks, dropped, unfinished = decode(device.tails(), rings, device.launches())
    assert sorted(rows(blocks)) == sorted(held) == sorted(device.started)
    assert (dropped, unfinished) == (0, 0)


@given(
    st.lists(
        st.tuples(
            sms,
            st.one_of(st.integers(0, 50 * US), st.integers(0, 300 * S)),  # idle before the launch
            st.integers(-MS, MS),  # error of the host's estimate
            st.integers(0, 3_900 * MS),  # time in the queue
            st.integers(1, 3),  # blocks
        ),
        max_size=40,
    ),
    st.sampled_from([4, 16]),
    st.integers(0, 2**32),
)
def test_a_submission_anchors_its_blocks_after_any_idle_time(
    work: list[tuple[int, int, int, int, int]], capacity: int, phase: int
) -> None:
    device = Device(3, capacity)
    now = EPOCH + phase
    for sm, idle, error, queued, count in work:
        now += idle
        launch = len(device.submits) + 1
        device.submits[launch] = now + error
        now += queued
        for i in range(count):
            device.run(launch, sm, now + 3 * US * i, 5 * US)
    rings, held = device.read()
    blocks, dropped, unfinished = decode(device.tails(), rings, device.launches())
    assert sorted(rows(blocks)) == sorted(held)
    assert dropped == len(device.started) - len(held)
    assert unfinished == 0


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 50 * US), st.integers(0, 30 * MS), st.integers(0, 20 * S)),
            st.one_of(st.integers(0, 50 * US), st.integers(0, 900 * MS)),
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([4, 8]),
    st.integers(0, 2**32),
    st.integers(0, 2 * S),
)
def test_marks_place_replays_of_an_old_graph_in_overflowed_rings(
    work: list[tuple[int, int]], capacity: int, phase: int, early: int
) -> None:
    captured = EPOCH + phase
    begin = captured + 500 * S
    device = Device(1, capacity, submits={1: captured})
    now = begin + 5 * US
    for gap, duration in work:
        now += gap
        device.run(1, 0, now, duration)
    read_ns = max(begin, now + 1 * S - early) + 1
    device.started = [row for row in device.started if row[3] < read_ns]
    ticks = [*range(begin, read_ns, S), read_ns]
    marks = [Mark(at, device.tails(at)) for at in ticks]
    rings, held = device.read(read_ns)
    tails = device.tails()
    blocks, dropped, unfinished = decode(tails, rings, device.launches(), marks[::-1])
    assert len(blocks) + dropped + unfinished == len(device.started)

    in_place = {row for row in device.started[-capacity:] if row in held}
    decoded = set(rows(blocks))
    assert in_place <= decoded
    # An older record in a newer slot is told apart as long as it is less than 4.29 s - 1 s - slack behind its place.
    behind = {
        row: device.started[place][3] - row[3]
        for row in held - in_place
        for place in range(row[1] % capacity, len(device.started), capacity)
        if place >= len(device.started) - capacity
    }
    assert {row for row, lag in behind.items() if lag < 2_400 * MS} <= decoded


@given(st.lists(st.tuples(st.integers(0, 20 * MS), st.integers(0, 1_500 * MS)), max_size=80), st.integers(0, 2**32))
def test_long_blocks_in_an_overflowed_ring_shift_nobody(work: list[tuple[int, int]], phase: int) -> None:
    device = Device(1, 8, submits={1: EPOCH + phase})
    now = EPOCH + phase
    for gap, duration in work:
        now += gap
        device.run(1, 0, now, duration)
    # Without marks, nothing but order and the first submission is known: the whole must fit the first 4 s.
    rings, held = device.read(now + 100 * MS)
    blocks, _, _ = decode(device.tails(), rings, device.launches())
    assert sorted(rows(blocks)) == sorted(held)


@pytest.mark.parametrize("marked", [True, False])
def test_a_long_block_written_over_a_newer_record_shifts_nobody(marked: bool) -> None:
    begin = EPOCH + 500 * S
    device = Device(1, 4, submits={1: EPOCH if marked else begin})
    device.run(1, 0, begin + 500 * MS, 900 * MS)
    for i in range(6):
        device.run(1, 0, begin + (1_100 if i < 4 else 1_500) * MS + i * MS, 10 * US)
    marks = marked * [Mark(at, device.tails(at)) for at in (begin, begin + S, begin + 2 * S)]
    rings, held = device.read()
    blocks, dropped, _ = decode(device.tails(), rings, device.launches(), marks)
    assert blocks["block"].tolist() == [3, 0, 5, 6]
    assert set(rows(blocks)) == held
    assert dropped == 3


def test_overflow_is_counted_and_the_newest_stay() -> None:
    device = Device(2, 4, submits={1: EPOCH})
    for i in range(11):
        device.run(1, 1, EPOCH + 10 * i * US, 5 * US)
    rings, _ = device.read()
    blocks, dropped, unfinished = decode(device.tails(), rings, device.launches())
    assert blocks["block"].tolist() == [7, 8, 9, 10]
    assert blocks["sm"].tolist() == [1] * 4
    assert blocks["kernel"].tolist() == [1] * 4
    assert (dropped, unfinished) == (7, 0)


def test_a_block_that_had_not_ended_is_unfinished_not_dropped() -> None:
    device = Device(1, 4, submits={1: EPOCH})
    device.run(1, 0, EPOCH, 5 * S)
    device.run(1, 0, EPOCH + US, US)
    rings, _ = device.read(EPOCH + S)
    blocks, dropped, unfinished = decode(device.tails(), rings, device.launches())
    assert blocks["block"].tolist() == [1]
    assert (dropped, unfinished) == (0, 1)


def test_nothing_recorded_gives_no_blocks() -> None:
    blocks, dropped, unfinished = decode(
        np.zeros(3, np.uint32), np.zeros((3, 8), RING_RECORD), np.zeros(0, LAUNCH), [Mark(5, np.zeros(3, np.uint32))]
    )
    assert blocks.dtype == BLOCK
    assert (len(blocks), dropped, unfinished) == (0, 0, 0)


def test_records_of_a_launch_nobody_listed_are_refused() -> None:
    device = Device(1, 4, submits={1: EPOCH})
    device.run(9, 0, EPOCH, US)
    rings, _ = device.read()
    with failing(TraceError, field="rings", given=9):
        decode(device.tails(), rings, device.launches())
    with failing(TraceError, field="rings", given=9):
        decode(device.tails(), rings, np.zeros(0, LAUNCH))


def test_a_launch_listed_twice_is_refused() -> None:
    launches = np.zeros(2, LAUNCH)
    launches["launch"] = 4
    with failing(TraceError, field="launches", given=4):
        decode(np.zeros(1, np.uint32), np.zeros((1, 4), RING_RECORD), launches)


@pytest.mark.parametrize(
    ("tails", "rings", "field"),
    [
        (np.zeros(1, np.uint32), np.zeros((1, 6), RING_RECORD), "capacity"),
        (np.zeros(2, np.uint32), np.zeros((1, 4), RING_RECORD), "tails"),
        (np.zeros(1, np.uint32), np.zeros((1, 4), np.uint32), "rings"),
    ],
)
def test_memory_of_the_wrong_shape_is_refused(tails: Any, rings: Any, field: str) -> None:
    with failing(TraceError, field=field):
        decode(tails, rings, np.zeros(0, LAUNCH))
