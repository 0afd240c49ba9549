"""Keepers: a worker that ends or hangs is replaced at once, and clients see nothing of it."""

from __future__ import annotations

import contextlib
import http.server
import math
import os
import signal
import threading
import time
import types
from pathlib import Path

import pytest
from engine_models import scale_model
from places import TESTS
from router_server import INFER, body, check
from serving_server import ask, running

from paellapy.cli.cluster import named_engines, route
from paellapy.cluster import processes
from paellapy.cluster.keeper import heard_over_http
from paellapy.cluster.listener import Routers
from paellapy.cluster.processes import EngineTask, free_port
from paellapy.cluster.router import RouterOptions
from paellapy.instrument.errors import ArgumentError


def until(condition):
    """Polls until the condition holds; the test's own timeout limits it."""
    while not condition():
        time.sleep(0.05)


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def kept_engine(tmp_path, **options):
    models = [{"factory": "served_models:plain"}, {"factory": "served_models:spare"}]
    config = {"device": "virtual:h200", "models": models, "keys": {"tests": "secret"}}
    task = EngineTask(
        config=config, names=["scale", "spare"], loaded=["scale"], folder=str(tmp_path), host="127.0.0.1",
        port=free_port("127.0.0.1"), **options,
    )  # fmt: skip
    kept = processes.kept(task)
    try:
        yield kept, types.SimpleNamespace(port=task.port)
    finally:
        kept.end()


def is_ready(server):
    with contextlib.suppress(OSError):
        return ask(server, "GET", "/v2/health/ready")[0] == 200
    return False


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_is_forked_again_with_the_wanted_models(tmp_path, monkeypatch, sent):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    with kept_engine(tmp_path, hung_s=3.0) as (kept, server):
        until(lambda: kept.health.alive and is_ready(server))
        (first,) = kept.health.pids
        assert b"secret" not in command_line(first)
        kept.tell(loaded=["spare"])  # what a plan wants now
        os.kill(first, sent)
        until(lambda: kept.health.starts == 2 and is_ready(server))
        assert kept.health.pids != [first]
        check(ask(server, "POST", INFER.replace("scale", "spare"), body(), {"X-API-Key": "secret"}))
        assert ask(server, "POST", INFER, body(), {"X-API-Key": "secret"})[0] == 404
        (last,) = kept.health.pids
        kept.process.kill()  # a keeper that is killed takes its server with it
        until(lambda: not is_running(last))


def is_running(pid):
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_a_server_that_answers_late_is_heard():
    """On a busy machine every answer may take longer than the pause between two questions."""

    class Late(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(0.6)
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        task = EngineTask(config={}, names=[], loaded=[], folder="", host="127.0.0.1", port=server.server_port)
        assert heard_over_http(task)
        server.shutdown()
    assert not heard_over_http(task)


def test_a_killed_or_hung_router_is_replaced_and_no_connection_is_left_in_its_queue():
    with (
        running([scale_model(batch=(1, 4))]) as engine,
        Routers({"e": engine.url}, RouterOptions(port=0, key="secret"), 2) as routers,
    ):
        door = types.SimpleNamespace(port=int(routers.url.rpartition(":")[2]))
        until(lambda: routers.kept.health.alive)
        check(ask(door, "POST", INFER, body()))
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            before, starts = routers.kept.health.pids, routers.kept.health.starts
            assert b"secret" not in command_line(before[0])
            os.kill(before[0], sent)
            for _ in range(8):  # the kernel deals them out to both
                check(ask(door, "POST", INFER, body()))
            until(lambda starts=starts: routers.kept.health.starts == starts + 1)
            assert routers.kept.health.pids[1:] == before[1:]
        routers.kept.process.kill()
        routers.kept.process.wait()
        routers.look()
        check(ask(door, "POST", INFER, body()))
        last = routers.kept
    assert last.ended


@pytest.mark.parametrize(
    ("engines", "number", "field"),
    [
        ({}, 1, "engines"),
        ({"a": "http://x:1", "b": "http://x:1"}, 1, "engines"),
        ({"a": "http://x:1"}, 0, "number"),
    ],
)
def test_routers_without_sense_are_refused(engines, number, field):
    with pytest.raises(ArgumentError, check=lambda e: e.field == field):
        Routers(engines, RouterOptions(port=0), number)


@pytest.mark.parametrize(
    ("field", "value"), [("port", 99999), ("port", -1), ("every_ms", 0), ("hold_s", math.nan), ("held_mb", -1.0)]
)
def test_options_without_sense_are_refused(field, value):
    options = {"max_held_bytes": -1_000_000} if field == "held_mb" else {field: value}
    with pytest.raises(ArgumentError, check=lambda e: e.field == field and repr(e.given) == repr(value)):
        RouterOptions(**options)


@pytest.mark.parametrize("held_mb", [float("nan"), float("inf"), 0.0])
def test_the_command_refuses_what_no_router_can_hold(held_mb):
    with pytest.raises(ArgumentError, check=lambda e: e.field == "held_mb"):
        route(["http://127.0.0.1:1"], held_mb=held_mb)


def test_engines_have_names():
    assert named_engines(["http://x:1", "b=http://x:2"]) == {"engine-0": "http://x:1", "b": "http://x:2"}
    with pytest.raises(ArgumentError, check=lambda e: e.given == "b"):
        named_engines(["b=http://x:1", "b=http://x:2"])
