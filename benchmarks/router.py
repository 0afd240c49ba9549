"""A router against the server behind it, in one run: latency at one client, throughput per core, and memory.

    python benchmarks/router.py [--requests 200000] [--seconds 5]

The server is one process with a small model on the virtual GPU. Rounds alternate between both, so that other load of
the machine affects both alike; the medians are compared. Throughput is per second of the measured process's own CPU
time, since on a machine with few cores the clients would take time from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from common import save

from paellapy.cluster.processes import Routers
from paellapy.cluster.router import RouterOptions

INFER = "/v2/models/mlp/infer"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


async def ask(url: str, clients: int, seconds: float, most: int | None = None) -> list[float]:
    """Latencies in ms of clients that ask one request after the other."""
    from paellapy import demo

    shape = next(iter(demo.load("mlp").inputs.values())).shape
    data = np.zeros((1, *shape), np.float32)
    tensor = {"name": next(iter(demo.load("mlp").inputs)), "shape": list(data.shape), "datatype": "FP32",
              "data": data.reshape(-1).tolist()}  # fmt: skip
    body = json.dumps({"inputs": [tensor]}).encode()
    found: list[float] = []
    end = time.perf_counter() + seconds

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            while time.perf_counter() < end and (most is None or len(found) < most):
                began = time.perf_counter()
                async with session.post(url + INFER, data=body) as answer:
                    await answer.read()
                    assert answer.status == 200
                found.append((time.perf_counter() - began) * 1e3)

        await asyncio.gather(*(client() for _ in range(clients)))
    return found


def start_server() -> tuple[subprocess.Popen[str], str]:
    code = (
        "import paellapy as pp; from paellapy import demo; "
        "pp.serve([demo.load('mlp', batch=(1, 8))], device='virtual:h200', server={'port': 0}, "
        "announce=lambda url: print(url, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def compare(server: tuple[int, str], router: tuple[int, str], seconds: float, rounds: int) -> dict[str, Any]:
    p50: dict[str, list[float]] = {"server": [], "router": []}
    per_cpu_s: dict[str, list[float]] = {"server": [], "router": []}
    for _ in range(rounds):
        for name, (_, url) in (("server", server), ("router", router)):
            p50[name].append(statistics.median(asyncio.run(ask(url, 1, seconds))))
        for name, (pid, url) in (("server", server), ("router", router)):
            before = cpu_s(pid)
            n = len(asyncio.run(ask(url, 32, seconds)))
            per_cpu_s[name].append(n / (cpu_s(pid) - before))
    found = {
        "p50_ms": {name: statistics.median(each) for name, each in p50.items()},
        "per_cpu_s": {name: statistics.median(each) for name, each in per_cpu_s.items()},
        "rounds": {"p50_ms": p50, "per_cpu_s": per_cpu_s},
    }
    found["p50_ratio"] = found["p50_ms"]["router"] / found["p50_ms"]["server"]
    found["throughput_ratio"] = found["per_cpu_s"]["router"] / found["per_cpu_s"]["server"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    process, url = start_server()
    results: dict[str, Any] = {}
    try:
        with Routers({"engine": url}, RouterOptions(port=0)) as routers:
            router = routers.processes[0].pid, routers.url
            asyncio.run(ask(routers.url, 4, 2.0))
            results.update(compare((process.pid, url), router, given.seconds, given.rounds))
            print({name: value for name, value in results.items() if name != "rounds"}, flush=True)
            save("router", results)
            grew, seen = [memory_mb(router[0])], 0
            while seen < given.requests:
                seen += len(asyncio.run(ask(routers.url, 32, 60.0, min(20_000, given.requests - seen))))
                grew.append(memory_mb(router[0]))
                results["memory"] = {"requests": seen, "mb": grew}
                save("router", results)
            print(results["memory"])
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
