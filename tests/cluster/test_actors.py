"""An engine's actor, without Ray: a standby, which has done the slow part of a start, replaces its server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
from pathlib import Path

import pytest
from places import TESTS
from router_server import INFER, body, check
from serving_server import ask

from paellapy.cluster.actors import EngineActor

pytest.importorskip("ray")


def until(condition):
    """Polls until the condition holds; the test's own timeout limits it."""
    while not condition():
        time.sleep(0.05)


def is_ready(server):
    with contextlib.suppress(OSError):
        return ask(server, "GET", "/v2/health/ready")[0] == 200
    return False


def test_the_standby_takes_over_with_the_models_that_are_wanted_by_then(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    monkeypatch.setattr("paellapy.cluster.actors.STANDBY_AFTER_S", 0.0)
    models = [{"factory": "served_models:plain"}, {"factory": "served_models:spare"}]
    config = {"device": "virtual:h200", "models": models, "keys": {"tests": "secret"}}
    task = {"config": config, "names": ["scale", "spare"], "loaded": ["scale"], "folder": str(tmp_path)}
    actor = EngineActor("engine-0", task, "127.0.0.1", 30.0, True)
    try:
        said = actor.info(["scale"])
        server = types.SimpleNamespace(port=int(said["url"].rpartition(":")[2]))
        until(lambda: is_ready(server))
        first = actor.info(["spare"])  # what a plan wants now
        assert b"secret" not in Path(f"/proc/{first['pid']}/cmdline").read_bytes()
        until(lambda: actor._standby is not None)
        standby = actor._standby.pid
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: actor.info(["spare"])["pid"] == standby)
        until(lambda: is_ready(server))
        check(ask(server, "POST", INFER.replace("scale", "spare"), body(), {"X-API-Key": "secret"}))
        assert ask(server, "POST", INFER, body(), {"X-API-Key": "secret"})[0] == 404
        assert actor.info(["spare"])["starts"] == 2
    finally:
        actor.stop()
    with pytest.raises(ConnectionRefusedError):
        ask(server, "GET", "/v2/health/live")


def test_a_server_that_answers_late_is_not_taken_for_a_silent_one(tmp_path, monkeypatch):
    """On a busy machine every answer may take longer than the pause between two questions."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr("paellapy.cluster.processes.MODULE", "slow_server")
    hung_s = 4.0
    task = {"config": {}, "names": [], "loaded": [], "folder": str(tmp_path)}
    actor = EngineActor("engine-0", task, "127.0.0.1", hung_s, False)
    answers = tmp_path / "answers"
    try:
        until(answers.exists)
        heard_at = time.monotonic()
        until(lambda: time.monotonic() - heard_at > hung_s + 1.0)
        assert actor.info([])["starts"] == 1
        assert len(set(answers.read_text().split())) == 1
        os.kill(actor.info([])["pid"], signal.SIGSTOP)
        until(lambda: actor.info([])["starts"] == 2)
    finally:
        actor.stop()
