"""Several HTTP processes before one engine: everything as in one process, and whoever dies is a 503 and a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from serving_processes import HERE, children, processes, wait_for_end
from serving_server import BODY, INFER, At, ask, infer_body, scrape, stop_under_load

from paellapy.cli.guest import Guest
from paellapy.scheduler.core import abort
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.remote import Producers
from paellapy.serving.dashboard_routes import MAX_VIEWERS

pytestmark = pytest.mark.xdist_group("workers")  # one server for most of them



@pytest.fixture(scope="module")
def server():
    with processes("served_models:pair") as found:
        yield found


def metric(server, name, **labels):
    """The sum over all series with these labels."""
    return sum(s.value for s in scrape(server) if s.name == name and labels.items() <= s.labels.items())


def is_ready(server):
    """Whether the server is ready, whichever worker answers."""
    with contextlib.suppress(OSError):
        return all(ask(server, "GET", "/v2/health/ready")[0] == 200 for _ in range(16))
    return False


def is_at_rest(server):
    return metric(server, "paellapy_items_live") == 0 and metric(server, "paellapy_requests_in_flight") == 0


class Load:
    """Clients that send requests all the time and check each answer against its request."""

    def __init__(self, url, clients=12, model="scale", factor=2.0, allowed=(503,)):
        self.url, self.clients, self.model, self.factor, self.allowed = url, clients, model, factor, allowed
        self.statuses, self.resets, self.retry_after, self.errors = [], 0, set(), set()
        self.stop = False

    async def _client(self, k):
        number = 0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            while not self.stop:
                number += 1
                x = np.full((1, 64), 1000 * k + number % 997, np.float32)
                body = infer_body("x", x)
                try:
                    async with session.post(f"{self.url}/v2/models/{self.model}/infer", json=body) as answer:
                        content = await answer.json()
                except aiohttp.ClientError:  # the worker it was talking to is gone
                    self.resets += 1
                    await asyncio.sleep(0.01)
                    continue
                self.statuses.append(answer.status)
                if answer.status == 200:
                    assert content["outputs"][0]["data"] == (self.factor * x[0]).tolist(), "a wrong answer"
                else:
                    assert answer.status in self.allowed, content
                    self.errors.add(content["error"])
                    if answer.status == 503:
                        self.retry_after.add(answer.headers["Retry-After"])
                    await asyncio.sleep(0.01)

    async def during(self, act):
        """Runs the clients until `act(self)`, a coroutine, is over."""
        tasks = [asyncio.create_task(self._client(k)) for k in range(self.clients)]
        acting = asyncio.create_task(act(self))
        done, _ = await asyncio.wait((acting, *tasks), return_when=asyncio.FIRST_COMPLETED)
        self.stop = True
        for task in done:
            task.result()
        await asyncio.gather(acting, *tasks)

    async def answered(self, more):
        """Waits until that many more requests are answered."""
        goal = self.statuses.count(200) + more
        while self.statuses.count(200) < goal:
            await asyncio.sleep(0.005)


# -- as in one process


def test_it_serves_and_every_worker_takes_part(server):
    seen = set()
    while len(seen) < 2:
        status, headers, found = ask(server, "POST", INFER, BODY)
        assert status == 200
        assert found["outputs"][0]["data"] == [2.0] * 64
        seen.add(headers["X-Request-Id"].partition("-")[0])  # each process numbers its own


def test_many_clients_get_their_own_answers(server):
    load = Load(server.url, clients=24)
    asyncio.run(load.during(lambda running: running.answered(600)))
    assert set(load.statuses) == {200}
    assert load.resets == 0
    server.wait_until(lambda: is_at_rest(server))


def test_whichever_worker_is_asked_the_totals_are_the_same(server):
    server.wait_until(lambda: is_at_rest(server))
    before = metric(server, "paellapy_requests_answered_total", model="scale")
    for _ in range(10):
        assert ask(server, "POST", INFER, BODY)[0] == 200
    totals = {metric(server, "paellapy_requests_answered_total", model="scale") for _ in range(10)}
    assert totals == {before + 10}
    assert metric(server, "paellapy_items_total", model="scale") >= before + 10
    assert metric(server, "paellapy_sm_warps_max") > 0  # of the engine's process
    found = {json.dumps(ask(server, "GET", "/v2/models/scale/stats")[2]) for _ in range(10)}
    assert len(found) == 1
    assert json.loads(found.pop())["model_stats"][0]["inference_stats"]["success"]["count"] == before + 10


def test_what_is_told_of_processes_and_the_machine_is_told_by_one(server):
    found = [{s.name: s.value for s in scrape(server)} for _ in range(10)]
    assert len({each["paellapy_start_time_seconds"] for each in found}) == 1
    assert len({each["paellapy_engine_process_start_time_seconds"] for each in found}) == 1
    assert all(0 <= each["nv_cpu_utilization"] <= 1 for each in found)
    own = {"process_resident_memory_bytes", "process_start_time_seconds", "paellapy_admission_window"}
    assert not any(own & each.keys() for each in found)


def test_every_worker_tells_of_work_beside_requests(server):
    (engine,) = server.pids("engine")
    with Guest("beside", engine=str(engine)).connect():
        assert {metric(server, "paellapy_job_running", job="beside", kind="process") for _ in range(10)} == {1.0}
    server.wait_until(lambda: metric(server, "paellapy_job_running", job="beside") == 0)


def test_models_are_unloaded_and_loaded_for_all_workers(server):
    before = metric(server, "paellapy_requests_answered_total", model="scale")
    assert ask(server, "POST", "/v2/repository/models/scale/unload", b"")[0] == 200
    assert {ask(server, "POST", INFER, BODY)[0] for _ in range(10)} == {404}
    assert ask(server, "POST", "/v2/repository/models/scale/load", b"")[0] == 200
    assert {ask(server, "POST", INFER, BODY)[0] for _ in range(10)} == {200}
    assert metric(server, "paellapy_requests_answered_total", model="scale") == before + 10
    status, _, content = ask(server, "POST", "/v2/repository/models/nope/load", b"")
    assert status == 404
    assert "nope" in content["error"]


def test_models_are_reloaded_under_load(server):
    """Requests to a model that goes away are refused; none gets another's answer."""

    async def reload(load):
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                await load.answered(20)
                async with session.post(f"{server.url}/v2/repository/models/scale/load") as answer:
                    assert answer.status == 200

    load = Load(server.url, clients=6, allowed=(503,))
    asyncio.run(load.during(reload))
    assert load.resets == 0
    server.wait_until(lambda: is_at_rest(server))
    assert ask(server, "POST", INFER, BODY)[0] == 200


def test_a_client_that_leaves_frees_its_work(server):
    async def main():
        async with aiohttp.ClientSession() as session:

            async def client():
                while True:  # until it leaves: all could be answered before the metric is read
                    async with session.post(f"{server.url}/v2/models/long/infer", data=BODY) as answer:
                        await answer.read()

            tasks = [asyncio.create_task(client()) for _ in range(20)]
            while await asyncio.to_thread(metric, server, "paellapy_items_live") < 5:
                pass
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    server.wait_until(lambda: is_at_rest(server))


def test_the_dashboard_shows_the_engine_of_the_other_process(server):
    with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("GET", "/dashboard/events")
        answer = connection.getresponse()
        line = answer.readline()
        while not line.startswith(b"data:"):
            line = answer.readline()
    found = json.loads(line[5:])
    assert found["state"] == "running"
    assert {each["name"] for each in found["models"]} == {"scale", "long"}


def test_the_dashboards_viewers_are_limited_in_all_workers_together(server):
    def watch():
        connection = opened.enter_context(contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=60)))
        connection.request("GET", "/dashboard/events")
        return connection.getresponse()

    with contextlib.ExitStack() as opened:
        answers = [watch() for _ in range(MAX_VIEWERS + 4)]
        assert sum(each.status == 200 for each in answers) <= MAX_VIEWERS
        assert any(each.status == 503 for each in answers)
    server.wait_until(lambda: ask_briefly(server, "/dashboard/events") == 200)  # those who left are not counted


def ask_briefly(server, path):
    """The status of an answer that is not read."""
    with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def test_the_policy_is_switched_in_the_other_process(server):
    headers = {"Content-Type": "application/json", "X-Paellapy": "1"}
    assert ask(server, "POST", "/dashboard/policy", b'{"policy": "edf"}', headers)[2] == {"policy": "edf"}
    assert ask(server, "POST", "/dashboard/policy", b'{"policy": "nope"}', headers)[0] == 400

    def policies():
        found = [ask(server, "GET", "/v2/models/scale/config")[2]["parameters"] for _ in range(6)]
        return {each["policy"]["string_value"] for each in found}

    server.wait_until(lambda: policies() == {"edf"})
    in_time = json.dumps(infer_body("x", np.ones((1, 64)), parameters={"timeout": 10**7}))
    assert ask(server, "POST", INFER, in_time)[0] == 200


# -- who dies


def test_nothing_is_compiled_when_a_worker_dies():
    with Engine("virtual:h200", limits=Limits(producers=2)) as engine:
        producers = Producers(engine)
        producers.warm_up()
        compiled = list(abort.reclaim.signatures)
        assert compiled
        producers.attach(1)
        assert producers.detach(1) == 0
        assert abort.reclaim.signatures == compiled


def test_a_worker_that_is_killed_under_load_is_replaced_and_others_never_notice(server):
    async def kill(load):
        for name in ("work1", "work2", "work1"):
            await load.answered(100)
            pid = server.kill(name)
            await asyncio.to_thread(server.wait_until, lambda p=pid, n=name: server.pids(n) not in ([], [p]))
            await load.answered(100)

    load = Load(server.url, clients=16)
    asyncio.run(load.during(kill))
    assert set(load.statuses) == {200}, (load.errors, server.lines()[-8:])
    assert load.resets > 0  # only those who talked to it
    server.wait_until(lambda: is_ready(server) and is_at_rest(server))
    ended = [line for line in server.lines() if line["message"] == "a process ended and is being restarted"]
    assert {line["process"] for line in ended} == {"worker 1", "worker 2"}
    assert all("SIGKILL" in line["how"] for line in ended)


def test_a_worker_killed_with_requests_in_its_only_instance_gives_it_back(server):
    async def kill(load):
        await load.answered(5)
        server.kill("work2")
        await load.answered(5)

    load = Load(server.url, clients=10, model="long", factor=1.0)
    before = server.pids("engine")
    asyncio.run(load.during(kill))
    server.wait_until(lambda: is_ready(server) and is_at_rest(server))
    assert server.pids("engine") == before
    assert ask(server, "POST", "/v2/models/long/infer", BODY)[2]["outputs"][0]["data"] == [1.0] * 64


def listening(port):
    """The number of sockets that listen on the port, from the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and int(row[1].partition(":")[2], 16) == port for row in rows)


def test_a_worker_that_dies_again_and_again_leaves_the_port_to_the_others(server):
    assert listening(server.port) == 2

    def left():
        for pid in server.pids("work2"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return listening(server.port) == 1

    server.wait_until(left)
    for _ in range(20):  # each on a connection of its own
        assert ask(server, "POST", INFER, BODY)[0] == 200
    server.wait_until(lambda: listening(server.port) == 2 and is_ready(server))


def test_an_engine_that_is_killed_under_load_is_a_503_and_a_restart(server):
    total = metric(server, "paellapy_requests_answered_total", model="scale")

    async def kill(load):
        for _ in range(2):
            await load.answered(100)
            pid = server.kill("engine")
            await asyncio.to_thread(server.wait_until, lambda p=pid: server.pids("engine") not in ([], [p]))
            await load.answered(100)

    load = Load(server.url, clients=16)
    asyncio.run(load.during(kill))
    assert set(load.statuses) == {200, 503}
    assert load.resets == 0  # every request gets an answer
    assert load.retry_after == {"1"} or load.retry_after == {"1", "2"}
    server.wait_until(lambda: is_ready(server) and is_at_rest(server))
    assert metric(server, "paellapy_requests_answered_total", model="scale") == total + load.statuses.count(200)
    assert metric(server, "paellapy_refusals_total", model="scale", reason="engine_away") > 0


SPARE = """
[[models]]
name = "spare"
factory = "served_models:spare"
load = false
"""


def test_an_engine_that_is_started_again_is_as_it_was_and_not_as_configured(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG.format("plain") + SPARE)
    switch = {"Content-Type": "application/json", "X-Paellapy": "1"}

    def state(server):
        found = ask(server, "POST", "/v2/repository/index", b"")[2]
        policy = ask(server, "GET", "/v2/models/spare/config")[2].get("parameters", {}).get("policy")
        return {each["name"]: each["state"] for each in found}, policy

    def said(server):
        return [line["message"] for line in server.lines()]

    with processes(str(config), workers=1) as server:
        assert ask(server, "POST", "/v2/repository/models/spare/load", b"")[0] == 200
        assert ask(server, "POST", "/v2/repository/models/scale/unload", b"")[0] == 200
        assert ask(server, "POST", "/dashboard/policy", b'{"policy": "edf"}', switch)[0] == 200
        wanted = {"scale": "UNAVAILABLE", "spare": "READY"}, {"string_value": "edf"}
        server.wait_until(lambda: state(server) == wanted)
        assert [m for m in said(server) if "on request" in m] == ["loaded on request", "unloaded on request"]
        for _ in range(2):
            pid = server.kill("engine")
            server.wait_until(lambda p=pid: server.pids("engine") not in ([], [p]) and is_ready(server))
            assert state(server) == wanted
        assert ask(server, "POST", "/dashboard/policy", b'{"policy": "paella"}', switch)[0] == 200
        told = [line for line in server.lines() if line["message"].startswith("restored changes")]
        assert [(t["loaded"], t["unloaded"], t["policy"]) for t in told] == [(["spare"], ["scale"], "edf")] * 2
        assert said(server).count("policy switched") == 4


def test_health_says_what_is_there_while_the_engine_is_away(server):
    server.kill("engine")
    seen = set()
    while seen != {200, 503}:
        assert ask(server, "GET", "/v2/health/live")[0] == 200
        status, _, content = ask(server, "GET", "/v2/health/ready")
        assert content == {"ready": status == 200}
        seen.add(status)
        assert ask(server, "GET", "/metrics")[0] == 200
    server.wait_until(lambda: is_ready(server))
    assert ask(server, "POST", INFER, BODY)[0] == 200


def test_a_stop_signal_under_load_loses_no_accepted_request():
    values = {json.dumps(infer_body("x", np.full((1, 64), k, np.float32))).encode(): k for k in range(16)}
    with processes("served_models:pair", server={"grace_s": 1.0, "admin_port": 0}) as server:
        pids = children(server.process.pid)
        assert len(pids) == 3
        server.kill("work1")
        server.wait_until(lambda: len(server.pids("work1")) == 1 and children(server.process.pid) != pids)
        pids = children(server.process.pid)
        (admin,) = {line["admin_url"] for line in server.lines() if "admin_url" in line and "workers" in line}
        for _ in range(20):  # all workers answer there; no process that has ended is asked
            assert ask(At(admin), "GET", "/metrics")[0] == ask(At(admin), "GET", "/v2/health/ready")[0] == 200
            assert ask(server, "GET", "/metrics")[0] == 404
        found = asyncio.run(stop_under_load(server.process, server.url + INFER, list(values)))
        assert server.process.wait(120) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        lines = server.lines()
    assert all(answer["outputs"][0]["data"] == [2.0 * values[body]] * 64 for body, answer in found)
    assert {line["message"] for line in lines if line["level"] != "info"} == {"a process ended and is being restarted"}
    assert lines[-1]["message"] == "stopped"


def test_when_the_supervisor_is_killed_the_others_end():
    with processes("served_models:pair") as server:
        pids = children(server.process.pid)
        assert len(pids) == 3
        server.process.kill()
        server.process.wait()
        wait_for_end(pids)


# -- restarts that fail


def test_a_restart_loop_backs_off_says_so_and_ends_when_the_cause_is_gone(tmp_path, monkeypatch):
    crash = tmp_path / "crash"
    monkeypatch.setenv("PAELLAPY_TEST_CRASH", str(crash))
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG.format("crashing"))
    with processes(str(config), workers=1) as server:
        crash.touch()
        server.kill("engine")

        def pauses():
            return [line["again_in_s"] for line in server.lines() if "again_in_s" in line]

        server.wait_until(lambda: len(pauses()) >= 2)
        assert pauses() == sorted(pauses())
        assert ask(server, "GET", "/v2/health/live")[0] == 200
        status, headers, content = ask(server, "POST", INFER, BODY)
        assert status == 503
        assert headers["Retry-After"]
        assert "engine" in content["error"]
        crash.unlink()
        server.wait_until(lambda: is_ready(server))
        assert not any("standby" in line["message"] for line in server.lines())
        assert ask(server, "POST", INFER, BODY)[0] == 200


CONFIG = """
device = "virtual:h200"
[server]
port = 0
log_format = "json"
standby = "off"
[[models]]
name = "scale"
factory = "served_models:{}"
"""


def test_a_server_that_cannot_start_says_why(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG.format("broken"))
    command = [sys.executable, str(HERE / "serving_processes.py"), str(config), "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "its weights are gone" in ended.stderr
