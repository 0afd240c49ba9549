"""A router against the server behind it, in one run: latency at one client, throughput per core, and memory.

    python benchmarks/router.py [--requests 200000] [--seconds 4] [--rounds 3]

The server is one process with a small model on the virtual GPU. Rounds alternate between both, so that other load of
the machine affects both alike. Throughput is per second of the measured process's own CPU time, since on a machine with
few cores the clients would take time from the server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness import ServerProcess, announce, arguments, medians, save, show
from serving_floor import cpu_s

import paellapy as pp
from paellapy import demo
from paellapy.cluster.listener import Routers
from paellapy.cluster.router import RouterOptions
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def ask(url: str, clients: int, seconds: float) -> dict[str, Any]:
    load = Load(("mlp",), concurrency=clients, duration_s=seconds, warmup_s=seconds / 8)
    found: dict[str, Any] = run_bench(url, load)["all"]
    assert not found["errors"], found["errors"]
    return found


def compare(sides: dict[str, tuple[int, str]], o: Any) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(o.rounds):
        rounds.append({"p50_ms": {}, "per_cpu_s": {}})
        for name, (pid, url) in sides.items():
            rounds[-1]["p50_ms"][name] = ask(url, 1, o.seconds)["latency_ms"]["p50"]
            before = sum(cpu_s(pid).values())
            answered = ask(url, 32, o.seconds)["answered_per_s"] * o.seconds * 9 / 8  # the warm-up's too
            rounds[-1]["per_cpu_s"][name] = answered / (sum(cpu_s(pid).values()) - before)
    found = medians(rounds)
    ratios = {key: found[key]["router"] / found[key]["server"] for key in found}
    return {**found, "p50_ratio": ratios["p50_ms"], "throughput_ratio": ratios["per_cpu_s"]}


def main() -> None:
    parser = arguments(__doc__, seconds=4.0, rounds=3)
    parser.add_argument("--requests", type=int, default=200_000, help="over which the router's memory is followed")
    parser.add_argument("--serve", action="store_true", help="be the server")
    o = parser.parse_args()
    if o.serve:
        pp.serve([demo.load("mlp", batch=(1, 8))], device="virtual:h200", server={"port": 0, "log_level": "warning"},
                 announce=announce)  # fmt: skip
        return
    with (
        ServerProcess(__file__, "--serve") as server,
        Routers({"engine": server.url}, RouterOptions(port=0)) as routers,
    ):
        ask(routers.url, 4, 2.0)
        (pid,) = routers.kept.health.pids
        results = compare({"server": (server.process.pid, server.url), "router": (pid, routers.url)}, o)
        grew, seen = [memory_mb(pid)], 0.0
        while seen < o.requests:
            seen += ask(routers.url, 32, 5.0)["answered_per_s"] * 5.0
            grew.append(memory_mb(pid))
        results["memory"] = {"requests": round(seen), "mb": grew}
    rows = [["p50, router ÷ server", results["p50_ratio"]], ["per CPU-second ÷", results["throughput_ratio"]],
            ["memory, MB: first, last", f"{grew[0]:.1f}, {grew[-1]:.1f}"]]  # fmt: skip
    show("a router", ["figure", "value"], rows)
    figures = {"router.p50": f"{results['p50_ratio']:.2f}", "router.throughput": f"{results['throughput_ratio']:.1f}"}
    print(save("router", results, folder=o.out, figures=figures))


if __name__ == "__main__":
    main()
