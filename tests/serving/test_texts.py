"""Texts and bytes over HTTP: tensors of the type BYTES, and the functions before and after models."""

from __future__ import annotations

import contextlib
import json
import struct
import time

import numpy as np
import pytest
from raw_client import Client
from served_models import words
from serving_processes import processes
from serving_server import ask, running

from paellapy.serving.build import build_entries
from paellapy.serving.config import load_config
from paellapy.serving.errors import ConfigError

PATH = "/v2/models/words"


@pytest.fixture(scope="module", params=["one process", "workers"])
def server(request):
    if request.param == "workers":
        with processes("served_models:words") as found:
            yield found
    else:
        with running(words(), max_body_bytes=4 << 20) as found:
            yield found


def as_bytes(*texts):
    return b"".join(struct.pack("<I", len(each)) + each for each in texts)


def binary(data, shape, **more):
    tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor], **more}).encode()
    return header + data, {"Inference-Header-Content-Length": str(len(header))}


def in_json(data, shape, **more):
    tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "data": data}
    return json.dumps({"inputs": [tensor], **more}).encode(), {}


def infer(server, sent):
    status, _, found = ask(server, "POST", f"{PATH}/infer", *sent)
    return status, {each["name"]: each for each in found["outputs"]} if status == 200 else found["error"]


TWO = {"outputs": [{"name": "words"}, {"name": "total"}]}


@pytest.mark.parametrize(
    ("sent", "shape"),
    [
        (in_json(["1 2", "3"], [2], **TWO), [2]),
        (binary(as_bytes(b"1 2", b"3"), [2], **TWO), [2]),
        (in_json(["1 2"], [1], **TWO), [1]),
        (in_json(["1 2"], [], **TWO), []),
        (in_json("1 2", [], **TWO), []),
    ],
)
def test_texts_come_in_json_and_in_binary(server, sent, shape):
    status, found = infer(server, sent)
    assert status == 200, found
    n = 1 if shape != [2] else 2
    assert found["words"] == {"name": "words", "datatype": "BYTES", "shape": shape, "data": ["2 4", "6"][:n]}
    assert found["total"] == {"name": "total", "datatype": "FP32", "shape": shape, "data": [6.0, 6.0][:n]}


def test_bytes_leave_in_binary(server):
    sent, headers = in_json(["1"], [1], outputs=[{"name": "raw", "parameters": {"binary_data": True}}])
    status, headers, body = ask(server, "POST", f"{PATH}/infer", sent, headers)
    assert status == 200
    at = int(headers["Inference-Header-Content-Length"])
    expected = np.zeros(64, np.float32)
    expected[0] = 2.0
    assert body[at:] == as_bytes(b"\xff" + expected.tobytes())


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (binary(as_bytes(b"\xff\xfe"), [1]), "UTF-8"),
        (binary(as_bytes(b"1")[:-1], [1]), "element 0"),
        (binary(as_bytes(b"1") + b"2", [1]), "1 bytes"),
        (binary(as_bytes(b"1"), [2]), "element 1"),
        (in_json(["1", "2"], [1]), "2 values"),
        (in_json([1], [1]), "strings"),
        (in_json([], [0]), "n ≥ 1"),
        (in_json([["1"]], [1, 1]), "shape"),
        (in_json(["a"], [1]), "could not convert"),
        (in_json(["1"] * 5, [5]), "up to 4 items"),
        (in_json(["1"], [1]), "binary_data"),  # its output `raw` is no text
    ],
)
def test_a_wrong_text_is_answered_with_400(server, sent, says):
    status, said = infer(server, sent)
    assert (status, says in said) == (400, True), said


def test_a_failing_function_is_answered_with_500_and_harms_nobody(server):
    for word in ("break", "short", "exit"):
        assert infer(server, in_json(["1", word], [2], **TWO))[0] == 500
        assert infer(server, in_json(["1"], [1], **TWO))[1]["words"]["data"] == ["2"]


def test_functions_that_hang_end_with_their_clients(server):
    body, _ = in_json(["hang"], [1], **TWO)
    head = f"POST {PATH}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as opened:
        for _ in range(words()[0].workers):
            opened.enter_context(Client(server)).send(head.encode() + body)
        time.sleep(0.2)  # all of the model's threads are busy
    assert infer(server, in_json(["1"], [1], **TWO))[1]["words"]["data"] == ["2"]


def test_long_texts_go_in_binary(server):
    text = b"1" + b" " * (3 << 20)
    assert infer(server, binary(as_bytes(text), [1], **TWO))[1]["words"]["data"] == ["2"]
    assert infer(server, in_json(["1" + " " * 200_000], [1], **TWO))[1]["words"]["data"] == ["2"]
    assert infer(server, in_json([text.decode()], [1], **TWO))[0] == 400


def test_metadata_and_configuration_name_what_requests_have(server):
    found = ask(server, "GET", PATH)[2]
    assert found["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert [each["datatype"] for each in found["outputs"]] == ["FP32", "BYTES", "BYTES"]
    assert ask(server, "GET", f"{PATH}/config")[2]["input"][0]["data_type"] == "TYPE_STRING"


def test_vectors_of_texts(server):
    body = json.dumps({"model": "vector", "input": ["1 2", "3"]}).encode()
    status, _, found = ask(server, "POST", "/v1/embeddings", body)
    assert (status, found["usage"]["prompt_tokens"]) == (200, 3)
    assert [each["embedding"][:3] for each in found["data"]] == [[2.0, 4.0, 0.0], [6.0, 0.0, 0.0]]


SETTINGS = """
[[models]]
factory = "served_models:plain"
before = "step_functions:read"
after = "step_functions:say"
takes = { text = "str" }
gives = { total = {dtype = "float32"}, words = "str", raw = "bytes" }
workers = 3
processes = true
"""


def test_settings_give_a_model_its_functions(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(SETTINGS)
    (entry,) = build_entries(*load_config(file))
    model, same = entry.make(), words()[0]
    assert (model.takes, model.gives, model.workers, model.processes) == (same.takes, same.gives, 3, True)
    assert (model.before, model.after) == (same.before, same.after)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('before = "step_functions:missing"', "models[0].before"),
        ('takes = { text = {size = 3} }', "models[0].takes"),
        ("workers = 0", "models[0].workers"),
    ],
)
def test_wrong_settings_of_functions_are_named(tmp_path, line, field):
    file = tmp_path / "settings.toml"
    file.write_text(f'[[models]]\nfactory = "served_models:plain"\n{line}\n')
    with pytest.raises(ConfigError) as e:
        build_entries(*load_config(file))
    assert e.value.field.startswith(field)
