"""Generated requests against a server process: none breaks it, hangs it, or leaves anything behind.

They use real sockets: requests from our own OpenAPI document (schemathesis), binary bodies with false lengths and
codings, and bytes that are hardly HTTP. What stands in a body is tested without HTTP, in test_protocol.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import selectors
import socket
import zlib

import ml_dtypes
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving_server import At, ask, scrape, serving, url_once

from paellapy.serving.openapi import document
from paellapy.serving.tensors import DTYPES

pytestmark = pytest.mark.xdist_group("fuzz")  # one server for all

CONFIG = """
device = "virtual:h200"
[server]
port = 0
grace_s = 0
drain_s = 5
max_body_bytes = 200000
log_format = "json"
[[models]]
factory = "serving_server:mixed_model"
"""
INFER = "/v2/models/mixed/infer"
KINDS = ("FP32", "FP16", "BF16", "INT8", "UINT64", "BOOL")
ARRAYS = {kind.lower(): (np.arange(8).reshape(2, 4) % 2).astype(DTYPES[kind]) for kind in KINDS}
NONE_LEFT = ("paellapy_items_live", "paellapy_requests_in_flight", "paellapy_items_queued", "paellapy_batches_active")
GROWTH_BYTES = 48 << 20  # of noise: pools, arenas, caches of their first use
TIMEOUT_S = 60.0  # of one answer: reached only by a server that hangs
MORE = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


class Server(At):
    def measure(self):
        return {s.name: s.value for s in scrape(self) if not s.labels}

    def check_right(self):
        header, tail = binary(ARRAYS)
        status, _, found = ask(self, "POST", INFER, header + tail, lengths(header))
        assert status == 200, found
        for tensor in found["outputs"]:
            sent = ARRAYS[tensor["name"]]
            assert np.array_equal(np.array(tensor["data"]).astype(sent.dtype).reshape(sent.shape), sent)

    @contextlib.contextmanager
    def unharmed(self):
        """Checks that the server answers and holds no more than before."""
        before = self.measure()
        yield
        self.check_right()
        for _ in range(1000):  # connections close in their own time
            now = self.measure()
            if now["process_open_fds"] <= before["process_open_fds"] and not now["paellapy_requests_in_flight"]:
                break
        assert now["process_open_fds"] <= before["process_open_fds"]
        assert {key: now[key] for key in NONE_LEFT} == dict.fromkeys(NONE_LEFT, 0)
        assert now["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + GROWTH_BYTES

    def raw(self, requests):
        """The answers to several byte strings, each sent on its own connection, all at once.

        If the server waits for more bytes, the sending side is closed; then the server must close the connection.
        """
        found = {}
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for k, data in enumerate(requests):
                connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
                stack.enter_context(connection)
                found[k] = b""
                with contextlib.suppress(ConnectionError):
                    connection.sendall(data)
                    selector.register(connection, selectors.EVENT_READ, k)
            patience_s = 0.1
            while selector.get_map():
                ready = selector.select(patience_s)
                if not ready:
                    assert patience_s < TIMEOUT_S, [requests[key.data] for key in selector.get_map().values()]
                    patience_s = TIMEOUT_S
                    for key in selector.get_map().values():
                        with contextlib.suppress(OSError):
                            key.fileobj.shutdown(socket.SHUT_WR)
                for key, _ in ready:
                    piece = b""
                    with contextlib.suppress(ConnectionError):
                        piece = key.fileobj.recv(65536)
                    found[key.data] += piece
                    if not piece:
                        selector.unregister(key.fileobj)
        return list(found.values())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = tmp_path_factory.mktemp("fuzz") / "paella.toml"
    config.write_text(CONFIG)
    with serving(str(config)) as process:
        found = Server(url_once(process))
        for _ in range(20):  # what is made on first use is there
            found.check_right()
            ask(found, "POST", INFER, b"{}")
        yield found
        process.terminate()
        assert process.wait(60) == 0
        rest = process.stderr.read()
    # Mistakes of clients are not worth a line, and none was an error of ours.
    lines = [json.loads(line) for line in rest.splitlines()]
    assert all(each["level"] == "info" or each["message"] == "requests are refused" for each in lines), rest[:3000]


def binary(arrays, **more):
    """A request with binary tensors: its JSON, and the bytes that follow."""
    tensors = [
        {"name": key, "shape": list(a.shape), "datatype": key.upper(), "parameters": {"binary_data_size": a.nbytes}}
        for key, a in arrays.items()
    ]
    return json.dumps({"inputs": tensors, **more}).encode(), b"".join(a.tobytes() for a in arrays.values())


def lengths(header):
    return {"Inference-Header-Content-Length": str(len(header))}


def described():
    """Our document, with names of models that exist, so that most requests get past the first check."""
    spec = json.loads(json.dumps(document()))
    for path, methods in spec["paths"].items():
        changes = path.endswith(("/load", "/unload"))
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"type": "string", "enum": ["nope", "a b", "%"] if changes else ["mixed"]}
                elif parameter["name"] == "version":
                    parameter["schema"] = {"type": "string", "enum": ["1", "1", "2"]}
    spec["paths"].pop("/dashboard/events", None)  # it never ends
    return schemathesis.openapi.from_dict(spec)


AS_DESCRIBED = [
    not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance,
]  # fmt: skip


def test_requests_from_our_own_description_are_answered_as_it_says(server):
    with server.unharmed(), requests.Session() as session:
        for found in described().get_all_operations():
            operation = found.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode == GenerationMode.NEGATIVE and "{" not in operation.label and "post" not in operation.method:
                    continue  # nothing in it could be wrong

                @settings(max_examples=15, **MORE)
                @given(case=operation.as_strategy(generation_mode=mode))
                def run(case):
                    answer = case.call(base_url=server.url, session=session, timeout=TIMEOUT_S)
                    if answer.status_code != 503:
                        case.validate_response(answer, checks=AS_DESCRIBED)
                    if answer.status_code >= 400 and case.method != "HEAD":
                        assert list(answer.json()) == ["error"] or answer.status_code == 503

                run()


LIES = ("boundary", "no boundary", "truncated", "longer", "gzip", "deflate", "br", "nonsense")


@some.composite
def lying_requests(draw):
    """A binary request whose bytes or headers have up to two false facts."""
    header, tail = binary(ARRAYS, parameters={"binary_data_output": True})
    lies = draw(some.lists(some.sampled_from(LIES), min_size=1, max_size=2))
    headers = {} if "no boundary" in lies else lengths(header)
    if "boundary" in lies:
        headers["Inference-Header-Content-Length"] = str(len(header) + draw(some.integers(-len(header), 200)))
    whole = header + tail
    if "truncated" in lies:
        whole = whole[: draw(some.integers(0, len(whole)))]
    if "longer" in lies:
        whole += draw(some.binary(max_size=50))
    for coding in {"gzip", "deflate", "br", "nonsense"} & set(lies):
        packed = gzip.compress(whole, 1) if coding == "gzip" else zlib.compress(whole, 1)
        at = draw(some.integers(0, len(packed) - 1))
        how = draw(some.sampled_from(["right", "cut", "plain", "changed"]))
        changed = packed[:at] + draw(some.binary(min_size=1, max_size=3)) + packed[at + 1 :]
        whole = {"right": packed, "cut": packed[:at], "plain": whole, "changed": changed}[how]
        headers["Content-Encoding"] = coding
    return whole, headers


def test_binary_bodies_that_lie_do_no_harm(server):
    statuses = set()

    @settings(max_examples=300, **MORE)
    @given(lying_requests())
    def run(request):
        status, _, content = ask(server, "POST", INFER, *request)
        statuses.add(status)
        assert status == 200 or list(content) == ["error"]

    with server.unharmed():
        run()
    assert {200, 400, 415} <= statuses <= {200, 400, 413, 415, 503}


def test_tensors_come_back_bit_for_bit(server):
    arrays = {key: array.copy() for key, array in ARRAYS.items()}
    arrays["fp32"][:] = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    arrays["bf16"][:] = np.array([1e38, -0.0, np.inf, -np.inf], ml_dtypes.bfloat16)
    arrays["uint64"][:] = np.uint64(2**64 - 1) - np.arange(4, dtype=np.uint64)
    header, tail = binary(arrays, parameters={"binary_data_output": True})
    status, _, content = ask(server, "POST", INFER, header + tail, lengths(header))
    assert status == 200
    assert content.endswith(tail)


# -- hardly HTTP

PATHS = ("/v2", "/v2/", "//", "/v2/models", "/v2/models/mixed", INFER, "/v2/models/mixed/versions/1/infer",
         "/v2/models//infer", "/v2/models/%2e%2e/infer", "/v2/models/mixed%2Finfer", "/v2/models/\x00/ready", "*",
         "/v2/../metrics", "/v2/models/stats/stats", "http://elsewhere/v2", "/v2?a=b#c", "/%", "/%ff%fe", "/é", "",
         "/v2/repository/models/mixed%00/load", "/docs", "/openapi.json", "/" + "a" * 9000)  # fmt: skip
VERBS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW", "get", "", "G ET",
         "PRI", "POST" * 50)  # fmt: skip
HEADERS = ("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 0x10",
           "Content-Length: 7\r\nContent-Length: 8", "Content-Length: +3", "Transfer-Encoding: chunked",
           "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: nonsense", "Content-Length:", "Host: a\r\nHost: b",
           "Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Encoding: br", "Connection: close",
           "Accept-Encoding: gzip;q=x,,;", "Inference-Header-Content-Length: 3",
           "Inference-Header-Content-Length: \x80",
           "Connection: upgrade\r\nUpgrade: websocket", "Upgrade: h2c", "Expect: 100-continue", "Expect: nonsense",
           "Content-Type: multipart/form-data", "Content-Type: \x00", "X: " + "y" * 9000, "no colon", ": no name",
           " folded", "traceparent: 00-" + "0" * 32, "X-Request-Id: \u00e9", "Range: bytes=0-1", "Cookie: a=b; ;;=",
           "Authorization: Bearer", "X-Client-Id: " + "z" * 500)  # fmt: skip
PLAIN = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = (b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n", b"2\r\nhello\r\n", b"{}")


@some.composite
def nearly_http(draw):
    version = draw(some.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "http/1.1"]))
    lines = [f"{draw(some.sampled_from(VERBS))} {draw(some.sampled_from(PATHS))} {version}"]
    lines += ["Host: x"] if draw(some.booleans()) else []
    lines += draw(some.lists(some.sampled_from(HEADERS), max_size=4))
    data = draw(some.sampled_from(["\r\n", "\r\n", "\n"])).join([*lines, "", ""]).encode("utf-8", "replace")
    data += b"".join(draw(some.lists(some.sampled_from(CHUNKS) | some.binary(max_size=60), max_size=4)))
    if draw(some.integers(0, 5)) == 0:
        at = draw(some.integers(0, len(data)))
        data = data[:at] + draw(some.binary(max_size=6)) + data[at:]
    return data[: draw(some.integers(0, len(data)))] if draw(some.integers(0, 5)) == 0 else data


def test_bytes_that_are_hardly_http_do_no_harm(server):
    statuses, several = set(), []

    @settings(max_examples=500, **MORE)
    @given(nearly_http() | nearly_http() | some.binary(max_size=200) | some.just(PLAIN))
    def collect(data):
        several.append(data)

    collect()
    with server.unharmed():
        for at in range(0, len(several), 40):
            for answers in filter(None, server.raw(several[at : at + 40])):
                assert answers.startswith(b"HTTP/"), answers[:200]
                statuses.add(int(answers[9:12]))
    assert {200, 400, 404} <= statuses
    assert all(status < 500 or status == 503 for status in statuses), statuses
