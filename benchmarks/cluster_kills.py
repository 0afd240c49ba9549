"""Kills every part of a three-node Ray cluster in turn, while clients check every answer: the effect, and for how long.

    python benchmarks/cluster_kills.py

Clients ask for two models all the time; some mark their requests X-At-Most-Once. For every event it reports wrong
answers, errors, the longest time without any answer, the slowest request, and the seconds until every engine has its
models again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, save, show

from paellapy import demo
from paellapy.cluster import lifecycle
from paellapy.cluster.actors import free_port

CONFIG = """
device = "virtual:h200"
[cluster]
engines = 1
routers = 2
port = {port}
resource = "virtual_gpu"
engine_host = "127.0.0.1"
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "mlp" }}
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "cnn" }}
"""
PATIENCE_S = 90.0
QUIET_S = 3.0  # before every event
PACE_S = 0.05  # of each client: the machine is not to be busy with them


class Clients:
    """Ask for both models all the time and compare every answer with the first; half of them mark their requests."""

    def __init__(self, port: int, number: int = 8) -> None:
        self._port, self._stop = port, threading.Event()
        self.answers: list[tuple[float, float]] = []  # from, until
        self.wrong: list[Any] = []
        self.errors: list[Any] = []
        self.not_again = self.broken = 0  # marked requests whose engine ended; connections to a router that ended
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(number)]
        for each in self._threads:
            each.start()

    def _run(self, k: int) -> None:
        name, marked = ("mlp", "cnn")[k % 2], k % 4 >= 2
        ((key, spec),) = demo.load(name).inputs.items()
        x = np.random.default_rng(k).random((1, *spec.shape), np.float32)
        tensor = {"name": key, "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
        body, first = json.dumps({"inputs": [tensor]}).encode(), None
        headers = {"X-At-Most-Once": "1"} if marked else {}
        while not self._stop.wait(PACE_S):
            began_at = time.monotonic()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
                connection.request("POST", f"/v2/models/{name}/infer", body, headers)
                answer = connection.getresponse()
                said = json.loads(answer.read())
                connection.close()
            except (OSError, http.client.HTTPException):
                self.broken += 1
                continue
            if marked and answer.status == 503:
                self.not_again += 1
            elif answer.status != 200:
                self.errors.append((answer.status, said))
            else:
                data = said["outputs"][0]["data"]
                first = data if first is None else first
                if not np.allclose(first, data, rtol=1e-5, atol=1e-6):
                    self.wrong.append((name, data))
                self.answers.append((began_at, time.monotonic()))

    def close(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()


def event(clients: Clients, what: Callable[[], object], restored: Callable[[], bool]) -> dict[str, Any]:
    """What clients see of something that happens, and for how long."""
    time.sleep(QUIET_S)
    n, wrong, errors, not_again = len(clients.answers), len(clients.wrong), len(clients.errors), clients.not_again
    at = time.monotonic()
    what()
    while not restored() and time.monotonic() - at < PATIENCE_S:
        time.sleep(0.1)
    full_s = time.monotonic() - at
    time.sleep(1.5)
    first, last, answers = at - 0.1, time.monotonic(), list(clients.answers)
    ends = sorted(end for _, end in answers if first <= end <= last)
    took = [end - begin for begin, end in answers if first <= begin <= last]
    return {
        "answers": len(answers) - n, "wrong": len(clients.wrong) - wrong, "errors": clients.errors[errors:],
        "marked_and_not_sent_again": clients.not_again - not_again,
        "longest_pause_s": float(max(np.diff([first, *ends, last]))), "slowest_s": max(took, default=0.0),
        "full_again_s": full_s if full_s < PATIENCE_S else None,
    }  # fmt: skip


class Ray:
    """Three nodes on this machine, and a cluster on them."""

    def __init__(self, file: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ.update(lifecycle.RAY_SETTINGS)
        self.port = free_port("127.0.0.1")
        self._cluster = Cluster()
        node = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": 80 << 20}
        self.nodes = [self._cluster.add_node(resources={"virtual_gpu": 2}, **node) for _ in range(3)]
        ray.init(address=self._cluster.address, namespace="paellapy", log_to_driver=False, logging_level="error")
        file.write_text(CONFIG.format(port=self.port))
        lifecycle.bring_up(file)

    def ready(self) -> dict[str, set[str]]:
        """The models that are ready, by engine; nothing while no router answers."""
        try:
            engines = lifecycle.front_door(f"http://127.0.0.1:{self.port}")["engines"]
        except OSError:
            return {}
        return {
            each["name"]: {name for name, model in each["models"].items() if each["up"] and model["state"] == "READY"}
            for each in engines
        }

    def has(self, engines: int) -> bool:
        """Whether there are so many engines, each with both models."""
        found = self.ready()
        return len(found) == engines and all(each == {"mlp", "cnn"} for each in found.values())

    def seen(self, *path: str) -> Any:
        """An entry of the cluster's status; None if there is none."""
        return reduce(lambda found, name: found and found.get(name), path, lifecycle.status())

    def replaced(self, *path: str) -> Callable[[], bool]:
        """Whether an entry of the status is another than now, and three engines have their models."""
        now = self.seen(*path)
        return lambda: self.seen(*path) not in (None, now) and self.has(3)

    def move(self, placement: dict[str, set[str]]) -> None:
        import ray

        controller = ray.get_actor("paellapy-controller", namespace="paellapy")
        ray.get(controller.move.remote({name: sorted(models) for name, models in placement.items()}))

    def remove_node(self, node_id: str) -> None:
        self._cluster.remove_node(next(n for n in self.nodes if n.node_id == node_id), allow_graceful=False)

    def close(self) -> None:
        import ray

        lifecycle.take_down()
        ray.shutdown()
        self._cluster.shutdown()


def events(ray: Ray) -> Iterator[tuple[str, Callable[[], object], Callable[[], bool]]]:
    """What happens in turn; each with when it is over."""
    yield "scale 1 to 3", lambda: lifecycle.scale(3), lambda: ray.has(3)
    for name, path, number in (
        ("kill an engine", ("engines", "engine-0", "pid"), signal.SIGKILL),
        ("kill a worker", ("engines", "engine-1", "actor_pid"), signal.SIGKILL),
        ("stop an engine", ("engines", "engine-2", "pid"), signal.SIGSTOP),
        ("kill a router", ("routers", "router-0", "pid"), signal.SIGKILL),
        ("kill the controller", ("pid",), signal.SIGKILL),
    ):
        yield name, partial(os.kill, ray.seen(*path), number), ray.replaced(*path)
    plan = {"engine-0": {"mlp"}, "engine-1": {"cnn"}, "engine-2": {"mlp", "cnn"}}
    yield "another plan", lambda: ray.move(plan), lambda: ray.ready() == plan
    yield "the plan before", lambda: ray.move({}), lambda: ray.has(3)
    head = ray.nodes[0].node_id  # Ray's own processes are there
    node = next(("engines", name, "node") for name, e in ray.seen("engines").items() if e["node"] != head)
    yield "remove a Ray node", partial(ray.remove_node, ray.seen(*node)), ray.replaced(*node)
    yield "scale 3 to 1", lambda: lifecycle.scale(1), lambda: ray.has(1)


def main() -> None:
    o = arguments(__doc__).parse_args()
    head = ["event", "answers", "wrong", "errors", "longest time without an answer, s", "slowest request, s",
            "all placed again after, s"]  # fmt: skip
    results: dict[str, Any] = {}
    rows = [["aim", "", "0", "0", "", "", "≤ 15"]]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Ray(Path(folder) / "cluster.toml")) as ray,
        contextlib.closing(Clients(ray.port)) as clients,
    ):
        for name, what, restored in events(ray):
            each = results[name] = event(clients, what, restored)
            took = (each["longest_pause_s"], each["slowest_s"])
            placed = f"{each['full_again_s'] or float('inf'):.1f}"
            counts = (f"{each['answers']:,}", each["wrong"], len(each["errors"]))
            rows.append([name, *counts, *(f"{s:.2f}" for s in took), placed])
            content = {"events": results, "broken_connections": clients.broken}
            save("cluster_kills", content, folder=o.out, tables={"cluster-kills": [head, *rows]})
    show("events", head, rows)


if __name__ == "__main__":
    main()
