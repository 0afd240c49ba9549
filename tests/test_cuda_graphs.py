"""What the times between the events of a graph say about its nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from scheduler.cuda_graphs import without_events
from scheduler.segments import cut

US = 1_000.0
kernels_us = hs.lists(hs.floats(1.5, 300), min_size=1, max_size=80)


@given(kernels_us, hs.floats(0, 3))
def test_the_cost_of_events_is_taken_off(kernels, event):
    times = np.array(kernels) * US
    found = without_events(times + event * US, [True] * len(times), float(times.sum()))
    np.testing.assert_allclose(found, times, rtol=1e-6, atol=1e-3)


@given(kernels_us, hs.floats(0, 3), hs.floats(2, 50), hs.floats(500, 10_000))
def test_a_copy_that_is_late_in_every_run_does_not_hide_the_kernels(kernels, event, copy, late):
    times = np.array([copy, *kernels, copy]) * US
    seen = times + event * US
    seen[-1] += late * US
    found = without_events(seen, [False, *([True] * len(kernels)), False], float(times.sum()))
    assert min(found) > 0
    assert sum(found) <= 1.01 * sum(times) + late * US


@pytest.mark.parametrize("late", [0.0, 3_000.0, 50_000.0])
def test_a_program_is_cut_though_a_copy_is_late(late):
    times = np.array([5.0, *[8.0] * 42, 5.0]) * US
    seen = times + 2.5 * US
    seen[0] += late * US
    found = without_events(seen, [False, *[True] * 42, False], float(times.sum()))
    assert len(cut(found, 20 * US)) > 10


def test_without_kernels_there_is_still_an_answer():
    assert without_events(np.array([3e3, 5e3]), [False, False], 4e3) == [1e3, 3e3]
