"""Large tensors on the fast path: complete bodies however they arrive, answers from memory that is reused at once."""

from __future__ import annotations

import asyncio
import json
import mmap
import socket
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import uvloop
from engine_models import scale_model
from hypothesis import given, settings
from hypothesis import strategies as some
from raw_client import Client
from serving_server import running

from paellapy.serving.fast_path import connection
from paellapy.serving.fast_path.connection import Body, write

pytestmark = pytest.mark.quick

LARGE = 50_000  # floats


@pytest.fixture(scope="module")
def server():
    models = [scale_model("large", n=LARGE, batch=(1, 2)), scale_model("small", n=64, batch=(1, 2))]
    with running(models, body_timeout_s=20) as found:
        yield found


def post(model: str, x: np.ndarray) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, x.size], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(head) + x.nbytes}",
             f"Inference-Header-Content-Length: {len(head)}", "", ""]  # fmt: skip
    return "\r\n".join(lines).encode() + head + x.tobytes()


def numbers(answer) -> np.ndarray:
    status, headers, body = answer
    assert status == 200, body
    return np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)


@settings(max_examples=40, deadline=None)
@given(
    models=some.lists(some.sampled_from(["large", "small"]), min_size=1, max_size=4),
    cuts=some.lists(some.integers(0, 1 << 20), max_size=6),
    first=some.sampled_from([1000, 1 << 16, 1 << 20]),
    copied=some.sampled_from([1, 1 << 14]),
)
def test_tensors_arrive_and_leave_whole_however_the_bytes_are_cut(server, models, cuts, first, copied):
    arrays = [np.random.default_rng(k).random(LARGE if m == "large" else 64, np.float32) for k, m in enumerate(models)]
    stream = b"".join(post(m, x) for m, x in zip(models, arrays, strict=True))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    with pytest.MonkeyPatch.context() as patch, Client(server) as client:
        patch.setattr(connection, "MAPPED_BYTES", first)
        patch.setattr(connection, "COPIED_BYTES", copied)

        def send() -> None:  # beside reading: what is pipelined may be more than the sockets hold
            for low, high in pairwise(edges):
                client.send(stream[low:high])

        sender = threading.Thread(target=send)
        sender.start()
        for x in arrays:
            assert np.array_equal(numbers(client.answer()), 2 * x)
        sender.join()
    server.wait_until(lambda: server.service.in_flight == 0)


def test_clients_that_send_at_once_get_their_own_answers(server):
    with Client(server) as one, Client(server) as other:
        for k in range(20):
            x, y = np.full(LARGE, k, np.float32), np.full(LARGE, -k, np.float32)
            first, second = post("large", x), post("large", y)
            one.send(first[:70_000])
            other.send(second)
            one.send(first[70_000:])
            assert np.array_equal(numbers(other.answer()), 2 * y)
            assert np.array_equal(numbers(one.answer()), 2 * x)


@given(some.lists(some.binary(max_size=50), max_size=20), some.integers(1, 40), some.booleans())
def test_a_body_is_what_was_added(pieces, first, in_place):
    whole = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "MAPPED_BYTES", first)
        body = Body(len(whole))
        for piece in pieces:
            while in_place and piece:
                room = body.room()
                n = min(len(room), len(piece))
                room[:n] = piece[:n]
                body.at, piece = body.at + n, piece[n:]
            body.add(piece)
    assert body.at == body.length
    assert bytes(body.all()) == whole


def test_a_length_alone_takes_no_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    body = Body(1 << 30)
    body.add(b"x" * 1000)
    assert resident() - before < 1 << 24
    assert body.at == 1000


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_was_written_may_be_overwritten_at_once(new_loop):
    """Also where the client takes only part of it at a time, and where the next answer is behind that part."""

    async def main() -> None:
        here, there = socket.socketpair()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, here)
        received = asyncio.create_task(asyncio.to_thread(receive, there, 3 * 1_000_004))
        for k in range(3):
            memory = np.full(1_000_000, k, np.uint8)
            write(transport, [b"head", memory.data])
            memory[:] = 99
        found = await received
        assert found == b"".join(b"head" + bytes([k]) * 1_000_000 for k in range(3))
        there.close()
        write(transport, [b"nobody reads it", bytes(100_000)])  # as the transport itself: no error here
        transport.close()

    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def receive(source: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        found += source.recv(1 << 20)
    return found
