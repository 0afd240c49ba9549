"""Thousands of open connections: their cost, and whether requests among them are answered.

    python benchmarks/trust/connections.py [--connections 5000] [--device virtual:h200] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Counts, exchange, judge, run_clients
from served import Served, requests, served
from store import save


async def run(server: Served, count: int) -> dict[str, Any]:
    work = requests(np.random.default_rng(0), 400, f"127.0.0.1:{server.port}")
    before = server.memory_bytes()
    began = time.perf_counter()
    opened = []
    for start in range(0, count, 100):
        opened += await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", server.port) for _ in range(min(100, count - start)))
        )
    opening_s = time.perf_counter() - began
    counts, end = Counts(), asyncio.Event()
    await run_clients(server.port, work, counts, 8, end, 1000)
    every = Counts()
    plain = [each for each in work if each.kind in ("json", "binary") and b"timeout" not in each.request]
    for k in range(0, count, 64):  # each of them asks once
        asking = [(plain[i % len(plain)], c) for i, c in enumerate(opened[k : k + 64])]
        found = await asyncio.gather(*(exchange(*c, each.request) for each, c in asking))
        for (each, _), answer in zip(asking, found, strict=True):
            every.outcomes[judge(each, *answer, every)[0]] += 1
    memory, descriptors = server.memory_bytes(), server.descriptors()
    for _, writer in opened:
        writer.close()
    await asyncio.sleep(1.0)
    return {
        "connections": count,
        "opening_s": round(opening_s, 2),
        "among_them": counts.summary(),
        "each_of_them": dict(every.outcomes),
        "bytes_per_connection": (memory - before) // count,
        "descriptors": {"open": descriptors, "closed": server.descriptors()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < args.connections + 500:
        raise SystemExit(f"this machine allows {hard} open files: ask for fewer connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, args.connections + 500), hard))
    with served(args.device, more="header_timeout_s = 600\nkeepalive_s = 600") as server:
        result = asyncio.run(run(server, args.connections))
    print(json.dumps(result, indent=1))
    print(save("trust_connections", result, folder=args.out))


if __name__ == "__main__":
    main()
