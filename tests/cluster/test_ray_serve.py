"""Ray Serve around engines: replicas answer, and its router prefers who would finish first."""

from __future__ import annotations

import asyncio
import runpy
import types

import numpy as np
import pytest
from places import ROOT

pytest.importorskip("ray.serve")
# Ray's own
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.xdist_group("ray"),  # one Ray for all
]


def replica(name, **stats):
    return types.SimpleNamespace(replica_id=name, routing_stats=stats)


def test_the_router_ranks_by_predicted_finish_and_counts_what_it_sends():
    from paellapy.cluster.ray_serve import PredictedFinishRouter

    router = object.__new__(PredictedFinishRouter)
    router.initialize_state()
    slow = replica("slow", **{"predicted_ms:m": 3.0, "step_ms:m": 2.0})
    fast = replica("fast", **{"predicted_ms:m": 1.0, "step_ms:m": 1.5})
    router._replicas = {each.replica_id: each for each in (slow, fast)}
    request = types.SimpleNamespace(args=("m",))

    def first():
        return asyncio.run(router.choose_replicas([slow, fast], request))[0][0].replica_id

    assert first() == "fast"
    router.on_request_routed(request, "fast", None)
    assert first() == "fast"
    router.on_request_routed(request, "fast", None)
    assert first() == "slow"
    fast.routing_stats = {"predicted_ms:m": 1.0, "step_ms:m": 1.5}  # a new report
    assert first() == "fast"


def test_serve_answers_from_engines(nodes):
    from ray import serve

    from paellapy.cluster.ray_serve import engine_deployment

    try:
        options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
        app = engine_deployment("served_models:plain", "virtual:h200", **options)
        handle = serve.run(app, name="paellapy", route_prefix=None)
        x = np.arange(64, dtype=np.float32)
        found = handle.infer.remote("scale", {"x": x}).result(timeout_s=120)
        np.testing.assert_array_equal(next(iter(found.values())), 2 * x)
    finally:
        serve.shutdown()


def test_the_example_runs(nodes, capsys):
    runpy.run_path(str(ROOT / "deploy" / "ray_serve" / "example.py"))["main"]()
    assert capsys.readouterr().out.count("(10,)") == 8
