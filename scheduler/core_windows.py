"""SM windows in the core: where many jobs share the GPU, each keeps to some of its SMs.

Kernels of small batches leave most of the GPU idle, and still slow each other where they meet on an SM. Confined to
windows that overlap, they meet fewer others: on the H200 the same mix of CNNs got 13 % more done, and ran steadier
(benchmarks/sm_windows.py). A lane has two windows that lie apart, and every launch goes to the emptier one: with only
one of each, jobs would wait for each other in some places while there is room in others. While few share the GPU each
has all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instrument.device.heaps import inlined
from scheduler.state import CONFINED_LAUNCHES, FLIGHT_N, NONE, WHOLE_ALWAYS, State

ROOMY = 4  # so many jobs in flight have all SMs

_ZERO = np.uint64(0)


@inlined
def leave_window(s: State, lane: int) -> None:
    a = s.lane[lane]
    if a.window >= 0:
        s.window_jobs[a.window] -= 1
        a.window = NONE


@inlined
def handle_of(s: State, lane: int, what: Any) -> Any:
    """Which handle of a LAUNCH to launch next, for a lane that is in flight; where the hardware decides, on all SMs."""
    leave_window(s, lane)
    if what.home == _ZERO or s.g[WHOLE_ALWAYS] or s.g[FLIGHT_N] <= ROOMY:
        return what.handle
    a = s.lane[lane]
    away = s.window_jobs[a.away] < s.window_jobs[a.home]
    a.window = a.away if away else a.home
    s.window_jobs[a.window] += 1
    s.g[CONFINED_LAUNCHES] += 1
    return what.away if away else what.home
