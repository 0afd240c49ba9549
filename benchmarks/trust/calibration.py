"""Of the requests that admission refuses: how many would have been late?

    python benchmarks/trust/calibration.py [--seconds 3] [--busy N] [--device virtual:h200] [--out DIR]

The same arrivals are played twice: to a server that refuses, and to one that admits everything. A refusal counts as
right if the same request, in the second run, was answered after its model's target. First come the loads of common
tools: 8 clients that each wait for their answer, and 40 requests at once.

All of this is measured on a quiet machine, and then once more beside N programs that each keep a core busy (default:
half of the cores; 0: the quiet machine only). The defaults add up to about 75 s where the servers keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from load import Counts, exchange, run_clients
from served import TARGETS_MS, Checked, Served, requests, served
from store import save

Outcome = tuple[int, float]  # status, seconds from its arrival
CAPACITY_S, CAPACITY_REQUESTS = 3.0, 6000  # either ends a measurement of the capacity
DRAIN_S = 2.0  # for answers after the last arrival; a request without one counts as late
# Ends with the script, even if the script is killed.
OCCUPY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextlib.contextmanager
def occupied(cores: int) -> Iterator[list[int]]:
    """Programs that keep cores busy meanwhile: their process ids."""
    programs = [subprocess.Popen([sys.executable, "-c", OCCUPY]) for _ in range(cores)]
    try:
        yield [each.pid for each in programs]
    finally:
        for each in programs:
            each.kill()
        for each in programs:
            each.wait()


class Pool:
    def __init__(self, port: int) -> None:
        self._port, self._free = port, list[Any]()

    async def ask(self, request: bytes) -> int:
        connection = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            status, head, _ = await exchange(*connection, request)
        except asyncio.CancelledError:  # the server need not work on it beside the next load
            connection[1].close()
            raise
        if b"\r\nconnection: close" in head:
            connection[1].close()
        else:
            self._free.append(connection)
        return status


async def play(server: Served, arrivals: list[tuple[float, Checked]]) -> list[Outcome]:
    """Open-loop: requests come when they come."""
    pool, found = Pool(server.port), [(0, math.inf)] * len(arrivals)
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
    _, pending = await asyncio.wait(tasks, timeout=DRAIN_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=bool(pending))
    return found


async def capacity(server: Served, work: list[Checked]) -> float:
    """Requests a second that 64 clients get who wait for their answers: enough of them to fill batches."""
    counts, end = Counts(), asyncio.Event()
    began = time.perf_counter()
    asyncio.get_running_loop().call_later(CAPACITY_S, end.set)
    await run_clients(server.port, work, counts, 64, end, CAPACITY_REQUESTS)
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


def rightly_refused(loads: dict[str, Any]) -> float | None:
    """Of the refused requests of all loads: the part that would have been late."""
    counts = [(each["refused"] * each["requests"], each["rightly_refused"] or 0) for each in loads.values()]
    refused = sum(n for n, _ in counts)
    return sum(n * share for n, share in counts) / refused if refused else None


def calibrate(servers: tuple[Served, Served], loads: list[float], seconds: float,
              note: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:  # fmt: skip
    """`servers`: the one that refuses, and the one that admits everything."""
    refusing, off = servers
    made = requests(np.random.default_rng(2), 2000, f"127.0.0.1:{refusing.port}")
    plain = [w for w in made if b"timeout" not in w.request and w.kind in ("json", "binary")]
    work = [w for w in plain if w.model in TARGETS_MS]
    found: dict[str, Any] = {"first": asyncio.run(first_impressions(refusing, work))}
    asyncio.run(capacity(refusing, work))  # both have seen every model and size before they are compared
    most = found["capacity_per_s"] = round(asyncio.run(capacity(off, work)), 1)
    found["loads"] = {}
    for load in loads:
        played = arrivals(work, load * most, seconds, seed=int(load * 10))
        outcomes = [asyncio.run(play(server, played)) for server in servers]
        found["loads"][str(load)] = compare(played, *outcomes)
        found["rightly_refused"] = rightly_refused(found["loads"])
        print(load, found["loads"][str(load)], flush=True)
        note(found)
    print(json.dumps(found["first"], indent=1), found["rightly_refused"])
    return found


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--loads", default="0.8,1.2,1.6,2.0", help="loads as parts of the measured capacity")
    parser.add_argument("--busy", type=int, default=cores // 2, help="programs beside the second half; 0: no such half")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loads = [float(each) for each in args.loads.split(",")]
    result: dict[str, Any] = {k: getattr(args, k) for k in ("device", "workers", "seconds")}
    result |= {"cores": cores, "targets_ms": TARGETS_MS}
    began = time.monotonic()

    def note(part: dict[str, Any]) -> Path:
        result.update(part)
        result["took_s"] = round(time.monotonic() - began, 1)
        return save("trust_calibration", result, folder=args.out)

    every_one = 'admission = "off"'
    with served(args.device, args.workers) as refusing, served(args.device, args.workers, more=every_one) as off:
        calibrate((refusing, off), loads, args.seconds, note)
        if args.busy:
            with occupied(args.busy):
                beside = {"programs": args.busy}
                calibrate((refusing, off), loads, args.seconds, lambda found: note({"busy": beside | found}))
    print(note({}), f"after {result['took_s']:.0f} s")


if __name__ == "__main__":
    main()
