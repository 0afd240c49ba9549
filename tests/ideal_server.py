"""One server that is preempted at any time and loses nothing by it: what theory compares schedulers with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def ideal_ends(
    arrival_ns: NDArray[np.int64], work_ns: NDArray[np.float64], rank: Callable[[int, float], float]
) -> NDArray[np.float64]:
    """When jobs, in order of arrival, end on an ideal server; `rank(job, work left)`, the least goes first."""
    ends, left, waiting, now, coming = np.zeros(len(work_ns)), work_ns.astype(float), [], 0.0, 0
    while coming < len(work_ns) or waiting:
        if not waiting:
            now = max(now, float(arrival_ns[coming]))
        while coming < len(work_ns) and arrival_ns[coming] <= now:
            waiting.append(coming)
            coming += 1
        job = min(waiting, key=lambda k: rank(k, left[k]))
        until = arrival_ns[coming] if coming < len(work_ns) else np.inf
        took = min(left[job], until - now)
        now, left[job] = now + took, left[job] - took
        if left[job] <= 1e-3:
            waiting.remove(job)
            ends[job] = now
    return ends
