"""Signs of life: what a server does, tick by tick, while its engine gives none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from engine_models import scale_model
from serving_server import BODY, DEVICE, INFER, ask, infer_body, running
from waiting import held_core

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.callbacks import Watchdog
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.server import DOUBTFUL_S, TICK_S, Heartbeat


class Work:
    name = "m"

    def __init__(self):
        self.errors = []

    def abandon(self, error):
        self.errors.append(type(error))


@pytest.fixture
def given_up():
    return []


@pytest.fixture
def service():
    return SimpleNamespace(engine=SimpleNamespace(client=None), live=set(), silent=False, draining=False)


@pytest.fixture
def heartbeat(service, given_up):
    found = Heartbeat(service, 10.0, lambda: given_up.append(True))
    found._watchdog = SimpleNamespace(responds=lambda: service.alive)
    service.alive = False
    return found


def tick(heartbeat, seconds):
    for _ in range(round(seconds / TICK_S)):
        heartbeat.look()


@pytest.mark.parametrize("more", [{}, {"traceparent": "none"}])  # the fast path, and aiohttp's
def test_deadlines_are_kept_while_the_engine_is_silent(monkeypatch, more):
    monkeypatch.setattr("paellapy.serving.server.TICK_S", 1e4)
    body = json.dumps(infer_body("x", np.ones((1, 64), np.float32), parameters={"timeout": 20_000})).encode()
    with running([scale_model(batch=(1,))]) as server:
        with held_core(server.engine):
            assert ask(server, "POST", INFER, body, more)[0] == 503
        assert server.service.counters.of("scale").refused == {"deadline": 1}
        assert ask(server, "POST", INFER, BODY, more)[0] == 200


def test_a_silent_engine_is_not_ready_then_given_up_once(heartbeat, service, given_up):
    work = Work()
    service.live = {work}
    tick(heartbeat, DOUBTFUL_S - TICK_S)
    assert not service.silent
    tick(heartbeat, TICK_S)
    assert service.silent
    assert not given_up
    tick(heartbeat, 20.0)
    assert given_up == [True]
    assert work.errors == [EngineAwayError]


def test_signs_of_life_make_it_good_again(heartbeat, service, given_up):
    tick(heartbeat, 9.0)
    service.alive = True
    tick(heartbeat, TICK_S)
    assert not service.silent
    service.alive = False
    tick(heartbeat, 9.0)
    assert not given_up


def test_a_server_that_stops_does_not_wait_for_a_silent_engine(heartbeat, service, given_up):
    service.draining = True
    tick(heartbeat, DOUBTFUL_S)
    assert given_up == [True]


def test_no_model_of_a_silent_engine_is_ready(monkeypatch):
    monkeypatch.setattr("paellapy.serving.server.TICK_S", 1e4)
    with running([scale_model(batch=(1,))]) as server:
        assert ask(server, "GET", "/v2/models/scale/ready")[0] == 200
        server.service.silent = True
        assert ask(server, "GET", "/v2/models/scale/ready")[0] == 503


def test_an_engine_that_works_responds_and_one_that_stands_still_does_not():
    with Engine(DEVICE) as engine:
        engine.load(scale_model(batch=(1,)))
        watchdog = Watchdog(engine.client)
        assert watchdog.responds()
        engine.infer_sync("scale", {"x": np.ones(64, np.float32)})  # posted after it, and so read after it
        assert watchdog.responds()
        watchdog._posted += 1000  # as if the core had read nothing since
        assert not watchdog.responds()


def test_an_engine_whose_core_is_still_compiled_is_not_silent():
    class Starting:
        closed = False
        state = SimpleNamespace(core={"steps": [0]}, ring=None)

    watchdog = Watchdog(SimpleNamespace(core=SimpleNamespace(ring=Starting())))
    assert all(watchdog.responds() for _ in range(5))
