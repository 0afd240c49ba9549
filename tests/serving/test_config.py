"""The configuration: every mistake is found at the start, and its line is named."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving.access import Key
from paellapy.serving.build import build_engine, build_entries, build_keys, build_tls
from paellapy.serving.config import line_of, load_config
from paellapy.serving.errors import ConfigError

pytestmark = pytest.mark.quick

GOOD = """\
device = "virtual:t4"
policy = "edf"
max_queue = 100

[server]
port = 0
grace_s = 0

[keys]
alice = "secret"
bob = "env:BOBS_KEY"

[[models]]
factory = "paellapy.demo:load"
arguments = { name = "mlp" }
target_ms = 20
batch = [1, 2]

[[models]]
name = "second"
factory = "paellapy.demo:load"
arguments = { name = "cnn" }
priority = 5
load = false
"""


@pytest.fixture
def write(tmp_path):
    def to(text):
        path = tmp_path / "paella.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_what_a_file_says_is_what_there_is(write, monkeypatch):
    monkeypatch.setenv("BOBS_KEY", "other")
    config, source = load_config(write(GOOD))
    assert build_keys(config, source) == {"alice": Key("secret"), "bob": Key("other")}
    assert build_tls(config, source) is None
    first, second = build_entries(config, source)
    assert (first.name, second.name, first.wanted, second.wanted) == ("mlp", "second", True, False)
    model = first.make()
    assert (model.batch, model.target_ms, model.priority) == ((1, 2), 20, 0)
    assert second.make().priority == 5
    with build_engine(config, source) as engine:
        assert engine.device.name == "virtual:t4"
        assert engine.policy == "edf"
        assert engine.limits.requests == 100


def test_an_engine_has_the_partitions_of_sms_its_file_asks_for(write):
    with build_engine(*load_config(write(GOOD.replace("max_queue = 100", "sm_partitions = 4")))) as engine:
        assert engine.state.core["partitions"][0] == 4


def test_a_number_of_partitions_that_cannot_be_is_named_with_its_line(write):
    path = write(GOOD.replace("max_queue = 100", "sm_partitions = 2"))
    with pytest.raises(ConfigError, match=r"paella.toml:3: sm_partitions: .*0, for none, or 3 to 64"):
        build_engine(*load_config(path))


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (('port = 0', 'port = "x"'), 6, "server.port: the value is a text: give a whole number"),
        (('port = 0', 'port = 70000'), 6, "server.port"),
        (('port = 0', 'prot = 0'), 6, "server.prot: "),
        (('policy = "edf"', 'polity = "edf"'), 2, "polity: "),
        (('max_queue = 100', 'sm_partitions = -1'), 3, "sm_partitions"),
        (('device = "virtual:t4"', 'device = virtual'), 1, "not TOML"),
        (('target_ms = 20', 'target_ms = -1'), 16, r"models\[0\].target_ms"),
        (('batch = [1, 2]', 'batch = [1, 0]'), 17, r"models\[0\].batch"),
        (('name = "second"\nfactory = "paellapy.demo:load"', 'name = "second"'), 19, r"models\[1\]: factory is miss"),
        (('alice = "secret"', 'alice = ""'), 10, "keys.alice: Expected str of length >= 1"),
        (('bob = "env:BOBS_KEY"', 'bob = 5'), 11, "keys.bob: the value is a whole number: give a text"),
        (('port = 0', 'admission = "of"'), 6, "server.admission: 'of' .* 'targets', 'deadlines' or 'off'"),
        (('port = 0', 'held_mb = inf'), 6, "server.held_mb: Expected float <= 1000000000"),
        (('port = 0', 'header_timeout_s = nan'), 6, "server.header_timeout_s: Expected float > 0"),
        (('port = 0', 'log_format = "xml"'), 6, "choose 'text' or 'json'"),
        (('port = 0', 'log_level = "loud"'), 6, "choose 'debug', 'info', 'warning' or 'error'"),
        (('max_queue = 100', 'quantum_us = inf'), 3, "quantum_us: Expected float <= 1000000000"),
        (('max_queue = 100', 'max_queue = 99999999999999999999'), 3, "max_queue: Expected int <= 1048576"),
        (('port = 0', 'standby = "hot"'), 6, "choose 'loaded', 'warm' or 'off'"),
        (('batch = [1, 2]', 'capture = "later"'), 17, r"models\[0\].capture: .* choose 'ahead' or 'on_demand'"),
        (('batch = [1, 2]', 'resident = "yes"'), 17, r"models\[0\].resident: .* choose true, false or 'auto'"),
        (('batch = [1, 2]', 'resident = 1'), 17, "give true, false or 'auto'"),
        (('[keys]', '[tenants.ann]\n[tenants.ben]\nshare = "x"\n[keys]'), 11, "tenants.ben.share: .* a number"),
        (('[keys]', '[tenants]\nann = { limit = 1 }\nben = { limit = 2 }\n[keys]'), 11, "tenants.ben.limit"),
        (('port = 0', 'access_log = true\nlog_level = "warning"'), 6, "set log_level to \"info\""),
    ],
)  # fmt: skip
def test_a_wrong_value_is_found_on_its_line(write, change, line, said):
    text = GOOD.replace(*change, 1)
    assert text != GOOD
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(write(text))
    assert f"paella.toml:{line}:" in str(caught.value)


@pytest.mark.parametrize("line", ['alice = "secret', "alice = 'secret\"", 'alice = """\nsecret', 'alice : "secret"'])
def test_a_line_that_is_no_toml_shows_no_key(write, line):
    with pytest.raises(ConfigError, match="not TOML") as caught:
        load_config(write(GOOD.replace('alice = "secret"', line).replace('bob = "env:BOBS_KEY"\n', "")))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("server = 1", r"server: the value is a whole number: give a table, under \[server\]"),
     ("models = 3", r"models: the value is a whole number: give tables, each under \[\[models\]\]"),
     ("models = [1]", r"models\[0\]: the value is a whole number: give tables, each under \[\[models\]\]"),
     ("[models]", r"models: the value is a table: give tables, each under \[\[models\]\]"),
     ("[server]\naccess_log = 1979-05-27", "server.access_log: the value is a date: give true or false")],
)  # fmt: skip
def test_what_is_of_the_wrong_kind_is_named_as_toml_has_it(write, text, said):
    with pytest.raises(ConfigError, match=said):
        load_config(write(text))


def test_keys_that_are_no_table_are_named():
    with pytest.raises(ConfigError, match=r"keys: the value is a whole number: give a table, under \[keys\]"):
        load_config(overrides=["keys=5"])


@pytest.mark.parametrize(
    ("change", "line", "said", "build"),
    [
        (("env:BOBS_KEY", "env:NOT_THERE"), 11, "NOT_THERE", build_keys),
        (('"edf"', '"nope"'), 2, "no policy named 'nope'", build_engine),
        (('"edf"', '"no.module:here"'), 2, "cannot be imported", build_engine),
        (('"virtual:t4"', '"virtual:nope"'), 1, "nope", build_engine),
        (("max_queue = 100", "memory_bytes = 99999999999999999999"), 3, "memory_bytes", build_engine),
        (("paellapy.demo:load", "paellapy.demo:lode"), 14, "cannot be imported", build_entries),
        (("paellapy.demo:load", "builtins:dict"), 13, "a dict", build_entries),
        (('name = "mlp"', 'name = "nope"'), 13, "no demo model", build_entries),
        (('name = "second"', 'name = "mlp"'), 19, "named 'mlp'", build_entries),
        (('[keys]', '[tls]\ncertificate = "a"\nkey = "b"\n[keys]'), 10, "cannot be loaded", build_tls),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found_on_its_line(write, monkeypatch, change, line, said, build):
    config, source = load_config(write(GOOD.replace(*change, 1)))
    with pytest.raises(ConfigError, match=said) as caught:
        build(config, source)
    assert f"paella.toml:{line}:" in str(caught.value)


@pytest.mark.parametrize(("value", "said"), [("9" * 5000, "5000 digits"), ("[" * 9000, "nested too deeply")])
def test_values_that_the_parser_cannot_take_are_an_error_of_the_file(write, value, said):
    with pytest.raises(ConfigError, match=f"paella.toml: this is not TOML: .*{said}"):
        load_config(write(f"max_queue = {value}"))


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load_config("nowhere.toml")


def test_everything_can_be_said_on_the_command_line(write):
    overrides = ["server.port=9000", "policy=srpt", "models.1.target_ms=7", "keys.carol=c", "server.access_log=true"]
    config, _ = load_config(write(GOOD), overrides)
    assert (config.server.port, config.policy, config.models[1].target_ms) == (9000, "srpt", 7)
    assert config.keys["carol"] == "c"
    assert config.server.access_log is True
    models = ['some.module:make{a = 1, b = "x"}', "m:f"]
    config, _ = load_config(overrides=["tls.certificate=c", "tls.key=k"], models=models)
    assert config.models[0].arguments == {"a": 1, "b": "x"}
    assert config.models[1].factory == "m:f"
    assert config.tls is not None


@pytest.mark.parametrize(
    ("overrides", "models", "said"),
    [
        (["server.port"], [], "key=value"),
        (["server.port=x"], [], "on the command line: server.port"),
        (["models.7.target_ms=1"], [], "models.7"),
        (["nothing=1"], [], "on the command line: nothing"),
        (["²=1"], [], "on the command line: ²"),
        (["server.port=" + "9" * 5000], [], "on the command line: server.port: the value is a text"),
        ([], ["m:f{a=}"], "TOML table"),
        ([], ["not a path"], "on the command line: models"),
    ],
)
def test_mistakes_on_the_command_line_are_said_to_be_there(write, overrides, models, said):
    with pytest.raises(ConfigError, match=said):
        load_config(write(GOOD), overrides, models=models)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 9000}, "options: port: .* server.port"),
        ({"server": {"prot": 1}}, "options: server.prot: "),
        ({"models": [{"factory": "mlp"}]}, "write package.module:name"),
    ],
)
def test_mistakes_in_settings_given_from_python_are_said_to_be_there(settings, said):
    with pytest.raises(ConfigError, match=said):
        load_config(defaults=settings)


def test_no_models_at_all():
    config, source = load_config()
    with pytest.raises(ConfigError, match="models"):
        build_entries(config, source)


def test_lines_of_nested_things():
    text = '# a\n"odd key" = 1\n[a.b]\nc = 2\n[[d]]\n[[d.e]]\nf = 1\n[[d]]\n[[d.e]]\n[[d.e]]\nf.g = 3\n'
    assert line_of(text, ("odd key",)) == 2
    assert line_of(text, ("a", "b", "c")) == 4
    assert line_of(text, ("d", 0, "e", 0, "f")) == 7
    assert line_of(text, ("d", 1, "e", 1, "f", "g")) == 11
    assert line_of(text, ("d", 1, "e", 0, "missing")) == 9
    assert line_of(text, ("nothing",)) == 1
    assert line_of("", ("x",)) == 1


def test_the_python_interface_checks_its_options():
    model = Model("m", lambda w, i, o: None, inputs={"x": TensorSpec(4)}, outputs={"y": TensorSpec(4)})
    with pytest.raises(ConfigError, match=r"server\.prot"):
        pp.serve([model], server={"prot": 1})
    with pytest.raises(ConfigError, match="policy"):
        pp.serve([model], policy="nope")
    complex_model = Model("m", lambda w, i, o: None, inputs={"x": TensorSpec(4, np.complex64)}, outputs=model.outputs)
    with pytest.raises(pp.PaellaError, match=r"complex64.*cannot carry"):
        pp.serve([complex_model], device="virtual:t4", server={"port": 0, "grace_s": 0})


def test_workers_are_one_of_the_options(write, monkeypatch):
    served = []
    keep = lambda config, *found, **more: served.append(config.server)  # noqa: E731
    monkeypatch.setattr("paellapy.serving.api.serve_config", keep)
    model = Model("m", lambda w, i, o: None, inputs={"x": TensorSpec(4)}, outputs={"y": TensorSpec(4)})
    for models in ([model], write(GOOD)):
        given = {"port": 1, "workers": 3}
        pp.serve(models, workers=2, server=given)
        assert (served[-1].port, served[-1].workers) == (1, 2)
        assert given == {"port": 1, "workers": 3}, "the caller's own dict stays as it is"
        pp.serve(models, server=given)
        assert served[-1].workers == 3
        said = r"options: server\.workers: .*a whole number$"
        with pytest.raises(ConfigError, match=said):
            pp.serve(models, workers="x")
        for server, kind in (("127.0.0.1", "str"), (9000, "int"), (None, "NoneType")):
            for workers in (None, 2):
                with pytest.raises(ConfigError, match=rf"options: server: .*{kind}"):
                    pp.serve(models, workers=workers, server=server)
    assert len(served) == 4


def test_options_come_before_what_a_file_says(write, monkeypatch):
    served = []
    monkeypatch.setattr("paellapy.serving.api.serve_config", lambda *found, **more: served.append(found))
    pp.serve(write(GOOD), workers=2, policy="srpt", server={"port": 1}, keys={"bob": "known"})
    config, source = served[0]
    assert (config.device, config.policy, config.server.port, config.server.workers) == ("virtual:t4", "srpt", 1, 2)
    assert config.server.grace_s == 0
    assert build_keys(config, source) == {"alice": Key("secret"), "bob": Key("known")}
    assert str(source.error(("policy",), "so")) == "in the options: policy: so"
    assert "paella.toml:1: device: so" in str(source.error(("device",), "so"))
    with pytest.raises(ConfigError, match=r"options: server\.prot: "):
        pp.serve(write(GOOD), server={"prot": 1})
    with pytest.raises(ConfigError, match=r"server\.port"):
        pp.serve(write(GOOD), port=1)
    with pytest.raises(ConfigError, match=r"paella\.toml:1: polcy"):
        pp.serve(write("polcy = 1"), device="virtual:t4")
    assert len(served) == 1
