"""A running server takes up its configuration and its models' code as they stand now."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from serving_processes import children
from serving_server import ask, infer_body, read_until, serving
from typer.testing import CliRunner

import paellapy as pp
from paellapy.cli import app
from paellapy.serving.config import ServerConfig
from paellapy.serving.factories import changed_modules, find_factory
from paellapy.serving.registry import Registry
from paellapy.serving.reload import Reloader
from paellapy.serving.server import Server

TLS = Path(__file__).parents[1] / "tls"
CODE = """
from engine_models import scale_model
from own_part import FACTOR

def model(name="own"):
    return scale_model(name, factor=FACTOR, batch=(1,))
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
BODY = json.dumps(infer_body("x", np.ones((1, 64), np.float32))).encode()


class At:
    def __init__(self, url):
        self.port = int(url.rpartition(":")[2])


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


def listening(process):
    """The server's address, once everything is loaded."""
    lines = read_until(process.stderr, '"message":"loaded"').splitlines()
    return next(json.loads(each)["url"] for each in lines if '"listening"' in each)


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
        url = listening(process)
        server = At(url)
        shown = process.stdout.readline() + process.stdout.readline()
        assert f"Serving own at {url}/v2" in shown
        assert "/v2/models/own/infer" in process.stdout.readline()
        assert first(server) == 2.0
        (folder / "own_part.py").write_text("FACTOR = 3.0\n")
        assert ask(server, "POST", "/v2/repository/models/own/unload", b"{}")[0] == 200
        assert ask(server, "POST", "/v2/repository/models/own/load", b"{}")[0] == 200
        assert first(server) == 3.0
        (folder / "own_part.py").write_text("FACTOR = nothing\n")
        assert ask(server, "POST", "/v2/repository/models/own/load", b"{}")[0] == 400
        assert first(server) == 3.0  # the one that was there
        (folder / "own_part.py").write_text("FACTOR = 5.0\n")
        config.write_text(CONFIG.format(server=f"workers = {workers}") + MORE)
        found = run.invoke(app, ["reload", str(config)])
        assert found.exit_code == 0, found.output + str(found.exception)
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


def test_certificates_and_keys_are_taken_up(folder):
    for name in ("certificate.pem", "key.pem"):
        shutil.copy(TLS / name, folder / name)
    config = folder / "paella.toml"
    tls = '\n[tls]\ncertificate = "certificate.pem"\nkey = "key.pem"\n[keys]\nme = "{key}"\n'
    config.write_text(CONFIG.format(server="workers = 0") + tls.format(key="old"))
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))

    def status(port, key):
        plain = socket.create_connection(("127.0.0.1", port), timeout=60)
        with trusting.wrap_socket(plain, server_hostname="localhost") as secure:
            secure.sendall(f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n".encode())
            return int(secure.recv(4096).split()[1])

    with serving(str(config)) as process:
        port = At(listening(process)).port
        assert (status(port, "old"), status(port, "new")) == (200, 401)
        config.write_text(CONFIG.format(server="workers = 0") + tls.format(key="new"))
        found = CliRunner().invoke(app, ["reload", str(config)])
        assert found.exit_code == 0, found.output
        assert (status(port, "old"), status(port, "new")) == (401, 200)
        unknown = MORE.replace("own_models:model", "own_models:gone")
        for wrong in (unknown + tls.format(key="x"), tls.partition("[keys]")[0]):  # refused, so no key changes either
            config.write_text(CONFIG.format(server="workers = 0") + wrong)
            os.kill(process.pid, signal.SIGHUP)
            assert read_until(process.stderr, "are unchanged")
            assert (status(port, "x"), status(port, "new"), status(port, "")) == (401, 200, 401)
        (folder / "certificate.pem").write_text("none")
        os.kill(process.pid, signal.SIGHUP)
        assert read_until(process.stderr, "are unchanged")
        assert status(port, "new") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


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
            await server._reloading
            assert len(begun) == 2
            server.hang_up()
            await server._reloading
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
