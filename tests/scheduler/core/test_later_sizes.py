"""Batch sizes that are not captured yet, as the core sees them."""

from __future__ import annotations

import numpy as np
import pytest
from core_bench import Bench, profile

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.install import install, install_size, open_model
from paellapy.scheduler.core.state import Limits

LIMITS = Limits(
    models=4, instances=16, instances_per_model=4, sizes=4, batch=8, segments=8, requests=48, clients=4, inputs=2
)
BATCH = (1, 2, 4, 8)


def bench_without_the_sizes_between() -> tuple[Bench, int]:
    bench = Bench([], limits=LIMITS)
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


def test_batches_run_at_the_sizes_that_are_there_and_name_the_one_they_want():
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


def test_a_instance_that_runs_keeps_its_size_when_a_better_one_comes():
    bench, model = bench_without_the_sizes_between()
    for _ in range(3):
        bench.submit()
    bench.step()
    install_size(bench.state, model, profile(batch=BATCH, segments=3), 4)
    bench.step()  # checks the tables
    bench.run_dry()
    assert len(bench.done) == 3


def test_predictions_are_those_of_the_size_that_will_run():
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
