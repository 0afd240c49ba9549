"""Policies that order jobs (mlfq, lax, pack), as a part of systems_gpu.py.

The first three models are small, the last is long. Under `mlfq` and `lax` one job is active at a time, as in
systems.py: the figures show the order of the jobs, not the gain from jobs that share the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from engine_load import poisson
from paper_models import TINY, VARIANTS, Kind
from paper_runs import Loaded
from systems_runs import Group, Options, beside, loops

from paellapy.scheduler.core import codes

SHORT, LONG = 0, 3
SMALL = (0, 1, 2)
SHORT_PER_S = 100.0
# Of the deadlines: the part of the GPU's time that each model's requests take alone, and deadline ÷ time alone.
PARTS = {SHORT: 0.15, LONG: 0.75}
DEADLINES = {SHORT: 5.0, LONG: 8.0}
TINY_DUE_NS = 10**10


def deadlines(loaded: Loaded, policy: str, seed: int, seconds: float, tiny: bool) -> dict[str, Any]:
    """Requests for a short and a long model with deadlines, nine tenths of the load that one job at a time allows."""
    rng = np.random.default_rng(seed)
    due_ns = [int(DEADLINES.get(m, 0.0) * loaded.alone_ns[m]) for m in range(len(loaded.kinds))]
    if tiny:  # a virtual GPU computes with the CPU, which takes far longer than the modelled time
        due_ns = [TINY_DUE_NS] * len(loaded.kinds)
    times = []
    for m, part in PARTS.items():
        rate = 20.0 if tiny else part * 1e9 / float(loaded.alone_ns[m])
        times.append(poisson(rng, rate, max(8, int(rate * seconds))))
    at = np.concatenate(times)
    model = np.repeat(np.array(list(PARTS), np.int64), [len(each) for each in times])
    order = np.argsort(at, kind="stable")
    at, model = at[order], model[order]
    which = rng.integers(0, VARIANTS, len(at))
    run = loaded.offer(policy, at, model, which, active=1, deadline_ns=due_ns, may_fail=True)
    met = (run.status == codes.OK) & (run.latency_ns <= np.array(due_ns)[run.model])
    return {
        "n": len(met),
        "met": float(met.mean()),
        "met_of": {loaded.kinds[m].label: float(met[run.model == m].mean()) for m in PARTS},
        "load": float(loaded.alone_ns[run.model].sum() / at.max()),
    }


def order(loaded: Loaded, o: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A short model beside a long one, deadlines near capacity, and small models that fit together."""
    rate = 20.0 if o.tiny else SHORT_PER_S
    for seed in o.seeds:
        given = (seed, rate, 0.8 * o.seconds, [SHORT])
        yield f"mlfq|alone|{seed}", lambda g=given: beside(loaded, "fifo", *g, [], active=1)
        for policy in ("mlfq", "fifo", "srpt"):
            yield f"mlfq|{policy}|{seed}", lambda p=policy, g=given: beside(loaded, p, *g, [LONG, LONG], active=1)
        for policy in ("lax", "edf", "fifo"):
            yield f"lax|{policy}|{seed}", lambda p=policy, s=seed: deadlines(loaded, p, s, o.seconds, o.tiny)
        for policy in ("pack", "serial"):
            yield f"pack|{policy}|{seed}", lambda p=policy: loops(loaded, p, [*SMALL, *SMALL], 0.4 * o.seconds)


def order_group(tiny: bool) -> Group:
    if tiny:
        kinds = (TINY[0], Kind("tiny2"), Kind("tiny3"), Kind("tiny4", items=4))
    else:
        kinds = (*map(Kind, ("resnet18", "mobilenet_v2", "squeezenet1_1")), Kind("resnet50", items=64))
    return Group("order", kinds, (0,) * len(kinds), order)
