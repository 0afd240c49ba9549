"""Three Ray nodes, clients that check every answer, and everything killed in turn: who notices, and for how long.

    python benchmarks/cluster_kills.py

For every event: wrong answers, errors, the longest pause that a client saw, when the last answer of the killed engine
came, and when the placement was full again. Written after every event.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import save

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
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Clients:
    """Ask both models all the time and compare every answer with the first."""

    def __init__(self, port: int, number: int = 4) -> None:
        self._port, self._stop = port, threading.Event()
        self.answers: list[tuple[float, str]] = []
        self.wrong: list[Any] = []
        self.errors: list[Any] = []
        self.broken = 0  # connections to a router that ended: the client connects again
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(number)]
        for each in self._threads:
            each.start()

    def _run(self, k: int) -> None:
        from paellapy import demo

        name = ("mlp", "cnn")[k % 2]
        (key, spec), = demo.load(name).inputs.items()
        x = np.random.default_rng(k).random((1, *spec.shape), np.float32)
        tensor = {"name": key, "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
        body, first = json.dumps({"inputs": [tensor]}).encode(), None
        while not self._stop.is_set():
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
                connection.request("POST", f"/v2/models/{name}/infer", body)
                answer = connection.getresponse()
                said = json.loads(answer.read())
                connection.close()
            except (OSError, http.client.HTTPException):
                self.broken += 1
                time.sleep(0.02)
                continue
            if answer.status != 200:
                self.errors.append((answer.status, said))
                continue
            data = said["outputs"][0]["data"]
            if first is None:
                first = data
            elif not np.allclose(first, data, rtol=1e-5, atol=1e-6):
                self.wrong.append((name, data))
            self.answers.append((time.monotonic(), answer.headers["X-Engine"]))

    def close(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()


def event(clients: Clients, what: Callable[[], str | None], restored: Callable[[], bool]) -> dict[str, Any]:
    """What clients see of something that happens; `what` returns the engine it happens to, if any."""
    n, wrong, errors = len(clients.answers), len(clients.wrong), len(clients.errors)
    began = time.monotonic()
    engine = what()
    at = time.monotonic()
    time.sleep(1.0)
    while not restored() and time.monotonic() - at < PATIENCE_S:
        time.sleep(0.1)
    full_s = time.monotonic() - at
    time.sleep(1.0)
    times = [began] + [t for t, _ in clients.answers[n:]]
    gaps = np.diff(times) if len(times) > 1 else [float("inf")]
    after = [t - at for t, name in clients.answers[n:] if name == engine and t < at + full_s]
    return {
        "answers": len(clients.answers) - n, "wrong": len(clients.wrong) - wrong,
        "errors": clients.errors[errors:], "longest_pause_s": float(max(gaps)),
        "last_answer_of_it_s": max([0.0, *[t for t in after if t < 1.5]]), "full_again_s": full_s,
    }  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    import ray
    from ray.cluster_utils import Cluster

    from paellapy.cluster import lifecycle

    cluster = Cluster()
    port = free_port()
    results: dict[str, Any] = {}
    nodes = [
        cluster.add_node(
            include_dashboard=False, num_cpus=1, resources={"virtual_gpu": 3}, object_store_memory=80 << 20
        )
        for _ in range(3)
    ]
    ray.init(address=cluster.address, namespace="paellapy", log_to_driver=False, logging_level="error")

    def full(n: int) -> Callable[[], bool]:
        def look() -> bool:
            try:
                seen = lifecycle.front_door(f"http://127.0.0.1:{port}")
            except OSError:
                return False
            return sum(each["up"] and len(each["models"]) == 2 for each in seen["engines"]) == n

        return look

    def kill(pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(CONFIG.format(port=port))
        lifecycle.bring_up(file)
        clients = Clients(port)

        def note(name: str, what: Callable[[], str | None], restored: Callable[[], bool]) -> None:
            results[name] = event(clients, what, restored)
            print(name, results[name], flush=True)
            save("cluster_kills", {**results, "broken_connections": clients.broken})

        def status() -> dict[str, Any]:
            return lifecycle.status()

        def engine_pid(name: str) -> int:
            return int(status()["engines"][name]["pid"])

        try:
            note("scale 1 to 3", lambda: lifecycle.scale(3) and None, full(3))
            note("kill an engine", lambda: kill(engine_pid("engine-0")) or "engine-0", full(3))
            actor = status()["engines"]["engine-1"]["actor_pid"]
            note("kill an engine's actor", lambda: kill(actor) or "engine-1", full(3))
            note("kill a router", lambda: kill(next(iter(status()["routers"].values()))["pid"]), full(3))
            note("kill the controller", lambda: kill(status()["pid"]), lambda: full(3)() and bool(status()["pid"]))
            stopped = engine_pid("engine-0")
            note("stop an engine", lambda: kill(stopped, signal.SIGSTOP) or "engine-0", lambda: True)
            note("let it go on", lambda: kill(stopped, signal.SIGCONT), full(3))
            controller = ray.get_actor("paellapy-controller", namespace="paellapy")
            moved = {"engine-0": ["mlp"], "engine-1": ["cnn"], "engine-2": ["cnn", "mlp"]}
            note("another plan", lambda: ray.get(controller.move.remote(moved)), lambda: True)
            note("the plan before", lambda: ray.get(controller.move.remote({})), full(3))
            note("remove a Ray node", lambda: cluster.remove_node(nodes[2], allow_graceful=False), full(3))
            note("scale 3 to 1", lambda: lifecycle.scale(1) and None, full(1))
        finally:
            clients.close()
            lifecycle.take_down()
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
