"""Live counts: differences of counters that wrap, carry into each other, and are read between two updates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stand_in_device import StandInDevice

from paellapy.instrument.records import SM_LINE, WARP_SHIFT
from paellapy.instrument.traces.session import counts

# Anywhere, and where a count of blocks is about to carry into the count of warps above it.
words = st.one_of(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32).map(lambda warps: ((warps << WARP_SHIFT) - 3) % 2**64)
)


def on_an_sm(started: int, ended: int) -> tuple[int, int]:
    lines = np.zeros(1, SM_LINE)
    lines["started"], lines["ended"] = started, ended
    now = counts(StandInDevice.make(lines=lines))
    return int(now.resident_blocks[0]), int(now.resident_warps[0])


def packed(blocks: int, warps: int) -> int:
    return (blocks + (warps << WARP_SHIFT)) % 2**64


@given(words, st.integers(0, 32), st.integers(0, 64))
def test_resident_is_what_started_and_did_not_end_wherever_counters_stand(ended: int, blocks: int, warps: int) -> None:
    assert on_an_sm((ended + packed(blocks, warps)) % 2**64, ended) == (blocks, warps)


@given(words, st.integers(0, 32), st.integers(0, 64))
def test_an_end_seen_before_its_start_is_nothing_resident(started: int, blocks: int, warps: int) -> None:
    assert on_an_sm(started, (started + packed(blocks, warps)) % 2**64) == (0, 0)


def test_counts_tell_blocks_warps_and_occupancy_of_every_sm() -> None:
    lines = np.zeros(3, SM_LINE)
    lines["started"] = [packed(5, 20), packed(1, 64), 0]
    lines["ended"] = [packed(3, 12), 0, 0]
    now = counts(StandInDevice.make(lines=lines))
    assert now.started.tolist() == [5, 1, 0]
    assert now.ended.tolist() == [3, 0, 0]
    assert now.resident_blocks.tolist() == [2, 1, 0]
    assert now.resident_warps.tolist() == [8, 64, 0]
    assert now.occupancy.tolist() == [8 / 64, 1.0, 0.0]
    assert all(a.dtype == np.int64 for a in (now.started, now.ended, now.resident_blocks, now.resident_warps))


def test_without_a_device_the_current_one_is_asked() -> None:
    with StandInDevice.make() as device:
        device.lines["started"] = packed(1, 2)
        assert counts().resident_warps.tolist() == [2, 2]
