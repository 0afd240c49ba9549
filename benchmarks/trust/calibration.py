"""Of the requests that admission refuses: how many would have been late?

    python benchmarks/trust/calibration.py [--seconds 10] [--device virtual:h200] [--out DIR]

The same arrivals are played twice: to a server that refuses, and to one that admits everything. A refusal counts as
right if the same request, in the second run, was answered after its model's target. First come the loads of common
tools: 8 clients that each wait for their answer, and 40 requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Counts, exchange, run_clients
from served import TARGETS_MS, Checked, Served, requests, served
from store import save

Outcome = tuple[int, float]  # status, seconds from its arrival


class Pool:
    def __init__(self, port: int) -> None:
        self._port, self._free = port, list[Any]()

    async def ask(self, request: bytes) -> int:
        connection = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        status, head, _ = await exchange(*connection, request)
        if b"\r\nconnection: close" in head:
            connection[1].close()
        else:
            self._free.append(connection)
        return status


async def play(server: Served, arrivals: list[tuple[float, Checked]]) -> list[Outcome]:
    """Open-loop: requests come when they come."""
    pool, found = Pool(server.port), [(0, 0.0)] * len(arrivals)
    began = time.perf_counter() + 0.05

    async def one(k: int, at: float, each: Checked) -> None:
        status = await pool.ask(each.request)
        found[k] = status, time.perf_counter() - at

    tasks = []
    for k, (gap_s, each) in enumerate(arrivals):
        at = began + gap_s
        if (wait := at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(k, at, each)))
    await asyncio.gather(*tasks)
    return found


async def capacity(server: Served, work: list[Checked]) -> float:
    """Requests a second that 64 clients get who wait for their answers: enough of them to fill batches."""
    counts, end = Counts(), asyncio.Event()
    began = time.perf_counter()
    await run_clients(server.port, work, counts, 64, end, 6000)
    return counts.outcomes["right"] / (time.perf_counter() - began)


async def first_impressions(server: Served, work: list[Checked]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cnn = next(each for each in work if each.model == "cnn" and each.kind == "binary")
    pool = Pool(server.port)
    statuses = await asyncio.gather(*(pool.ask(cnn.request) for _ in range(40)))
    found["40 requests for cnn at once, refused"] = sum(status == 503 for status in statuses)
    counts, end = Counts(), asyncio.Event()
    mlp = [each for each in work if each.model == "mlp" and each.kind == "binary"]
    await run_clients(server.port, mlp, counts, 8, end, 4000)
    found["8 clients of mlp, 4000 requests"] = counts.summary()
    return found


def arrivals(work: list[Checked], rate: float, seconds: float, seed: int) -> list[tuple[float, Checked]]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    return [(float(t), work[int(rng.integers(len(work)))]) for t in at]


def compare(played: list[tuple[float, Checked]], refusing: list[Outcome], letting: list[Outcome]) -> dict[str, Any]:
    target = np.array([TARGETS_MS[each.model] * 1e-3 for _, each in played])
    refused = np.array([status == 503 for status, _ in refusing])
    late_then = np.array([took for _, took in letting]) > target
    answered = np.array([status == 200 for status, _ in refusing])
    late_now = np.array([took for _, took in refusing]) > target
    models = np.array([each.model for _, each in played])
    return {
        "requests": len(played),
        "refused": float(refused.mean()),
        "refused_by_model": {str(m): float(refused[models == m].mean()) for m in np.unique(models)},
        "rightly_refused": float(late_then[refused].mean()) if refused.any() else None,
        "in_time_with_admission": float((answered & ~late_now).mean()),
        "in_time_without": float((~late_then).mean()),
        "late_though_let_in": float(late_now[answered].mean()) if answered.any() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--loads", default="0.5,0.8,1.2,1.6,2.0", help="loads as parts of the measured capacity")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    every_one = 'admission = "off"'
    with served(args.device, args.workers) as refusing, served(args.device, args.workers, more=every_one) as off:
        host = f"127.0.0.1:{refusing.port}"
        made = requests(np.random.default_rng(2), 2000, host)
        plain = [w for w in made if b"timeout" not in w.request and w.kind in ("json", "binary")]
        work = [w for w in plain if w.model in TARGETS_MS]
        settings = {k: getattr(args, k) for k in ("device", "workers", "seconds")}
        settings |= {"cores": len(os.sched_getaffinity(0)), "targets_ms": TARGETS_MS}
        result: dict[str, Any] = {**settings, "first": asyncio.run(first_impressions(refusing, work))}
        asyncio.run(capacity(refusing, work))  # both have seen every model and size before they are compared
        most = result["capacity_per_s"] = round(asyncio.run(capacity(off, work)), 1)
        result["loads"] = {}
        for load in (float(each) for each in args.loads.split(",")):
            played = arrivals(work, load * most, args.seconds, seed=int(load * 10))
            found = [asyncio.run(play(server, played)) for server in (refusing, off)]
            result["loads"][str(load)] = compare(played, *found)
            print(load, result["loads"][str(load)], flush=True)
            save("trust_calibration", result, folder=args.out)
    weights = [(each["refused"] * each["requests"], each["rightly_refused"] or 0) for each in result["loads"].values()]
    refused, rightly = sum(n for n, _ in weights), sum(n * share for n, share in weights)
    result["rightly_refused"] = rightly / refused if refused else None
    print(json.dumps(result["first"], indent=1), result["rightly_refused"])
    print(save("trust_calibration", result, folder=args.out))


if __name__ == "__main__":
    main()
