"""Clusters on Ray, for real: three nodes, and engines that are killed, changed and scaled while clients check every
answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
import warnings
from http.client import HTTPException
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cluster_text import CONFIG, KEY, SPARE
from router_server import INFER, X, body
from serving_server import ask

from paellapy.cluster.cluster_file import ClusterFile, ClusterSettings
from paellapy.cluster.processes import free_port
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, save_profiles
from paellapy.scheduler.sim.plan import regroup

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # Ray's own, here and below
    from paellapy.cluster import control
    from paellapy.cluster.control import ClusterError, Planner, State

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.xdist_group("ray"),  # one Ray for all
]


@contextlib.contextmanager
def served(tmp_path, text=CONFIG):
    port, file = free_port("127.0.0.1"), tmp_path / "cluster.toml"
    file.write_text(text.format(port=port))
    url, started = control.bring_up(file)
    assert not started
    try:
        yield types.SimpleNamespace(url=url, port=port)
    finally:
        control.take_down()


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
            time.sleep(0.02)  # engines that start need the CPU too

    each = ({}, {"X-At-Most-Once": "1"})
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


def ready(door, model="scale"):
    """Engines that have the model."""
    try:
        status, _, said = ask(door, "GET", "/v2/cluster", None, {"X-API-Key": KEY})
    except (OSError, HTTPException):
        return set()
    if status != 200:  # a router that has just started knows no engines yet
        return set()
    return {
        each["name"] for each in said["engines"] if each["up"] and each["models"].get(model, {}).get("state") == "READY"
    }


def processes(word):
    """Processes with this word in their command line: pid → its parent."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_text():
                yield int(pid), int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def servers(folder):
    """Engines' servers, by age: the children of their keepers."""
    found = {
        pid: parent for pid, parent in processes("paellapy.cluster.keeper")
        if f'"folder":"{folder}"' in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    }  # fmt: skip
    return sorted(pid for pid, parent in found.items() if parent in found)


@pytest.mark.timeout(600)  # on a machine with six times more work than cores it took more than four minutes
def test_a_cluster_survives_what_is_killed_and_follows_its_scale(nodes, tmp_path):
    with served(tmp_path, CONFIG + SPARE) as door, asking(door) as answers:
        assert ask(door, "POST", INFER, body())[0] == 401
        control.scale(2)
        until(lambda: len(ready(door)) == 2)

        # Ray's processes end, and servers go on: new replicas adopt them.
        before, there = servers(tmp_path), ready(door)
        actors = {pid for kind in ("ray::ServeController", "ray::ServeReplica:paellapy-") for pid, _ in processes(kind)}
        for pid in actors:
            os.kill(pid, signal.SIGKILL)
        gone_at = time.monotonic()
        replicas = "ray::ServeReplica:paellapy-"
        until(lambda: len({pid for pid, _ in processes(replicas)} - actors) == len(actors) - 1)
        until(lambda: sum(at > gone_at + 1.0 for at, _ in answers) > 20 and ready(door) == there)
        assert servers(tmp_path) == before

        # At once: a Ray node is lost with all its workers, a server is killed, and another is stopped for ever.
        os.kill(before[0], signal.SIGKILL)
        os.kill(before[1], signal.SIGSTOP)
        nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
        until(lambda: not {*before} & {*servers(tmp_path)} and len(ready(door)) == len(ready(door, "spare")) == 2)

        # One model is on one engine only; then the policy changes as well.
        file = tmp_path / "cluster.toml"
        file.write_text(file.read_text().replace("[keys]", "[cluster.replicas]\nspare = 1\n[keys]", 1))
        shown = []
        assert not control.apply(file, shown.extend, dry_run=True)
        assert len(ready(door, "spare")) == 2
        file.write_text('policy = "srpt"\n' + file.read_text().replace("engines = 1", "engines = 2"))
        assert control.apply(file, shown.append)
        assert shown[0] == "cluster.replicas.spare: none -> 1"
        assert shown[1] == ["cluster.engines: 1 -> 2", shown[0], 'policy: none -> "srpt"']
        until(lambda: len(ready(door)) == 2 and len(ready(door, "spare")) == 1)
        assert not control.apply(file, shown.append)

        leaving = min(ready(door))
        control.drain(leaving)
        until(lambda: len({name for _, name in answers[-10:]} - {leaving}) == 1)
        until(lambda: len(control._engines()) == 1)
        (only,) = control._engines()
        for wrong, given in (
            (lambda: control.drain("engine-7"), "engine-7"),
            (lambda: control.drain(only), only),
            (lambda: control.scale(50), 50),
            (lambda: control.scale(0), 0),
        ):
            with pytest.raises(ClusterError, check=lambda e, given=given: e.given == given):
                wrong()
        until(lambda: control.status()["front_door"]["ready"])  # it has loaded what the other one had
        with pytest.raises(ClusterError, check=lambda e: e.field == "cluster"):
            control.bring_up(file)
    with pytest.raises(ClusterError, check=lambda e: e.field == "cluster"):
        control.status()
    until(lambda: not servers(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('resource = "virtual_gpu"', 'resource = "GPU"', "GPU"),
        ("engines = 1", "engines = 50", "virtual_gpu"),
        ('"virtual:h200"', '"cuda"', "device"),
        ("plain", "endless", "cluster.ready_s"),
    ],
)
def test_a_cluster_that_cannot_start_leaves_nothing_behind(nodes, tmp_path, old, new, field):
    text = CONFIG.replace(old, new).replace("engines = 1", "engines = 1\nready_s = 4")
    with pytest.raises(ClusterError, check=lambda e: e.field == field), served(tmp_path, text):
        pass
    with pytest.raises(ClusterError, check=lambda e: e.field == "cluster"):
        control.status()
    until(lambda: not servers(tmp_path))


def test_placement_follows_the_load_with_few_moves_and_then_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("paellapy.scheduler.sim.plan.REQUESTS", 4000)
    monkeypatch.setattr(Planner, "_run", lambda self: None)
    profiles = [ModelProfile(name, {1: [SegmentProfile(400e3)]}, target_ms=4.0, instances=4) for name in ("m", "n")]
    save_profiles(tmp_path / "profiles.json", profiles)
    settings = ClusterSettings(replan_s=10.0, profiles="profiles.json", gpu_gb=1.0, memory_gb={"m": 1, "n": 1})
    file = ClusterFile(settings=settings, engine={}, models=["m", "n"], folder=str(tmp_path))
    state = State(file=file, groups=regroup([], (("m",), ("m",), ("m",), ("n",))), node="")
    planner, now, counts = Planner(), time.monotonic(), {"m": 0, "n": 0}

    def pass_time(seconds, **rates):
        """Returns another placement, or None."""
        nonlocal now
        now += seconds
        counts.update({name: counts[name] + int(rate * seconds) for name, rate in rates.items()})
        return planner.replan(state, counts, now)

    assert pass_time(10, m=20_000, n=100) is None  # nothing to compare with
    assert pass_time(10, m=20_000, n=100) is None  # it fits the load
    state = msgspec.structs.replace(state, groups=regroup(state.groups, pass_time(10, m=100, n=20_000)))
    assert {each.models: each.engines for each in state.groups} == {("m",): 1, ("n",): 3}
    for _ in range(3):
        assert pass_time(10, m=100, n=20_000) is None
    assert pass_time(10) is None  # nobody asks: no reason to move
    counts["n"] = 10_000  # an engine has left with its counts
    assert pass_time(10, m=20_000) is None


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "3.0.0"])
def test_a_ray_that_does_not_fit_is_refused(version):
    with pytest.raises(ClusterError, check=lambda e: e.given == version):
        control.check_version(version)


@pytest.mark.parametrize(
    ("engines", "predicted_s", "wanted"),
    [
        (2, {"m": {"a": 0.04, "b": 0.5}}, 2),  # a request goes to the first
        (2, {"m": {"a": 0.01, "b": 0.01}, "n": {"a": 0.08}}, 4),
        (4, {"m": {"a": 9.0}}, 8),  # not more than twice as many at once
        (4, {"m": {"a": 0.001}}, 3),
        (1, {}, 1),
    ],
)
def test_the_number_of_engines_follows_the_longest_prediction(engines, predicted_s, wanted):
    from paellapy.cluster.replicas import PredictedFinish

    context = types.SimpleNamespace(current_num_replicas=engines, aggregated_metrics=predicted_s)
    assert PredictedFinish(0.05)(context)[0] == wanted
