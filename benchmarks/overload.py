"""A server at three times its capacity: the fate of accepted requests, of refused ones, and of the server.

    python benchmarks/overload.py [--seconds 60] [--factor 3] [--clients 1] [--set server.workers=2] [--out DIR]

`paellapy serve` runs in its own process with a demo model on the virtual GPU; its capacity is measured first,
closed-loop. Then requests come open-loop (Poisson), from separate processes, whether or not earlier ones are answered.
Latencies count from the intended time of sending. On a machine with few cores, the clients and the CPU that computes
for the virtual GPU share them, so the virtual GPU is slower than it would be alone, in both parts of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import save
from prometheus_client.parser import text_string_to_metric_families

from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench
from paellapy.serving.bench.targets import HttpTarget

DOCS = Path(__file__).parent.parent / "docs"
CONFIG = """
device = "virtual:h200"
[server]
port = 0
log_format = "json"
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "{model}" }}
target_ms = {target_ms}
"""
KEPT = ("answered", "answered_per_s", "refused", "errors", "within_target", "latency_ms", "refusal_ms", "latency_hdr")
WATCHED = {
    "process_resident_memory_bytes": "rss_bytes",
    "process_open_fds": "open_files",
    "paellapy_requests_in_flight": "in_flight",
    "paellapy_items_live": "live",
    "paellapy_requests_answered_total": "answered",
    "paellapy_refusals_total": "refused",
    "paellapy_admission_window": "window",
}


@contextlib.contextmanager
def server(model: str, target_ms: float, settings: list[str]) -> Iterator[tuple[str, int]]:
    """The address and the process of a server whose model is loaded; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "overload.toml"
        config.write_text(CONFIG.format(model=model, target_ms=target_ms))
        command = [sys.executable, "-c", "from paellapy.cli import main; main()", "serve", str(config)]
        for each in settings:
            command += ["--set", each]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            url = ""
            for line in process.stderr:
                said = json.loads(line) if line.startswith("{") else {}
                url = said.get("url", url)
                if said.get("message") == "loaded":
                    break
            assert url, "the server did not start"
            drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
            drain.start()
            wait_ready(url)
            yield url, process.pid
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def wait_ready(url: str) -> None:
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=30) as answer:
            if answer.status == 200:
                return
        time.sleep(0.05)


def cpu_s(pid: int) -> tuple[float, float]:
    """What the threads of a process and of its children have run, and waited for a core that others had; Linux only."""
    ran = waited = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            on, off, _ = map(int, stat.read_text().split())
            ran, waited = ran + on, waited + off
    found = ran * 1e-9, waited * 1e-9
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                more = cpu_s(int(child))
                found = found[0] + more[0], found[1] + more[1]
    return found


class Watch(threading.Thread):
    """What /metrics says, twice a second."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._over = url, threading.Event()
        self.rows: list[dict[str, float]] = []
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                self.rows.append(self.look())
            self._over.wait(0.5)

    def look(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = {"t": time.monotonic()} | dict.fromkeys(WATCHED.values(), 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in WATCHED:
                    found[WATCHED[sample.name]] += sample.value
        return found

    def stop(self) -> None:
        self._over.set()
        self.join()


def capacity(url: str, seconds: float) -> float:
    """The most requests a second that clients who wait for their answers got."""
    found = [
        run_bench(url, Load(concurrency=n, duration_s=seconds, warmup_s=1.0))["all"]["answered_per_s"]
        for n in (8, 16, 24)
    ]
    return max(found)


class Recovery(threading.Thread):
    """One client from the moment the load ends: when the last of its requests was refused or late."""

    def __init__(self, url: str, target_ms: float, for_s: float = 3.0) -> None:
        super().__init__(daemon=True)
        self._url, self._target_ms, self._for_s = url, target_ms, for_s
        self.load_ended = threading.Event()
        self.asked, self.recovered_s = 0, 0.0
        self.start()

    def run(self) -> None:
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        target = HttpTarget(self._url, Load(concurrency=1))
        name = (await target.prepare(np.random.default_rng(0)))[0]
        await asyncio.to_thread(self.load_ended.wait)
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + self._for_s:
            status, *_ = await target.ask(name, self.asked, None, None)
            self.asked += 1
            if status != 200 or (time.perf_counter() - now) * 1e3 > self._target_ms:
                self.recovered_s = time.perf_counter() - begin
            await asyncio.sleep(0.01)
        target.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    target_ms = arguments.target_ms
    with server(arguments.model, target_ms, arguments.set) as (url, pid):
        able = capacity(url, arguments.capacity_seconds)
        rate = able * arguments.factor
        print(f"can do {able:.0f}/s; now {rate:.0f}/s for {arguments.seconds:.0f} s", flush=True)
        load = Load(rate=rate, duration_s=arguments.seconds, warmup_s=3.0, connections=4096, target_ms=target_ms)
        watch = Watch(url)
        begin, cpu_before = watch.look(), cpu_s(pid)
        after = Recovery(url, target_ms)

        def progress(elapsed_s: float, counted: int, refused: int) -> None:
            if elapsed_s >= load.uncounted_s + load.counted_s:  # the last request was sent; answers may be missing
                after.load_ended.set()

        result = run_bench(url, load, progress, clients=arguments.clients)
        ran_s, waited_s = (now - then for now, then in zip(cpu_s(pid), cpu_before, strict=True))
        after.load_ended.set()
        after.join()
        watch.stop()
        end = watch.look()
    everything = result["all"]
    loaded = [row for row in watch.rows if row["in_flight"] > 0 and row["t"] > begin["t"] + 5]
    found = {
        "model": arguments.model,
        "target_ms": target_ms,
        "cores": os.cpu_count(),
        "settings": arguments.set,
        "client_processes": arguments.clients,
        "capacity_per_s": able,
        "offered_per_s": rate,
        "factor": arguments.factor,
        "seconds": arguments.seconds,
        "client_late_ms": result["client_late_ms"],
        # A machine that others use too makes requests late whatever is admitted: this says how much of that there was.
        "server_ran_s": ran_s,
        "server_waited_for_a_core_s": waited_s,
        **{key: everything.get(key) for key in KEPT},
        "memory_bytes": {
            "before": begin["rss_bytes"],
            "early": loaded[0]["rss_bytes"] if loaded else None,
            "late": loaded[-1]["rss_bytes"] if loaded else None,
            "after": end["rss_bytes"],
        },
        "open_files": {"before": begin["open_files"], "after": end["open_files"]},
        "in_flight_after": end["in_flight"],
        "live_after": end["live"],
        "recovered_s": after.recovered_s,
        "asked_after": after.asked,
        "timeline": [{key: value - begin[key] if key in ("t", "answered", "refused") else value
                      for key, value in row.items()} for row in watch.rows],
    }  # fmt: skip
    refusal = found["refusal_ms"]
    print(
        f"answered {found['answered_per_s']:.0f}/s, {found['within_target']:.2%} within {target_ms:g} ms; "
        f"{found['refused']} refused, p50 {refusal['p50']:.2f} ms, p99 {refusal['p99']:.1f} ms; "
        f"errors {found['errors']}; memory {begin['rss_bytes'] / 1e6:.0f} -> {end['rss_bytes'] / 1e6:.0f} MB; "
        f"recovered after {after.recovered_s:.2f} s; "
        f"the server ran {ran_s:.0f} s and waited {waited_s:.0f} s for a core",
        flush=True,
    )
    return found


def picture(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = found["timeline"]
    t = np.array([row["t"] for row in rows])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for key, colour in (("answered", "tab:blue"), ("refused", "tab:orange")):
        counts = np.array([row[key] for row in rows])
        left.plot(t[1:], np.diff(counts) / np.diff(t), color=colour, label=f"{key}/s")
    left.axhline(found["capacity_per_s"], color="grey", linestyle=":", label="capacity/s")
    left.set(xlabel="seconds", ylabel="requests a second", ylim=(0, None))
    memory = left.twinx()
    memory.plot(t, [row["rss_bytes"] / 1e6 for row in rows], color="tab:green", label="memory, MB")
    memory.set(ylabel="MB", ylim=(0, 1.5 * max(row["rss_bytes"] / 1e6 for row in rows)))
    lines = left.get_lines() + memory.get_lines()
    left.legend(lines, [str(line.get_label()) for line in lines], fontsize=8, loc="best")
    left.set_title(f"{found['factor']:g} × capacity, {found['seconds']:g} s", fontsize=10)
    p, ms = np.array(found["latency_hdr"])[:-1].T
    right.plot(1 / (1 - p / 100), ms, color="tab:blue", label="accepted")
    right.axhline(found["target_ms"], color="black", linestyle="--", label="target")
    ticks = [1, 2, 10, 100, 1000, 10_000]
    right.set(xscale="log", ylabel="latency from intended arrival, ms", xlabel="percentile", ylim=(0, None))
    right.set_xticks(ticks, ["0", "50", "90", "99", "99.9", "99.99"])
    right.set_title(f"{found['within_target']:.2%} of accepted requests within their target", fontsize=10)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--capacity-seconds", type=float, default=5.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--target-ms", type=float, default=250.0)
    parser.add_argument("--set", action="append", default=[], help="override a setting of the server")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file and the picture")
    arguments = parser.parse_args()
    found = measure(arguments)
    print("written to", save("overload", found, folder=arguments.out))
    picture(found, (arguments.out or DOCS) / "overload.png")


if __name__ == "__main__":
    main()
