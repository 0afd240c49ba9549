"""A long run at a steady load: memory, descriptors and latency, sampled, and how much they drift.

    python benchmarks/trust/soak.py [--seconds 3600] [--clients 4] [--rest-ms 0] [--every 10]
                                      [--device virtual:h200] [--out DIR]

The result is written at every sample. The first fifth is the warm-up; drift compares the means of the second and the
last fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Counts, run_clients
from served import Served, requests, served
from store import save


def drift(samples: list[dict[str, Any]], key: str) -> float | None:
    values = [each[key] for each in samples if each[key] is not None]
    fifth = len(values) // 5
    if not fifth:
        return None
    before, after = np.mean(values[fifth : 2 * fifth]), np.mean(values[-fifth:])
    return round(float(after / before - 1), 4)


async def run(server: Served, args: argparse.Namespace, result: dict[str, Any]) -> None:
    work = requests(np.random.default_rng(1), 2000, f"127.0.0.1:{server.port}")
    counts, end = Counts(), asyncio.Event()
    load = asyncio.create_task(run_clients(server.port, work, counts, args.clients, end, 1 << 60, args.rest_ms * 1e-3))
    began = time.monotonic()
    while (now := time.monotonic() - began) < args.seconds:
        await asyncio.sleep(min(args.every, args.seconds - now))
        ordered = sorted(counts.latencies_s)
        counts.latencies_s.clear()
        result["samples"].append(
            {
                "s": round(time.monotonic() - began, 1),
                "requests": sum(counts.outcomes.values()),
                "memory_bytes": server.memory_bytes(),
                "descriptors": server.descriptors(),
                "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 3) if ordered else None,
                "p99_ms": round(ordered[int(0.99 * len(ordered))] * 1e3, 3) if ordered else None,
            }
        )
        result["outcomes"] = dict(counts.outcomes)
        result["drift"] = {key: drift(result["samples"], key) for key in ("memory_bytes", "descriptors", "p50_ms")}
        save("trust_soak", result, folder=args.out)
    end.set()
    await load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rest-ms", type=float, default=0.0, help="pause of a client between two requests")
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "seconds": args.seconds, "clients": args.clients, "rest_ms": args.rest_ms, "device": args.device, "samples": [],
    }  # fmt: skip
    with served(args.device) as server:
        asyncio.run(run(server, args, result))
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))
    print(save("trust_soak", result, folder=args.out))


if __name__ == "__main__":
    main()
