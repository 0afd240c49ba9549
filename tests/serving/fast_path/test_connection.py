"""The fast path of an inference and aiohttp's are one server: the same answers, in order, however the bytes arrive."""

from __future__ import annotations

import contextlib
import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
from engine_models import scale_model
from hypothesis import given, note, settings
from hypothesis import strategies as some
from raw_client import Client
from serving_server import infer_body, running

from paellapy.scheduler.core.errors import QueueFullError, UnknownModelError
from paellapy.scheduler.engine import callbacks
from paellapy.scheduler.engine import client as request_client
from paellapy.serving.access import Key
from paellapy.serving.app import ACCESS
from paellapy.serving.fast_path import connection, inference

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def server():
    with running([scale_model(batch=(1, 4))], max_body_bytes=100_000, body_timeout_s=0.5) as found:
        yield found


def post(value: float, number: int, *more: str, items: int = 1) -> bytes:
    body = json.dumps(infer_body("x", np.full((items, 64), value, np.float32), id=str(number))).encode()
    lines = ["POST /v2/models/scale/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


GET = b"GET /v2/models/scale HTTP/1.1\r\nHost: x\r\n\r\n"
WRONG = b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nnot"
UNKNOWN = b"POST /v2/models/nope/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
INDEX = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def ways(monkeypatch):
    """The number of requests on each path."""
    counts = {"fast": 0, "aiohttp": 0}
    start, give = inference.FastInference.start, connection.FastConnection._give

    def counted_start(self, *args):
        counts["fast"] += 1
        start(self, *args)

    def counted_give(self, data):
        counts["aiohttp"] += 1
        give(self, data)

    monkeypatch.setattr(inference.FastInference, "start", counted_start)
    monkeypatch.setattr(connection.FastConnection, "_give", counted_give)
    return counts


def check(answer, value, number, items=1):
    status, _, body = answer
    found = json.loads(body)
    assert status == 200
    assert found["id"] == str(number)
    assert found["outputs"][0]["data"] == [2.0 * value] * 64 * items


def test_both_ways_are_taken_on_one_connection(server, ways):
    with Client(server) as client:
        for k in range(3):
            client.send(post(k, k))
            check(client.answer(), k, k)
            client.send(GET)
            assert json.loads(client.answer()[2])["name"] == "scale"
    assert ways == {"fast": 3, "aiohttp": 3}


# -- keys and the access log


ROLES = {"ann": Key("ann's"), "ops": Key("ops'", roles=("operate",)), "bot": Key("bot's", tenant="ann")}


def test_requests_with_a_known_key_are_fast_and_others_are_refused(ways):
    with running([scale_model(batch=(1, 4))], keys=ROLES) as server, Client(server) as client:
        for k, line in enumerate(("X-API-Key: ann's", "Authorization: bearer  bot's", "x-api-key:bot's\t")):
            client.send(post(k, k, line))
            check(client.answer(), k, k)
        assert ways == {"fast": 3, "aiohttp": 0}
        refused = (
            ("X-Client-Id: ann", 401),
            ("X-API-Key: no", 401),
            ("X-API-Key: ops'", 403),
            ("Authorization: ann's", 401),
        )
        for line, status in refused:
            client.send(post(1, 1, line))
            assert client.answer()[0] == status
        client.send(post(1, 1, "X-API-Key: ann's", "X-API-Key: no"))  # the first one counts
        check(client.answer(), 1, 1)
        assert ways == {"fast": 3, "aiohttp": 5}
        server.server.app[ACCESS].set_keys({"eve": "eve's"})
        for line, status in (("X-API-Key: ann's", 401), ("X-API-Key: eve's", 200)):
            client.send(post(1, 1, line))
            assert client.answer()[0] == status
        assert server.service.counters.of("scale").failed == 0  # who has no key is counted nowhere
        server.wait_until(lambda: server.service.in_flight == 0)


def test_the_access_log_has_the_same_line_on_both_ways(caplog, ways):
    keys = {"ann": "secret"}
    with running([scale_model(batch=(1, 4))], keys=keys, access_log=True) as server, Client(server) as client:
        with caplog.at_level("INFO", "paellapy.serving"):
            for more in ((), ("Connection: keep-alive", "te: none")):
                for value, path in ((1, b"/scale/"), (1, b"/scale/versions/1/"), (1, b"/nope/")):
                    client.send(
                        post(value, 7, "X-API-Key: secret", "X-Request-Id: mine", *more).replace(b"/scale/", path)
                    )
                    client.answer()
            client.send(post(1, 7, "X-API-Key: secret")[:-5])
            server.wait_until(lambda: server.service.in_flight == 1)
        with caplog.at_level("INFO", "paellapy.serving"):
            client._socket.close()
            lines = [r.fields for r in caplog.records if r.message == "request"]
            server.wait_until(lambda: any(r.fields["status"] == 499 for r in caplog.records if r.message == "request"))
    assert ways["fast"] == 3
    assert all(each.pop("ms") >= 0 for each in lines)
    times = [each.pop(name) for each in lines for name in ("queue_ms", "gpu_ms") if name in each]
    assert len(times) == 2 * sum(each["status"] == 200 for each in lines)
    assert lines[:3] == lines[3:6]
    assert [each["status"] for each in lines[:3]] == [200, 200, 404]
    assert lines[1].pop("in") > lines[1].pop("out") > 0
    common = {"request": "mine", "method": "POST", "client": "ann", "peer": "127.0.0.1", "model": "scale"}
    assert lines[1] == {**common, "path": "/v2/models/scale/versions/1/infer", "status": 200}


requests = some.lists(
    some.sampled_from(["one", "three", "get", "wrong", "unknown", "index", "closes"]), min_size=1, max_size=6
)


@settings(max_examples=60)
@given(kinds=requests, cuts=some.lists(some.integers(0, 4000), max_size=6))
def test_answers_come_in_order_however_the_bytes_are_cut(server, kinds, cuts):
    """Pipelined, in pieces of any size: also where a piece ends within a header."""
    stream = b""
    for k, kind in enumerate(kinds):
        stream += {"one": post(k, k), "three": post(k, k, items=3), "get": GET, "wrong": WRONG, "unknown": UNKNOWN,
                   "index": INDEX, "closes": post(k, k, "Connection: close")}[kind]  # fmt: skip
        if kind == "closes":
            kinds = kinds[: k + 1]
            break
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    note(f"{kinds} cut at {edges}")
    with Client(server) as client:
        for low, high in pairwise(edges):
            client.send(stream[low:high])
        for k, kind in enumerate(kinds):
            answer = client.answer()
            if kind in ("one", "three", "closes"):
                check(answer, k, k, 3 if kind == "three" else 1)
            else:
                assert answer[0] == {"get": 200, "index": 200, "wrong": 400, "unknown": 404}[kind]
    server.wait_until(lambda: server.service.in_flight == 0)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("Content-Length: 5", 400),  # a second one
        ("Transfer-Encoding: chunked", 400),
        ("Content-Encoding: gzip", 400),
        ("Bad Header: x", 400),
        ("Inference-Header-Content-Length: x", 400),
        ("Expect: 100-continue", 200),
        ("traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", 200),
    ],
)
def test_what_is_unusual_gets_the_answer_it_always_got(server, line, status):
    with Client(server) as client:
        client.send(post(1, 1, line))
        found = client.answer()
        if found[0] == 100:
            found = client.answer()
        assert found[0] == status
    with Client(server) as client:
        client.send(post(1, 1))
        check(client.answer(), 1, 1)


def test_request_ids_come_back_and_others_are_made(server):
    with Client(server) as client:
        client.send(post(1, 1, "X-Request-Id: mine"))
        assert client.answer()[1]["x-request-id"] == "mine"
        client.send(post(1, 1))
        assert client.answer()[1]["x-request-id"] not in ("", "mine")


def test_long_answers_are_compressed_for_who_asks(server):
    with Client(server) as client:
        client.send(post(0.123456789, 1, "Accept-Encoding: gzip, deflate", items=4))
        status, headers, body = client.answer()
        assert status == 200
        assert headers["content-encoding"] == "gzip"
        assert len(json.loads(gzip.decompress(body))["outputs"][0]["data"]) == 256
        client.send(post(1, 1, "Accept-Encoding: gzip"))
        assert "content-encoding" not in client.answer()[1]


@pytest.mark.parametrize("more", [(), ("traceparent: none",)])  # the fast path, and aiohttp's
def test_a_body_that_does_not_come_is_a_408_and_the_end_of_the_connection(server, more):
    with Client(server) as client:
        client.send(post(1, 1, *more)[:-10])
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "body_timeout_s" in json.loads(body)["error"]
        assert client.closed
    server.wait_until(lambda: server.service.in_flight == 0)


def test_a_refused_request_is_answered_before_its_body_and_the_next_one_is_served(server):
    whole = post(1, 1).replace(b"/scale/", b"/nope1/")
    with Client(server) as client:
        client.send(whole[:-100])
        assert client.answer()[0] == 404
        client.send(whole[-100:] + post(2, 2))
        check(client.answer(), 2, 2)


@pytest.mark.parametrize("path", ["/v2/models/scale/infer", "/v2/repository/index"])
@pytest.mark.parametrize("more", ["", "Expect: 100-continue\r\n"])
def test_a_body_that_says_it_is_too_large_is_not_waited_for(server, path, more):
    with Client(server) as client:
        client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: 100001\r\n\r\n".encode())
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert "bytes allowed" in json.loads(body)["error"]
        assert client.closed
    server.wait_until(lambda: server.service.in_flight == 0)


@pytest.mark.parametrize("known", [False, True])  # whether the request's JSON is: its inputs then stay bytes
@pytest.mark.parametrize("more", [(), ("traceparent: none",)])
def test_a_request_that_an_unload_overtakes_is_to_be_sent_again(server, monkeypatch, more, known):
    submit = callbacks.submit_one

    def unloaded(ring, pending, *request):
        submit(ring, pending, *request)
        pending.fail(UnknownModelError("unloaded"))

    def not_there(*request):
        raise UnknownModelError("not there")

    for k, each in enumerate((unloaded, not_there)):
        number = f"unload {more} {known} {k}"
        with Client(server) as client:
            if known:
                client.send(post(1.0, number, *more))
                check(client.answer(), 1.0, number)
            with monkeypatch.context() as patch:
                patch.setattr(callbacks, "submit_one", each)
                client.send(post(1.0, number, *more))
                status, headers, body = client.answer()
        assert (status, headers["retry-after"]) == (503, "2")
        assert "unloaded before" in json.loads(body)["error"]
    server.wait_until(lambda: not server.engine.core.ring.waiting)


def is_refused(client, items):
    client.send(post(1.0, 1, items=items))
    status, _, body = client.answer()
    assert (status, json.loads(body)) == (503, {"error": "no room"})


def test_items_beside_one_that_has_failed_are_withdrawn(server, monkeypatch):
    written, write = [], request_client.write

    def second_fails(producer, pending, *rest):
        written.append(pending)
        write(producer, pending, *rest)
        if len(written) == 2:
            pending.fail(QueueFullError("no room"))

    monkeypatch.setattr(request_client, "write", second_fails)
    with Client(server) as client:
        is_refused(client, items=4)
        client.send(post(2.0, 2, items=4))
        check(client.answer(), 2.0, 2, items=4)
    server.wait_until(lambda: not server.engine.core.ring.waiting)


def test_a_request_whose_items_fail_twice_counts_once(server, monkeypatch):
    written, write = [], request_client.write
    counts = server.service.counters.of("scale")
    before = counts.refused["queue_full"]

    def second_fails_and_cannot_be_written(producer, pending, *rest):
        if written:
            pending.fail(QueueFullError("no room"))
            raise QueueFullError("no room here either")
        written.append(pending)
        write(producer, pending, *rest)

    monkeypatch.setattr(request_client, "write", second_fails_and_cannot_be_written)
    with Client(server) as client:
        is_refused(client, items=3)
    assert counts.refused["queue_full"] == before + 1
    server.wait_until(lambda: not server.engine.core.ring.waiting)


# -- requests for other protocols


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


@settings(max_examples=40)
@given(
    kinds=some.lists(some.sampled_from(["one", "get", "wanting", "getting"]), min_size=1, max_size=6),
    cuts=some.lists(some.integers(0, 4000), max_size=4),
)
def test_requests_behind_one_for_another_protocol_are_answered_or_the_connection_ends(server, kinds, cuts):
    """However the bytes are cut: no request is left without an answer on an open connection."""
    wanting = b"GET /v2/models/scale HTTP/1.1\r\nHost: x\r\n" + "".join(f"{line}\r\n" for line in UPGRADE).encode()
    stream = b"".join(
        {"one": post(k, k), "get": GET, "wanting": post(k, k, *UPGRADE), "getting": wanting + b"\r\n"}[kind]
        for k, kind in enumerate(kinds)
    )
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    note(f"{kinds} cut at {edges}")
    with Client(server) as client:
        with contextlib.suppress(ConnectionError):  # it may be closed by now
            for low, high in pairwise(edges):
                client.send(stream[low:high])
        for k, kind in enumerate(kinds):
            status, headers, body = client.answer()
            assert status == 200
            if kind in ("one", "wanting"):
                check((status, headers, body), k, k)
            if headers.get("connection") == "close":
                break


@pytest.mark.parametrize("first", [post(1, 1, *UPGRADE), post(1, 1, "Upgrade: h2c", "Connection: upgrade", "te: x")])
@pytest.mark.parametrize("apart", [False, True])
def test_a_client_that_asks_for_another_protocol_keeps_its_connection(server, first, apart):
    with Client(server) as client:
        for k in range(3):
            head = first.find(b"\r\n\r\n") + 4 if apart else len(first)
            client.send(first[:head])
            client.send(first[head:] + post(k, k))
            check(client.answer(), 1, 1)
            check(client.answer(), k, k)
