"""How long a policy switch takes while a virtual engine is busy, and how long requests take meanwhile.

    python benchmarks/policy_switch.py [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np
from common import save

import paellapy as pp
from paellapy import demo

CLIENTS = 8


def ask(engine: pp.Engine, name: str, stop: threading.Event, took: list[float]) -> None:
    (key, spec), = engine.models[name].inputs.items()
    x = np.zeros(spec.shape, spec.dtype)
    while not stop.is_set():
        began = time.perf_counter()
        engine.infer_sync(name, {key: x})
        took.append(time.perf_counter() - began)


def measure(seconds: float) -> dict[str, Any]:
    stop, took = threading.Event(), list[float]()
    found = {}
    with pp.Engine("virtual:h200") as engine:
        for name in ("mlp", "cnn"):
            engine.load(demo.load(name, batch=(1, 4)))
        threads = [
            threading.Thread(target=ask, args=(engine, ("mlp", "cnn")[k % 2], stop, took)) for k in range(CLIENTS)
        ]
        for each in threads:
            each.start()
        while len(took) < 20 * CLIENTS:  # the engine's first requests compile what the first of them needs
            time.sleep(0.05)
        first = max(took)
        took.clear()
        for name in pp.policy_names():
            time.sleep(seconds)
            began = time.perf_counter()
            engine.set_policy(name)
            found[name] = time.perf_counter() - began
        stop.set()
        for each in threads:
            each.join()
    times = sorted(found.values())
    return {
        "switch_s": found,
        "median_s": statistics.median(times),
        "longest_s": times[-1],
        "requests": len(took),
        "longest_request_s": max(took),
        "first_request_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds between two switches")
    found = measure(parser.parse_args().seconds)
    for name, value in found.items():
        print(name, value)
    save("policy_switch", found)


if __name__ == "__main__":
    main()
