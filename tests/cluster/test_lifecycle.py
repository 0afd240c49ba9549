"""Clusters on Ray, for real: three nodes, and engines that are killed and scaled while clients check every answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import types
from http.client import HTTPException

import numpy as np
import pytest
from router_server import INFER, X, body
from serving_server import ask

from paellapy.cluster import lifecycle
from paellapy.cluster.cluster_file import first_placement, load_cluster
from paellapy.serving.errors import ConfigError

ray = pytest.importorskip("ray")
# Ray's own
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.xdist_group("ray"),  # one Ray for all
]

KEY = "for tests only"
CONFIG = """
device = "virtual:h200"
[cluster]
engines = 1
port = {port}
resource = "virtual_gpu"
engine_host = "127.0.0.1"
hung_s = 3.0
standby = false
[keys]
tests = "env:PAELLAPY_TEST_KEY"
[server]
grace_s = 0.2
drain_s = 2.0
[[models]]
name = "scale"
factory = "served_models:plain"
"""


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("PAELLAPY_TEST_KEY", KEY)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def served(tmp_path, text=CONFIG):
    port = free_port()
    file = tmp_path / "cluster.toml"
    file.write_text(text.format(port=port))
    url, _ = lifecycle.bring_up(file)
    try:
        yield types.SimpleNamespace(url=url, port=port)
    finally:
        lifecycle.take_down()


@contextlib.contextmanager
def asking(door):
    """Clients that ask all the time; the last marks its requests X-At-Most-Once.

    A client may retry after a broken connection to a router. An error is a failure, unless it says that a marked
    request is not sent again.
    """
    answers, wrong, stop = [], [], threading.Event()

    def client(k, headers):
        x = X + k
        while not stop.is_set():
            try:
                status, found, said = ask(door, "POST", INFER, body(x), {"X-API-Key": KEY, **headers})
            except (OSError, HTTPException):
                time.sleep(0.05)
                continue
            if status == 503 and headers:
                continue
            if status != 200 or not np.array_equal(said["outputs"][0]["data"], (2 * x).reshape(-1)):
                wrong.append((status, said))
            answers.append((time.monotonic(), found.get("X-Engine")))
            time.sleep(0.01)  # engines that start need the CPU too

    each = ({}, {}, {"X-At-Most-Once": "1"})
    threads = [threading.Thread(target=client, args=(k, headers)) for k, headers in enumerate(each)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def until(condition):
    """Polls until the condition holds; the test's own timeout limits it."""
    while not condition():
        time.sleep(0.05)


def ready(door):
    """Engines that have the model."""
    try:
        status, _, said = ask(door, "GET", "/v2/cluster", None, {"X-API-Key": KEY})
    except (OSError, HTTPException):
        return set()
    if status != 200:  # a router that has just started knows no engines yet
        return set()
    return {each["name"] for each in said["engines"] if each["up"] and each["models"]["scale"]["state"] == "READY"}


def engines_of(number):
    """The controller's facts about each engine, once it knows all."""
    while True:
        found = lifecycle.status()["engines"]
        if len(found) == number and all(found.values()):
            return found  # an engine may be unknown again by a second look
        time.sleep(0.05)


@pytest.mark.timeout(600)  # on a machine with six times more work than cores it took more than four minutes
def test_a_cluster_survives_what_is_killed_and_follows_its_scale(nodes, tmp_path):
    all_three = {f"engine-{k}" for k in range(3)}
    with served(tmp_path) as door, asking(door) as answers:

        def others_answer(*names):
            """Checks that no client waits for the engines that are gone."""
            gone_at = time.monotonic()
            until(lambda: sum(at > gone_at + 1.0 and name not in names for at, name in answers) > 20)

        assert ask(door, "POST", INFER, body())[0] == 401
        assert lifecycle.scale(3) == sorted(all_three)
        until(lambda: ready(door) == all_three)

        # At once: a Ray node is lost with its workers, and an engine elsewhere is killed.
        first = engines_of(3)
        away = next(name for name, each in first.items() if each["node"] != nodes.head_node.node_id)
        there = next(each for each in nodes.list_all_nodes() if each.node_id == first[away]["node"])
        killed = next(name for name, each in first.items() if each["node"] != there.node_id)
        kept = [name for name, each in first.items() if name != killed and each["node"] != there.node_id]
        nodes.remove_node(there, allow_graceful=False)
        if kept:  # Ray may have put two on the node
            os.kill(first[killed]["pid"], signal.SIGKILL)
        others_answer(*(all_three - {*kept, killed}), *([killed] if kept else []))
        until(lambda: engines_of(3)[away]["node"] != there.node_id and ready(door) == all_three)
        assert lifecycle.status()["engines"][killed]["starts"] == (2 if kept else 1)

        # At once: the controller, a router and an engine's actor are killed, and an engine is stopped for ever.
        status = lifecycle.status()
        stopped, orphan = status["engines"]["engine-2"], status["engines"]["engine-1"]
        os.kill(status["pid"], signal.SIGKILL)
        os.kill(status["routers"]["router-0"]["pid"], signal.SIGKILL)
        os.kill(stopped["pid"], signal.SIGSTOP)
        os.kill(orphan["actor_pid"], signal.SIGKILL)
        others_answer("engine-1", "engine-2")
        until(lambda: engines_of(3)["engine-2"]["pid"] != stopped["pid"] and ready(door) == all_three)
        again = lifecycle.status()
        assert again["pid"] != status["pid"]
        assert again["engines"]["engine-1"]["actor_pid"] != orphan["actor_pid"]
        # The new controller has found the engine that was well.
        assert again["engines"]["engine-0"]["pid"] == status["engines"]["engine-0"]["pid"]

        controller = ray.get_actor("paellapy-controller", namespace="paellapy")
        ray.get(controller.move.remote({"engine-2": []}))
        until(lambda: ready(door) == all_three - {"engine-2"})
        ray.get(controller.move.remote({}))
        until(lambda: ready(door) == all_three)

        lifecycle.drain("engine-0")
        assert lifecycle.scale(1) == ["engine-1"]
        until(lambda: {name for _, name in answers[-10:]} == {"engine-1"})
        for wrong, said in (
            (lambda: lifecycle.drain("engine-7"), "'engine-7'"),
            (lambda: lifecycle.drain("engine-1"), "the only engine"),
            (lambda: lifecycle.scale(50), "50 engines need one each"),
            (lambda: lifecycle.scale(0), "0 engines"),
        ):
            with pytest.raises(lifecycle.ClusterError, match=said):
                wrong()
        assert lifecycle.is_up()
        with pytest.raises(lifecycle.ClusterError, match="cluster down"):
            lifecycle.bring_up(tmp_path / "cluster.toml")
    with pytest.raises(lifecycle.ClusterError, match="no cluster"):
        lifecycle.status()
    assert not lifecycle.is_up()
    until(lambda: not any(servers(tmp_path)))


def servers(folder):
    """Engine processes of the cluster whose file is in this folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if f'"folder":"{folder}"'.encode() in file.read():
                yield int(pid)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('resource = "virtual_gpu"', 'resource = "GPU"', "Ray has 0 GPU"),
        ("engines = 1", "engines = 50", "50 engines need one each"),
    ],
)
def test_a_cluster_without_gpus_is_refused(nodes, tmp_path, old, new, said):
    with pytest.raises(lifecycle.ClusterError, match=said), served(tmp_path, CONFIG.replace(old, new)):
        pass
    with pytest.raises(lifecycle.ClusterError, match="no cluster"):
        lifecycle.status()


def test_an_engine_that_never_gets_ready_leaves_nothing_behind(nodes, tmp_path):
    text = CONFIG.replace("plain", "endless").replace("engines = 1", "engines = 1\nready_s = 4")
    with pytest.raises(lifecycle.ClusterError, match="within 4 s"), served(tmp_path, text):
        pass
    until(lambda: not any(servers(tmp_path)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[server]", "[cluster.replicas]\nother = 1\n[server]", "other.* scale"),
        ("served_models:plain", "served_models:nothing", "cannot be imported"),
        ("engines = 1", "engines = 0", "under .cluster."),
        ("engines = 1", "replan_s = 5.0", "needs cluster.profiles"),
        ('device = "virtual:h200"', "device = ", "cannot be read"),
        ("drain_s = 2.0", "drain = 2.0", "drain: "),
        ("env:PAELLAPY_TEST_KEY", "env:PAELLAPY_NO_KEY", "PAELLAPY_NO_KEY"),
        ("tests = ", "paellapy-cluster = ", "the cluster's own key"),
        ("[server]", '[tls]\ncertificate = "a"\nkey = "b"\n[server]', "TLS"),
    ],
)
def test_files_without_sense_are_refused(tmp_path, old, new, said):
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG.format(port=8000).replace(old, new))
    with pytest.raises(ConfigError, match=said):
        load_cluster(file)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(file)


def test_models_are_dealt_out(tmp_path):
    file = tmp_path / "cluster.toml"
    more = '[[models]]\nname = "spare"\nfactory = "served_models:spare"\n'
    file.write_text(CONFIG.format(port=8000).replace("[server]", "[cluster.replicas]\nspare = 1\n[server]") + more)
    placement = first_placement(load_cluster(file), 3)
    assert [name for each in placement for name in each].count("scale") == 3
    assert [name for each in placement for name in each].count("spare") == 1


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "3.0.0"])
def test_a_ray_that_does_not_fit_is_refused(version):
    with pytest.raises(lifecycle.ClusterError, match=version):
        lifecycle.check_version(version)
