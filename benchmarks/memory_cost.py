"""The cost of a memory budget where everything fits: an engine with `memory_bytes` ÷ an engine without, in one run.

    python benchmarks/memory_cost.py [--device virtual:h200 --quick] [--rounds 4]

In each round each engine starts anew, one after the other and in alternating order, and gets the same requests for
eight CNNs: one at a time (`light`), a mix with bursts at three loads (`mixed`), and as many as it can take. The
budget is large enough that no weights leave.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from engine_load import Loaded, Setup, lognormal_gaps
from harness import arguments, finish, spread
from models import FIG11, TINY

import paellapy as pp

POLICY = "srpt"
WAYS = {"without": None, "with": 64 << 30}
LOADS = (0.6, 0.8, 0.95)  # of saturation
SETUP = Setup(instances=8, active=None)


def measured(loaded: Loaded, base: float, o: Any) -> dict[str, float]:
    """Requests a second at saturation if there is no base yet."""
    n, found = 60 if o.quick else 12_000, {}
    loaded.saturate(POLICY, None, n // 10, 64, 99)  # warm
    full = loaded.saturate(POLICY, None, n, 64, 0).steady_throughput
    base = base or full
    for m, kind in enumerate(loaded.kinds):
        count = 20 if o.quick else 200
        zeros = np.zeros(count, np.int64)
        run = loaded.offer(POLICY, zeros, zeros + m, zeros, outstanding=1)
        found[f"light, {kind.label}, µs"] = float(np.median(run.latency_ns[count // 4 :])) / 1e3
    for part in LOADS:
        rng = np.random.default_rng(0)
        n = max(40, int(base * part * o.seconds))
        summary = loaded.summary(loaded.offer(POLICY, lognormal_gaps(rng, base * part, 1.5, n), *loaded.mix(rng, n)))
        found |= {f"mixed, {part:g} of saturation, {q}": summary[f"{q}_slowdown"] for q in ("p50", "p99")}
    return {**found, "saturation, requests per second": full}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seconds=0.8, rounds=4)
    o = parser.parse_args()
    kinds, references = TINY if o.quick else FIG11, {}
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: {way: [] for way in WAYS})
    counts, base = {"checked": 0, "wrong": 0, "evicted": 0}, 0.0
    for k in range(o.rounds + 1):  # the first engines of a process are slower, and are not counted
        for way in sorted(WAYS, reverse=bool(k % 2)):
            loaded = Loaded(o.device, kinds, replace(SETUP, memory_bytes=WAYS[way]), None, references)
            found = measured(loaded, base, o)
            base = base or found["saturation, requests per second"]
            if k:
                for name, value in found.items():
                    values[name][way].append(value)
            counts["checked"], counts["wrong"] = counts["checked"] + loaded.checked, counts["wrong"] + loaded.wrong
            counts["evicted"] += loaded.engine.memory()["evicted"] if WAYS[way] else 0
            loaded.close()
    ratios = {name: spread(np.divide(each["with"], each["without"]).tolist()) for name, each in values.items()}
    rows = [["load, figure", "with a budget ÷ without, median of the rounds", "least to most"]]
    for name, each in ratios.items():
        rows.append([name, f"{each['median']:.3f}", f"{each['least']:.3f} to {each['most']:.3f}"])
    content = {"budget_bytes": WAYS["with"], "ratios": ratios, **counts}
    finish(o, "memory_cost", content, "the cost of a budget", rows, pp.Device(o.device))


if __name__ == "__main__":
    main()
