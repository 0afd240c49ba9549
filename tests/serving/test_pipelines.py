"""Pipelines over HTTP and from a settings file."""

from __future__ import annotations

import json

import pytest
from serving_server import ask, running

from paellapy.serving.build import build_entries, build_pipelines
from paellapy.serving.config import load_config
from paellapy.serving.errors import ConfigError

SETTINGS = """
[[models]]
factory = "served_models:double"

[[models]]
factory = "served_models:triple"
load = {load}

[[pipelines]]
name = "ocr"
steps = ["step_functions:numbers", "double", "step_functions:halves", "triple", "step_functions:join"]
takes = {{ text = "str" }}
gives = {{ words = "str", total = "float32" }}
"""


def entries(folder, text=None, load="true", **changes):
    file = folder / "settings.toml"
    file.write_text(SETTINGS.format(load=load) if text is None else text)
    config, source = load_config(file, **changes)
    models = build_entries(config, source)
    return [*models, *build_pipelines(config, source, models)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(entries(tmp_path_factory.mktemp("settings"))) as found:
        yield found


def post(server, *texts, **parameters):
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return ask(server, "POST", "/v2/models/ocr/infer", body)[::2]


def test_a_request_of_several_items(server):
    status, found = post(server, "1 2", "3", timeout=60_000_000)
    assert status == 200, found
    answers = {each["name"]: each["data"] for each in found["outputs"]}
    assert answers == {"words": ["6 12", "18"], "total": [18.0, 18.0]}


@pytest.mark.parametrize(("text", "status"), [("a", 400), ("666", 500)])
def test_an_error_is_that_requests_own(server, text, status):
    assert post(server, text)[0] == status
    assert post(server, "1")[0] == 200


def test_a_late_pipeline_is_refused(server):
    assert post(server, "hang", timeout=50_000)[0] == 503
    assert post(server, "1")[0] == 200


def test_it_has_the_addresses_of_a_model(server):
    assert ask(server, "GET", "/v2/models/ocr")[2]["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert ask(server, "GET", "/v2/models/ocr/ready")[0] == 200
    assert ask(server, "GET", "/v2/models/ocr/config")[0] == 200
    assert ask(server, "GET", "/v2/outlook")[2]["models"]["ocr"]["state"] == "READY"
    stats = ask(server, "GET", "/v2/models/ocr/stats")[2]["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] >= 1
    index = ask(server, "POST", "/v2/repository/index", b"{}")[2]
    assert [each["name"] for each in index] == ["double", "triple", "ocr"]


def test_it_can_be_loaded_once_its_models_are(tmp_path):
    with running(entries(tmp_path, load="false"), load=False) as server:
        found = dict(server.server.registry.entries)
        found["ocr"].wanted = False
        server.call(server.server.load())
        load = "/v2/repository/models/{}/load".format
        assert ask(server, "POST", load("ocr"))[0] == 400
        assert ask(server, "POST", load("triple"))[0] == 200
        assert ask(server, "POST", load("ocr"))[0] == 200
        assert post(server, "1")[0] == 200
        assert ask(server, "POST", "/v2/repository/models/ocr/unload")[0] == 200
        assert post(server, "1")[0] == 404


@pytest.mark.parametrize(
    ("line", "options", "field"),
    [
        ('name = "ocr"\nsteps = ["nobody"]', {}, "pipelines[0].steps[0]"),
        ('name = "ocr"\nsteps = ["step_functions:nothing"]', {}, "pipelines[0].steps[0]"),
        ('name = "plain"\nsteps = ["plain"]', {}, "pipelines[0].name"),
        ('name = "ocr"\nsteps = []', {}, "pipelines[0].steps"),
        ('name = "ocr"\nsteps = ["plain"]', {"options": {"server": {"workers": 1}}}, "pipelines"),
    ],
)
def test_wrong_settings_are_named(tmp_path, line, options, field):
    text = f'[[models]]\nname = "plain"\nfactory = "served_models:plain"\n[[pipelines]]\n{line}\n'
    with pytest.raises(ConfigError) as e:
        entries(tmp_path, text, **options)
    assert e.value.field == field
