"""The server as a process: what `paellapy serve` starts, prints, secures, and finishes when it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
import signal
import socket
import ssl
import threading
from urllib.request import urlopen

import aiohttp
import pytest
from forked import Forked
from places import TESTS
from serving_server import BODY, At, ask, infer_body, read_until, running, serving, stop_under_load, url_once
from waiting import wait_until

from paellapy import demo
from paellapy.cli.serve import picture
from paellapy.serving.logs import log

pytestmark = pytest.mark.xdist_group("serve")  # one process that some are forked from

TLS = TESTS / "tls"  # a certificate for localhost that signs itself
IMAGES, LABELS = demo.held_out()

CONFIG = """
device = "virtual:h200"
[server]
port = 0
grace_s = 1.0
log_format = "json"
[[models]]
factory = "paellapy.demo:load"
arguments = { name = "mlp", batch = [1, 8] }
"""


def test_the_demo_server_prints_a_line_that_classifies_a_digit():
    with serving("--port", "0", "--device", "virtual:h200") as process:
        said = read_until(process.stdout, "Ctrl-C")
        line = next(each for each in said.splitlines() if each.startswith("curl"))
        words = shlex.split(line)
        url, body = words[2], words[4]
        root = url.partition("/v2/")[0]
        for path in ("/", "/docs", "/metrics"):  # what it says there is, is there
            assert re.search(rf"{re.escape(root + path)}$", said, re.MULTILINE)
            with urlopen(root + path, timeout=60) as page:
                assert page.status == 200
        assert re.match(r"http://127\.0\.0\.1:\d+/v2/models/cnn/infer$", url)

        async def main():
            async with aiohttp.ClientSession() as session:
                # As curl sends it: the type of a form.
                headers = {"Content-Type": "application/x-www-form-urlencoded"}
                async with session.post(url, data=body, headers=headers) as answer:
                    return await answer.json()

        found = asyncio.run(main())
        score, digit = found["outputs"][0]["data"][0].split(":")
        assert int(digit) == LABELS[0]
        assert float(score) > 0.5
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_stop_signal_under_load_loses_no_accepted_request(tmp_path):
    config = tmp_path / "paella.toml"
    config.write_text(CONFIG)
    bodies = [json.dumps(infer_body("image", IMAGES[k : k + 1])).encode() for k in range(16)]
    with serving(str(config)) as process:
        found = asyncio.run(stop_under_load(process, f"{url_once(process)}/v2/models/mlp/infer", bodies))
        assert process.wait(60) == 0
        rest = process.stderr.read()
    assert {len(answer["outputs"][0]["data"]) for _, answer in found} == {10}
    assert all(json.loads(line)["level"] == "info" for line in rest.splitlines())
    assert json.loads(rest.splitlines()[-1])["message"] == "stopped"


@pytest.fixture
def manager(tmp_path):
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(60)
        made.bind(str(tmp_path / "notify"))
        yield made


@pytest.mark.parametrize("workers", [0, 1])
def test_signals_write_stacks_into_the_log_and_open_its_file_again(tmp_path, workers, monkeypatch, manager):
    """A service manager hears that the server is ready, and that it stops."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    config, kept = tmp_path / "paella.toml", tmp_path / "log.1"
    more = f'workers = {workers}\naccess_log = true\nlog_file = "log"'
    config.write_text(CONFIG.replace("[server]", f"[server]\n{more}"))
    processes = {"engine", "worker 1", None} if workers else {None}

    def said(file, message):
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [line for line in lines if line["message"] == message]

    with serving(str(config)) as process:
        url = re.search(r"http://\S+(?=/v2)", read_until(process.stdout, "Serving"))[0]
        assert manager.recv(100) == b"READY=1"
        for number in (signal.SIGUSR2, signal.SIGQUIT):
            process.send_signal(number)
        wait_until(lambda: {each.get("process") for each in said(tmp_path / "log", "a thread's stack")} == processes)
        wait_until(lambda: "serve_config" in "".join(
            each["traceback"] for each in said(tmp_path / "log", "a thread's stack")
        ))  # fmt: skip
        (tmp_path / "log").rename(kept)
        process.send_signal(signal.SIGUSR1)

        def is_in_new_file():
            return ask(At(url), "GET", "/v2")[0] == 200 and said(tmp_path / "log", "request")

        wait_until(is_in_new_file)
        process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    assert said(tmp_path / "log", "stopped")


FAULTY = """
device = "virtual:h200"
[server]
port = 0
grace_s = 0.0
log_format = "json"
[[models]]
factory = "engine_models:gpu_losing_model"
"""


def test_a_lost_gpu_is_told_and_ends_the_server(tmp_path):
    """In one process nothing could start its engine again: whoever started the server must know."""
    config = tmp_path / "paella.toml"
    config.write_text(FAULTY)

    async def main(url):
        path = f"{url}/v2/models/faulty/infer"
        async with aiohttp.ClientSession() as session, session.post(path, data=BODY) as answer:
            assert answer.status == 500
            assert "fault_if" not in (await answer.json())["error"]  # the log has it

    with serving(str(config)) as process:
        asyncio.run(main(url_once(process)))
        assert process.wait(60) == 1
        rest = process.stderr.read()
    told = json.loads(next(line for line in rest.splitlines() if '"message":"the GPU failed"' in line))
    assert told["level"] == "error"
    assert "fault_if" in told["error"]
    assert "--workers 1" in rest.splitlines()[-1] + rest.splitlines()[-2]
    assert "Traceback" not in rest


@pytest.fixture(scope="module")
def imported():
    head = """
        import sys
        from paellapy import demo
        from paellapy.cli import main
        from paellapy.serving import api
        from paellapy.scheduler.policies.policy import find_policy
        find_policy("paella")
    """
    with Forked(head) as processes:
        yield processes


@pytest.fixture
def complaint(imported, tmp_path):
    """Runs `paellapy serve …`, which fails, and returns the lines of its standard error as one."""

    def complaint(*arguments):
        code = f"sys.argv = {['paellapy', 'serve', *arguments]!r}\nmain()"
        status, _, said = imported.outcome(code, tmp_path, {})
        assert status == "1"
        assert "Traceback" not in said
        return " ".join(said.split())

    return complaint


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("host", ["nohost.invalid", "192.0.2.1"])
def test_a_host_of_another_machine_is_refused_with_the_remedy(complaint, host, workers):
    said = complaint("--host", host, "--port", "0", "--device", "virtual:h200", "--workers", workers)
    assert f"{host}:0" in said
    assert "choose a host of this machine" in said


def test_what_ends_a_server_with_json_logs_is_json(complaint):
    where = "--host", "192.0.2.1", "--port", "0", "--device", "virtual:h200"
    said = complaint(*where, "--set", "server.log_format=json").replace("} {", "},{")
    assert [each["level"] for each in json.loads(f"[{said}]")] == ["info", "warning", "error"]


def test_mistakes_are_one_line_and_an_exit_code(complaint, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[server]\nport = 'x'\n")
    assert "bad.toml:2: server.port" in complaint(str(bad))


def test_a_port_that_is_taken_is_said(complaint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f":{port}" in complaint("--port", str(port), "--device", "virtual:h200")


def test_tls():
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")

    async def main(url):
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v2/health/ready", ssl=trusting) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{url}/v2/health/ready")
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"{url.replace('https', 'http')}/v2/health/ready")

    with running([demo.load("mlp", batch=(1,))], tls=tls) as server:
        assert server.url.startswith("https://")
        asyncio.run(main(server.url))


def test_it_is_live_before_it_is_ready():
    with running([demo.load("mlp", batch=(1,))], load=False) as server:

        async def statuses():
            async with aiohttp.ClientSession() as session:
                found = []
                for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/mlp/ready"):
                    async with session.get(server.url + path) as answer:
                        found.append(answer.status)
                return found

        assert asyncio.run(statuses()) == [200, 503, 503]
        server.call(server.server.load())
        assert asyncio.run(statuses()) == [200, 200, 200]
        server.service.draining = True
        assert asyncio.run(statuses()) == [200, 503, 503]


ENDLESS = """
device = "virtual:h200"
[server]
port = 0
grace_s = 0.0
drain_s = 0.5
log_format = "json"
[[models]]
name = "endless"
factory = "served_models:endless"
[[models]]
name = "mlp"
factory = "paellapy.demo:load"
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_stop_signal_while_models_are_loaded_ends_the_server(tmp_path, workers):
    config = tmp_path / "paella.toml"
    config.write_text(ENDLESS)

    async def statuses(url):
        async with aiohttp.ClientSession() as session:
            for name in ("endless", "mlp"):  # the second one's turn has not come
                async with session.post(f"{url}/v2/models/{name}/infer", data=b"{}") as answer:
                    assert answer.status == 503
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert "is being loaded" in (await answer.json())["error"]

    with serving(str(config), "--workers", workers) as process:
        asyncio.run(statuses(url_once(process, '"message":"loading"')))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        rest = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert "stopped while a model was being loaded" in [line["message"] for line in rest]


PARTLY = """
device = "virtual:h200"
[server]
port = 0
grace_s = 0.0
log_format = "json"
[[models]]
name = "broken"
factory = "served_models:broken"
load = {broken}
[[models]]
name = "plain"
factory = "served_models:plain"
load = {plain}
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_message_of_a_server_that_is_ready_names_the_models_that_were_loaded(tmp_path, workers):
    config = tmp_path / "paella.toml"
    config.write_text(PARTLY.format(broken="true", plain="true"))
    with serving(str(config), "--workers", workers) as process:
        said = read_until(process.stdout, "curl")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
    assert "Serving plain at" in said
    assert "/v2/models/plain/infer" in said
    assert "broken" not in said
    (why,) = [line["error"] for line in log if line["message"] == "a model could not be loaded"]
    assert "weights are gone" in why


def test_the_message_of_a_server_without_models_is_its_address(tmp_path):
    config = tmp_path / "paella.toml"
    config.write_text(PARTLY.format(broken="false", plain="false"))
    with serving(str(config)) as process:
        said = read_until(process.stdout, "/v2")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said += process.stdout.read()
    (line,) = [each for each in said.splitlines() if each.startswith("Serving")]
    assert "Serving at http" in line


def test_whoever_waits_for_what_is_compiled_before_the_models_hears_of_it(monkeypatch):
    told = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            if "still loading" in record.getMessage():
                told.set()

    handler = Handler()
    monkeypatch.setattr("paellapy.serving.loading.PATIENCE_S", 0.01)
    monkeypatch.setattr("paellapy.serving.loading.warm_up", lambda policy: told.wait())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)
    log.setLevel(logging.INFO)
    with running([demo.load("mlp", batch=(1,))]):
        assert told.is_set()


def test_the_picture_of_a_digit_is_eight_lines():
    assert len(picture(IMAGES[0]).splitlines()) == 8
