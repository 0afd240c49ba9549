"""Ray Serve around engines: replicas answer, and its router prefers the replica that would finish first."""

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


def test_a_replica_answers_from_its_engine_and_reports_what_a_request_would_take():
    from paellapy.cluster.ray_serve import EngineReplica

    replica = EngineReplica("served_models:plain", "virtual:h200")
    x = np.arange(64, dtype=np.float32)

    async def asked():
        return await replica.infer("scale", {"x": x}), await replica.record_routing_stats()

    found, stats = asyncio.run(asked())
    np.testing.assert_array_equal(next(iter(found.values())), 2 * x)
    assert stats["predicted_ms:scale"] == pytest.approx(stats["step_ms:scale"], abs=1e-3)  # nobody waits before it
    assert stats["step_ms:scale"] > 0


def test_serve_answers_from_two_replicas_as_the_example_shows(nodes, capsys):
    runpy.run_path(str(ROOT / "deploy" / "ray_serve" / "example.py"))["main"]()
    assert capsys.readouterr().out.count("(10,)") == 8
