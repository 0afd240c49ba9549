"""Models of a server whose batch sizes are captured on demand."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import msgspec
from engine_models import scale_model
from serving_server import running

from paellapy.serving.build import make_model
from paellapy.serving.config import ModelConfig


def ask(server, path: str, body: object) -> object:
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_index_names_sizes_that_come_later():
    with running([scale_model(batch=(1, 2, 4, 8), capture="on_demand"), scale_model("ahead")]) as server:

        def sizes() -> dict[str, object]:
            return {each["name"]: each.get("batch_sizes") for each in ask(server, "/v2/repository/index", {})}

        assert sizes() == {"scale": {"captured": [1, 8], "later": [2, 4], "failed": []}, "ahead": None}
        for items in (2, 4):
            data = [[float(k)] * 64 for k in range(items)]
            inputs = [{"name": "x", "datatype": "FP32", "shape": [items, 64], "data": data}]
            found = ask(server, "/v2/models/scale/infer", {"inputs": inputs})
            assert found["outputs"][0]["data"] == [2.0 * k for k in range(items) for _ in range(64)]
        server.wait_until(lambda: sizes()["scale"] is None)
        assert server.engine.stats()["models"]["scale"]["sizes"]["captured"] == [1, 2, 4, 8]


def test_a_server_s_settings_say_when_sizes_are_captured():
    config = msgspec.convert({"factory": "engine_models:scale_model", "capture": "on_demand"}, ModelConfig)
    assert make_model(config, Path(__file__).parent).later_batch == (2, 4)
