"""Clients that behave badly, connections without end, models that cannot be loaded: the server goes on, and right."""

from __future__ import annotations

import asyncio
import json
import resource
import zlib

import aiohttp
import numpy as np
import pytest
from engine_models import scale_model
from raw_client import Client
from serving_server import infer_body, running

from paellapy.instrument.errors import LaunchError
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving import inference
from paellapy.serving.listening import Connection
from paellapy.serving.server import failure_of

X = np.arange(64, dtype=np.float32)[np.newaxis]
BODY = json.dumps(infer_body("x", X)).encode()
RIGHT = (2 * X[0]).tolist()
CONNECTIONS = 2000


def head(model, length):
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def check_right(client):
    status, _, body = client.answer()
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, RIGHT)


def check_serves(server, model="scale"):
    with Client(server) as client:
        client.send(head(model, len(BODY)) + BODY)
        check_right(client)


@pytest.fixture(scope="module")
def server():
    models = [scale_model(batch=(1, 4)), scale_model("single", batch=(1,), instances=1)]
    with running(models) as found:
        yield found


@pytest.fixture(scope="module")
def impatient():
    """A server with short limits that a normal client still meets, even on a busy machine."""
    with running([scale_model(batch=(1, 4))], header_timeout_s=2.0, body_timeout_s=2.0) as found:
        yield found


# -- clients that leave


def test_clients_that_leave_while_they_wait_free_their_work(server):
    """Everything behind a held instance waits; those whose clients leave are gone from the engine before it is let go.
    """
    held = server.hold("single")
    clients = [Client(server) for _ in range(30)]
    for client in clients:
        client.send(head("single", len(BODY)) + BODY)
    server.wait_until(lambda: server.engine.stats()["queued"] == 30)
    before = server.service.counters.of("single").left
    for client in clients[1:]:
        client.close()
    server.wait_until(lambda: server.engine.stats()["live"] == 2)  # the one that stays, and the held one
    assert server.service.counters.of("single").left - before == 29
    assert server.service.in_flight == 1
    held.cancel()
    with clients[0] as client:
        check_right(client)
    server.wait_until(lambda: server.engine.stats()["live"] == 0)


def test_an_answer_that_cannot_be_written_is_an_error_for_its_client_alone(server, monkeypatch):
    def broken(*given):
        raise MemoryError("no room for the answer")

    with monkeypatch.context() as patch:
        patch.setattr(inference, "encode", broken)
        patch.setattr(inference, "known_answer", lambda request: None)
        with Client(server) as client:
            client.send(head("scale", len(BODY)) + BODY)
            assert client.answer()[0] == 500
    check_serves(server)


def test_clients_that_leave_within_their_body_leave_nothing(server):
    sent = (1, len(BODY) // 2, len(BODY) - 1)
    for length in sent:
        with Client(server) as client:
            client.send(head("scale", len(BODY)) + BODY[:length])
            server.wait_until(lambda: server.service.in_flight == 1)
        server.wait_until(lambda: server.service.in_flight == 0)
    assert server.engine.stats()["live"] == 0
    check_serves(server)


def test_a_compressed_body_that_ends_early_is_told_and_the_next_one_is_served(server):
    packed = zlib.compress(BODY)
    header = head("scale", len(packed) - 9).replace(b"\r\n\r\n", b"\r\nContent-Encoding: deflate\r\n\r\n")
    with Client(server) as client:
        client.send(header)
        server.wait_until(lambda: server.service.in_flight == 1)
        client.send(packed[:-9])
        status, _, body = client.answer()
        assert status == 400
        assert "decompressed" in json.loads(body)["error"]
        client.send(head("scale", len(BODY)) + BODY)
        assert client.answer()[0] == 200


@pytest.mark.parametrize("turns", range(5))
def test_a_chunk_that_is_none_is_told_however_soon_it_follows(server, monkeypatch, turns):
    """The body comes so many turns of the event loop after its header: before, while and after its reader begins."""
    received = Connection.data_received

    def apart(self, data):
        at = data.find(b"\r\n\r\n") + 4
        received(self, data[:at])
        later(self, data[at:], turns)

    def later(self, data, n):
        if n:
            self._loop.call_soon(later, self, data, n - 1)
        else:
            received(self, data)

    header = b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    monkeypatch.setattr(Connection, "data_received", apart)
    with Client(server) as client:
        client.send(header + b"no length\r\n")
        status, _, body = client.answer()
        assert client.closed  # one answer, and the end
    assert status == 400
    assert json.loads(body)["error"]
    monkeypatch.undo()
    check_serves(server)


def test_what_is_not_http_gets_a_json_answer(server):
    for data, said in ((b"nonsense\r\n\r\n", "HTTP/1.1"), (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", "longer")):
        with Client(server) as client:
            client.send(data)
            status, _, body = client.answer()
        assert status == 400
        assert said in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ("Host: x\r\nContent-Encoding: zstd\r\nContent-Length: 2", 415, "Content-Encoding"),
        ("Host: x\r\n" + "\r\n".join(f"X-{k}: 1" for k in range(300)), 400, "more headers"),
        ("Accept: a", 400, "Host header is missing"),
        ("Host: x\r\nHost: y", 400, "two Host headers"),
        ("Host: x\r\nContent-Length: 2\r\nContent-Length: 2", 400, "two Content-Length"),
        ("Host: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", 400, "Content-Length and Transfer-Encoding"),
        ("Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2", 400, "Content-Length and Transfer-Encoding"),
        ("Host: x\r\nContent-Length: two", 400, "Content-Length"),
    ],
)
def test_headers_that_are_wrong_are_named(server, headers, status, said):
    with Client(server) as client:
        client.send(f"POST /v2/models/scale/infer HTTP/1.1\r\n{headers}\r\n\r\n{{}}".encode())
        answer, _, body = client.answer()
    assert answer == status
    assert said in json.loads(body)["error"]


# -- clients that are slow


def test_a_header_that_drips_is_not_waited_for(impatient):
    with Client(impatient) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nX-Slow: ")
        connection = client._socket
        connection.settimeout(0.02)
        answer = None
        while answer is None:
            try:
                client.send(b"a")
                answer = connection.recv(1000)
            except TimeoutError:
                continue
            except ConnectionError:  # a drop crossed the answer
                answer = b"HTTP/1.1 408"
        assert answer.startswith(b"HTTP/1.1 408")
    check_serves(impatient)


def test_a_connection_that_never_says_anything_is_closed(impatient):
    with Client(impatient) as client:
        assert client.closed


def test_a_second_header_that_stops_midway_is_not_waited_for(impatient):
    with Client(impatient) as client:
        client.send(head("scale", len(BODY)) + BODY)
        assert client.answer()[0] == 200
        client.send(b"POST /v2/models/scale")
        assert client.answer()[0] == 408
        assert client.closed


# -- many connections


def test_two_thousand_open_connections_and_requests_are_answered():
    """Idle ones that have been used once, slow ones within their header, and others that work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * CONNECTIONS + 500  # both ends are in this process
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"this machine allows {hard} open files; {needed} are needed")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

    async def one(reader, writer):
        writer.write(head("scale", len(BODY)) + BODY)
        header = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        assert header.startswith(b"HTTP/1.1 200"), header
        assert json.loads(body)["outputs"][0]["data"] == RIGHT

    async def main(server):
        open_ones = []
        for start in range(0, CONNECTIONS, 100):
            made = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(100))
            open_ones += await asyncio.gather(*made)
            for _, writer in open_ones[start : start + 50]:
                writer.write(b"GET /v2/health/live HT")
        server.wait_until(lambda: server.connections() >= CONNECTIONS)
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/v2/health/ready") as answer:
            assert answer.status == 200
        idle = [each for k, each in enumerate(open_ones) if k % 100 >= 50]
        for start in range(0, len(idle), 100):
            await asyncio.gather(*(one(*each) for each in idle[start : start + 100]))
        assert server.connections() >= CONNECTIONS
        for _, writer in open_ones:
            writer.close()

    try:
        with running([scale_model(batch=(1, 8))], header_timeout_s=600.0) as server:
            asyncio.run(main(server))
            server.wait_until(lambda: server.connections() == 0)
            assert server.service.in_flight == 0
            assert server.engine.stats()["live"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_error_of_a_server_names_whose_work_was_on_the_gpu():
    with Engine("virtual:h200") as engine:
        with engine.core.outside("lease 'script'"):
            pass
        assert engine.state.core["outside"][0] == 0
        with engine.core.outside("job 'train'"):
            engine.core.fail(LaunchError("the GPU is gone"))
        error = asyncio.run(failure_of(engine))
        assert engine.state.core["outside"][0] == 1  # a request beside the job is not to blame alone
    assert str(error) == "the GPU is gone (running at that time: job 'train')"
    assert isinstance(error.__cause__, LaunchError)
