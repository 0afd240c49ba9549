"""Who may do what: roles of keys, pages of other origins, names of the server, and control over HTTP at all."""

from __future__ import annotations

import logging

import pytest
from engine_models import scale_model
from failing import failing
from serving_server import BODY, INFER, At, ask, running

from paellapy.instrument.errors import PaellaError
from paellapy.serving.access import Access, Key
from paellapy.serving.build import build_keys
from paellapy.serving.config import load_config
from paellapy.serving.errors import ConfigError
from paellapy.serving.listening import listen_admin
from paellapy.serving.logs import log
from paellapy.serving.server import ServerConfig, warn_of_neighbours

OPERATIONS = [
    ("/v2/repository/models/scale/load", b""),
    ("/v2/repository/models/spare/unload", b""),
    ("/dashboard/policy", b'{"policy": "paella"}'),
]
SWITCH = {"Content-Type": "application/json", "X-Paellapy": "1"}


def models():
    return [scale_model(batch=(1,)), scale_model("spare", batch=(1,))]


@pytest.fixture(scope="module")
def server():
    with running(models(), hosts=["inference.example"]) as found:
        yield found


@pytest.fixture(scope="module")
def with_keys():
    keys = {"alice": Key("secret-a", ("infer",)), "oscar": Key("secret-o", ("operate",)), "both": "secret-b"}
    with running(models(), keys=keys, access_log=True) as found:
        yield found


@pytest.mark.parametrize(("path", "body"), OPERATIONS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # curl
        ({"Origin": "http://127.0.0.1:{port}"}, 200),  # the dashboard's own page
        ({"Origin": "http://evil.example"}, 403),  # fetch(…, {mode: "no-cors"})
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another server of this machine
        ({"Origin": "null"}, 403),  # a sandboxed frame
        ({"Origin": "http://[x"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}, 403),  # a name made to mean 127.0.0.1
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "[::1]:{port}"}, 200),
        ({"Host": "inference.example", "Origin": "https://inference.example"}, 200),
    ],
)
def test_pages_of_other_sites_change_nothing(server, path, body, headers, status):
    own = {name: value.format(port=server.port) for name, value in headers.items()}
    found, _, said = ask(server, "POST", path, body, {**SWITCH, **own})
    assert found == status, said
    rebinds = "evil" in own.get("Host", "")
    for more in ({}, {"traceparent": "none"}):  # the fast path, and aiohttp's
        assert ask(server, "POST", INFER, BODY, {**own, **more})[0] == (403 if rebinds else 200)
    assert ask(server, "GET", "/metrics", None, own)[0] == (403 if rebinds else 200)
    assert ask(server, "GET", "/v2/health/ready", None, own)[0] == 200


def test_whom_others_may_reach_or_who_has_keys_answers_under_any_name():
    evil = {"Host": "evil.example", "X-API-Key": "secret"}
    for host, keys in (("0.0.0.0", None), ("127.0.0.1", {"alice": "secret"})):
        with running([scale_model(batch=(1,))], host=host, keys=keys) as server:
            assert ask(server, "POST", INFER, BODY, evil)[0] == 200


def test_a_server_beyond_loopback_is_not_controlled_over_http_unless_asked_for():
    for host, control, status in (("127.0.0.1", False, 403), ("0.0.0.0", None, 403), ("0.0.0.0", True, 200)):
        with running([scale_model(batch=(1,))], host=host, model_control=control) as server:
            assert ask(server, "POST", "/v2/repository/models/scale/load", b"")[0] == status
            assert ask(server, "POST", INFER, BODY)[0] == 200


@pytest.mark.parametrize(
    ("key", "infers", "operates"),
    [("secret-a", 200, 403), ("secret-o", 403, 200), ("secret-b", 200, 200), ("x", 401, 401)],
)
def test_keys_have_roles(with_keys, key, infers, operates):
    assert ask(with_keys, "POST", INFER, BODY, {"X-API-Key": key})[0] == infers
    assert ask(with_keys, "GET", "/v2/models/scale", None, {"X-API-Key": key})[0] == (401 if key == "x" else 200)
    for path, body in OPERATIONS:
        assert ask(with_keys, "POST", path, body, {**SWITCH, "X-API-Key": key})[0] == operates


def test_no_key_is_written_anywhere(with_keys, caplog):
    log.propagate = True
    try:
        with caplog.at_level(logging.DEBUG, logger=log.name):
            pages = [
                ask(with_keys, "GET", path, None, {"X-API-Key": "secret-b"})[2]
                for path in ("/metrics", "/docs", "/", "/openapi.json", "/v2/models/scale", "/nowhere?key=secret-b")
            ]
            ask(with_keys, "POST", INFER, b"{", {"Authorization": "Bearer secret-b"})
    finally:
        log.propagate = False
    assert "secret" not in str(pages)
    assert "secret-b" not in caplog.text
    assert "secret" not in repr(Key("secret"))


def test_an_error_in_the_configuration_shows_no_key(tmp_path):
    file = tmp_path / "paella.toml"
    file.write_text('[keys]\nalice = { key = "hush", roles = ["everything"] }\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "hush" not in str(caught.value)
    assert "'infer' or 'operate'" in str(caught.value)


def test_roles_are_read_from_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("OSCAR", "of the environment")
    file = tmp_path / "paella.toml"
    file.write_text('[keys]\nalice = "both"\noscar = { key = "env:OSCAR", roles = ["operate"] }\n')
    found = build_keys(*load_config(file))
    assert found["alice"] == Key("both")
    assert found["oscar"] == Key("of the environment", ("operate",))


@pytest.mark.parametrize(
    ("host", "keys", "warns"), [("0.0.0.0", {}, True), ("0.0.0.0", {"a": "b"}, False), ("localhost", {}, False)]
)
def test_a_port_for_everybody_is_warned_of(caplog, host, keys, warns):
    log.propagate = True
    try:
        warn_of_neighbours(ServerConfig(host=host), keys)
    finally:
        log.propagate = False
    assert bool(caplog.records) == warns


def test_what_may_be_done_does_not_depend_on_how_a_host_is_spelled():
    access = Access({}, ["Paella.Example"])
    assert all(
        map(access._knows, ["paella.example", "PAELLA.example:80", "paella.example.", "10.0.0.1:8", "[fe80::1]"])
    )
    assert not any(map(access._knows, ["", "evil.example", "paella.example.evil", "127.0.0.1.evil.example", "0x7f.1"]))


def test_operators_may_have_a_port_of_their_own() -> None:
    with running([scale_model(batch=(1,))], admin_port=0) as server:
        admin = At(server.server.admin_url)
        for path in ("/metrics", "/", "/dashboard/events"):
            assert ask(server, "GET", path)[0] == 404
        assert (ask(admin, "GET", "/metrics")[0], ask(admin, "GET", "/")[0]) == (200, 200)
        unload = "/v2/repository/models/scale/unload"
        assert ask(server, "POST", unload, b"{}")[0] == 404
        for at in (server, admin):
            assert ask(at, "GET", "/v2/health/ready")[0] == ask(at, "POST", INFER, BODY)[0] == 200
        assert ask(admin, "POST", unload, b"{}")[0] == 200
        with failing(PaellaError):
            listen_admin("127.0.0.1", admin.port)
