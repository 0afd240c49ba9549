"""Preemptible launches: preempted and resumed they compute what plain ones do; slices keep a bound on turnaround."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import TRITON_CASES, Case, assert_same
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

import paellapy as pp
from paellapy.instrument.device import virtual
from paellapy.instrument.errors import ArgumentError, InstrumentError, LaunchError
from paellapy.instrument.gpu_model import parts
from paellapy.instrument.kernels.preempt import Turnaround, Wave

REFUSED = {"spin_lock", "grid_barrier", "gemm_two_ctas"}
CASES = [c for c in TRITON_CASES if c.evaluable and c.name not in REFUSED]
B = 16


@triton.jit
def plus(x, out, chain, n, turns, B: tl.constexpr):
    """Adds to the output, so that a block that runs twice, or not at all, shows. `turns` dependent loads take time."""
    block = tl.program_id(0)
    for _ in range(turns):
        block = tl.load(chain + block)
    i = block * B + tl.arange(0, B)
    tl.store(out + i, tl.load(out + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)


@pytest.fixture
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened
        opened.synchronize()


class Job:
    """Blocks of `plus`, enough for several waves, with their expected sum."""

    def __init__(self, blocks: int = 4000, turns: int = 200) -> None:
        n = blocks * B
        self.x, self.out = np.arange(1, n + 1, dtype=np.float32), np.zeros(n, np.float32)
        self.grid, self.rest = (blocks,), (np.arange(blocks, dtype=np.int32), n, turns)
        self.kernel = pp.kernel(plus, report=None)

    def launch(self, **keywords: Any) -> pp.PreemptibleLaunch:
        return self.kernel.preemptible(**keywords)[self.grid](self.x, self.out, *self.rest, B=B)

    def add_to(self, target: np.ndarray) -> None:
        """A plain launch that reads the blocks' results."""
        self.kernel[self.grid](self.out, target, *self.rest, B=B)

    def ran(self) -> np.ndarray:
        return np.flatnonzero(self.out.reshape(-1, B).all(axis=1))

    def right(self) -> bool:
        return np.array_equal(self.out, self.x)


def after(device: Any, ns: int) -> None:
    """Lets the host wait for a while."""
    device.wait_until(device.host_ns() + ns)


def test_a_launch_that_nobody_preempts_runs_as_any_other(device: Any) -> None:
    job = Job(300)
    launch = job.launch()
    launch.synchronize()
    assert launch.done
    assert job.right()
    assert len(launch.left) == 0


def test_blocks_that_have_not_started_are_left_and_run_on_resume(device: Any) -> None:
    job = Job()
    launch = job.launch()
    after(device, 4000)
    launch.preempt()
    left = launch.left
    assert 0 < len(left) < job.grid[0]
    assert not launch.done
    assert np.array_equal(np.union1d(left, job.ran()), np.arange(job.grid[0]))
    assert not np.isin(left, job.ran()).any()
    with failing(LaunchError, kernel="plus", field="synchronize", given=len(left)):
        launch.synchronize()
    launch.resume()
    launch.synchronize()
    assert launch.done
    assert job.right()
    launch.resume()  # nothing is left to do
    assert launch.done


def test_it_can_be_preempted_any_number_of_times(device: Any) -> None:
    job = Job(12_000)
    launch = job.launch()
    counts = []
    while not launch.done and len(counts) < 50:
        after(device, 2000)
        launch.preempt()
        counts.append(len(launch.left))
        launch.resume()
    launch.synchronize()
    assert len(counts) > 2
    assert counts == sorted(counts, reverse=True)
    assert job.right()


def test_a_launch_that_runs_cannot_be_resumed(device: Any) -> None:
    launch = Job().launch()
    with failing(LaunchError, kernel="plus", field="resume"):
        launch.resume()
    launch.synchronize()


def test_one_flag_preempts_all_that_was_launched_under_it_and_nothing_else(device: Any) -> None:
    flag = device.flag()
    queue = [Job() for _ in range(3)]
    launches = [job.launch(flag=flag) for job in queue]
    other = Job()
    with pp.stream():
        beside = other.launch()
    flag.set()
    later = Job()
    with pp.stream():
        running = later.launch(flag=flag)
    for job, launch in zip(queue[1:], launches[1:], strict=True):
        assert len(launch.left) == job.grid[0], "what was behind the first has not begun"
    assert len(launches[0].left) > 0
    for launch in launches:
        launch.resume()
    for launch in (*launches, beside, running):
        launch.synchronize()
    assert all(job.right() for job in (*queue, other, later))


def test_what_follows_on_the_stream_sees_what_the_blocks_have_computed(device: Any) -> None:
    job = Job()
    copy = np.zeros_like(job.out)
    launch = job.launch()
    after(device, 4000)
    launch.preempt()
    job.add_to(copy)
    assert 0 < len(launch.left) < job.grid[0]
    assert np.array_equal(copy, job.out)
    launch.resume()
    job.add_to(copy)
    assert job.right()
    assert np.array_equal(copy, np.where(copy > job.x, 2 * job.x, job.x))


def test_waiting_for_an_event_of_another_stream_sees_them_too(device: Any) -> None:
    job = Job()
    copy = np.zeros_like(job.out)
    first, second = pp.stream(), pp.stream()
    with first:
        job.launch()
        event = first.record()
    second.wait(event)
    with second:
        job.add_to(copy)
    assert job.right()
    assert np.array_equal(copy, job.x)


def test_an_array_s_copy_waits_for_the_stream(device: Any) -> None:
    job = Job(300)
    job.out = pp.array(job.out)
    job.launch()
    assert np.array_equal(job.out.numpy(), job.x)


def test_blocks_are_traced_when_they_run(device: Any) -> None:
    job = Job()
    with pp.trace() as trace:
        launch = job.launch()
        after(device, 4000)
        launch.preempt()
        left = launch.left
        launch.resume()
        launch.synchronize()
    first, second = trace.launches["launch"]
    blocks = trace.blocks
    assert np.array_equal(np.sort(blocks["block"]), np.arange(job.grid[0]))
    assert np.array_equal(np.sort(blocks["block"][blocks["launch"] == second]), left)
    assert list(trace.launches["blocks"]) == [job.grid[0], len(left)]
    assert first != second


def test_an_empty_grid_is_done(device: Any) -> None:
    launch = pp.kernel(plus).preemptible[(0,)](*(np.zeros(1, t) for t in "ffi"), 0, 0, B=B)
    assert launch.done
    launch.preempt()
    launch.synchronize()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_kernels_whose_blocks_depend_on_each_other_are_refused(name: str, device: Any) -> None:
    case = next(c for c in TRITON_CASES if c.name == name)
    call = case.make(np.random.default_rng(1), 0.3)
    with failing(InstrumentError, field="preempt"):
        pp.kernel(case.kernel).preemptible[call.grid](**call.args, **call.constexprs, **call.options)


# -- a bound on turnaround


def test_slices_are_chosen_by_what_a_wave_takes(device: Any) -> None:
    job = Job(30_000)
    launch = job.launch(turnaround=Turnaround(us=36))
    slices = [launch._size]
    while not launch.done:
        after(device, 1000)
        if launch._run is not None and slices[-1] != launch._size:
            slices.append(launch._size)
    assert job.right()
    (wave,) = job.kernel._waves.values()
    assert slices[0] == wave.blocks, "a kernel that was never measured begins with a wave"
    job.out[:] = 0
    again = job.launch(turnaround=Turnaround(us=36))
    assert again._size % wave.blocks == 0
    assert wave.drain_ns(again._size) <= 36_000
    after(device, 3000)
    again.preempt()
    assert len(again.left) > 0
    again.resume()
    again.synchronize()
    assert job.right()


def test_a_preempted_launch_does_not_go_on_to_its_next_slice(device: Any) -> None:
    job = Job()
    launch = job.launch(turnaround=Turnaround(us=5))
    launch.preempt()
    device.synchronize()
    before = len(launch.left)
    assert before
    assert not launch.done
    assert len(launch.left) == before
    launch.resume()
    launch.synchronize()
    assert job.right()


# -- any flag at any time

# After such a share of the plain kernel's time the flag is set, cleared, or set until the launch is resumed.
moments = st.lists(st.tuples(st.floats(0, 0.7), st.sampled_from(["set", "clear", "resume"])), min_size=1, max_size=6)


def at_once(device: Any, flag: Any, is_set: bool) -> None:
    """Writes a flag instantly, so that blocks may start at any moment between two writes."""
    flag._word = flag._epoch if is_set else 0
    device.model.set_flag(flag.number, flag._word)


@functools.cache
def tiny() -> Any:
    """A GPU that holds two blocks, so that grids of the corpus take many waves."""
    whole = parts.part("h200")
    small = dataclasses.replace(
        whole, name="tiny", gpc_sms=(1,), sm=dataclasses.replace(whole.sm, blocks=2), concurrent_grids=8
    )
    made: Any = object.__new__(virtual.VirtualDevice)
    with mock.patch.object(virtual, "part", return_value=small):
        made._setup("tiny")
    return made


@settings(max_examples=40)
@given(st.sampled_from(CASES), moments, st.integers(0, 2**30), st.sampled_from([None, None, 20.0]))
def test_whenever_the_flag_changes_the_result_is_the_plain_kernel_s(
    case: Case, script: list[tuple[float, str]], seed: int, turnaround_us: float | None
) -> None:
    plain, call = (case.make(np.random.default_rng(seed), 0.5) for _ in range(2))
    kernel = pp.kernel(case.kernel, report=None)
    with tiny() as device:
        model, latency_ns = device.model, device.model.timing.launch_ns
        device.synchronize()
        kernel[plain.grid](**plain.args, **plain.constexprs, **plain.options)
        started_ns = device.host_ns() + latency_ns
        device.synchronize()
        whole_ns = device.host_ns() - started_ns
        flag, bound = device.flag(), None if turnaround_us is None else Turnaround(us=turnaround_us)
        with pp.trace() as trace:
            launch = kernel.preemptible(flag, bound)[call.grid](**call.args, **call.constexprs, **call.options)
            model.run(max(model.now_ns, device.host_ns() + latency_ns))
            for share, what in script:
                model.run(model.now_ns + share * whole_ns)
                at_once(device, flag, what != "clear")
                if what == "resume":
                    launch.resume()
                    model.run(max(model.now_ns, device.host_ns() + latency_ns))
            while not launch.done:
                if launch._run is not None and launch._run.over():
                    launch.resume()
    total = int(np.prod(call.grid))
    assert np.array_equal(np.sort(trace.blocks["block"]), np.arange(total)), "every block once"
    assert_same(case, call, *({name: np.asarray(each.args[name]) for name in call.outputs} for each in (call, plain)))


times = st.floats(1.0, 1e7)


@st.composite
def waves(draw: st.DrawFn) -> Wave:
    return Wave(draw(st.integers(1, 5000)), draw(times), draw(st.floats(1.0, 1e5)))


bounds = st.builds(Turnaround, st.floats(0.001, 1e5))
totals = st.integers(1, 100_000)


@given(bounds, waves(), totals, st.integers(0, 1000))
def test_slices_make_up_the_whole_launch(bound: Turnaround, wave: Wave, total: int, first: int) -> None:
    wave = Wave(max(wave.blocks, total // 500), wave.time_ns, wave.exit_ns)
    parts = bound.parts(total, wave, first)
    at = first
    for start, count in parts:
        assert start == at
        assert count >= 1
        at += count
    assert at == first + total
    assert all(count <= bound.blocks(wave) for _, count in parts)
    assert len(parts) <= -(-total // bound.blocks(wave)), "as few as may be"


@given(bounds, waves())
def test_the_largest_slice_keeps_the_bound_wherever_any_can(bound: Turnaround, wave: Wave) -> None:
    most, slack = bound.blocks(wave), 1 + 1e-9
    assert most % wave.blocks == 0, "whole waves"
    if most > wave.blocks or wave.drain_ns(wave.blocks) <= bound.us * 1e3:
        assert wave.drain_ns(most) <= bound.us * 1e3 * slack
        assert wave.drain_ns(most + wave.blocks) * slack >= bound.us * 1e3, "another wave would be too much"
    else:
        assert most == wave.blocks


@given(waves(), st.lists(st.floats(0.001, 1e5), min_size=2, max_size=6))
def test_more_time_never_means_smaller_slices(wave: Wave, times_us: list[float]) -> None:
    found = [Turnaround(us).blocks(wave) for us in sorted(times_us)]
    assert found == sorted(found)


def test_slices_are_as_equal_as_whole_waves_allow() -> None:
    wave = Wave(100, time_ns=10_000, exit_ns=1_000)
    assert Turnaround(us=13.5).parts(1000, wave) == ((0, 300), (300, 300), (600, 300), (900, 100))
    assert Turnaround(us=14.5).parts(900, wave) == ((0, 300), (300, 300), (600, 300))
    assert Turnaround(us=5).parts(250, wave) == ((0, 100), (100, 100), (200, 50))
    assert Turnaround(us=35).parts(0, wave) == ()


@pytest.mark.parametrize("us", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_is_some_time(us: float) -> None:
    with failing(ArgumentError, field="us"):
        Turnaround(us)


@pytest.mark.parametrize(
    "fields", [(0, 1.0), (1, 0.0), (1, float("nan")), (1, 1.0, 0.0), (1, 1.0, float("inf"))]
)
def test_a_profile_that_cannot_be_is_refused(fields: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError) as raised:
        Wave(*fields)  # type: ignore[arg-type]
    assert raised.value.field == "wave"
