"""A server beyond its capacity: accepted requests, refused ones, and how many of the refused would have been late.

    python benchmarks/overload.py [--seconds 10] [--loads 0.5,0.8,1.2,1.6,2.0,3.0] [--busy 1]

The same arrivals are played twice, whether or not earlier requests are answered: to a server that refuses, and to one
that admits everything. A refusal counts as right if the same request, in the second run, was answered after its model's
target. `--busy N`: once more beside N programs that each keep a core busy. Capacity is the throughput of 64 clients
that wait for their answers; they share the machine's cores with the CPU that computes for the virtual GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import arguments, finish
from trust import TARGETS_MS, Checked, Served, connections, requests, run_clients, served

Outcome = tuple[str, float]  # and seconds from its arrival
CAPACITY_S, DRAIN_S = 3.0, 2.0  # of the measurement; for answers after the last arrival: one without counts as late
# Ends with the script, even if the script is killed.
OCCUPY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextlib.contextmanager
def occupied(cores: int) -> Iterator[None]:
    """Programs that keep cores busy meanwhile."""
    programs = [subprocess.Popen([sys.executable, "-c", OCCUPY]) for _ in range(cores)]
    try:
        yield
    finally:
        for each in programs:
            each.kill()
            each.wait()


async def play(server: Served, arrivals: list[tuple[float, Checked]]) -> list[Outcome]:
    found: list[Outcome] = [("lost", math.inf)] * len(arrivals)
    async with connections() as session:
        began = time.perf_counter() + 0.05

        async def one(k: int, at: float, each: Checked) -> None:
            found[k] = await each.ask(session, server.url), time.perf_counter() - at

        tasks = []
        for k, (after_s, each) in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began + after_s - time.perf_counter()))
            tasks.append(asyncio.create_task(one(k, began + after_s, each)))
        _, pending = await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def capacity(server: Served, work: list[Checked]) -> float:
    """Requests a second that 64 clients get who wait for their answers: enough of them to fill batches."""
    outcomes, end, began = Counter[str](), asyncio.Event(), time.perf_counter()
    asyncio.get_running_loop().call_later(CAPACITY_S, end.set)
    await run_clients(server.url, work, outcomes, 64, end)
    return outcomes["right"] / (time.perf_counter() - began)


def compare(played: list[tuple[float, Checked]], refusing: list[Outcome], letting: list[Outcome]) -> dict[str, Any]:
    target = np.array([TARGETS_MS[each.model] * 1e-3 for _, each in played])
    status, took = np.array([s for s, _ in refusing]), np.array([t for _, t in refusing])
    late_then = np.array([t for _, t in letting]) > target
    refused, answered, late = np.isin(status, ("refused", "unavailable")), status == "right", took > target
    return {
        "requests": len(played), "refused": float(refused.mean()),
        "rightly_refused": float(late_then[refused].mean()) if refused.any() else None,
        "in_time_with_admission": float((answered & ~late).mean()), "in_time_without": float((~late_then).mean()),
        "late_though_let_in": float(late[answered].mean()) if answered.any() else None,
        "p99_ms": float(np.quantile(took[answered], 0.99) * 1e3) if answered.any() else None,
        "refusal_p50_ms": float(np.median(took[refused]) * 1e3) if refused.any() else None,
    }  # fmt: skip


def calibrate(refusing: Served, off: Served, work: list[Checked], o: Any) -> dict[str, Any]:
    asyncio.run(capacity(refusing, work))  # both have seen every model and size before they are compared
    most = asyncio.run(capacity(off, work))
    loads: dict[str, Any] = {}
    for load in o.loads.split(","):
        rng = np.random.default_rng(int(float(load) * 10))
        rate = float(load) * most
        at = np.cumsum(rng.exponential(1 / rate, int(rate * o.seconds))).tolist()
        played = [(t, work[int(rng.integers(len(work)))]) for t in at]
        loads[load] = compare(played, *(asyncio.run(play(server, played)) for server in (refusing, off)))
        print(load, loads[load], flush=True)
    counts = [(each["refused"] * each["requests"], each["rightly_refused"] or 0) for each in loads.values()]
    refused = sum(n for n, _ in counts)
    right = sum(n * share for n, share in counts) / refused if refused else None
    return {"capacity_per_s": most, "rightly_refused": right, "loads": loads}


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=10.0)
    parser.add_argument("--loads", default="0.5,0.8,1.2,1.6,2.0,3.0", help="loads as parts of the measured capacity")
    parser.add_argument("--busy", type=int, default=0, help="programs beside a second half")
    o = parser.parse_args()
    made = requests(np.random.default_rng(2), 2000)
    plain = (each for each in made if not each.timed and each.kind in ("json", "binary"))
    work = [each for each in plain if each.model in TARGETS_MS]
    found: dict[str, Any] = {"seconds": o.seconds, "targets_ms": TARGETS_MS}
    with served(o.device, 1) as refusing, served(o.device, 1, more='admission = "off"') as off:
        found["quiet"] = calibrate(refusing, off, work, o)
        if o.busy:
            with occupied(o.busy):
                found["busy"] = {"programs": o.busy, **calibrate(refusing, off, work, o)}
    rows = []
    for machine in ("quiet", "busy"):
        for load, each in found.get(machine, {"loads": {}})["loads"].items():
            cells = (each[key] for key in ("rightly_refused", "in_time_with_admission", "in_time_without",
                                           "late_though_let_in"))  # fmt: skip
            rows.append([machine, load, f"{each['refused']:.3f}", *("–" if c is None else f"{c:.3f}" for c in cells)])
    head = ["machine", "load ÷ capacity", "refused", "refused requests late when let in", "in time with admission",
            "in time without", "late though let in"]  # fmt: skip
    late = [100 * each["late_though_let_in"] for load, each in found["quiet"]["loads"].items()
            if 0.8 <= float(load) <= 2.0 and each["late_though_let_in"] is not None]  # fmt: skip
    figures = {"trust.late-least": f"{min(late):.1f}", "trust.late-most": f"{max(late):.1f}"} if late else {}
    finish(o, "trust_calibration", found, "admission", [head, *rows], figures=figures)


if __name__ == "__main__":
    main()
