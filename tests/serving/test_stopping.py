"""A server that stops finishes what has arrived, waits a little for what is arriving, and for nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import numpy as np
import pytest
from engine_models import scale_model
from raw_client import Client
from router_server import routing
from serving_server import infer_body, running

from paellapy.serving import listening
from paellapy.serving.listening import Connection

FOREVER_S = 1e4  # a test that waits for this long fails
PATIENT = {"body_timeout_s": FOREVER_S, "drain_s": FOREVER_S}
BODY = json.dumps(infer_body("x", np.ones((1, 64), np.float32))).encode()
LENGTH = len(BODY)
WAYS = pytest.mark.parametrize("more", ["", "traceparent: none\r\n"], ids=["fast path", "aiohttp"])


def head(more="", length=LENGTH):
    return f"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {length}\r\n\r\n".encode()


@contextlib.contextmanager
def served(kind, models=()):
    """A server, or a router in front of one; yields it and a function that begins to stop it."""
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(running(models or [scale_model(batch=(1,))], **PATIENT))
        stop = found.server.stop
        if kind == "router":
            found = opened.enter_context(routing({"e": found.url}, **PATIENT))
            found.wait_until(lambda: found.router.ready)
            stop = found.door.stop
        yield found, lambda: asyncio.run_coroutine_threadsafe(stop(), found.loop)


def opened_by(server):
    runner = server.door._runner if hasattr(server, "door") else server.server._runner
    return list(runner.server.connections)


@pytest.fixture
def stops(monkeypatch):
    """Set when the first connection is told that the server stops."""
    told, arrive = threading.Event(), Connection.arrive

    def noted(self, *args):
        told.set()
        return arrive(self, *args)

    monkeypatch.setattr(Connection, "arrive", noted)
    return told


@WAYS
@pytest.mark.parametrize("kind", ["server", "router"])
def test_a_body_that_never_comes_does_not_delay_the_end(monkeypatch, kind, more):
    monkeypatch.setattr(listening, "UNFINISHED_S", 0.2)
    with served(kind) as (server, stop), Client(server) as client:
        client.send(head(more) + BODY[:100])
        server.wait_until(lambda: any(c.arriving for c in opened_by(server)))
        stopped = stop()
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "stops" in json.loads(body)["error"]
        assert client.closed
        stopped.result()


@WAYS
@pytest.mark.parametrize("kind", ["server", "router"])
def test_a_body_that_comes_after_the_signal_is_answered(monkeypatch, stops, kind, more):
    monkeypatch.setattr(listening, "UNFINISHED_S", FOREVER_S)
    with served(kind) as (server, stop), Client(server) as client:
        client.send(head(more) + BODY[:100])
        server.wait_until(lambda: any(c.arriving for c in opened_by(server)))
        stopped = stop()
        stops.wait()
        client.send(BODY[100:])
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["outputs"][0]["data"] == [2.0] * 64
        stopped.result()


def test_a_header_that_never_ends_and_a_refused_body_do_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(listening, "UNFINISHED_S", 0.2)
    with served("server") as (server, stop), Client(server) as client, Client(server) as refused:
        client.send(head()[:40])
        refused.send(head("traceparent: none\r\n").replace(b"scale", b"nope"))  # 404, and its body is read nevertheless
        assert refused.answer()[0] == 404
        server.wait_until(lambda: any(c.arriving for c in opened_by(server)))
        stopped = stop()
        assert client.answer()[0] == 408
        stopped.result()


@WAYS
def test_an_answer_that_is_being_sent_is_sent_to_its_end(stops, more):
    """More bytes than the kernel's buffers hold."""
    n = 4 << 20
    tensor = {"name": "x", "shape": [1, n], "datatype": "FP32", "parameters": {"binary_data_size": 4 * n}}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = f"{more}Inference-Header-Content-Length: {len(body)}\r\n"
    with served("server", [scale_model(n=n, batch=(1,))]) as (server, stop), Client(server) as client:
        client.send(head(lines, len(body) + 4 * n) + body + np.ones(n, np.float32).tobytes())
        server.wait_until(lambda: any(c._send_timer is not None for c in opened_by(server)))
        (connection,) = opened_by(server)
        stopped = stop()
        stops.wait()
        status, _, found = client.answer()
        assert status == 200
        assert np.frombuffer(found[-4 * n :], np.float32).sum() == 2.0 * n
        stopped.result()
        assert connection._to_client is None


def test_a_limit_of_zero_is_no_endless_wait():
    """aiohttp takes a time limit of 0 as none."""
    with running([scale_model(batch=(1,), instances=1)], drain_s=0.0) as server, Client(server) as client:
        held = server.hold("scale")
        client.send(head("traceparent: none\r\n") + BODY)
        server.wait_until(lambda: server.service.in_flight == 1)
        server.call(server.server.stop())
        held.cancel()
