"""A server with a memory budget: the places of weights as clients see them, and requests that wait for a copy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chain_models import SMALL, N, chain, expected, room_for, settle
from serving_server import DEVICE, ask, infer_body, running, scrape

from paellapy.scheduler.engine.monitor import Monitor

X = np.random.default_rng(0).standard_normal(N).astype(np.float32)


@pytest.fixture(scope="module")
def server():
    """Two models, of which one fits at a time."""
    settings = {"memory_bytes": room_for(DEVICE, 1), "quantum_us": 2, "tuning": SMALL}
    with running([chain("one", 1)[0], chain("two", 2)[0]], engine=settings) as found:
        yield found


def infer(server, name, **parameters):
    return ask(server, "POST", f"/v2/models/{name}/infer", json.dumps(infer_body("x", X, parameters=parameters)))


def places(server):
    return {each["name"]: each["weights"] for each in ask(server, "POST", "/v2/repository/index")[2]}


def metrics(server):
    return {(each.name, *each.labels.values()): each.value for each in scrape(server)}


def test_index_dashboard_and_metrics_say_where_weights_are(server):
    for name, seed in (("two", 2), ("one", 1)):  # the second one makes the first one leave
        status, _, found = infer(server, name)
        assert status == 200
        answer = found["outputs"][0]["data"]
        np.testing.assert_allclose(answer, expected(chain(name, seed)[1], X), rtol=2e-3, atol=2e-3)
    assert places(server) == {"one": "resident", "two": "host"}
    with Monitor(server.engine) as monitor:
        shown = {each["name"]: each["weights"] for each in monitor.snapshot()["models"]}
    assert (shown["one"]["state"], shown["one"]["there"]) == ("resident", 1.0)
    assert (shown["two"]["state"], shown["two"]["there"]) == ("host", 0.0)
    before = metrics(server)
    server.engine.evict("one")
    assert places(server) == {"one": "host", "two": "host"}
    assert infer(server, "one")[0] == 200
    after = metrics(server)
    grown = {name: after[name, "one"] - before[name, "one"] for name, *_ in after if (name, "one") in before}
    assert grown["paellapy_reloads_total"] == grown["paellapy_cold_requests_total"] == 1
    assert grown["paellapy_evictions_total"] == 1
    assert grown["paellapy_reload_seconds_total"] > 0
    assert 0 < after["paellapy_weights_hit_rate",] < 1
    assert after["paellapy_weights_bytes", "host"] == 2 * after["paellapy_weights_bytes", "gpu"] > 0
    assert after["paellapy_weights_bytes", "disk"] == 0


def test_a_request_whose_weights_come_too_late_is_refused_and_the_weights_come_nevertheless(server):
    server.engine.evict("one")
    rate = server.engine.state.residency["ns_per_byte"]
    measured, rate[0] = rate[0], 1e5  # as if the link took ten seconds
    status, headers, _ = infer(server, "one", timeout=2_000_000)  # µs
    assert status == 503
    assert 6 <= int(headers["Retry-After"]) <= 60
    settle(server.engine, "one", "resident")
    assert infer(server, "one", timeout=2_000_000)[0] == 200  # no copy any more
    rate[0] = measured
