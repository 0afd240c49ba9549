"""Slices that keep a bound on turnaround."""

from __future__ import annotations

import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.kernels.preempt import Turnaround, Wave

times = st.floats(1.0, 1e7)


@st.composite
def waves(draw: st.DrawFn) -> Wave:
    time_ns = draw(times)
    block_ns = draw(st.none() | st.floats(0.01, 1.0).map(lambda share: share * time_ns))
    return Wave(draw(st.integers(1, 5000)), time_ns, block_ns, draw(st.floats(1.0, 1e5)))


bounds = st.builds(Turnaround, st.floats(0.001, 1e5), st.booleans())
totals = st.integers(1, 100_000)


@given(bounds, waves(), totals, st.booleans(), st.integers(0, 1000))
def test_slices_make_up_the_whole_launch(bound: Turnaround, wave: Wave, total: int, flag: bool, first: int) -> None:
    wave = Wave(max(wave.blocks, total // 500), wave.time_ns, wave.block_ns, wave.exit_ns)
    if bound.below_wave:
        total = min(total, 300)
    parts = bound.parts(total, wave, flag, first)
    at = first
    for start, count in parts:
        assert start == at
        assert count >= 1
        at += count
    assert at == first + total
    assert all(count <= bound.blocks(wave, flag) for _, count in parts)
    assert len(parts) <= -(-total // bound.blocks(wave, flag)), "as few as may be"


@given(bounds, waves(), st.booleans())
def test_the_largest_slice_keeps_the_bound_wherever_any_can(bound: Turnaround, wave: Wave, flag: bool) -> None:
    taken = wave.drain_ns if flag else wave.slice_ns
    most, slack = bound.blocks(wave, flag), 1 + 1e-9
    if most > wave.blocks or taken(wave.blocks) <= bound.us * 1e3:
        assert most % wave.blocks == 0, "whole waves"
        assert taken(most) <= bound.us * 1e3 * slack
        assert taken(most + wave.blocks) * slack >= bound.us * 1e3, "another wave would be too much"
    elif not bound.below_wave or flag or wave.block_ns is None:
        assert most == wave.blocks, "never below one wave unless asked to"
    elif most > 1:
        assert taken(most) <= bound.us * 1e3 * slack


@given(waves(), st.booleans(), st.lists(st.floats(0.001, 1e5), min_size=2, max_size=6))
def test_more_time_never_means_smaller_slices(wave: Wave, flag: bool, times_us: list[float]) -> None:
    found = [Turnaround(us).blocks(wave, flag) for us in sorted(times_us)]
    assert found == sorted(found)


def test_slices_are_as_equal_as_whole_waves_allow() -> None:
    wave = Wave(100, time_ns=10_000)
    assert Turnaround(us=35).parts(1000, wave) == ((0, 300), (300, 300), (600, 300), (900, 100))
    assert Turnaround(us=45).parts(900, wave) == ((0, 300), (300, 300), (600, 300))
    assert Turnaround(us=5).parts(250, wave) == ((0, 100), (100, 100), (200, 50))
    assert Turnaround(us=35).parts(0, wave) == ()


def test_below_a_wave_the_time_of_a_block_decides() -> None:
    wave = Wave(100, time_ns=10_000, block_ns=2_000)
    assert Turnaround(us=6, below_wave=True).blocks(wave) == 50
    assert Turnaround(us=1, below_wave=True).blocks(wave) == 1
    assert Turnaround(us=6).blocks(wave) == 100


def test_under_a_flag_only_the_blocks_that_leave_take_time() -> None:
    wave = Wave(100, time_ns=10_000, exit_ns=1_000)
    assert Turnaround(us=20).blocks(wave) == 200
    assert Turnaround(us=20).blocks(wave, flag=True) == 1000


@pytest.mark.parametrize("us", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_is_some_time(us: float) -> None:
    with failing(ArgumentError, field="us"):
        Turnaround(us)


@pytest.mark.parametrize(
    "fields", [(0, 1.0), (1, 0.0), (1, float("nan")), (1, 1.0, 2.0), (1, 1.0, 0.0), (1, 1.0, None, 0)]
)
def test_a_profile_that_cannot_be_is_refused(fields: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError) as raised:
        Wave(*fields)  # type: ignore[arg-type]
    assert raised.value.field in ("wave", "block_ns")
