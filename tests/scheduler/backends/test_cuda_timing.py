"""What the times between the events of a graph say about its nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from paellapy.scheduler.backends import cuda_timing
from paellapy.scheduler.backends.cuda_timing import saturated_ns, settled_times_ns, without_events
from paellapy.scheduler.models.program import cut

US = 1_000.0
kernels_us = hs.lists(hs.floats(1.5, 300), min_size=1, max_size=80)


@given(kernels_us, hs.floats(0, 3))
def test_the_cost_of_events_is_taken_off(kernels, event):
    times = np.array(kernels) * US
    found = without_events(times + event * US, [True] * len(times), float(times.sum()))
    np.testing.assert_allclose(found, times, rtol=1e-6, atol=1e-3)


@given(hs.lists(hs.floats(4, 12), min_size=24, max_size=200), hs.floats(0, 3), hs.floats(0, 10_000))
def test_a_copy_that_is_late_in_every_run_does_not_hide_the_kernels(kernels, event, late):
    times = np.array([5.0, *kernels, 5.0]) * US
    seen = times + event * US
    seen[-1] += late * US
    found = without_events(seen, [False, *([True] * len(kernels)), False], float(times.sum()))
    assert (np.array(found) >= 0.4 * times).all()
    assert max(found) <= times.sum()


@pytest.mark.parametrize("late", [0.0, 100.0, 300.0, 1_000.0, 3_000.0, 50_000.0])
@pytest.mark.parametrize("kernels", [42, 200])
def test_a_program_is_cut_though_a_copy_is_late(late, kernels):
    times = np.array([5.0, *[8.0] * kernels, 5.0]) * US
    seen = times + 2.5 * US
    seen[0] += late * US
    found = without_events(seen, [False, *[True] * kernels, False], float(times.sum()))
    assert len(cut(found, 20 * US)) > kernels / 4


def test_without_kernels_there_is_still_an_answer():
    assert without_events(np.array([3e3, 5e3]), [False, False], 4e3) == [1e3, 3e3]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose runs take the given times; notes how many graphs each call launches."""

    class Gpu:
        def __init__(self) -> None:
            self.times, self.calls = [], []

        def launch(self, runs, stream, gate):
            self.calls.append([len(run) for run in runs])
            return [[self.times.pop(0) for _ in run] for run in runs]

        def crowd(self, instances, rounds, streams):
            self.calls.append(rounds)
            return self.times.pop(0)

    made = Gpu()
    monkeypatch.setattr(cuda_timing, "launch_times_ns", made.launch)
    monkeypatch.setattr(cuda_timing, "_crowd_ns", made.crowd)
    return made


def test_runs_that_agree_are_not_repeated_and_others_are(gpu):
    gpu.times = [9.0, 9.0, *[5.0, 5.1] * 3]
    assert settled_times_ns([1, 2], 15, 0, None).tolist() == [[5.0, 5.1]] * 3
    assert gpu.calls == [[2] * 4]
    gpu.times = [float(k) for k in range(100)]
    assert len(settled_times_ns([1, 2], 15, 0, None)) == 15


def test_one_graph_runs_again_and_again_behind_a_single_one_in_front_of_it(gpu):
    gpu.times = [9.0, 5.0, 5.0, 5.01]
    assert settled_times_ns([1], 15, 0, None).tolist() == [[5.0], [5.0], [5.01]]
    assert gpu.calls == [[4]]
    gpu.times = [9.0, 5.0, 5.0, 5.01]
    settled_times_ns([1], 15, 0, object())  # queued behind a gate: one at a time, as the queue is short
    assert gpu.calls[1:] == [[1] * 4]


@pytest.mark.parametrize(("times", "runs"), [([60, 61], 2), ([60, 90, 60], 3), ([90, 75, 60], 3)])
def test_a_crowd_runs_until_two_runs_agree(gpu, times, runs):
    gpu.times = [40, *times]
    assert saturated_ns([object()] * 4, 3, [0] * 4) == 5.0
    assert gpu.calls == [1, *[3] * runs]
