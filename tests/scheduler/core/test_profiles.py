"""Profiles of models: stored, checked, and installed in the core's tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile

from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import (
    ModelProfile,
    SegmentProfile,
    estimated_demand,
    install,
    install_size,
    load_profiles,
    open_model,
    save_profiles,
)

pytestmark = pytest.mark.quick


def test_a_demand_that_was_not_measured_is_estimated_from_the_fullest_resource() -> None:
    state = Bench([]).state
    half = int(state.gpu["capacity_warps"][0] / 2)
    assert estimated_demand(state, [SegmentProfile(1e6, warps=half, registers=0)]) == pytest.approx(0.5)
    busy = SegmentProfile(1e6, registers=0, kernels=round(state.gpu["capacity_issue"][0] * 1e-3 / 4))
    assert estimated_demand(state, [busy]) == pytest.approx(0.25, rel=0.01)
    assert estimated_demand(state, [busy, SegmentProfile(1e6, warps=10 * half, registers=0)]) == 1.0


def test_profiles_survive_a_file(tmp_path: object) -> None:
    path = tmp_path / "models.json"  # type: ignore[operator]
    models = [profile(batch=(1, 4), target_ms=2.5, priority=3), profile("b", share=0.5, demand={1: 0.3})]
    save_profiles(path, models)
    assert load_profiles(path) == models
    path.write_text('{"models": [{"name": "x"}]}')
    with pytest.raises(ProfileError) as caught:
        load_profiles(path)
    assert caught.value.given == str(path)


@pytest.mark.parametrize(
    ("field", "given", "make"),
    [
        ("time_ns", 0.0, lambda: SegmentProfile(0.0)),
        ("kernels", 0, lambda: SegmentProfile(1.0, kernels=0)),
        ("memory", 1.5, lambda: SegmentProfile(1.0, memory=1.5)),
        ("sizes", {}, lambda: ModelProfile("m", {})),
        ("sizes", {1: []}, lambda: ModelProfile("m", {1: []})),
        ("share", 0.0, lambda: profile(share=0.0)),
        ("target_ms", -1, lambda: profile(target_ms=-1)),
        ("needs", {1: [5]}, lambda: profile(needs={1: [5]})),
        ("batch", 2, lambda: profile().alone_ns(2)),
        ("segments", 9, lambda: install(st.new_state(LIMITS), profile(segments=9))),
        ("batch", 16, lambda: install(st.new_state(LIMITS), profile(batch=(1, 16)))),
        ("instances_per_model", 5, lambda: install(st.new_state(LIMITS), profile(instances=5))),
    ],
)
def test_a_wrong_profile_is_refused(field: str, given: object, make: Any) -> None:
    with pytest.raises(ProfileError) as caught:
        make()
    assert (caught.value.field, caught.value.given) == (field, given)


BATCH = (1, 2, 4, 8)


def bench_without_the_sizes_between() -> tuple[Bench, int]:
    bench = Bench([], limits=replace(LIMITS, sizes=4))
    model, _ = install(bench.state, profile(batch=(1, 8), segments=2), BATCH)
    open_model(bench.state, model)
    bench.step()
    return bench, model


def run(bench: Bench, n: int) -> int:
    """Runs a batch of n requests; returns the size at which it ran."""
    for _ in range(n):
        bench.submit()
    bench.step()
    (instance,) = np.flatnonzero(bench.state.instance["state"] == codes.RUNNING)
    found = int(bench.state.size["batch"][0, bench.state.instance["size"][instance]])
    bench.run_dry()
    return found


def test_batches_run_at_captured_sizes_and_mark_the_size_they_want():
    bench, model = bench_without_the_sizes_between()
    size = bench.state.size[model]
    assert run(bench, 1) == 1
    assert run(bench, 8) == run(bench, 5) == 8
    assert size["capture"].tolist() == [codes.LATER] * 4
    assert run(bench, 3) == 8
    assert size["capture"].tolist() == [codes.LATER, codes.LATER, codes.WANTED, codes.LATER]
    install_size(bench.state, model, profile(batch=BATCH, segments=3), 4)
    assert run(bench, 3) == 4
    assert run(bench, 2) == 4
    assert size["capture"].tolist() == [codes.LATER, codes.WANTED, codes.WANTED, codes.LATER]
    size["capture"][1] = codes.GIVEN_UP
    assert run(bench, 2) == 4
    assert size["capture"][1] == codes.GIVEN_UP


def test_an_instance_that_runs_keeps_its_size_when_a_better_one_comes():
    bench, model = bench_without_the_sizes_between()
    for _ in range(3):
        bench.submit()
    bench.step()
    install_size(bench.state, model, profile(batch=BATCH, segments=3), 4)
    bench.step()  # checks the tables
    bench.run_dry()
    assert len(bench.done) == 3


def test_predictions_use_the_captured_size_that_will_run():
    bench, model = bench_without_the_sizes_between()
    whole, _ = bench_without_the_sizes_between()
    for k in (1, 2):
        install_size(whole.state, model, profile(batch=BATCH, segments=2), BATCH[k])
    for each in (bench, whole):
        each.submit(direct=True, ready=False)  # another request of the same batch, still being written
    ahead = [predict_finish(each.state, model, each.now) - each.now for each in (bench, whole)]
    times = bench.state.size["total_ns"][model]
    longer = times[3] - whole.state.size["total_ns"][model, 1]
    assert ahead[0] - ahead[1] == pytest.approx(longer, abs=2)
    assert longer > 0
