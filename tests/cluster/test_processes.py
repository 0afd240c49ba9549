"""Routers as processes: several share a port, and killing one loses no request."""

from __future__ import annotations

import math
import os
import signal
import socket
import types
from pathlib import Path

import pytest
from engine_models import scale_model
from router_server import INFER, body, check
from serving_server import ask, running

from paellapy.cli.cluster import named_engines, route
from paellapy.cluster.actors import RouterActor
from paellapy.cluster.processes import Routers
from paellapy.cluster.router import RouterOptions
from paellapy.instrument.errors import ArgumentError


def test_a_killed_router_is_replaced_and_no_connection_is_left_in_its_queue():
    with (
        running([scale_model(batch=(1, 4))]) as engine,
        Routers({"e": engine.url}, RouterOptions(port=0, key="secret"), 2) as routers,
    ):
        door = types.SimpleNamespace(port=int(routers.url.rpartition(":")[2]))
        check(ask(door, "POST", INFER, body()))
        before = [each.pid for each in routers.processes]
        assert b"secret" not in Path(f"/proc/{before[0]}/cmdline").read_bytes()
        os.kill(before[0], signal.SIGKILL)
        routers.processes[0].wait()
        routers.look()
        assert [each.pid for each in routers.processes][1:] == before[1:]
        for _ in range(8):  # the kernel deals them out to both
            check(ask(door, "POST", INFER, body()))
    assert all(each.poll() is not None for each in routers.processes)


def test_an_actors_router_listens_when_it_knows_its_engines_and_says_why_it_cannot():
    with running([scale_model(batch=(1,))]) as engine, socket.create_server(("127.0.0.1", 0)) as taken:
        door = types.SimpleNamespace(port=taken.getsockname()[1])
        actor = RouterActor("router-0", {"port": door.port}, ["scale"])
        assert "cannot listen" in actor.set_members([("e", engine.url)])["why"]
        taken.close()
        assert actor.set_members([("e", engine.url)])["why"] is None
        check(ask(door, "POST", INFER, body()))
        actor.stop()
        with pytest.raises(ConnectionRefusedError):
            ask(door, "POST", INFER, body())


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
