"""A cluster on three Ray nodes whose parts are killed in turn, and that is changed, while clients check every answer.

    python benchmarks/cluster_kills.py [--rounds 5] [--kills 30] [--parts engine router ...] [--against CHECKOUT]

For every event: answers, wrong ones, errors, broken connections, the longest time without any answer, the slowest
request, and the seconds until two engines have their models again. Before that, as the median of the rounds: the median
time of a request, and requests a second. Parts of earlier runs stay in the file.

Ray's GCS keeps its state in RocksDB, and is started again at once when it is killed, as KubeRay or systemd would do.
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
from harness import arguments, medians, save, show, stored, trees

from paellapy import demo
from paellapy.cluster.processes import free_port
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
QUIET_S = 0.5  # before every event, and after it
CHANGES = 6
PACE_S = 0.05  # of each client: the machine is not to be busy with them
RAY = {"RAY_worker_niceness": "0", "RAY_health_check_period_ms": "1000"}
# Words in the command lines of parts, here and in checkouts before there was a control plane of Ray Serve
PARTS = {
    "engine": ("paellapy-engines", "ray::EngineActor"),
    "replica of an engine": ("paellapy-engines", "ray::EngineActor"),
    "router": ("paellapy-routers", "ray::RouterActor"),
    "replica of a router": ("paellapy-routers", "ray::RouterActor"),
    "controller": ("ray::ServeController", "ray::Controller"),
}
OTHERS = ("node", "GCS", "stop: router", "stop: engine", "another policy")
WORDS = sorted({word for words in PARTS.values() for word in words} | {"paellapy.cluster", "gcs_server"})


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


class Cluster:
    """Three Ray nodes on this machine and a cluster on them, all of them processes of one checkout."""

    def __init__(self, tree: Path, folder: Path) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.port = free_port("127.0.0.1")
        self._file, self._policy = folder / "cluster.toml", "paella"
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
        os.environ.update({**RAY, **store, "PYTHONPATH": str(tree)})
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
        self._nodes = Nodes()
        self._ray = [self._node() for _ in range(3)]
        self._env = {**os.environ, "RAY_ADDRESS": self._nodes.address}
        self._started: list[subprocess.Popen[bytes]] = []
        self._victim = 0  # the process that a signal was sent to last
        self._write()
        self._start("paellapy", "cluster", "serve", str(self._file))
        while not self.has_two():
            time.sleep(0.2)
        time.sleep(3.0)
        self._census = self.census()

    def _node(self) -> Any:
        return self._nodes.add_node(
            resources={"virtual_gpu": 2}, include_dashboard=False, num_cpus=1, object_store_memory=80 << 20
        )

    def census(self) -> list[int]:
        """Processes of each kind."""
        lines = [command(pid) for pid in children(os.getpid())]
        return [sum(word in line for line in lines) for word in WORDS]

    def is_whole(self) -> bool:
        """Whether what was killed or stopped is gone, and no part is missing."""
        is_full = all(now >= before for now, before in zip(self.census(), self._census, strict=True))
        return is_full and not command(self._victim)

    def _start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
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

    def part(self, name: str) -> int:
        """A process of this kind: the last one, since the first is where routers were started."""
        actors = [pid for pid in children(os.getpid()) if any(word in command(pid) for word in PARTS[name])]
        own = [pid for pid in children(actors[-1]) if "paellapy.cluster" in command(pid)]
        return own[-1] if name in ("engine", "router") and own else actors[-1]

    def signal(self, name: str, number: int) -> None:
        self._victim = self.part(name)
        os.kill(self._victim, number)

    def kill_node(self) -> None:
        """Kills the older one of those that are not the first, with all its workers, and adds another."""
        self._nodes.remove_node(self._ray.pop(1), allow_graceful=False)
        self._ray.append(self._node())

    def kill_gcs(self) -> None:
        self._nodes.head_node.kill_gcs_server()
        self._nodes.head_node.start_gcs_server()

    def change(self) -> None:
        """Sets another policy: in place, or by taking the cluster down if its version cannot do that."""
        self._policy = "srpt" if self._policy == "paella" else "paella"
        self._write()
        run = [sys.executable, "-m", "paellapy", "cluster"]
        if subprocess.run([*run, "apply", str(self._file)], env=self._env, capture_output=True).returncode:
            subprocess.run([*run, "down"], env=self._env, check=True, capture_output=True)
            self._start("paellapy", "cluster", "serve", str(self._file))

    def close(self) -> None:
        for each in reversed(self._started):
            each.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(60)
            each.kill()
            each.wait()
        self._nodes.shutdown()


def event(clients: Clients, cluster: Cluster, what: Callable[[], object]) -> dict[str, Any]:
    """What clients see of something that happens, and for how long."""
    time.sleep(QUIET_S)
    wrong, errors, broken, at = len(clients.wrong), len(clients.errors), clients.broken, time.monotonic()
    what()
    again_s = 0.0
    while time.monotonic() - at < PATIENCE_S:
        time.sleep(0.1)
        if not cluster.has_two():
            again_s = 0.0
        elif not again_s:
            again_s = time.monotonic() - at
        if again_s and time.monotonic() - at > 1.0 and cluster.is_whole():
            break
    time.sleep(QUIET_S)
    ends = sorted(end for _, end in clients.answers if end >= at - 0.1)
    took = [end - begin for begin, end in clients.answers if begin >= at - 0.1]
    return {
        "answers": len(ends), "wrong": len(clients.wrong) - wrong, "errors": len(clients.errors) - errors,
        "broken": clients.broken - broken, "longest_pause_s": float(max(np.diff([at - 0.1, *ends, time.monotonic()]))),
        "slowest_s": max(took, default=0.0), "two_again_s": again_s or PATIENCE_S,
    }  # fmt: skip


def events(cluster: Cluster, o: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name in o.parts:
        what: Callable[[], object] = {
            "node": cluster.kill_node, "GCS": cluster.kill_gcs, "another policy": cluster.change,
        }.get(name) or partial(cluster.signal, name.removeprefix("stop: "),
                               signal.SIGSTOP if name.startswith("stop: ") else signal.SIGKILL)  # fmt: skip
        for _ in range(min(o.kills, CHANGES) if name == "another policy" else o.kills):
            yield name, what


def run_of(tree: Path, o: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Cluster(tree, Path(folder))) as cluster:
        speeds = []
        for _ in range(o.rounds):
            speeds.append({})
            for number in (1, 32):
                load = Load(("mlp",), concurrency=number, duration_s=o.seconds, warmup_s=o.seconds / 4)
                found = run_bench(f"http://127.0.0.1:{cluster.port}", load)["all"]
                speeds[-1][str(number)] = {"p50_ms": found["latency_ms"]["p50"], "per_s": found["answered_per_s"]}
        with contextlib.closing(Clients(cluster.port)) as clients:
            seen: dict[str, list[dict[str, Any]]] = {}
            for name, what in events(cluster, o):
                seen.setdefault(name, []).append(event(clients, cluster, what))
                print(name, seen[name][-1], flush=True)
    return {"speed": medians(speeds) if speeds else {}, "events": {name: together(each) for name, each in seen.items()}}


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds: counts are added; of times, the median and the largest are kept."""
    found: dict[str, Any] = {"times": len(runs)}
    for key in runs[0]:
        each = [run[key] for run in runs]
        found |= {f"{key}_median": float(np.median(each)), key: max(each)} if key.endswith("_s") else {key: sum(each)}
    return found


def main() -> None:
    parser = arguments(__doc__, seconds=4.0, rounds=5, against=True)
    parser.add_argument("--kills", type=int, default=30, help="of each part")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *OTHERS], default=[*PARTS, *OTHERS])
    o = parser.parse_args()
    results = stored("cluster_kills", o.out)
    for name, tree in trees(o).items():
        found = run_of(tree, o)
        before = results.get(name, {"speed": {}, "events": {}})
        results[name] = {key: {**before[key], **found[key]} for key in found}
    keys = ("times", "answers", "wrong", "errors", "broken", "longest_pause_s_median", "longest_pause_s", "slowest_s",
            "two_again_s_median", "two_again_s")  # fmt: skip
    head = ["what is killed", "times", "answers", "wrong", "errors", "broken connections", "longest pause, s: median",
            "worst", "slowest request, s", "two engines again, s: median", "worst"]  # fmt: skip
    tables: dict[str, list[Sequence[object]]] = {}
    for name, found in results.items():
        rows = [
            [what, *(f"{e[key]:.2f}" if "_s" in key else f"{e[key]:,}" for key in keys)]
            for what, e in found["events"].items()
        ]
        print(name, found["speed"])
        show(f"a cluster whose parts are killed ({name})", head, rows)
        tables["cluster-kills" if name == "now" else "cluster-kills-before"] = [head, *rows]
    print(save("cluster_kills", results, folder=o.out, tables=tables))


if __name__ == "__main__":
    main()
