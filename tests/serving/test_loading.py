"""What is done before the first request: modules are imported, code is compiled, and the HTTP path is walked once."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
from engine_models import lookup_model
from places import TESTS
from serving_server import echo_model

from paellapy.scheduler.models.model import TensorSpec
from paellapy.serving import loading
from paellapy.serving.loading import walk_http
from paellapy.serving.tensors import DTYPES

FIRST_REQUEST = """
import json, sys
sys.path.insert(0, {tests!r})
import http.client
from engine_models import scale_model
from numba.core import event
from serving_server import infer_body, running
import numpy as np

compiled = []
class Listener(event.Listener):
    def on_start(self, started): compiled.append(str(started.data["dispatcher"]))
    def on_end(self, ended): pass

x = np.ones((1, 64), np.float32)
tensor = {{"name": "x", "shape": [1, 64], "datatype": "FP32", "parameters": {{"binary_data_size": x.nbytes}}}}
header = json.dumps({{"inputs": [tensor], "parameters": {{"binary_data_output": True}}}}).encode()
requests = {{"json": (json.dumps(infer_body("x", x)).encode(), {{}}),
            "binary": (header + x.tobytes(), {{"Inference-Header-Content-Length": str(len(header))}})}}
with running([scale_model(batch=(1, 4))]) as server:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    counters = server.service.counters.of("scale")
    assert (counters.answered, counters.items, counters.failed) == (0, 0, 0)
    modules = set(sys.modules)
    with event.install_listener("numba:compile", Listener()):
        body, headers = requests[sys.argv[1]]
        connection.request("POST", "/v2/models/scale/infer", body, headers)
        answer = connection.getresponse()
        answer.read()
    print(json.dumps([answer.status, sorted(set(sys.modules) - modules), compiled]))
"""


@pytest.mark.parametrize("kind", ["json", "binary"])
def test_the_first_request_imports_no_module_and_compiles_nothing(kind):
    command = [sys.executable, "-c", FIRST_REQUEST.format(tests=str(TESTS)), kind]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "[200, [], []]", found.stderr


def test_the_http_path_is_walked_for_tensors_of_all_types_and_ranges():
    walk_http(echo_model("all", DTYPES, batch=(1, 2)))
    walk_http(echo_model("large", ["FP16"], shape=(3, 224, 224), batch=(1,)))
    indices = {"i": TensorSpec((1,), np.int64, low=3, high=15)}
    walk_http(lookup_model(batch=(1, 4), inputs=indices))


@pytest.mark.parametrize("error", [ImportError, OSError])  # PyTorch raises OSError where a library of CUDA is missing
def test_a_module_that_cannot_be_imported_is_left_out(monkeypatch, error):
    tried = []

    def load(name):
        tried.append(name)
        if name in ("torch", "cuda.bindings.driver"):
            raise error(name)

    monkeypatch.setattr(importlib, "import_module", load)
    loading.import_device("cuda:1")
    assert tried[0] == "paellapy.scheduler.backends.cuda"
    assert tried[-1] == "torch"
