"""Thousands of generated requests against a server process: none breaks it, hangs it, or leaves anything behind.

They use real sockets: requests from our own OpenAPI document (schemathesis), binary bodies with false lengths, and
bytes that are hardly HTTP. After each kind the server still answers correctly and holds no more resources.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import selectors
import socket
import zlib
from http.client import HTTPConnection

import ml_dtypes
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving_server import read_until, serving

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
GROWTH_BYTES = 48 << 20  # of noise: pools, arenas, caches of their first use
TIMEOUT_S = 60.0  # of one answer: reached only by a server that hangs
MORE = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


class Target:
    """The server, and its own metrics."""

    def __init__(self, url):
        self.url, self.port = url, int(url.rpartition(":")[2])
        self.asked = 0
        self._connection = None

    def ask(self, method, path, body=None, headers=None):
        """Status and body, over one connection as long as the server keeps it."""
        self.asked += 1
        for attempt in (0, 1):
            if self._connection is None:
                self._connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
            try:
                self._connection.request(method, path, body, headers or {})
                answer = self._connection.getresponse()
                content = answer.read()
            except (ConnectionError, BrokenPipeError):  # it was closed after the last answer
                self.close()
                if attempt:
                    raise
                continue
            if answer.will_close:
                self.close()
            return answer.status, content
        raise AssertionError

    def close(self):
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def raw(self, requests):
        """The answers to several byte strings, each sent on its own connection, all at once.

        If the server waits for more bytes, the sending side is closed; then the server must close the connection.
        """
        self.asked += len(requests)
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

    def measure(self):
        _, text = self.ask("GET", "/metrics")
        wanted = ("process_resident_memory_bytes", "process_open_fds", "paellapy_items_live",
                  "paellapy_requests_in_flight", "paellapy_items_queued", "paellapy_batches_active")  # fmt: skip
        samples = (s for family in text_string_to_metric_families(text.decode()) for s in family.samples)
        return {s.name: s.value for s in samples if s.name in wanted}

    def check_right(self):
        header, tail = binary(ARRAYS)
        status, content = self.ask("POST", INFER, header + tail, lengths(header))
        assert status == 200, content
        found = json.loads(content)
        for tensor in found["outputs"]:
            sent = ARRAYS[tensor["name"]]
            assert np.array_equal(np.array(tensor["data"]).astype(sent.dtype).reshape(sent.shape), sent)

    def check_unharmed(self, before):
        self.check_right()
        self.close()
        for _ in range(1000):  # connections close in their own time
            now = self.measure()
            if now["process_open_fds"] <= before["process_open_fds"] and not now["paellapy_requests_in_flight"]:
                break
        assert now["process_open_fds"] <= before["process_open_fds"]
        for key in ("paellapy_items_live", "paellapy_requests_in_flight", "paellapy_items_queued",
                    "paellapy_batches_active"):  # fmt: skip
            assert now[key] == 0, key
        assert now["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + GROWTH_BYTES


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config = tmp_path_factory.mktemp("fuzz") / "paella.toml"
    config.write_text(CONFIG)
    with serving(str(config)) as process:
        said = read_until(process.stderr, '"message":"loaded"')
        url = next(json.loads(line)["url"] for line in said.splitlines() if '"listening"' in line)
        found = Target(url)
        for _ in range(50):  # what is made on first use is there
            found.check_right()
            found.ask("POST", INFER, b"{}")
        yield found
        found.close()
        process.terminate()
        assert process.wait(60) == 0
        rest = process.stderr.read()
    # Mistakes of clients are not worth a line, and none was an error of ours.
    assert all(line.startswith("{") and json.loads(line)["level"] == "info" for line in rest.splitlines()), rest[:3000]


def binary(arrays, sizes=None, **more):
    """A request with binary tensors: its JSON, and the bytes that follow."""
    tensors, tail = [], b""
    for key, array in arrays.items():
        raw = array.tobytes()
        parameters = {"binary_data_size": (sizes or {}).get(key, len(raw))}
        tensors.append({"name": key, "shape": list(array.shape), "datatype": key.upper(), "parameters": parameters})
        tail += raw
    return json.dumps({"inputs": tensors, **more}).encode(), tail


def lengths(header):
    return {"Inference-Header-Content-Length": str(len(header))}


# -- from our own description


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


def test_requests_from_our_own_description_do_no_harm_and_are_answered_as_it_says(target):
    before, asked = target.measure(), target.asked
    session = requests.Session()
    with session:
        for found in described().get_all_operations():
            operation = found.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode == GenerationMode.NEGATIVE and "{" not in operation.label and "post" not in operation.method:
                    continue  # nothing in it could be wrong

                @settings(max_examples=22, **MORE)
                @given(case=operation.as_strategy(generation_mode=mode))
                def run(case):
                    target.asked += 1
                    answer = case.call(base_url=target.url, session=session, timeout=TIMEOUT_S)
                    if answer.status_code != 503:
                        case.validate_response(answer, checks=AS_DESCRIBED)
                    if answer.status_code >= 400 and case.method != "HEAD":
                        assert list(answer.json()) == ["error"] or answer.status_code == 503

                run()
    assert target.asked - asked >= 380
    target.check_unharmed(before)


# -- binary bodies

SHAPES = some.lists(some.integers(-3, 5) | some.integers(-(2**70), 2**70), max_size=5)
JUNK = some.none() | some.booleans() | some.integers(-(2**70), 2**70) | some.text(max_size=4) | SHAPES


@some.composite
def lying_requests(draw):
    """A valid binary request with up to three false facts, and random bytes in its tensors."""
    tensors, tail = [], b""
    for key, array in ARRAYS.items():
        raw = draw(some.binary(min_size=array.nbytes, max_size=array.nbytes))  # NaN and infinities too
        tensors.append(
            {"name": key, "shape": [2, 4], "datatype": key.upper(), "parameters": {"binary_data_size": len(raw)}}
        )
        tail += raw
    body = {"inputs": tensors, "parameters": {"binary_data_output": True}}
    lies = draw(some.lists(some.sampled_from(LIES), max_size=3))
    for lie in lies:
        tensor = draw(some.sampled_from(tensors))
        if lie == "size":
            tensor["parameters"] = {"binary_data_size": draw(some.integers(-9, 99) | JUNK)}
        elif lie == "shape":
            tensor["shape"] = draw(SHAPES | JUNK)
        elif lie == "datatype":
            tensor["datatype"] = draw(some.sampled_from([*DTYPES, "BYTES", "FP8", ""]) | JUNK)
        elif lie == "name":
            tensor["name"] = draw(some.sampled_from([*ARRAYS, "x"]) | JUNK)
        elif lie == "data":
            tensor["data"] = draw(some.lists(JUNK, max_size=9))
        elif lie == "missing":
            tensor.pop(draw(some.sampled_from(["name", "shape", "datatype", "parameters"])), None)
        elif lie == "fewer":
            body["inputs"] = tensors[: draw(some.integers(0, len(tensors)))]
        elif lie == "parameters":
            names = ["priority", "timeout", "binary_data_output", "sequence_id"]
            body["parameters"] = draw(some.dictionaries(some.sampled_from(names), JUNK, max_size=3) | JUNK)
        elif lie == "outputs":
            outputs = some.lists(some.fixed_dictionaries({"name": some.sampled_from([*ARRAYS, "x"])}))
            body["outputs"] = draw(outputs | JUNK)
    header = json.dumps(body).encode()
    length = len(header)
    if "boundary" in lies:
        length += draw(some.integers(-length, 200))
    headers = {"Inference-Header-Content-Length": str(length)}
    if "no boundary" in lies:
        headers = {}
    whole = header + tail
    if "truncated" in lies:
        whole = whole[: draw(some.integers(0, len(whole)))]
    if "longer" in lies:
        whole += draw(some.binary(max_size=50))
    if "coding" in lies:
        coding = draw(some.sampled_from(["gzip", "deflate", "br", "zstd", "identity", "nonsense"]))
        how = draw(some.sampled_from(["right", "cut", "plain", "changed"]))
        packed = gzip.compress(whole, 1) if coding == "gzip" else zlib.compress(whole, 1)
        if how == "cut":
            packed = packed[: draw(some.integers(0, len(packed)))]
        elif how == "changed":
            at = draw(some.integers(0, len(packed) - 1))
            packed = packed[:at] + draw(some.binary(min_size=1, max_size=3)) + packed[at + 1 :]
        headers["Content-Encoding"] = coding
        whole = whole if how == "plain" else packed
    return whole, headers, lies, tail


LIES = ("size", "shape", "datatype", "name", "data", "missing", "fewer", "parameters", "outputs", "boundary",
        "no boundary", "truncated", "longer", "coding")  # fmt: skip


def check_same(found, sent):
    """Compares bit for bit, except for the model's bools and for the kind of NaN in 16-bit floats."""
    at = 0
    for key, array in ARRAYS.items():
        a, b = (np.frombuffer(each[at : at + array.nbytes], array.dtype) for each in (found, sent))
        at += array.nbytes
        if key == "bool":
            b = b.view(np.uint8).astype(bool)
        elif key in ("fp16", "bf16"):  # the virtual GPU computes in 32 bits
            with np.errstate(invalid="ignore"):  # some CPUs report NaNs that signal
                a, b = a.astype(np.float32), b.astype(np.float32)
            assert np.array_equal(a, b, equal_nan=True)
            continue
        assert a.tobytes() == b.tobytes(), key


def test_binary_bodies_that_lie_do_no_harm(target):
    before, asked = target.measure(), target.asked
    statuses = set()

    @settings(max_examples=3400, **MORE)
    @given(lying_requests())
    def run(request):
        body, headers, lies, tail = request
        status, content = target.ask("POST", INFER, body, headers)
        statuses.add(status)
        if not lies:
            assert status == 200
            check_same(content[-len(tail) :], tail)
        else:
            assert status in (200, 400, 413, 415, 503), (status, content)
        if status >= 400:
            assert list(json.loads(content)) == ["error"]

    run()
    assert {200, 400} <= statuses
    assert target.asked - asked >= 3350
    target.check_unharmed(before)


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


def test_bytes_that_are_hardly_http_do_no_harm(target):
    before, asked = target.measure(), target.asked
    statuses = set()

    several = []

    @settings(max_examples=1300, **MORE)
    @given(nearly_http() | nearly_http() | some.binary(max_size=200) | some.just(PLAIN))
    def collect(data):
        several.append(data)

    collect()
    for at in range(0, len(several), 40):
        for answers in target.raw(several[at : at + 40]):
            if answers:
                assert answers.startswith(b"HTTP/"), answers[:200]
                statuses.add(int(answers[9:12]))
    assert {200, 400, 404, 405} <= statuses
    assert all(status < 500 or status == 503 for status in statuses), statuses
    assert target.asked - asked >= 1280
    target.check_unharmed(before)


def test_not_a_number_comes_back_bit_for_bit(target):
    arrays = {key: array.copy() for key, array in ARRAYS.items()}
    arrays["fp32"][:] = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    arrays["bf16"][:] = np.array([1e38, -0.0, np.inf, -np.inf], ml_dtypes.bfloat16)
    header, tail = binary(arrays, parameters={"binary_data_output": True})
    status, content = target.ask("POST", INFER, header + tail, lengths(header))
    assert status == 200
    assert content.endswith(tail)
