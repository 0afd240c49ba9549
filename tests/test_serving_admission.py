"""Admission: what cannot be in time is refused at once, what can is let in, and the server learns how slow it is."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
from engine_models import scale_model
from serving_server import DEVICE, infer_body, running

from scheduler.engine import Engine
from serving.admission import Admission, Slowdown
from serving.errors import RefusedError, retry_after_s

X = {"x": np.ones(64, np.float32)}


@pytest.fixture(scope="module")
def engine():
    with Engine(DEVICE) as found:
        found.load(scale_model("fast", batch=(1, 8)))
        found.load(scale_model("slow", steps=200, batch=(1,), target_ms=0.001))
        yield found


def rows(engine):
    return {loaded.model.name: row for row, loaded in engine.loaded_rows().items()}


def test_without_a_limit_everything_is_let_in(engine):
    assert Admission(engine).check(engine.models["fast"], rows(engine)["fast"], None, None) is None


def test_a_deadline_shorter_than_the_model_is_refused(engine):
    model, row = engine.models["fast"], rows(engine)["fast"]
    with pytest.raises(RefusedError, match=r"deadline is 0\.001 ms") as caught:
        Admission(engine).check(model, row, None, 0.001)
    assert caught.value.reason == "predicted_deadline"
    assert retry_after_s(caught.value) == 1
    predicted = Admission(engine).check(model, row, None, 1000.0)
    assert predicted == pytest.approx(engine.profile("fast")[0].whole_ns, rel=1)


@pytest.mark.parametrize(("mode", "refused"), [("targets", True), ("deadlines", False), ("off", False)])
def test_a_target_counts_where_that_is_asked_for(engine, mode, refused):
    admission = Admission(engine, mode)
    model, row = engine.models["slow"], rows(engine)["slow"]
    if refused:
        with pytest.raises(RefusedError, match="target"):
            admission.check(model, row, None, None)
    else:
        assert admission.check(model, row, None, None) is None


def test_off_is_off(engine):
    assert Admission(engine, "off").check(engine.models["fast"], rows(engine)["fast"], None, 1e-6) is None


def test_the_slowdown_finds_a_high_quantile_and_forgets():
    slowdown, rng = Slowdown(), np.random.default_rng(0)
    for ratio in rng.lognormal(np.log(20), 0.5, 4000):
        slowdown.note(1000.0, 1000.0 * ratio)
    assert 20 * np.exp(0.5) < slowdown.factor < 20 * np.exp(1.5)  # the 99th percentile is at 2.33 sigma
    for _ in range(200):
        slowdown.note(1000.0, 1000.0)
    assert slowdown.factor < 5


def test_under_overload_the_surplus_is_refused_and_it_recovers():
    """150 at once are more than fit the target even at the modelled speed."""
    model = scale_model("slow", steps=200, batch=(1,), lanes=1, target_ms=10.0)
    body = infer_body("x", np.ones((1, 64), np.float32))

    async def one(session, url):
        async with session.post(f"{url}/v2/models/slow/infer", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("Retry-After")

    async def main(server):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for _ in range(60):
                assert (await one(session, server.url))[0] in (200, 503)
            found = []
            for _ in range(4):
                found += await asyncio.gather(*(one(session, server.url) for _ in range(150)))
            server.wait_until(lambda: server.engine.stats()["live"] == 0)
            return found, (await one(session, server.url))[0]

    with running([model]) as server:
        found, after = asyncio.run(main(server))
        refused = server.service.counters.of("slow").refused
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    assert all(retry is not None for status, retry in found if status == 503)
    assert after == 200
    assert refused["predicted_target"] == statuses.count(503)
