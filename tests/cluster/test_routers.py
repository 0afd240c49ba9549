"""Routers as processes: several on one port, and one that is killed is not missed."""

from __future__ import annotations

import os
import signal
import types

import pytest
from engine_models import scale_model
from router_server import INFER, body, check
from serving_server import ask, running

from paellapy.cli_cluster import _named
from paellapy.cluster.router import RouterOptions
from paellapy.cluster.routers import Routers
from paellapy.instrument.errors import ArgumentError


def test_a_killed_router_is_replaced_and_no_connection_is_left_in_its_queue():
    with (
        running([scale_model(batch=(1, 4))]) as engine,
        Routers({"e": engine.url}, RouterOptions(port=0), 2) as routers,
    ):
        door = types.SimpleNamespace(port=int(routers.url.rpartition(":")[2]))
        check(ask(door, "POST", INFER, body()))
        before = [each.pid for each in routers.processes]
        os.kill(before[0], signal.SIGKILL)
        routers.processes[0].wait()
        routers.look()
        assert [each.pid for each in routers.processes][1:] == before[1:]
        for _ in range(8):  # the kernel deals them out to both
            check(ask(door, "POST", INFER, body()))
    assert all(each.poll() is not None for each in routers.processes)


@pytest.mark.parametrize(
    ("engines", "number", "said"),
    [
        ({}, 1, "needs engines"),
        ({"a": "http://x:1", "b": "http://x:1"}, 1, "one address"),
        ({"a": "http://x:1"}, 0, "one or more"),
    ],
)
def test_routers_without_sense_are_refused(engines, number, said):
    with pytest.raises(ArgumentError, match=said):
        Routers(engines, RouterOptions(port=0), number)


def test_engines_have_names():
    assert _named(["http://x:1", "b=http://x:2"]) == {"engine-0": "http://x:1", "b": "http://x:2"}
    with pytest.raises(ArgumentError, match="two engines are named"):
        _named(["b=http://x:1", "b=http://x:2"])
