"""A second process of the engine that has loaded everything and waits: it takes over when the engine ends."""

from __future__ import annotations

from serving_processes import processes
from serving_server import BODY, ask

INFER = "/v2/models/own/infer"
CONFIG = """
device = "virtual:h200"
[server]
port = 0
log_format = "json"
[[models]]
name = "own"
factory = "own_model:own"
"""
OWN = """
from engine_models import scale_model

def own():
    return scale_model("own", factor={}, batch=(1,))
"""


def is_ready(server):
    return ask(server, "GET", "/v2/health/ready")[0] == 200


def answer(server):
    """The answer; None while the worker that was asked has not found the new engine: each worker finds it by itself."""
    status, headers, content = ask(server, "POST", INFER, BODY)
    assert status == 200 or (status == 503 and "Retry-After" in headers)
    return content["outputs"][0]["data"][0] if status == 200 else None


def standby_after(server, before):
    """The process id of a standby other than `before` that has loaded its models."""

    def loaded():
        return [line["pid"] for line in server.lines() if line["message"] == "a standby is ready"]

    server.wait_until(lambda: loaded() and loaded()[-1] != before)
    return loaded()[-1]


def test_it_takes_over_at_once_however_often_and_knows_what_was_changed(tmp_path):
    (tmp_path / "own_model.py").write_text(OWN.format("2.0"))
    (tmp_path / "serve.toml").write_text(CONFIG)
    with processes(str(tmp_path / "serve.toml"), workers=2, standby_after_s=0.0) as server:
        first = standby_after(server, 0)
        engine = server.kill("engine")
        server.wait_until(lambda: server.pids("engine") == [first] and is_ready(server))
        server.wait_until(lambda: answer(server) == 2.0)
        assert engine not in server.pids("spare")
        second = standby_after(server, first)
        (tmp_path / "own_model.py").write_text(OWN.format("3.0"))
        assert ask(server, "POST", "/v2/repository/models/own/load", b"")[0] == 200
        third = standby_after(server, second)
        server.kill("engine")
        server.wait_until(lambda: server.pids("engine") == [third] and is_ready(server))
        server.wait_until(lambda: answer(server) == 3.0)
        fourth = standby_after(server, third)
        server.kill("engine")
        server.wait_until(lambda: server.pids("engine") == [fourth])
        ended = [line for line in server.lines() if line["message"].startswith("a process ended")]
        assert len(ended) == 3
        assert not any("again_in_s" in line for line in ended)
