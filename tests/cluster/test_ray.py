"""Clusters on Ray, for real: three nodes, and engines that are killed and scaled while clients check every answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import types

import numpy as np
import pytest
from places import TESTS
from router_server import INFER, X, body
from serving_server import ask

from paellapy.cluster import lifecycle
from paellapy.cluster.cluster_file import first_placement, load_cluster
from paellapy.serving.errors import ConfigError

ray = pytest.importorskip("ray")
# Ray's own
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)

CONFIG = """
device = "virtual:h200"
[cluster]
engines = 1
port = {port}
resource = "virtual_gpu"
engine_host = "127.0.0.1"
[server]
grace_s = 0.2
drain_s = 2.0
[[models]]
name = "scale"
factory = "served_models:plain"
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def nodes():
    """Three Ray nodes; the first start may fail while an agent comes up."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), before])  # for engines' factories
    node = {"num_cpus": 1, "resources": {"virtual_gpu": 2}, "object_store_memory": 80 << 20}
    for attempt in range(3):
        cluster = Cluster()
        try:
            for _ in range(3):
                cluster.add_node(include_dashboard=False, **node)
            ray.init(address=cluster.address, namespace="paellapy", log_to_driver=False, logging_level="error")
            break
        except Exception:
            ray.shutdown()
            cluster.shutdown()
            if attempt == 2:
                raise
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ["PYTHONPATH"] = before


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
def asking(door, clients=2):
    """Clients that ask all the time. A broken connection, to a router, is theirs to try again; an error is not."""
    answers, wrong, stop = [], [], threading.Event()

    def client(k):
        x = X + k
        while not stop.is_set():
            try:
                status, headers, said = ask(door, "POST", INFER, body(x))
            except OSError:
                time.sleep(0.05)
                continue
            if status != 200 or not np.array_equal(said["outputs"][0]["data"], (2 * x).reshape(-1)):
                wrong.append((status, said))
            answers.append((time.monotonic(), headers.get("X-Engine")))

    threads = [threading.Thread(target=client, args=(k,)) for k in range(clients)]
    for each in threads:
        each.start()
    try:
        yield answers
    finally:
        stop.set()
        for each in threads:
            each.join()
    assert wrong == []


def until(condition):
    """Polls; the test's own timeout is the end of it."""
    while not condition():
        time.sleep(0.05)


def up(door):
    try:
        return {each["name"]: each for each in ask(door, "GET", "/v2/cluster")[2]["engines"] if each["up"]}
    except OSError:
        return {}


def test_a_cluster_survives_what_is_killed_and_follows_its_scale(nodes, tmp_path):
    before = set(_children())
    with served(tmp_path) as door, asking(door) as answers:
        assert lifecycle.scale(2) == ["engine-0", "engine-1"]
        until(lambda: len(up(door)) == 2)
        status = lifecycle.status()
        engine = status["engines"]["engine-0"]["pid"]
        os.kill(engine, signal.SIGKILL)
        killed_at = time.monotonic()
        until(lambda: sum(at > killed_at + 1.0 for at, _ in answers) > 20)  # the other one answers
        until(lambda: len(up(door)) == 2)  # and it is back
        assert lifecycle.status()["engines"]["engine-0"]["starts"] == 2

        os.kill(status["pid"], signal.SIGKILL)  # the controller
        os.kill(next(iter(status["routers"].values()))["pid"], signal.SIGKILL)
        n = len(answers)
        until(lambda: len(answers) > n + 20)
        again = lifecycle.status()  # waits for the controller
        assert again["pid"] != status["pid"]
        until(lambda: all(lifecycle.status()["engines"].values()))
        again = lifecycle.status()
        assert {name: each["pid"] for name, each in again["engines"].items()}.keys() == {"engine-0", "engine-1"}
        assert again["engines"]["engine-1"]["pid"] == status["engines"]["engine-1"]["pid"]  # found, not started

        lifecycle.drain("engine-0")
        assert list(lifecycle.status()["engines"]) == ["engine-1"]
        n = len(answers)
        until(lambda: len(answers) > n + 20)
        assert {name for _, name in answers[-10:]} == {"engine-1"}
        with pytest.raises(lifecycle.ClusterError, match="there is no engine"):
            lifecycle.drain("engine-7")
        with pytest.raises(lifecycle.ClusterError, match="runs on this Ray already"):
            lifecycle.bring_up(tmp_path / "cluster.toml")
    with pytest.raises(lifecycle.ClusterError, match="no cluster runs"):
        lifecycle.status()
    until(lambda: set(_children()) <= before)


def _children():
    """Engine servers that run."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"paellapy.cluster.engine_process" in file.read():
                yield int(pid)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('resource = "virtual_gpu"', 'resource = "GPU"', "Ray has 0 of GPU"),
        ("engines = 1", "engines = 50", "50 engines need one each"),
    ],
)
def test_a_cluster_without_gpus_is_refused(nodes, tmp_path, old, new, said):
    with pytest.raises(lifecycle.ClusterError, match=said), served(tmp_path, CONFIG.replace(old, new)):
        pass
    with pytest.raises(lifecycle.ClusterError, match="no cluster runs"):
        lifecycle.status()


def test_an_engine_that_never_gets_ready_leaves_nothing_behind(nodes, tmp_path):
    text = CONFIG.replace("plain", "endless").replace("engines = 1", "engines = 1\nready_s = 4")
    with pytest.raises(lifecycle.ClusterError, match="did not get ready within 4 s"), served(tmp_path, text):
        pass
    until(lambda: not list(_children()))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[server]", "[cluster.replicas]\nother = 1\n[server]", "names other: the models are scale"),
        ("served_models:plain", "served_models:nothing", "cannot be imported"),
        ("engines = 1", "engines = 0", "under .cluster."),
        ("engines = 1", "replan_s = 5.0", "needs cluster.profiles"),
        ('device = "virtual:h200"', "device = ", "cannot be read"),
        ("drain_s = 2.0", "drain = 2.0", "no such setting"),
    ],
)
def test_files_without_sense_are_refused(tmp_path, old, new, said):
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG.format(port=8000).replace(old, new))
    with pytest.raises(ConfigError, match=said):
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
    with pytest.raises(lifecycle.ClusterError, match="does not fit"):
        lifecycle.check_version(version)
