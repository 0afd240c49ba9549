"""Limits before work: what a client sends costs little until it is known to be wanted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import resource
import socket
import ssl
import threading
import zlib
from unittest import mock

import numpy as np
import pytest
import uvloop
from engine_models import scale_model
from places import TESTS
from raw_client import Client
from serving_server import BODY, INFER, ask, echo_model, infer_body, running

from paellapy.instrument.errors import PaellaError
from paellapy.serving import compression, inference, listening, metrics, protocol, tensors
from paellapy.serving.access import Key
from paellapy.serving.errors import RequestError, TooLargeError
from paellapy.serving.fast_path import connection
from paellapy.serving.fast_path.connection import Body, Reading
from paellapy.serving.limits import BESIDE_BYTES, ConnectionLimits, largest_request
from paellapy.serving.listening import Connection, Connections, unsent_bytes
from paellapy.serving.logs import configure, log

TLS = TESTS / "tls"


@pytest.fixture(scope="module")
def server():
    with running([scale_model(batch=(1, 4))], keys={"alice": "secret"}) as found:
        yield found


@pytest.fixture(scope="module")
def open_server():
    with running([scale_model(batch=(1, 4)), scale_model("wide", n=1 << 16, batch=(1,))], send_timeout_s=0.2) as found:
        yield found


@pytest.fixture
def unpacked(monkeypatch):
    """Lengths of decompressed bodies, and the threads that decompressed them."""
    found, unpack = [], compression.unpack

    def noted(body, *more):
        found.append((len(body), threading.current_thread().name))
        return unpack(body, *more)

    monkeypatch.setattr(compression, "unpack", noted)
    return found


KEY = {"X-API-Key": "secret"}
BOMB = gzip.compress(bytes(50_000_000), 9, mtime=0)


@pytest.mark.parametrize(("method", "path"), [("POST", INFER), ("GET", "/docs"), ("POST", "/v2/repository/index")])
def test_nothing_is_unpacked_for_whoever_has_no_key(server, unpacked, method, path):
    status = ask(server, method, path, BOMB, {"Content-Encoding": "gzip"})[0]
    assert status == (200 if path == "/docs" else 401)
    assert unpacked == []


@pytest.mark.parametrize("path", [INFER, "/v2/repository/index"])
def test_a_bomb_is_unpacked_away_from_the_loop_and_only_to_its_limit(server, unpacked, path):
    status, _, said = ask(server, "POST", path, BOMB, {"Content-Encoding": "gzip", **KEY})
    assert status == 413
    assert "more than" in said["error"]
    assert [name.startswith("unpack") for _, name in unpacked] == [True]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x-gzip"])
def test_packed_bodies_are_read(server, coding):
    packed = zlib.compress(BODY) if coding == "deflate" else gzip.compress(BODY, mtime=0)
    assert ask(server, "POST", INFER, packed, {"Content-Encoding": coding, **KEY})[0] == 200
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bare = raw.compress(BODY) + raw.flush()
    assert ask(server, "POST", INFER, bare, {"Content-Encoding": "deflate", **KEY})[0] == 200


def test_short_packed_bodies_do_not_wait_behind_long_ones(server):
    release = threading.Event()
    waiting = [compression._unpacking.submit(release.wait) for _ in range(2)]
    try:
        packed = gzip.compress(BODY[:-1] + b',"id":"' + os.urandom(800).hex().encode() + b'"}')
        assert len(packed) * compression.MAX_RATIO > compression.IN_THREAD_BYTES
        assert ask(server, "POST", INFER, packed, {"Content-Encoding": "gzip", **KEY})[0] == 200
    finally:
        release.set()
    assert all(each.result(20) for each in waiting)


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400),
        ("gzip", b"no such thing", 400),
        ("gzip", b"", 400),
        ("br", BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0), 415),
        ("nonsense", BODY, 415),
        ("identity", BODY, 200),
    ],
    ids=["cut", "more behind", "not packed", "empty", "brotli", "twice", "unknown", "none"],
)
def test_codings_that_are_wrong_are_told_and_the_connection_goes_on(server, coding, body, status):
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\nContent-Length: "
    with Client(server) as client:
        client.send(f"{head}{len(body)}\r\nContent-Encoding: {coding}\r\n\r\n".encode() + body)
        assert client.answer()[0] == status
        client.send(f"{head}{len(BODY)}\r\n\r\n".encode() + BODY)
        assert client.answer()[0] == 200


def test_a_ratio_beyond_all_data_is_refused_though_the_size_is_allowed():
    zeros = bytes(4 * compression.FREE_BYTES)
    with pytest.raises(TooLargeError) as caught:
        compression.unpack(gzip.compress(zeros, mtime=0), "gzip", len(zeros))
    assert caught.value.given > caught.value.limit == compression.FREE_BYTES
    noise = np.random.default_rng(0).bytes(4 * compression.FREE_BYTES)
    assert compression.unpack(gzip.compress(noise, 1, mtime=0), "gzip", len(noise)) == noise


# -- JSON


@pytest.mark.parametrize("more", ["", "traceparent: none\r\n"])  # the fast path, and aiohttp's
def test_a_body_is_no_longer_than_the_largest_request_of_its_model(open_server, more):
    most = largest_request(open_server.engine.models["scale"])
    assert most < open_server.service.limits.max_body_bytes
    with Client(open_server) as client:
        client.send(f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {most + 1}\r\n\r\n".encode())
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert f"{most:,} bytes" in json.loads(body)["error"]
    with Client(open_server) as client:
        padded = BODY + b" " * (BESIDE_BYTES - len(BODY))
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(padded)}\r\n\r\n"
        client.send(head.encode() + padded)
        assert client.answer()[0] == 200


def test_the_largest_request_of_a_model_is_within_its_bound():
    model = scale_model(batch=(1, 4))
    longest = np.full((4, 64), -1.2345678901234567e-38, np.float32)
    assert len(json.dumps(infer_body("x", longest), indent=4)) <= largest_request(model)


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/models/scale/load", "/dashboard/policy"])
def test_addresses_that_need_little_take_little(open_server, path):
    """The limit of a body is that of a request with tensors elsewhere."""
    headers = "Content-Type: application/json\r\nX-Paellapy: 1\r\nHost: localhost"
    with Client(open_server) as client:
        client.send(f"POST {path} HTTP/1.1\r\n{headers}\r\nContent-Length: {BESIDE_BYTES + 1}\r\n\r\n".encode())
        status, _, body = client.answer()
    assert status == 413
    assert f"{BESIDE_BYTES:,} bytes" in json.loads(body)["error"]


@pytest.mark.parametrize("more", ["", "traceparent: none"])  # the fast path, and aiohttp's
def test_the_bodies_of_all_requests_are_bounded_and_who_finds_no_room_may_try_again(more):
    whole = wide_request(more)
    models = [scale_model(batch=(1,)), scale_model("wide", n=1 << 16, batch=(1,))]
    with running(models, held_mb=0.4) as server, Client(server) as slow, Client(server) as other:
        slow.send(whole[:-1000])
        server.wait_until(lambda: server.service.held.nbytes > 200_000)
        other.send(whole[:100_000])  # in pieces: a body that is there at once is not held
        server.wait_until(lambda: server.service.held.nbytes > 300_000)  # there is room for what has come
        other.send(whole[100_000:])
        assert other.answer()[0] == 503
        other.send(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(BODY), BODY))
        assert other.answer()[0] == 200
        slow.send(whole[-1000:])
        assert slow.answer()[0] == 200
        server.wait_until(lambda: server.service.held.nbytes == 0)
        assert server.service.counters.of("wide").refused == {"overloaded": 1}


def test_a_length_without_bytes_takes_no_place():
    """Clients that announce much and send little keep nobody away."""
    claimed = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 260000\r\n\r\n{"
    with running([scale_model("wide", n=1 << 16, batch=(1,))], held_mb=0.4) as server, contextlib.ExitStack() as opened:
        for _ in range(50):
            opened.enter_context(Client(server)).send(claimed)
        server.wait_until(lambda: server.service.in_flight == 50)
        assert server.service.held.nbytes == 50
        with Client(server) as honest:
            whole = wide_request()
            honest.send(whole[:100_000])
            server.wait_until(lambda: server.service.held.nbytes > 50_000)
            honest.send(whole[100_000:])
            assert honest.answer()[0] == 200


LINE = b"X-%d: " + b"a" * 8000 + b"\r\n"


def test_a_header_is_bounded_as_a_whole(server):
    with Client(server) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"".join(LINE % k for k in range(6)))
        status, headers, _ = client.answer()
        assert (status, headers["connection"]) == (431, "close")
        assert client.closed
    with Client(server) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\n" + LINE % 1)
        client.send(LINE % 2)
        client.send(b"\r")
        client.send(b"\n")
        assert client.answer()[0] == 200
    server.wait_until(lambda: server.service.held.nbytes == 0)


def test_unfinished_headers_are_bounded_in_sum():
    begun = b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + LINE % 1
    with running([scale_model(batch=(1,))], held_mb=0.1) as server, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(Client(server)) for _ in range(5)]
        for k, client in enumerate(clients):
            client.send(begun)
            if k < 4:
                server.wait_until(lambda k=k: server.service.held.nbytes > k * 24_000)
        assert clients[4].answer()[0] == 503
        clients[0].send(b"\r\n")
        assert clients[0].answer()[0] == 200
        assert ask(server, "POST", INFER, BODY)[0] == 200
        opened.close()
        server.wait_until(lambda: server.service.held.nbytes == 0)


def test_connections_leave_descriptors_for_the_server():
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    highest = max(map(int, os.listdir("/proc/self/fd")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, ((highest + 60) * 4 // 3, hard))  # a quarter is kept
    try:
        with running([scale_model(batch=(1,))]) as server, Client(server) as first, contextlib.ExitStack() as opened:
            first.send(live)
            assert first.answer()[0] == 200
            taken = 0
            while taken < highest + 60:
                taken = os.dup(0)
                opened.callback(os.close, taken)
            with Client(server) as late:
                assert late.answer()[0] == 503
                assert late.closed
            first.send(live)
            assert first.answer()[0] == 200
            opened.close()
            assert ask(server, "POST", INFER, BODY)[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hostile(kind: str, n: int) -> bytes:
    """A body of n bytes for the model `wide` that is not mostly numbers where numbers belong."""
    start = b'{"inputs":[{"name":"x","shape":[1,65536],"datatype":"FP32","data":['
    return {
        "outputs": b'{"outputs":[' + b'{"name":"y"},' * (n // 13) + b'{"name":"y"}],' + start[1:] + b"1]}]}",
        "inputs": start + b"1]}" + b',{"name":"x","shape":[1],"datatype":"FP32","data":[1]}' * (n // 54) + b"]}",
        "shape": b'{"inputs":[{"name":"x","datatype":"FP32","data":[1],"shape":[' + b"1," * (n // 2) + b"1]}]}",
        "parameters": b'{"parameters":{"a":[' + b"1," * (n // 2) + b"1]}," + start[1:] + b"1]}]}",
        "names": b'{"parameters":{' + b'"a":1,' * (n // 6) + b'"a":1},' + start[1:] + b"1]}]}",
        "id": b'{"id":"' + b"a" * n + b'",' + start[1:] + b"1]}]}",
        "escapes": b'{"id":"' + b"\\u00e9" * (n // 6) + b'",' + start[1:] + b"1]}]}",
        "blanks": b" " * n + start + b"1]}]}",
        "quotes": b'"' * n,
        "nothing": b"",
        "lists": start + b"[1]," * (n // 4) + b"[1]]}]}",
        "open": start + b"[" * n,
        "digits": start + b"1" * n + b"]}]}",
        "gaps": start + b"1," + b" " * n + b"1]}]}",
    }[kind]


KINDS = ["outputs", "inputs", "shape", "parameters", "names", "id", "escapes", "blanks", "quotes", "lists", "open",
         "digits", "gaps"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_long_text_reaches_the_decoder(kind, monkeypatch):
    """The decoder holds the interpreter: what it gets at once is short, whatever a client sends."""
    model = scale_model("wide", n=1 << 16, batch=(1,))
    given = []

    def noted(decode):
        return lambda text: (given.append(len(text)), decode(text))[1]

    monkeypatch.setattr(protocol, "_decode", noted(protocol._decode))
    monkeypatch.setattr(tensors, "_decode_any", noted(tensors._decode_any))
    monkeypatch.setattr(tensors, "_LISTS", {kind: noted(decode) for kind, decode in tensors._LISTS.items()})
    with pytest.raises(RequestError) as caught:
        protocol.decode(model, hostile(kind, 1_000_000), None)
    assert caught.value.status in (400, 413)
    assert max(given, default=0) <= BESIDE_BYTES + 2 * protocol.CUT_BYTES


@pytest.mark.parametrize("more", ["", "traceparent"])  # the fast path, and aiohttp's
@pytest.mark.parametrize("header_length", [False, True])
def test_long_json_is_read_and_written_away_from_the_loop_and_counted(header_length, more, monkeypatch):
    seen, decode, encode = [], inference.decode, inference.encode

    def note():
        seen.append((threading.current_thread().name[:4], server.service.held.nbytes))

    def decoded(model, body, length, as_bytes=False):
        note()
        return decode(model, body, length, as_bytes)

    def encoded(model, version, request, results, claim):
        note()
        return encode(model, version, request, results, lambda nbytes: (claim(nbytes), note()))

    monkeypatch.setattr(inference, "decode", decoded)
    monkeypatch.setattr(inference, "encode", encoded)
    x = np.random.default_rng(0).standard_normal((2, 1 << 15), np.float32)
    body = json.dumps(infer_body("x", x)).encode()
    headers = {"Inference-Header-Content-Length": str(len(body))} if header_length else {}
    with running([scale_model("wide", n=1 << 15, batch=(1, 2))]) as server:
        headers |= {more: "none"} if more else {}
        status, _, said = ask(server, "POST", "/v2/models/wide/infer", body, headers)
        server.wait_until(lambda: server.service.held.nbytes == 0)
    assert (status, said["outputs"][0]["shape"]) == (200, [2, 1 << 15])
    assert np.array_equal(np.array(said["outputs"][0]["data"], np.float32), 2 * x.reshape(-1))
    assert {thread for thread, _ in seen} == {"json"}
    assert seen[0][1] >= 2 * len(body)
    assert seen[1][1] >= x.nbytes
    assert seen[-1][1] >= x.nbytes + len(json.dumps(said["outputs"][0]["data"], separators=(",", ":")))


def test_an_answer_that_finds_no_room_is_refused(monkeypatch):
    x = np.ones((1, 1 << 16), np.float32)
    request = wide_request().replace(b'"binary_data_output": true', b'"binary_data_output":false')
    with running([scale_model("wide", n=1 << 16, batch=(1,))], held_mb=0.3) as server, Client(server) as client:
        client.send(request)
        assert client.answer()[0] == 503
        server.wait_until(lambda: server.service.held.nbytes == 0)
        client.send(wide_request())
        assert len(client.answer()[2]) > x.nbytes


@pytest.mark.parametrize("kind", ["FP32", "FP16", "INT64", "BOOL"])
def test_no_long_list_reaches_the_encoder(kind, monkeypatch):
    name, model = kind.lower(), echo_model("wide", [kind], (1 << 14,), batch=(1, 2))
    results = {name: np.arange(1 << 15).reshape(2, -1).astype(tensors.DTYPES[kind])}
    request = protocol.Request("", 2, True, {}, [protocol.Output(name, binary=False)], None, None)
    given, encode = [], protocol._encode
    monkeypatch.setattr(protocol, "_encode", lambda value: (given.append(value), encode(value))[1])
    pieces, _ = protocol.encode(model, "1", request, results)
    assert max(len(each) for each in given if isinstance(each, list)) == protocol.PIECE_VALUES
    assert json.loads(b"".join(pieces))["outputs"][0]["data"] == results[name].reshape(-1).tolist()


def test_one_turn_of_the_loop_reads_a_bounded_part_of_all_bodies(monkeypatch):
    """libuv reads on as long as the socket fills the memory it gets."""
    turns, note, begin = [0], Reading.note, Reading._begin
    monkeypatch.setattr(Reading, "note", lambda *given: (turns.append(turns.pop() + given[1]), note(*given)))
    monkeypatch.setattr(Reading, "_begin", lambda reading: (turns.append(0), begin(reading)))
    whole = wide_request(n=1 << 20)
    models = [scale_model("wide", n=1 << 20, batch=(1,))]
    with running(models, new_loop=uvloop.new_event_loop) as server, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(Client(server)) for _ in range(4)]
        senders = [threading.Thread(target=each.send, args=(whole,)) for each in clients]
        for each in senders:
            each.start()
        assert [each.answer()[0] for each in clients] == [200] * 4
        for each in senders:
            each.join()
    assert sum(turns) > 4 * (1 << 22) - 4 * connection.READ_BYTES
    assert max(turns) <= connection.TURN_BYTES + 4 * connection.LEAST_BYTES


def test_a_connection_that_waits_holds_no_body(open_server):
    with Client(open_server) as client:
        client.send(wide_request())
        assert client.answer()[0] == 200
        gc.collect()
        assert [each for each in gc.get_objects() if type(each) is Body] == []


def server_tls():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    return context


def test_a_body_that_grows_under_tls_is_counted_too():
    """There the pieces of a body do not end where its memory does."""
    with running([scale_model("wide", n=1 << 20, batch=(1,))], tls=server_tls(), held_mb=3) as server:
        trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
        with Client(server) as client, trusting.wrap_socket(client._socket, server_hostname="localhost") as wrapped:
            client._socket = wrapped
            client.send(wide_request(n=1 << 20))
            assert client.answer()[0] == 503
        server.wait_until(lambda: server.service.held.nbytes == 0)


def test_a_tls_connection_that_is_closed_twice_has_nothing_to_send():
    async def left() -> int:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_tls()) as server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
            writer.close()
            writer.close()
            found = unsent_bytes(writer.transport)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
        return found

    assert asyncio.run(left()) == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_pipelined_requests_are_all_answered_under_tls(new_loop):
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
    one = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(BODY), BODY)
    with running([scale_model(batch=(1, 4))], tls=server_tls(), new_loop=new_loop) as server:
        for request in (one, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"):
            with Client(server) as client, trusting.wrap_socket(client._socket, server_hostname="localhost") as wrapped:
                wrapped.settimeout(20)
                client._socket = wrapped
                client.send(request * 20)
                assert [client.answer()[0] for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("cut", [*range(1, 5), 30])
def test_a_header_may_end_in_two_pieces_before_a_long_body(open_server, cut):
    """The body is longer than a header may be."""
    request = wide_request("traceparent: none")
    end = request.index(b"\r\n\r\n") + 4
    with Client(open_server) as client:
        client.send(request[: end - cut])
        open_server.wait_until(lambda: open_server.service.held.nbytes > 0)
        client.send(request[end - cut :])
        assert client.answer()[0] == 200


def test_requests_that_wait_for_their_turn_are_no_header(open_server):
    """aiohttp keeps bytes behind a full queue unparsed."""
    count = 60
    with Client(open_server) as client:
        sender = threading.Thread(target=client.send, args=(wide_request("traceparent: none") * count,))
        sender.start()
        assert [client.answer()[0] for _ in range(count)] == [200] * count
        sender.join()


# -- clients that do not read


def wide_request(more="", n=1 << 16):
    """A request of 256 KiB with an answer of 256 KiB, or of n numbers."""
    x = np.ones((1, n), np.float32)
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = ["POST /v2/models/wide/infer HTTP/1.1", "Host: x", f"Content-Length: {len(header) + x.nbytes}",
             f"Inference-Header-Content-Length: {len(header)}", *([more] if more else []), "", ""]  # fmt: skip
    return "\r\n".join(lines).encode() + header + x.tobytes()


@pytest.mark.parametrize("more", ["", "traceparent: none"])  # the fast path, and aiohttp's
def test_a_client_that_never_reads_is_let_go(open_server, more):
    def ask_on(connection):
        """Sends requests until the answers fill all buffers, or the connection ends."""
        while True:
            connection.sendall(wide_request(more))

    with socket.create_connection(("127.0.0.1", open_server.port)) as connection:
        with pytest.raises(ConnectionError):
            ask_on(connection)
        open_server.wait_until(lambda: open_server.connections() == 0)
    assert open_server.service.in_flight == 0
    assert ask(open_server, "POST", INFER, BODY)[0] == 200


@pytest.mark.parametrize("more", ["", "traceparent: none"])  # the fast path, and aiohttp's
def test_of_many_clients_that_do_not_read_the_slowest_are_let_go(more):
    def ask_on(connection):
        """Sends requests until the answers fill all buffers, and then until the connection ends."""
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(wide_request(more))

    def stuck():
        return [each for each in server.server._runner.server.connections if each._send_timer is not None]

    models = [scale_model(batch=(1,)), scale_model("wide", n=1 << 16, batch=(1,))]
    with running(models, send_timeout_s=1e4) as server, contextlib.ExitStack() as opened:
        unsent = server.server._runner.server.unsent
        unsent.max_bytes = 1
        clients = []
        for _ in range(3):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            clients.append(threading.Thread(target=ask_on, args=(connection,)))
            clients[-1].start()
            for each in clients[:-1]:  # who waited before
                each.join()
            server.wait_until(lambda: len(stuck()) == 1)
        assert ask(server, "POST", INFER, BODY)[0] == 200
        connection.shutdown(socket.SHUT_RDWR)  # ends the thread's call
        clients[-1].join()
        connection.close()
        server.wait_until(lambda: unsent.nbytes == 0 and server.service.in_flight == 0)


def test_a_tls_handshake_that_stalls_ends_in_time():
    with running([], tls=server_tls(), header_timeout_s=0.3) as server, Client(server) as client:
        client.send(b"\x16\x03\x01")  # the beginning of a handshake, and nothing more
        assert client.closed


# -- small things


def test_part_of_a_header_that_comes_with_the_connection_gets_an_answer():
    """Bytes may be read before the task that handles the connection's requests has begun."""

    async def connect() -> bytes:
        transport = mock.Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        closed = asyncio.Event()
        transport.close.side_effect = closed.set
        loop = asyncio.get_running_loop()
        connections = Connections(Connection, ConnectionLimits(header_timeout_s=0.01), lambda request: None)
        connection = Connection(connections, log_rejected=False, loop=loop)
        connection.connection_made(transport)
        connection.data_received(b"POST /v2/models/scale/inf")
        await closed.wait()
        connection.connection_lost(None)
        return transport.write.call_args[0][0] if transport.write.called else b""

    assert asyncio.run(connect()).startswith(b"HTTP/1.1 408")


def test_an_unknown_expectation_is_an_error_in_json(open_server):
    for path in (INFER, "/v2", "/nowhere"):
        with Client(open_server) as client:
            client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: a\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            status, headers, body = client.answer()
            assert (status, headers["server"]) == (417, "paellapy")
            assert "100-continue" in json.loads(body)["error"]
            client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.answer()[0] == 200


def test_no_answer_names_versions(open_server):
    with Client(open_server) as client:
        for request in (
            b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            b"nonsense\r\n\r\n",
        ):
            client.send(request)
            assert client.answer()[1]["server"] == "paellapy"


# -- nobody waits for what another one asks for


def test_metrics_are_written_away_from_the_loop(open_server, monkeypatch):
    where, write = [], metrics.generate_latest

    def noted(registry):
        where.append(threading.current_thread())
        return write(registry)

    async def loops_thread():
        return threading.current_thread()

    monkeypatch.setattr(metrics, "generate_latest", noted)
    assert ask(open_server, "GET", "/metrics")[0] == 200
    assert where
    assert open_server.call(loops_thread()) not in where


def test_whoever_waits_to_be_accepted_when_the_server_stops_is_answered():
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(BODY), BODY)
    with running([scale_model(batch=(1, 4))]) as server, contextlib.ExitStack() as opened:
        busy, go_on = threading.Event(), threading.Event()

        def stand_still():
            busy.set()
            go_on.wait()

        server.loop.call_soon_threadsafe(stand_still)
        busy.wait()
        stopped = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        clients = [opened.enter_context(Client(server)) for _ in range(24)]
        for client in clients:
            client.send(request)
        go_on.set()
        assert {client.answer()[0] for client in clients} == {200}
        stopped.result()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_whoever_connects_while_the_server_stops_listening_is_answered(monkeypatch, new_loop):
    """A client comes in every turn of the loop that the stop takes, up to its last look at the queue."""
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(BODY), BODY)
    sleep, clients = asyncio.sleep, []

    async def joined(seconds, result=None):
        if seconds == 0 and len(clients) < 12:
            with contextlib.suppress(ConnectionRefusedError):  # the server does not listen any more
                clients.append(opened.enter_context(Client(server)))
                clients[-1].send(request)
        return await sleep(seconds, result)

    with contextlib.ExitStack() as opened:
        with running([scale_model(batch=(1, 4))], new_loop=new_loop) as server:
            monkeypatch.setattr("paellapy.serving.listening.asyncio.sleep", joined)
            server.call(server.server.stop())
            monkeypatch.undo()
        assert len(clients) >= listening.TURNS
        assert {client.answer()[0] for client in clients} == {200}


# -- sockets other than a port


ASK = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(BODY), BODY)


def client_of(connection):
    client = Client.__new__(Client)
    client._socket, client._held = connection, b""
    return client


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_server_may_listen_at_a_file(tmp_path, new_loop):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a server that was killed leaves it
    with running([scale_model(batch=(1,))], host=f"unix:{path}", new_loop=new_loop, access_log=True) as server:
        assert server.url == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            client = client_of(connection)
            for request in (ASK, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"):
                client.send(request)
                assert client.answer()[0] == 200
        with pytest.raises(PaellaError) as caught:
            listening.listen(f"unix:{path}", 0)
        assert caught.value.given == f"unix:{path}"


def test_a_service_manager_may_have_opened_the_socket(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as given:
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        monkeypatch.setattr(listening, "_FIRST_DESCRIPTOR", given.fileno())
        shares = listening.Shares("127.0.0.1", 0, 2)
        assert shares.address == given.getsockname()
        assert {each.getsockname() for each in (shares[0], shares[1])} == {given.getsockname()}
        shares.leave(0)
        assert shares[0].getsockname() == given.getsockname()
        monkeypatch.setattr(listening, "_FIRST_DESCRIPTOR", shares[1].dup().detach())
        with running([scale_model(batch=(1,))], port=1) as server:
            assert server.port == given.getsockname()[1]
            assert ask(server, "POST", INFER, BODY)[0] == 200
        shares.close()
        given.detach()  # closed with the shares


# -- the access log


@pytest.fixture
def logged():
    """The JSON log of a server with an access log."""
    text, before = io.StringIO(), (log.handlers[:], log.propagate, log.level)
    configure("json")
    log.handlers[0].setStream(text)
    yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    log.handlers[:], log.propagate = before[:2]
    log.setLevel(before[2])


def test_whatever_bytes_a_client_is_named_by_the_log_is_json(logged):
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nX-Client-Id: a\xff\xfe\r\nContent-Length: %d\r\n\r\n"
    with running([scale_model(batch=(1,))], access_log=True) as server:
        with Client(server) as client:
            client.send(head % (INFER.encode(), len(BODY)) + BODY)
            assert client.answer()[0] == 200
        server.wait_until(lambda: any(line.get("client") == "a\\xff\\xfe" for line in logged()))


def test_what_is_no_request_is_logged_too(logged):
    with running([scale_model(batch=(1,))], access_log=True) as server:
        with Client(server) as client:
            client.send(b"\x16\x03\x01 not HTTP\r\n\r\n")
            assert client.answer()[0] == 400
        server.wait_until(lambda: any(line.get("status") == 400 for line in logged()))


LATE = json.dumps(infer_body("x", np.ones((1, 64), np.float32), parameters={"timeout": 1})).encode()


@pytest.mark.parametrize("more", [{}, {"traceparent": "none"}])  # the fast path, and aiohttp's
def test_the_access_log_says_what_a_request_was_and_where_its_time_went(logged, more):
    def requests():
        return [line for line in logged() if line["message"] == "request"]

    with running([scale_model(batch=(1,))], access_log=True) as server:
        for body in (BODY, LATE):
            ask(server, "POST", INFER, body, more)
        server.wait_until(lambda: len(requests()) == 2)
    first, second = requests()
    assert (first["model"], first["in"], first["status"]) == ("scale", len(BODY), 200)
    assert first["out"] > 64
    assert first["gpu_ms"] > 0 <= first["queue_ms"] <= first["ms"]
    assert (second["reason"], second["status"], "gpu_ms" in second) == ("predicted_deadline", 503, False)


@pytest.mark.parametrize("more", [{}, {"traceparent": "none"}])  # the fast path, and aiohttp's
def test_refused_requests_are_counted_by_client_and_logged_now_and_then(logged, more):
    keys = {"alice": "a", "oscar": Key("o", ("operate",))}
    with running([scale_model(batch=(1,))], keys=keys) as server:
        for key, body, status in (("x", BODY, 401), ("o", BODY, 403), ("a", LATE, 503), ("a", BODY, 200)):
            for _ in range(3):
                assert ask(server, "POST", INFER, body, {"X-API-Key": key, **more})[0] == status
        with Client(server) as client:
            client.send(b"nonsense\r\n\r\n")
            assert client.answer()[0] == 400
        counters = server.service.counters
        server.wait_until(lambda: counters.gauge("descriptors") > 5 and counters.statuses.get(200) == 3)
        text = ask(server, "GET", "/metrics", None, {"X-API-Key": "a"})[2].decode()
    assert counters.statuses == {200: 4, 400: 1, 401: 3, 403: 3, 503: 3}
    refusals = {("unauthorized", ""): 3, ("forbidden", ""): 3, ("predicted_deadline", "alice"): 3}
    assert counters.refusals == refusals
    said = [(line["reason"], line["count"]) for line in logged() if line["message"] == "requests are refused"]
    assert sorted(said) == sorted((reason, 1) for reason, _ in refusals)
    for name in ("http_responses_total", "http_refusals_total", "connections_open", "held_bytes", "unsent_bytes",
                 "open_descriptors", "event_loop_lag_seconds"):  # fmt: skip
        assert f"\npaellapy_{name}" in text
