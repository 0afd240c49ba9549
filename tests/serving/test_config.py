"""The configuration: every mistake is found at the start, and its line is named."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from paellapy.demo import AUSTEN
from paellapy.scheduler.core.errors import ModelError
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
capture = "on_demand"
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
    assert second.make().later_batch
    with build_engine(config, source) as engine:
        assert engine.device.name == "virtual:t4"
        assert engine.policy == "edf"
        assert engine.limits.requests == 100


def test_an_engine_has_the_partitions_of_sms_its_file_asks_for(write):
    with build_engine(*load_config(write(GOOD.replace("max_queue = 100", "sm_partitions = 4")))) as engine:
        assert engine.state.core["partitions"][0] == 4


def test_a_number_of_partitions_that_cannot_be_is_named_with_its_line(write):
    path = write(GOOD.replace("max_queue = 100", "sm_partitions = 2"))
    with pytest.raises(ConfigError) as caught:
        build_engine(*load_config(path))
    assert (caught.value.field, caught.value.line) == ("sm_partitions", 3)


@pytest.mark.parametrize(
    ("change", "line", "field"),
    [
        (('port = 0', 'port = "x"'), 6, "server.port"),
        (('port = 0', 'port = 70000'), 6, "server.port"),
        (('port = 0', 'prot = 0'), 6, "server.prot"),
        (('policy = "edf"', 'polity = "edf"'), 2, "polity"),
        (('max_queue = 100', 'sm_partitions = -1'), 3, "sm_partitions"),
        (('device = "virtual:t4"', 'device = virtual'), 1, ""),
        (('target_ms = 20', 'target_ms = -1'), 16, "models[0].target_ms"),
        (('batch = [1, 2]', 'batch = [1, 0]'), 17, "models[0].batch[1]"),
        (('name = "second"\nfactory = "paellapy.demo:load"', 'name = "second"'), 19, "models[1]"),
        (('alice = "secret"', 'alice = ""'), 10, "keys.alice"),
        (('bob = "env:BOBS_KEY"', 'bob = 5'), 11, "keys.bob"),
        (('port = 0', 'admission = "of"'), 6, "server.admission"),
        (('port = 0', 'held_mb = inf'), 6, "server.held_mb"),
        (('port = 0', 'header_timeout_s = nan'), 6, "server.header_timeout_s"),
        (('port = 0', 'log_format = "xml"'), 6, "server.log_format"),
        (('port = 0', 'log_level = "loud"'), 6, "server.log_level"),
        (('max_queue = 100', 'quantum_us = inf'), 3, "quantum_us"),
        (('max_queue = 100', 'max_queue = 99999999999999999999'), 3, "max_queue"),
        (('port = 0', 'standby = "hot"'), 6, "server.standby"),
        (('batch = [1, 2]', 'capture = "later"'), 17, "models[0].capture"),
        (('batch = [1, 2]', 'resident = "yes"'), 17, "models[0].resident"),
        (('batch = [1, 2]', 'resident = 1'), 17, "models[0].resident"),
        (('[keys]', '[tenants.ann]\n[tenants.ben]\nshare = "x"\n[keys]'), 11, "tenants.ben.share"),
        (('[keys]', '[tenants]\nann = { limit = 1 }\nben = { limit = 2 }\n[keys]'), 11, "tenants.ben.limit"),
        (('port = 0', 'access_log = true\nlog_level = "warning"'), 6, "server.access_log"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_found_on_its_line(write, change, line, field):
    text = GOOD.replace(*change, 1)
    assert text != GOOD
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    assert (caught.value.field, caught.value.line) == (field, line)
    assert f"paella.toml:{line}:" in str(caught.value)


@pytest.mark.parametrize("line", ['alice = "secret', "alice = 'secret\"", 'alice = """\nsecret', 'alice : "secret"'])
def test_a_line_that_is_no_toml_shows_no_key(write, line):
    with pytest.raises(ConfigError) as caught:
        load_config(write(GOOD.replace('alice = "secret"', line).replace('bob = "env:BOBS_KEY"\n', "")))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("server = 1", "server: the value is a whole number: give a table, under [server]"),
     ("models = 3", "models: the value is a whole number: give tables, each under [[models]]"),
     ("models = [1]", "models[0]: the value is a whole number: give tables, each under [[models]]"),
     ("[models]", "models: the value is a table: give tables, each under [[models]]"),
     ("[server]\naccess_log = 1979-05-27", "server.access_log: the value is a date: give true or false"),
     ("keys = 5", "keys: the value is a whole number: give a table, under [keys]"),
     ("[keys]\nbob = 5", "keys.bob: the value is a whole number: give a text, or a table with key and roles"),
     ("port = 1", "port: no setting has this name; did you mean server.port?"),
     ('[server]\nadmission = "of"', "server.admission: 'of' is not allowed: choose 'targets', 'deadlines' or 'off'"),
     ('[[models]]\nname = "m"', "models[0]: factory, or language_model, is missing"),
     ('[[models]]\nfactory = "m"', "write package.module:name"),
     ('[[models]]\nfactory = "m:f"\nresident = "yes"', "'yes' is not allowed: choose true, false or 'auto'"),
     ('[[models]]\nfactory = "m:f"\nresident = 1', "the value is a whole number: give true, false or 'auto'")],
)  # fmt: skip
def test_the_words_of_an_error_are_those_of_toml(write, text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "field"),
    [('factory = "m:f"\nlanguage_model = "x"', "models[0]"),
     ('factory = "m:f"\nttft_ms = 5', "models[0].ttft_ms"),
     ('language_model = "x"\ntarget_ms = 5', "models[0].target_ms"),
     ('language_model = "x"\narguments = { a = 1 }', "models[0].arguments"),
     ('language_model = "x"\ndtype = "int8"', "models[0].dtype"),
     ('language_model = "nowhere"', "models[0]"),
     (f'language_model = "{AUSTEN}"\ncontext = 1000', "models[0]")],
)  # fmt: skip
def test_a_language_model_has_settings_of_its_own(write, settings, field):
    with pytest.raises(ConfigError) as caught:
        build_entries(*load_config(write(f"[[models]]\n{settings}")))
    assert caught.value.field == field


def test_a_language_model_is_made_with_its_settings(write):
    text = f'[[models]]\nlanguage_model = "{AUSTEN}"\nttft_ms = 200\nkv_gb = 0.5\npriority = 3\nsequences = 4'
    text += '\ncapture = "ahead"'
    (entry,) = build_entries(*load_config(write(text)))
    made = entry.make()
    assert (made.name, made.ttft_ms, made.tbt_ms, made.kv_gb) == ("austen", 200, None, 0.5)
    assert (made.priority, made.sequences, made.context, made.capture) == (3, 4, 256, "ahead")
    assert [each.later_batch for each in made.programs(10)] == [(), ()]


@pytest.mark.parametrize(
    ("change", "line", "field", "build"),
    [
        (("env:BOBS_KEY", "env:NOT_THERE"), 11, "keys.bob", build_keys),
        (('"edf"', '"nope"'), 2, "policy", build_engine),
        (('"edf"', '"no.module:here"'), 2, "policy", build_engine),
        (('"virtual:t4"', '"virtual:nope"'), 1, "device", build_engine),
        (("max_queue = 100", "memory_bytes = 99999999999999999999"), 3, "memory_bytes", build_engine),
        (("paellapy.demo:load", "paellapy.demo:lode"), 14, "models[0].factory", build_entries),
        (("paellapy.demo:load", "builtins:dict"), 13, "models[0]", build_entries),
        (('name = "mlp"', 'name = "nope"'), 13, "models[0]", build_entries),
        (('name = "second"', 'name = "mlp"'), 19, "models[1]", build_entries),
        (('[keys]', '[tls]\ncertificate = "a"\nkey = "b"\n[keys]'), 10, "tls.certificate", build_tls),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found_on_its_line(write, change, line, field, build):
    config, source = load_config(write(GOOD.replace(*change, 1)))
    with pytest.raises(ConfigError) as caught:
        build(config, source)
    assert (caught.value.field, caught.value.line) == (field, line)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 9000], ids=["digits", "nested"])
def test_values_that_the_parser_cannot_take_are_an_error_of_the_file(write, value):
    with pytest.raises(ConfigError) as caught:
        load_config(write(f"max_queue = {value}"))
    assert (caught.value.field, caught.value.line) == ("", None)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError):
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
    ("overrides", "models", "field"),
    [
        (["server.port"], [], ""),
        (["server.port=x"], [], "server.port"),
        (["models.7.target_ms=1"], [], "models.7.target_ms"),
        (["nothing=1"], [], "nothing"),
        (["²=1"], [], "²"),
        (["server.port=" + "9" * 5000], [], "server.port"),
        ([], ["m:f{a=}"], ""),
        ([], ["not a path"], "models[0].factory"),
    ],
)
def test_mistakes_on_the_command_line_are_said_to_be_there(write, overrides, models, field):
    with pytest.raises(ConfigError) as caught:
        load_config(write(GOOD), overrides, models=models)
    assert (caught.value.field, caught.value.line) == (field, None)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": 9000}, "port"),
        ({"server": {"prot": 1}}, "server.prot"),
        ({"models": [{"factory": "mlp"}]}, "models[0].factory"),
    ],
)
def test_mistakes_in_settings_given_from_python_are_said_to_be_there(settings, field):
    with pytest.raises(ConfigError) as caught:
        load_config(options=settings)
    assert (caught.value.field, caught.value.line) == (field, None)


def test_no_models_at_all():
    config, source = load_config()
    with pytest.raises(ConfigError) as caught:
        build_entries(config, source)
    assert caught.value.field == "models"


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
    for options, field in (({"server": {"prot": 1}}, "server.prot"), ({"policy": "nope"}, "policy")):
        with pytest.raises(ConfigError) as caught:
            pp.serve([model], **options)
        assert caught.value.field == field
    complex_model = Model("m", lambda w, i, o: None, inputs={"x": TensorSpec(4, np.complex64)}, outputs=model.outputs)
    with pytest.raises(ModelError):
        pp.serve([complex_model], device="virtual:t4", server={"port": 0, "grace_s": 0})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('bob = " hush"', "keys.bob"),
        ('bob = "hush\\n"', "keys.bob"),
        ('bob = "hu\\u0000sh"', "keys.bob"),
        ('bob = { key = "secret", roles = ["infer"] }', "keys.bob"),  # alice's
        ('bob = "env:TWICE"', "keys.bob"),
    ],
)
def test_a_key_that_no_header_carries_or_that_two_clients_have_is_refused(write, monkeypatch, text, field):
    monkeypatch.setenv("TWICE", "secret")
    with pytest.raises(ConfigError) as caught:
        build_keys(*load_config(write(f'[keys]\nalice = "secret"\n{text}\n')))
    assert (caught.value.field, caught.value.line) == (field, 3)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "X Client", "X-Client:", "Host", "x-api-key", "Größe"])
def test_a_header_that_cannot_name_clients_is_refused(write, name):
    with pytest.raises(ConfigError) as caught:
        load_config(write(f'[server]\nclient_header = "{name}"\n'))
    assert (caught.value.field, caught.value.line) == ("server.client_header", 2)


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
        with pytest.raises(ConfigError) as caught:
            pp.serve(models, workers="x")
        assert caught.value.field == "server.workers"
        for server in ("127.0.0.1", 9000, None):
            for workers in (None, 2):
                with pytest.raises(ConfigError) as caught:
                    pp.serve(models, workers=workers, server=server)
                assert caught.value.field == "server"
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
    for text, given, found in (
        (GOOD, {"server": {"prot": 1}}, ("server.prot", None)), (GOOD, {"port": 1}, ("port", None)),
        ("polcy = 1", {"device": "virtual:t4"}, ("polcy", 1)),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            pp.serve(write(text), **given)
        assert (caught.value.field, caught.value.line) == found
    assert len(served) == 1
