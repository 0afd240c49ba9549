"""A running server takes up its configuration and its models' code as they stand now."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_models import scale_model
from serving_processes import children
from serving_server import BODY, At, ask, read_until, serving, url_once
from typer.testing import CliRunner
from waiting import wait_until

import paellapy as pp
from paellapy.cli import app
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.policies.policy import find_policy
from paellapy.serving.build import build_entries
from paellapy.serving.config import ServerConfig, load_config
from paellapy.serving.errors import ConfigError
from paellapy.serving.loading import load_models
from paellapy.serving.registry import Registry, changed_modules, entry_of, find_factory
from paellapy.serving.reload import Reloader, ask_to_reload, check, noted
from paellapy.serving.server import Server
from paellapy.serving.workers.engine_process import EngineProcess, Latest, Policies

TLS = Path(__file__).parents[1] / "tls"
CODE = """
import threading

import paellapy as pp
from engine_models import scale_model
from own_part import FACTOR

def model(name="own"):
    return scale_model(name, factor=FACTOR, batch=(1,))

def leaving():
    raise SystemExit(2)

def broken(name="broken"):
    def fn(weights, inputs, outputs):
        raise ValueError("it cannot be captured")

    specs = {"inputs": {"x": pp.TensorSpec((64,))}, "outputs": {"y": pp.TensorSpec((64,))}}
    return pp.Model(name, fn, **specs, batch=(1,))

def hanging():
    threading.Event().wait()

@pp.policy
def longest_first(job):
    return -job.remaining_ns
"""
CONFIG = """
device = "virtual:h200"
[server]
port = 0
grace_s = 0.0
log_format = "json"
{server}
[[models]]
name = "own"
factory = "own_models:model"
"""
MORE = """
[[models]]
name = "second"
factory = "own_models:model"
arguments = { name = "second" }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "own_part.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "own_models.py").write_text(CODE)
    return tmp_path


def pids(parent, name):
    found = [pid for pid in children(parent) if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    assert found
    return found


def first(server, name="own"):
    status, _, content = ask(server, "POST", f"/v2/models/{name}/infer", BODY)
    return content["outputs"][0]["data"][0] if status == 200 else status


def test_a_factory_whose_file_has_changed_is_imported_anew(folder):
    assert find_factory("own_models:FACTOR", folder) == 2.0
    assert not changed_modules()
    (folder / "own_part.py").write_text("FACTOR = 3.0\n")  # as long, and in the same second
    assert changed_modules() == ["own_part"]
    assert find_factory("own_models:FACTOR", folder) == 3.0
    (folder / "own_part.py").unlink()
    with pytest.raises(ImportError):
        find_factory("own_models:FACTOR", folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_edited_code_a_new_model_and_one_that_is_gone(folder, workers):
    config = folder / "paella.toml"
    config.write_text(CONFIG.format(server=f"workers = {workers}"))
    run = CliRunner()
    with serving(str(config)) as process:
        url = url_once(process)
        server = At(url)
        shown = read_until(process.stdout, "/v2/models/own/infer")
        assert f"Serving own at {url}/v2" in shown
        assert first(server) == 2.0
        (folder / "own_part.py").write_text("FACTOR = 3.0\n")
        assert ask(server, "POST", "/v2/repository/models/own/unload", b"{}")[0] == 200
        assert ask(server, "POST", "/v2/repository/models/own/load", b"{}")[0] == 200
        assert first(server) == 3.0
        (folder / "own_part.py").write_text("FACTOR = nothing\n")
        assert ask(server, "POST", "/v2/repository/models/own/load", b"{}")[0] == 400
        assert first(server) == 3.0  # the one that was there
        (folder / "own_part.py").write_text("FACTOR = 5.0\n")
        policy = 'policy = "own_models:longest_first"\n'
        config.write_text(policy + CONFIG.format(server=f"workers = {workers}") + MORE)
        found = run.invoke(app, ["reload", str(config)])
        assert found.exit_code == 0, found.output + str(found.exception)
        assert "policy: longest_first" in found.output
        assert "loaded: own, second" in found.output
        assert (first(server), first(server, "second")) == (5.0, 5.0)
        if workers:  # the next engine is as this one is, and not as the server began
            (engine,) = pids(process.pid, "paellapy-engine")
            os.kill(engine, signal.SIGKILL)
            while first(server, "second") != 5.0:
                time.sleep(0.05)
        assert "nothing has changed" in run.invoke(app, ["reload", str(config)]).output
        config.write_text(CONFIG.format(server=f"workers = {workers}\nport = 1").replace("port = 0\n", ""))
        found = run.invoke(app, ["reload", str(config)])
        assert "unloaded: second" in found.output
        assert "needs a restart: server" in found.output
        assert first(server, "second") == 404
        assert first(server) == 5.0
        config.write_text("models = 3")
        os.kill(process.pid, signal.SIGHUP)  # nothing of it is taken up, and nobody dies
        assert "not reloaded" in read_until(process.stderr, "not reloaded")
        assert first(server) == 5.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    found = run.invoke(app, ["reload", str(folder / "other.toml")])
    assert found.exit_code == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_certificates_and_keys_are_taken_up(folder, workers):
    settings = CONFIG.format(server=f"workers = {workers}")
    for name in ("certificate.pem", "key.pem"):
        shutil.copy(TLS / name, folder / name)
    config = folder / "paella.toml"
    tls = '\n[tls]\ncertificate = "certificate.pem"\nkey = "key.pem"\n[keys]\nme = "{key}"\n'
    config.write_text(settings + tls.format(key="old"))
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))

    def status(port, key):
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        with trusting.wrap_socket(plain, server_hostname="localhost") as secure:
            secure.sendall(f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n".encode())
            return int(secure.recv(4096).split()[1])

    with serving(str(config)) as process:
        port = At(url_once(process)).port
        assert (status(port, "old"), status(port, "new")) == (200, 401)
        config.write_text(settings + tls.format(key="new"))
        checked = CliRunner().invoke(app, ["serve", "--check", str(config)])
        assert (checked.exit_code, "keys.me" in checked.output, "new" in checked.output) == (0, True, False)
        found = CliRunner().invoke(app, ["reload", str(config)])
        assert found.exit_code == 0, found.output
        if workers:  # they hear of it after the engine's process; one that is started again begins with it
            wait_until(lambda: status(port, "new") == 200)
            os.kill(pids(process.pid, "paellapy-work1")[0], signal.SIGKILL)
            read_until(process.stderr, "was restarted")
            wait_until(lambda: status(port, "new") == 200)
        assert (status(port, "old"), status(port, "new")) == (401, 200)
        unknown, broken = (MORE.replace("own_models:model", f"own_models:{name}") for name in ("gone", "broken"))
        # Refused, so no key changes either
        for wrong in (unknown + tls.format(key="x"), broken + tls.format(key="x"), tls.partition("[keys]")[0]):
            config.write_text(settings + wrong)
            os.kill(process.pid, signal.SIGHUP)
            assert read_until(process.stderr, "not reloaded")
            assert (status(port, "x"), status(port, "new"), status(port, "")) == (401, 200, 401)
        (folder / "certificate.pem").write_text("none")
        os.kill(process.pid, signal.SIGHUP)
        assert read_until(process.stderr, "not reloaded")
        assert status(port, "new") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture
def reloader(folder):
    """Reloads a file whose models are not loaded, beside its outcome for `paellapy reload`."""
    path = folder / "paella.toml"
    path.write_text(CONFIG.format(server="") + "load = false\n")
    with pp.Engine("virtual:h200") as engine:
        config, source = load_config(path)
        yield Reloader(Registry(engine, build_entries(config, source)), config, source)


def changed(folder, text, before="", server=""):
    (folder / "paella.toml").write_text(before + CONFIG.format(server=server) + "load = false\n" + text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MORE.replace('"second"', '"stats"', 1), "'stats' cannot name"),
        (MORE.replace('"second"', '"a/b"', 1), "'a/b' cannot name"),
        ('[[models]]\nfactory = "own_models:leaving"\n', "the factory failed: SystemExit: 2"),
        ('[[models]]\nfactory = "leaving:model"\n', "cannot be imported: SystemExit: 3"),
        (MORE + '[keys]\nme = "env:NOT_THERE"\n', "NOT_THERE is not set"),
        (MORE + '[tls]\ncertificate = "none.pem"\nkey = "none.pem"\n', "cannot be loaded"),
    ],
)
def test_a_file_with_a_mistake_changes_nothing(reloader, folder, text, said):
    (folder / "leaving.py").write_text("raise SystemExit(3)")
    changed(folder, text, 'policy = "edf"\n')
    told = reloader.reload()
    assert re.search(said, told["error"]), told
    assert (list(reloader._registry.entries), reloader._registry.engine.policy) == (["own"], "paella")


@pytest.mark.parametrize("text", ["", "[server]\nport = 0\n"])
def test_a_file_that_was_cut_short_unloads_nothing(reloader, folder, text):
    """As an editor or a full disk leaves it. The next engine process keeps the models too."""
    path = folder / "paella.toml"
    latest = Latest(*load_config(path))
    path.write_text(text)
    assert "[[models]]" in reloader.reload()["error"]
    assert [entry.reason for entry in reloader._registry.entries.values()] == ["not loaded yet"]
    latest.read_again()
    assert [each.name for each in latest.config.models] == ["own"]
    with pytest.raises(ConfigError) as caught:
        reloader._source.again()
    assert caught.value.field == "models"


@pytest.mark.parametrize("name", ["", 'name = "third"\n'])
@pytest.mark.parametrize(("factory", "said"), [("hanging", "0.1 s"), ("leaving", "SystemExit: 2")])
def test_a_reload_whose_last_model_cannot_be_made_changes_nothing(reloader, folder, name, factory, said):
    last = f'[[models]]\n{name}factory = "own_models:{factory}"\n'
    changed(folder, MORE + last, 'policy = "edf"\n', server="factory_timeout_s = 0.1")
    assert said in reloader.reload()["error"]
    assert (list(reloader._registry.entries), reloader._registry.engine.policy) == (["own"], "paella")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_server_ends_though_a_factory_hangs(folder, workers):
    path = folder / "paella.toml"
    changed(folder, "", server=f"drain_s = 0.2\nworkers = {workers}")
    with serving(str(path)) as process:
        read_until(process.stderr, '"starting"')
        process.send_signal(signal.SIGHUP)  # before anything can be reloaded
        read_until(process.stderr, '"listening"')
        changed(folder, '[[models]]\nfactory = "own_models:hanging"\n', server=f"drain_s = 0.2\nworkers = {workers}")
        time.sleep(1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture
def loaded(folder):
    """A registry with both models loaded, and a function that reloads it."""
    path = folder / "paella.toml"
    path.write_text(CONFIG.format(server="") + MORE)
    with pp.Engine("virtual:h200", limits=Limits(models=2)) as engine:
        config, source = load_config(path)
        registry = Registry(engine, build_entries(config, source))
        secrets = []
        for name in registry.entries:
            registry.load(name)
        yield registry, Reloader(registry, config, source, lambda *taken: secrets.append(taken)), secrets


THIRD = MORE.replace("second", "third")


def test_a_reload_whose_last_model_cannot_be_loaded_leaves_all_as_it_was(folder, loaded):
    registry, reloader, secrets = loaded
    before = [(each.name, each.model, each.state, each.wanted, each.make) for each in registry.entries.values()]
    policy = 'policy = "edf"\n'
    text = policy + CONFIG.format(server="") + "target_ms = 7\n" + MORE.replace("own_models:model", "own_models:broken")
    (folder / "paella.toml").write_text(text)
    assert "cannot be captured" in reloader.reload()["error"]
    (folder / "paella.toml").write_text(policy + CONFIG.format(server="") + MORE + THIRD)  # more than there is room for
    assert "error" in reloader.reload()
    assert [(each.name, each.model, each.state, each.wanted, each.make) for each in registry.entries.values()] == before
    assert (registry.engine.policy, secrets) == ("paella", [])
    for name in ("own", "second"):
        assert registry.engine.infer_sync(name, {"x": np.ones(64, np.float32)})["y"][0] == 2.0


def test_models_that_are_gone_make_room_for_those_that_come(folder, loaded):
    registry, reloader, secrets = loaded
    (folder / "paella.toml").write_text(CONFIG.format(server="") + THIRD)
    assert reloader.reload() == {"loaded": ["third"], "unloaded": ["second"]}
    assert (set(registry.engine.models), len(secrets)) == ({"own", "third"}, 1)


def test_a_check_says_what_would_change_and_shows_no_key(folder):
    path = folder / "paella.toml"
    path.write_text(CONFIG.format(server="") + '[keys]\nme = "hush"\n')
    config, source = load_config(path)
    assert check(config, source) == (["own"], None)
    with noted(source, config):
        assert check(config, source) == (["own"], {})
        path.write_text('policy = "edf"\n' + CONFIG.format(server="drain_s = 2") + MORE + '[keys]\nme = "psst"\n')
        names, changed = check(*load_config(path))
        path.write_text(CONFIG.format(server="") + MORE.replace("own_models:model", "own_models:leaving"))
        with pytest.raises(PaellaError):
            check(*load_config(path))
    assert names == ["own", "second"]
    assert changed["policy"] == ("paella", "edf")
    assert changed["server.drain_s"] == (30.0, 2.0)
    assert changed["models.second.factory"] == (None, "own_models:model")
    assert "hush" not in str(changed)
    assert {name.split(".")[0] for name in changed} == {"policy", "server", "models", "keys"}


def test_settings_that_need_a_restart_are_named_until_it(reloader, folder):
    changed(folder, '[tenants.ann]\nshare = 2\n[keys]\nann = "x"\n', "host_bytes = 0\n", "keepalive_s = 1")
    needs = {"needs a restart": ["host_bytes", "server", "tenants", "keys"]}
    assert reloader.reload() == needs
    assert reloader.reload() == needs
    changed(folder, "")
    assert reloader.reload() == {}


def test_authorities_that_are_gone_are_told_to_stay_trusted(folder):
    for name in ("certificate.pem", "key.pem"):
        shutil.copy(TLS / name, folder / name)
    shutil.copy(TLS / "certificate.pem", folder / "authorities.pem")
    tls = '[tls]\ncertificate = "certificate.pem"\nkey = "key.pem"\nclient_ca = "authorities.pem"\n'
    changed(folder, tls)
    with pp.Engine("virtual:h200") as engine:
        config, source = load_config(folder / "paella.toml")
        reloader = Reloader(Registry(engine, build_entries(config, source)), config, source)
        assert reloader.reload() == {}
        (folder / "authorities.pem").write_text((TLS / "certificate.pem").read_text() * 2)
        assert reloader.reload() == {"needs a restart": ["tls.client_ca"]}


def test_a_reload_that_fails_has_an_outcome(reloader, folder, monkeypatch):
    monkeypatch.setattr(reloader._registry, "tell", lambda: 1 / 0)
    assert "ZeroDivisionError" in reloader.reload()["error"]


def test_a_folder_for_notes_that_is_gone_or_full_stops_no_server(reloader, folder, monkeypatch, caplog):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "gone"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder / "paella.toml"))  # no folder
    with noted(reloader._source, reloader._config):
        assert reloader.reload() == {}
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    with noted(reloader._source, reloader._config):
        with pytest.raises(ConfigError) as caught:
            ask_to_reload(folder / "other.toml")
        assert caught.value.field == "file"
        note = next(folder.glob("paellapy-*/*.pid"))
        note.write_text("a newer server of the same file")
    assert note.exists()


def test_the_next_engine_has_the_settings_of_the_start_and_the_models_of_the_file(folder):
    changed(folder, "", server="workers = 2")
    latest = Latest(*load_config(folder / "paella.toml"))
    changed(folder, MORE, 'max_queue = 9\npolicy = "own_models:longest_first"\n', "workers = 1")
    latest.read_again()
    assert (latest.config.server.workers, latest.config.max_queue) == (2, 8192)
    assert [each.name for each in latest.entries()] == ["own", "second"]
    engine = EngineProcess(latest, [], Policies(find_policy("paella")), folder)
    assert engine._policy().name == "longest_first"
    changed(folder, '[keys]\nme = "env:NOT_THERE"\n')  # refused
    latest.read_again()
    assert len(latest.config.models) == 2
    changed(folder, "", 'policy = "own_models:gone"\n')
    latest.read_again()
    assert engine._policy().name == "paella"


def test_a_reload_may_add_models_while_others_are_loaded(folder, monkeypatch):
    changed(folder, "")

    async def load_both() -> list[str]:
        with pp.Engine("virtual:h200") as engine:
            registry = Registry(engine, build_entries(*load_config(folder / "paella.toml")))
            registry.entries["own"].wanted = True

            def load(name: str) -> float:
                registry.add(entry_of(scale_model("later")))
                return 0.0

            monkeypatch.setattr(registry, "load", load)
            await load_models(registry, lambda: False)
            return list(registry.entries)

    assert asyncio.run(load_both()) == ["own", "later"]


def test_a_load_has_its_outcome_though_the_model_is_unloaded_at_once(monkeypatch):
    with pp.Engine("virtual:h200") as engine:
        registry = Registry(engine, [entry_of(scale_model(batch=(1,)))])
        monkeypatch.setattr("paellapy.serving.registry.spare_more_objects", lambda: registry.unload("scale"))
        assert registry.load("scale") > 0
        assert not engine.models


def test_a_signal_that_comes_during_a_reload_is_not_lost(monkeypatch):
    begun = []

    async def hang_up_twice() -> None:
        with pp.Engine("virtual:h200") as engine:
            server, go = Server(Registry(engine, ()), ServerConfig(port=0)), asyncio.Event()

            async def reload() -> None:
                begun.append(None)
                await go.wait()

            monkeypatch.setattr(server, "reload", reload)
            server.hang_up()
            await asyncio.sleep(0)
            assert len(begun) == 1
            for _ in range(3):  # the configuration is read once more, not three times
                server.hang_up()
            go.set()
            await server.reloading
            assert len(begun) == 2
            server.hang_up()
            await server.reloading
            assert len(begun) == 3

    asyncio.run(hang_up_twice())


def test_reloads_of_several_threads_wait_for_each_other(monkeypatch):
    reloader, inside, most = Reloader.__new__(Reloader), [], []
    reloader._reloading = threading.Lock()

    def reload() -> dict[str, object]:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return {}

    monkeypatch.setattr(reloader, "_reload", reload)
    threads = [threading.Thread(target=reloader.reload) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * 4
