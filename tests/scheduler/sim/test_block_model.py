"""A simulation's trace: every block of the models' own kernels, and the requests of the results."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy import demo
from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.scheduler.sim.recorded_profiles import mix_profiles
from paellapy.scheduler.sim.results import Results

LOAD = pp.Poisson(30_000, {"mlp": 2, "cnn": 1}, duration=0.001)


@pytest.fixture(scope="module")
def models() -> list[pp.Model]:
    return [demo.load("mlp", batch=(1, 2), target_ms=0.05), demo.load("cnn", batch=(1,))]


@pytest.fixture(scope="module")
def results(models: list[pp.Model]) -> dict[str, Results]:
    return {policy: pp.simulate(models, LOAD, policy, trace=True) for policy in ("streams", "srpt")}


def traced(result: Results) -> EngineTrace:
    assert result.trace is not None
    return result.trace


@pytest.mark.parametrize("policy", ["streams", "srpt"])
def test_requests_of_the_trace_are_those_of_the_results(results: dict[str, Results], policy: str) -> None:
    result = results[policy]
    t = traced(result)
    assert (t.policy, t.simulated, t.models) == (policy, True, ("mlp", "cnn"))
    rows = sorted(result.jobs[["arrival_ns", "started_ns", "finish_ns", "model", "batch", "status"]].tolist())
    assert sorted(t.jobs[["arrival_ns", "start_ns", "end_ns", "model", "batch", "status"]].tolist()) == rows
    of_mlp = t.jobs["model"] == 0
    np.testing.assert_array_equal(t.jobs["deadline_ns"][of_mlp], t.jobs["arrival_ns"][of_mlp] + 50_000)
    assert (t.jobs["deadline_ns"][~of_mlp] == -1).all()


@pytest.mark.parametrize("policy", ["streams", "srpt"])
def test_every_block_belongs_to_a_launch_of_a_model_and_to_a_segment(results: dict[str, Results], policy: str) -> None:
    t = traced(results[policy])
    assert len(t.blocks) == t.launches["blocks"].sum() == t.segments["blocks"].sum()
    assert (t.model_of_launch() >= 0).all()
    assert set(t.kernels) >= {"linear", "classify", "conv3x3"}
    for segment in t.segments:
        jobs = t.jobs[(t.jobs["instance"] == segment["instance"]) & (t.jobs["start_ns"] <= segment["start_ns"])]
        assert (jobs["end_ns"] >= segment["end_ns"]).any()


def test_a_request_ends_with_the_copy_of_its_outputs_not_with_its_last_kernel(results: dict[str, Results]) -> None:
    for result in results.values():
        t = traced(result)
        assert t.jobs["end_ns"].max() > t.blocks["end_ns"].max()


def test_streams_launch_whole_programs(results: dict[str, Results]) -> None:
    assert set(traced(results["streams"]).segments["segment"].tolist()) == {-1}


def test_the_same_seed_gives_the_same_trace(models: list[pp.Model], results: dict[str, Results]) -> None:
    again = traced(pp.simulate(models, LOAD, "srpt", trace=True))
    first = traced(results["srpt"])
    np.testing.assert_array_equal(again.jobs, first.jobs)
    columns = ["sm", "start_ns", "end_ns"]
    np.testing.assert_array_equal(again.blocks[columns], first.blocks[columns])


def test_without_trace_there_is_none(models: list[pp.Model]) -> None:
    assert pp.simulate(models, LOAD, "srpt").trace is None


def test_what_cannot_be_traced_says_why(models: list[pp.Model]) -> None:
    with failing(ArgumentError, field="trace"):
        pp.simulate(mix_profiles(), LOAD, trace=True)
    with failing(ArgumentError, field="fidelity"):
        pp.simulate(models, LOAD, trace=True, fidelity="segments")
