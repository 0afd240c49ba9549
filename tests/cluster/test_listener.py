"""What a router holds, reads and says before it knows that a request is wanted, and when it is ready."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
from engine_models import scale_model
from raw_client import Client
from router_server import INFER, body, check, routing
from serving_server import ask, running

from paellapy.cli.cluster import route
from paellapy.cluster import router as router_module
from paellapy.cluster.cluster_file import ClusterSettings
from paellapy.cluster.headers import KEPT_S, timeout_s
from paellapy.cluster.router import RouterOptions
from paellapy.serving.limits import BESIDE_BYTES, largest_request

N = 1 << 19  # a request of 2 MiB, longer than the first memory of a body
WAYS = pytest.mark.parametrize("more", ["", "traceparent: none\r\n"], ids=["fast path", "aiohttp"])


@pytest.fixture(scope="module")
def engine():
    with running([scale_model(batch=(1, 4)), scale_model("wide", n=N, batch=(1,), instances=1)]) as found:
        yield found


def wide(more=""):
    """The header and the body of a long request."""
    tensor = {"name": "x", "shape": [1, N], "datatype": "FP32", "parameters": {"binary_data_size": 4 * N}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = ["POST /v2/models/wide/infer HTTP/1.1", "Host: x", f"Content-Length: {len(text) + 4 * N}",
             f"Inference-Header-Content-Length: {len(text)}"]  # fmt: skip
    return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode(), text + np.ones(N, np.float32).tobytes()


def small(more=""):
    return f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body())}\r\n\r\n".encode() + body()


@WAYS
def test_the_bytes_of_all_requests_are_bounded_and_who_finds_no_room_may_try_again(engine, more):
    """One client stops within its body and holds most of the room; it is not shut out by those who come later."""
    head, content = wide(more)
    with (
        routing({"e": engine.url}, max_held_bytes=3 << 20) as router,
        Client(router) as slow,
        Client(router) as other,
    ):
        held = router.router.held
        router.wait_until(lambda: router.router.ready)
        slow.send(head + content[:-1000])
        router.wait_until(lambda: held.nbytes >= len(content) - 1000)
        other.send(head + content)
        status, headers, said = other.answer()
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert f"{3 << 20:,} bytes" in json.loads(said)["error"]
        other.send(small(more))  # there is room for it, and the rest of the refused body has been read
        assert other.answer()[0] == 200
        assert held.nbytes <= held.max_bytes
        slow.send(content[-1000:])
        assert slow.answer()[0] == 200
        router.wait_until(lambda: held.nbytes == 0)
        other.send(head + content)
        assert other.answer()[0] == 200
        page = ask(router, "GET", "/metrics")[2].decode()
        assert "\npaellapy_router_full_total 1.0\n" in page


@WAYS
def test_requests_whose_clients_have_left_hold_nothing(engine, more):
    head, content = wide(more)
    with routing({"e": engine.url}) as router:
        held = router.router.held
        router.wait_until(lambda: router.router.ready)
        with Client(router) as client:
            client.send(head + content[:-1])
            router.wait_until(lambda: held.nbytes >= len(content) - 1)
        router.wait_until(lambda: held.nbytes == 0)
        waiting = engine.hold("wide")
        with Client(router) as client:
            client.send(head + content)
            router.wait_until(lambda: engine.service.in_flight == 1)
        router.wait_until(lambda: router.router.in_flight == 0)
        assert held.nbytes == len(content)  # the engine may be lost, and then nobody needs them; now it has them
        waiting.cancel()
        router.wait_until(lambda: held.nbytes == 0)


@WAYS
def test_a_body_longer_than_the_models_largest_request_is_not_read(engine, more):
    most = largest_request(engine.engine.models["scale"])
    with routing({"e": engine.url}) as router, Client(router) as client:
        router.wait_until(lambda: router.router.ready)
        client.send(f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {most + 1}\r\n\r\n".encode())
        status, headers, said = client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert f"{most:,} bytes" in json.loads(said)["error"]


def test_a_body_in_chunks_is_read_up_to_its_limit_and_the_index_takes_little(engine):
    with routing({"e": engine.url}) as router:
        router.wait_until(lambda: router.router.ready)
        for path, most in (
            (INFER, largest_request(engine.engine.models["scale"])),
            ("/v2/repository/index", BESIDE_BYTES),
        ):
            with Client(router) as client:
                client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
                client.send(b"%x\r\n" % (most + 1) + b" " * (most + 1))
                assert client.answer()[0] == 413
        with Client(router) as client:
            client.send(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n".encode())
            assert client.answer()[0] == 400


def test_keys_are_checked_before_a_long_body_is_read():
    keys = {"alice": "secret", "router": "other"}
    with (
        running([scale_model("wide", n=N, batch=(1,))], keys=keys) as engine,
        routing({"e": engine.url}, key="other") as router,
    ):
        router.wait_until(lambda: router.router.ready)
        for more in ("", "X-API-Key: wrong\r\n", "Transfer-Encoding: chunked\r\n", "traceparent: none\r\n"):
            head = wide(more)[0]
            if "chunked" in more:
                head = head.replace(b"Content-Length: ", b"X-Length: ")
            with Client(router) as client:
                client.send(head)
                assert client.answer()[0] == 401
        for more in ("X-API-Key: secret\r\n", "Authorization: Bearer secret\r\n"):
            with Client(router) as client:
                for _ in range(2):  # the second one's key is known
                    client.send(b"".join(wide(more)))
                    assert client.answer()[0] == 200
        status, _, said = ask(router, "POST", "/v2/models/none/infer", b"{}")
        assert status == 404
        assert "wide" not in said["error"]


def test_a_key_in_use_stays_known():
    with (
        running([scale_model("wide", n=N, batch=(1,))], keys={"alice": "secret", "router": "other"}) as engine,
        routing({"e": engine.url}, key="other") as router,
    ):
        router.wait_until(lambda: router.router.ready)
        known = router.router.keys._accepted_at
        request, before = b"".join(wide("X-API-Key: secret\r\n")), float("-inf")
        for _ in range(2):
            with Client(router) as client:
                client.send(request)
                assert client.answer()[0] == 200
            ((digest, at),) = known.items()
            assert at > before
            before = known[digest] = at - KEPT_S / 2  # a while later it is still known


def test_it_is_ready_when_every_model_that_an_engine_should_have_is_on_one(engine):
    with (
        running([scale_model("late", batch=(1,)), scale_model(batch=(1,))], load=False) as other,
        routing({"e": engine.url, "other": other.url}) as router,
    ):
        router.wait_until(lambda: router.router.knows_all)
        status, _, said = ask(router, "GET", "/v2/health/ready")
        assert (status, said) == (503, {"ready": False, "missing": ["late"], "unheard": []})
        assert ask(router, "GET", "/v2/cluster")[2]["missing"] == ["late"]
        check(ask(router, "POST", INFER, body()))
        other.call(other.server.load())
        router.wait_until(lambda: router.router.ready)
        assert ask(router, "GET", "/v2/health/ready")[2] == {"ready": True}
        other.call(other.server.registry.unload_async("late"))  # on purpose: nobody misses it
        router.wait_until(lambda: "late" not in router.router.views["other"].offers())
        assert router.router.ready


def test_an_engine_that_has_not_said_which_models_it_should_have_is_waited_for_at_the_start(engine):
    with routing({"e": engine.url, "nowhere": "http://127.0.0.1:9"}) as router:
        status, _, said = ask(router, "GET", "/v2/health/ready")
        assert status == 503
        assert "nowhere" in said["unheard"]
        router.wait_until(lambda: router.router.ready)  # after a while: it may be one that starts only under load


def test_requests_whose_clients_have_left_do_not_wait(monkeypatch):
    """They would keep others from waiting, and none is counted twice."""
    monkeypatch.setattr(router_module, "MOST_WAITING", 2)
    with routing({}, models=("scale",), hold_s=1e4) as router:
        for k in range(4):
            with Client(router) as client:
                client.send(small())
                router.wait_until(lambda k=k: router.router.counts.held == k + 1)
            router.wait_until(lambda: router.router.in_flight == 0)
        assert not router.router._waiting


@pytest.mark.parametrize("timeout", ['"nan"', '"inf"', "1e308", "-5", '"5"', "0", "null"])
def test_only_a_valid_timeout_is_a_deadline(timeout):
    """An engine refuses the others, or takes them as none: a router that sends them again changes nothing."""
    text = b'{"inputs":[],"parameters":{"timeout":%b}}' % timeout.encode()
    assert timeout_s(b"POST / HTTP/1.1\r\n\r\n", text) is None


def test_the_limit_is_the_same_on_the_command_line_and_in_files():
    assert inspect.signature(route).parameters["held_mb"].default * 1e6 == RouterOptions().max_held_bytes
    assert round(ClusterSettings().held_mb * 1e6) == RouterOptions().max_held_bytes
