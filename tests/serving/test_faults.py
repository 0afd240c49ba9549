"""Clients that behave badly, connections without end, models that cannot be loaded: the server goes on, and right."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import zlib

import aiohttp
import numpy as np
import pytest
from engine_models import scale_model
from serving_server import infer_body, read_until, running, serving

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


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=120)


def answer_of(connection):
    """Status and JSON of one answer on a socket."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    header, _, body = data.partition(b"\r\n\r\n")
    length = int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return int(header[9:12]), json.loads(body)


def check_serves(server, model="scale"):
    with connect(server) as connection:
        connection.sendall(head(model, len(BODY)) + BODY)
        status, found = answer_of(connection)
    assert status == 200
    assert found["outputs"][0]["data"] == RIGHT


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
    connections = [connect(server) for _ in range(30)]
    for connection in connections:
        connection.sendall(head("single", len(BODY)) + BODY)
    server.wait_until(lambda: server.engine.stats()["queued"] == 30)
    before = server.service.counters.of("single").left
    for connection in connections[1:]:
        connection.close()
    server.wait_until(lambda: server.engine.stats()["live"] == 2)  # the one that stays, and the held one
    assert server.service.counters.of("single").left - before == 29
    assert server.service.in_flight == 1
    held.cancel()
    with connections[0]:
        status, found = answer_of(connections[0])
    assert (status, found["outputs"][0]["data"]) == (200, RIGHT)
    server.wait_until(lambda: server.engine.stats()["live"] == 0)


def test_an_answer_that_cannot_be_written_is_an_error_for_its_client_alone(server, monkeypatch):
    def broken(*given):
        raise MemoryError("no room for the answer")

    with monkeypatch.context() as patch:
        patch.setattr(inference, "encode", broken)
        patch.setattr(inference, "known_answer", lambda request: None)
        with connect(server) as connection:
            connection.sendall(head("scale", len(BODY)) + BODY)
            assert answer_of(connection)[0] == 500
    check_serves(server)


def test_clients_that_leave_within_their_body_leave_nothing(server):
    sent = (1, len(BODY) // 2, len(BODY) - 1)
    for length in sent:
        with connect(server) as connection:
            connection.sendall(head("scale", len(BODY)) + BODY[:length])
            server.wait_until(lambda: server.service.in_flight == 1)
        server.wait_until(lambda: server.service.in_flight == 0)
    assert server.engine.stats()["live"] == 0
    check_serves(server)


def test_a_compressed_body_that_ends_early_is_told_and_the_next_one_is_served(server):
    packed = zlib.compress(BODY)
    header = head("scale", len(packed) - 9).replace(b"\r\n\r\n", b"\r\nContent-Encoding: deflate\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(header)
        server.wait_until(lambda: server.service.in_flight == 1)
        connection.sendall(packed[:-9])
        status, found = answer_of(connection)
        assert status == 400
        assert "decompressed" in found["error"]
        connection.sendall(head("scale", len(BODY)) + BODY)
        assert answer_of(connection)[0] == 200


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
    with connect(server) as connection:
        connection.sendall(header + b"no length\r\n")
        status, found = answer_of(connection)
        assert connection.recv(1) == b""  # one answer, and the end
    assert status == 400
    assert found["error"]
    monkeypatch.undo()
    check_serves(server)


def test_what_is_not_http_gets_a_json_answer(server):
    for data, said in ((b"nonsense\r\n\r\n", "HTTP/1.1"), (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", "longer")):
        with connect(server) as connection:
            connection.sendall(data)
            status, found = answer_of(connection)
        assert status == 400
        assert said in found["error"]


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
    with connect(server) as connection:
        connection.sendall(f"POST /v2/models/scale/infer HTTP/1.1\r\n{headers}\r\n\r\n{{}}".encode())
        answer, found = answer_of(connection)
    assert answer == status
    assert said in found["error"]


# -- clients that are slow


def test_a_header_that_drips_is_not_waited_for(impatient):
    with connect(impatient) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nX-Slow: ")
        connection.settimeout(0.02)
        answer = None
        while answer is None:
            try:
                connection.sendall(b"a")
                answer = connection.recv(1000)
            except TimeoutError:
                continue
            except ConnectionError:  # a drop crossed the answer
                answer = b"HTTP/1.1 408"
        assert answer.startswith(b"HTTP/1.1 408")
    check_serves(impatient)


def test_a_connection_that_never_says_anything_is_closed(impatient):
    with connect(impatient) as connection:
        assert connection.recv(1) == b""


def test_a_second_header_that_stops_midway_is_not_waited_for(impatient):
    with connect(impatient) as connection:
        connection.sendall(head("scale", len(BODY)) + BODY)
        assert answer_of(connection)[0] == 200
        connection.sendall(b"POST /v2/models/scale")
        assert answer_of(connection)[0] == 408
        assert connection.recv(1) == b""


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


# -- a model that cannot be loaded

CONFIG = """
device = "virtual:h200"
[server]
port = 0
log_format = "json"
[[models]]
name = "good"
factory = "paellapy.demo:load"
arguments = { name = "mlp", batch = [1] }
[[models]]
name = "bad"
factory = "broken_factory:load"
"""


def test_a_server_goes_on_without_a_model_that_cannot_be_loaded_and_says_why(tmp_path):
    (tmp_path / "broken_factory.py").write_text("def load():\n    raise OSError('its weights are gone')\n")
    (tmp_path / "paella.toml").write_text(CONFIG)

    async def main(url):
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v2/models/good/ready") as answer:
                assert answer.status == 200
            async with session.get(f"{url}/v2/health/ready") as answer:
                assert answer.status == 503
            async with session.post(f"{url}/v2/repository/index") as answer:
                return {each["name"]: each for each in await answer.json()}

    with serving(str(tmp_path / "paella.toml")) as process:
        said = read_until(process.stderr, "could not be loaded")
        url = next(json.loads(line)["url"] for line in said.splitlines() if '"listening"' in line)
        index = asyncio.run(main(url))
        process.terminate()
        assert process.wait(120) == 0
    assert index["good"]["state"] == "READY"
    assert index["bad"]["state"] == "UNAVAILABLE"
    assert "its weights are gone" in index["bad"]["reason"]


def test_the_error_of_a_server_names_whose_work_was_on_the_gpu():
    with Engine("virtual:h200") as engine:
        with engine.outside("lease 'script'"):
            pass
        assert engine.state.core["outside"][0] == 0
        with engine.outside("job 'train'"):
            engine._fail(LaunchError("the GPU is gone"))
        error = asyncio.run(failure_of(engine))
        assert engine.state.core["outside"][0] == 1  # a request beside the job is not to blame alone
    assert str(error) == "the GPU is gone (running at that time: job 'train')"
    assert isinstance(error.__cause__, LaunchError)
