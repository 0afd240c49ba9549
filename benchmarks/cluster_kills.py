"""A cluster on four Ray nodes whose parts are killed in turn, and that is changed, while clients check every answer.

    python benchmarks/cluster_kills.py [--rounds 5] [--kills 30] [--parts machine engine ...] [--against CHECKOUT]

For every event: answers, wrong ones, errors, broken connections, the longest time without any answer, the slowest
request, and the seconds until two engines have their models again. Before that, as the median of the rounds: the median
time of a request and requests a second, of this cluster, of `paellapy cluster route` in front of two servers, and of
the cluster of another checkout. Every part is stored when it is done; parts of earlier runs stay in the file.

Ray's GCS keeps its state in RocksDB, and is started again at once when it is killed, as KubeRay or systemd would do. A
lost node takes all its processes along, as a machine would; another one joins when two engines are there again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, arguments, medians, save, show, stored, trees

from paellapy import demo
from paellapy.cluster.processes import RAY_SETTINGS, answers, free_port
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

CONFIG = """
policy = "{policy}"
device = "virtual:h200"
[cluster]
engines = 2
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
QUIET_S = 0.3  # before every event, and after it
LEAST_S = 1.5
FEWER = {"replica of a router": 10, "stop: router": 4, "stop: engine": 4, "another policy": 6}  # they take long
LEAST_CHECKED = 10_000  # answers during changes
PACE_S = 0.05  # of each client: the machine is not to be busy with them
MARK = "PAELLAPY_CLUSTER_KILLS"  # in the environment of all processes of a cluster
# A node is lost first: later, keepers may have been adopted from another one.
ENGINE, ROUTER, CONTROLLER = "paellapy-engines", "paellapy-routers", "ray::ServeController"
REPLICAS = {"replica of an engine": ENGINE, "replica of a router": ROUTER, "controller": CONTROLLER}
PARTS = ("machine", "engine", "router", *REPLICAS, "GCS", "stop: router", "stop: engine", "another policy")


class Clients:
    """Ask for both models all the time and compare every answer with the first."""

    def __init__(self, port: int, number: int = 8) -> None:
        self._port, self._stop = port, threading.Event()
        self.answers: list[tuple[float, float]] = []  # from, until
        self.wrong: list[Any] = []
        self.errors: list[Any] = []
        self.broken = 0  # connections to a router that ended
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(number)]
        for each in self._threads:
            each.start()

    def _run(self, k: int) -> None:
        name = ("mlp", "cnn")[k % 2]
        ((key, spec),) = demo.load(name).inputs.items()
        x = np.random.default_rng(k).random((1, *spec.shape), np.float32)
        tensor = {"name": key, "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
        body, first = json.dumps({"inputs": [tensor]}).encode(), None
        while not self._stop.wait(PACE_S):
            began_at = time.monotonic()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
                connection.request("POST", f"/v2/models/{name}/infer", body)
                answer = connection.getresponse()
                said = json.loads(answer.read())
                connection.close()
            except (OSError, http.client.HTTPException):
                self.broken += 1
                continue
            if answer.status != 200:
                self.errors.append((answer.status, said))
                continue
            data = said["outputs"][0]["data"]
            first = data if first is None else first
            if not np.allclose(first, data, rtol=1e-5, atol=1e-6):
                self.wrong.append((name, data))
            self.answers.append((began_at, time.monotonic()))

    def close(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()


def children(pid: int) -> list[int]:
    """Its children, theirs, and so on. Each thread has its own: Ray Serve calls replicas in threads."""
    found: list[int] = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, each.read_text().split())
    return found + [each for child in found for each in children(child)]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def keepers(mark: str, kind: str = "") -> list[int]:
    """Keepers of the processes with this mark; those that were adopted are nobody's children."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if "paellapy.cluster.keeper" in command(pid):
                environment = Path(f"/proc/{pid}/environ").read_text()
                if f"{MARK}={mark}" in environment and f'"type":"{kind}' in environment:
                    found.append(pid)
    return found


class Cluster:
    """Four Ray nodes on this machine, three of which have a virtual GPU, and a cluster of two engines on them."""

    def __init__(self, tree: Path, folder: Path) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.port, self._mark = free_port("127.0.0.1"), str(folder)
        self._file, self._policy = folder / "cluster.toml", "paella"
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
        os.environ.update({**RAY_SETTINGS, **store, "PYTHONPATH": str(tree), MARK: self._mark})
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
        self._nodes = Nodes()
        self._ray = [self._node(gpus) for gpus in (0, 1, 1, 1)]
        self._env = {**os.environ, "RAY_ADDRESS": self._nodes.address}
        self._started: list[subprocess.Popen[bytes]] = []
        self._victim = 0  # the process that a signal was sent to last
        self._write()
        self._start("cluster", "serve", str(self._file))
        while not self.has_two():
            time.sleep(0.2)
        time.sleep(3.0)
        self._census = self.census()

    def _node(self, gpus: int = 1) -> Any:
        return self._nodes.add_node(
            resources={"virtual_gpu": gpus}, include_dashboard=False, num_cpus=0, object_store_memory=80 << 20
        )

    def route(self, number: int = 2) -> str:
        """Starts servers and routers without Ray, too; returns the address."""
        ports = [free_port("127.0.0.1") for _ in range(number + 1)]
        text = self._file.read_text().partition("[cluster]")[0] + self._file.read_text().partition('"127.0.0.1"')[2]
        (file := self._file.with_name("serve.toml")).write_text(text)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for port in ports[:-1]:
            self._start("serve", str(file), "--port", str(port))
        self._start("cluster", "route", *urls[:-1], "--routers", "2", "--port", str(ports[-1]))
        while not answers(urls[-1] + "/v2/health/ready"):
            time.sleep(0.2)
        return urls[-1]

    def census(self) -> list[int]:
        """Processes of each kind."""
        lines = [command(pid) for pid in children(os.getpid())]
        kinds = [keepers(self._mark, kind) for kind in ("EngineTask", "RouterTask")]
        servers = [sum(len(children(pid)) for pid in kind) for kind in kinds]
        return [sum(word in line for line in lines) for word in (*REPLICAS.values(), "gcs_server")] + servers

    def is_whole(self) -> bool:
        """Whether what was killed or stopped is gone, and no part is missing."""
        is_full = all(now >= before for now, before in zip(self.census(), self._census, strict=True))
        return is_full and not command(self._victim)

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "paellapy", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._started.append(subprocess.Popen(command, env=self._env, **quiet))  # type: ignore[call-overload]

    def _write(self) -> None:
        self._file.write_text(CONFIG.format(port=self.port, policy=self._policy))

    def has_two(self) -> bool:
        """Whether two engines have both models."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/cluster", timeout=2.0) as answer:
                engines = json.load(answer)["engines"]
        except (OSError, http.client.HTTPException):
            return False
        ready = [each["up"] and [m["state"] for m in each["models"].values()] == ["READY"] * 2 for each in engines]
        return ready.count(True) == 2

    def signal(self, name: str, number: int) -> None:
        """To the newest process of this kind."""
        if word := REPLICAS.get(name):
            found = [pid for pid in children(os.getpid()) if word in command(pid)]
        else:
            kind = "EngineTask" if name == "engine" else "RouterTask"
            found = [pid for keeper in keepers(self._mark, kind) for pid in children(keeper)]
        self._victim = max(found)
        os.kill(self._victim, number)

    def lose_machine(self) -> Callable[[], None]:
        """Kills all processes of one with an engine; returns what adds another."""
        found = []
        for node in self._ray:
            (raylet,) = node.all_processes["raylet"]
            lost = children(raylet.process.pid)
            with_engine, routers = (sum(word in command(pid) for pid in lost) for word in (ENGINE, ROUTER))
            if with_engine:  # routers belong to the first machine, but all nodes have its address here
                found.append((routers, node.node_id, node, lost))
        *_, node, lost = min(found)
        # Parents last: Ray's own would start others
        own = [pid for pid in lost if "paellapy.cluster.keeper" in command(pid)]
        for pid in [*own, *lost]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ray.remove(node)
        self._nodes.remove_node(node, allow_graceful=False)
        return lambda: self._ray.append(self._node())

    def kill_gcs(self) -> None:
        self._nodes.head_node.kill_gcs_server()
        self._nodes.head_node.start_gcs_server()

    def change(self) -> None:
        """Sets another policy in place."""
        self._policy = "srpt" if self._policy == "paella" else "paella"
        self._write()
        run = [sys.executable, "-m", "paellapy", "cluster", "apply", str(self._file)]
        subprocess.run(run, env=self._env, check=True, capture_output=True)

    def close(self) -> None:
        for each in reversed(self._started):
            each.terminate()
        for each in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(60)
            each.kill()
            each.wait()
        self._nodes.shutdown()


def event(clients: Clients, cluster: Cluster, what: Callable[[], object]) -> dict[str, Any]:
    """What clients see of something that happens, and for how long."""
    time.sleep(QUIET_S)
    wrong, errors, broken, at = len(clients.wrong), len(clients.errors), clients.broken, time.monotonic()
    afterwards = what()
    again_s = 0.0
    while time.monotonic() - at < PATIENCE_S:
        time.sleep(0.1)
        if not cluster.has_two():
            again_s = 0.0
            continue
        again_s = again_s or time.monotonic() - at
        if time.monotonic() - at < LEAST_S:  # what is lost may not have been noticed yet
            continue
        if callable(afterwards):
            afterwards = afterwards()
        if cluster.is_whole():
            break
    time.sleep(QUIET_S)
    ends = sorted(end for _, end in clients.answers if end >= at - 0.1)
    took = [end - begin for begin, end in clients.answers if begin >= at - 0.1]
    return {
        "answers": len(ends), "wrong": len(clients.wrong) - wrong, "errors": len(clients.errors) - errors,
        "broken": clients.broken - broken, "longest_pause_s": float(max(np.diff([at - 0.1, *ends, time.monotonic()]))),
        "slowest_s": max(took, default=0.0), "two_again_s": again_s or PATIENCE_S,
    }  # fmt: skip


def events(cluster: Cluster, clients: Clients, o: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each part with what was seen every time."""
    for name in o.parts:
        stops = name.startswith("stop: ")
        what: Callable[[], object] = {
            "machine": cluster.lose_machine, "GCS": cluster.kill_gcs, "another policy": cluster.change,
        }.get(name) or partial(
            cluster.signal, name.removeprefix("stop: "), signal.SIGSTOP if stops else signal.SIGKILL
        )  # fmt: skip
        seen: list[dict[str, Any]] = []
        times = min(o.kills, FEWER.get(name, o.kills))
        checked = 0 if name == "another policy" and times > 1 else LEAST_CHECKED
        while len(seen) < times or checked < LEAST_CHECKED:
            seen.append(event(clients, cluster, what))
            checked += seen[-1]["answers"]
            print(name, seen[-1], flush=True)
        yield name, seen


def speeds(urls: dict[str, str], o: Any) -> dict[str, Any]:
    """Of each cluster, in turns."""
    runs: list[dict[str, dict[str, Any]]] = []
    for _ in range(o.rounds):
        runs.append({name: {} for name in urls})
        for number in (1, 32):
            load = Load(("mlp",), concurrency=number, duration_s=o.seconds, warmup_s=o.seconds / 4)
            for name, url in urls.items():
                found = run_bench(url, load)["all"]
                runs[-1][name][str(number)] = {
                    "p50_ms": found["latency_ms"]["p50"], "per_s": found["answered_per_s"],
                }  # fmt: skip
    return medians(runs) if runs else {}


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds: counts are added; of times, the median and the largest are kept."""
    found: dict[str, Any] = {"times": len(runs)}
    for key in runs[0]:
        each = [run[key] for run in runs]
        found |= {f"{key}_median": float(np.median(each)), key: max(each)} if key.endswith("_s") else {key: sum(each)}
    return found


def show_and_save(results: dict[str, Any], o: Any) -> None:
    keys = ("times", "answers", "wrong", "errors", "broken", "longest_pause_s_median", "longest_pause_s", "slowest_s",
            "two_again_s_median", "two_again_s")  # fmt: skip
    head = ["what is killed", "times", "answers", "wrong", "errors", "broken connections", "longest pause, s: median",
            "worst", "slowest request, s", "two engines again, s: median", "worst"]  # fmt: skip
    rows = [
        [what, *(f"{e[key]:.2f}" if "_s" in key else f"{e[key]:,}" for key in keys)]
        for what, e in results["events"].items()
    ]
    fast = ["", "p50, ms: 1 client", "32 clients", "requests/s: 1 client", "32 clients"]
    names = {
        "now": "`paellapy cluster serve`", "route": "`paellapy cluster route`",
        "before": "cluster with its own control plane",
    }  # fmt: skip
    speed = [
        [names[name], *(f"{each[n]['p50_ms']:.2f}" for n in each), *(f"{each[n]['per_s']:,.0f}" for n in each)]
        for name, each in results["speed"].items()
    ]
    show("speed", fast, speed)
    show("a cluster whose parts are killed", head, rows)
    tables: dict[str, list[Sequence[object]]] = {"cluster-kills": [head, *rows], "cluster-speed": [fast, *speed]}
    print(save("cluster_kills", results, folder=o.out, tables={k: t for k, t in tables.items() if len(t) > 1}))


def main() -> None:
    parser = arguments(__doc__, seconds=2.0, rounds=5, against=True)
    parser.add_argument("--kills", type=int, default=30, help="of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    o = parser.parse_args()
    results = {"speed": {}, "events": {}, **stored("cluster_kills", o.out)}
    with contextlib.ExitStack() as stack:
        clusters = {}
        for name, tree in reversed(trees(o).items()):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            clusters[name] = stack.enter_context(contextlib.closing(Cluster(tree, folder)))
        if o.rounds:
            urls = {name: f"http://127.0.0.1:{each.port}" for name, each in clusters.items()}
            results["speed"] = speeds({**urls, "route": clusters["now"].route()}, o)
            show_and_save(results, o)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Cluster(ROOT, Path(folder))) as cluster,
        contextlib.closing(Clients(cluster.port)) as clients,
    ):
        for name, seen in events(cluster, clients, o):
            results["events"][name] = together(seen)
            show_and_save(results, o)


if __name__ == "__main__":
    main()
