"""SM windows in the core: where many jobs share the GPU, each launch is confined to some of its SMs.

Kernels of small batches leave most of the GPU idle and still slow each other, less so on different SMs. Confined to
windows, they meet fewer others. Windows overlap, a lane has several to choose from, and every launch goes to the
emptiest one: with fixed windows, jobs would wait for each other in some while there is room in others. While few jobs
share the GPU, each has all of it.

A window has its own streams, and a launch starts sooner on one of these. A job keeps its stream while any of its
launches is in flight, so it changes windows then only if another one is much emptier.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.codes import CHOICES, NONE, OF_WINDOWS, QUEUES
from paellapy.scheduler.core.state import State

_ZERO = np.uint64(0)


@part
def fill_window(s: State, window: int, change: int) -> None:
    """Adds or removes a job in a window, and so in the windows that share SMs with it."""
    for other in range(s.core[0].windows):
        s.window_load[other] += change * s.overlap[window, other]


@part
def leave_window(s: State, lane: int) -> None:
    a = s.lane[lane]
    if a.window >= 0:
        fill_window(s, a.window, -1)
        a.window = NONE


@part
def can_be_confined(s: State, lane: int) -> bool:
    return bool(s.core[0].windows > 0 and s.confined[lane, s.lane[lane].size, s.confined.shape[2] - 1, 0] != _ZERO)


@part
def choose_handle(s: State, lane: int, segment: int, wide: Any, sms: float) -> Any:
    """The handle of a lane's next launch: `wide`, or the same launch in the emptiest of the lane's windows.

    Where the hardware decides, every launch has all SMs. `sms`: the part of the SMs that the policy wants; 0: it does
    not say.
    """
    core = s.core[0]
    leave_window(s, lane)
    a = s.lane[lane]
    at = s.confined.shape[2] - 1 if a.whole else segment
    roomy = core.flight <= s.tuning[0].roomy_jobs if sms == 0.0 else sms >= 1.0
    if core.whole_always or roomy or s.lane_window[lane, 0] < 0:
        return wide
    best = 0
    least = np.inf
    for k in range(CHOICES):
        window = s.lane_window[lane, k]
        if window >= 0:
            load = float(s.window_load[window])
            if a.stream_at >= OF_WINDOWS and (a.stream_at - OF_WINDOWS) // QUEUES == window:
                load -= s.tuning[0].staying_jobs * s.overlap[window, window]
            if load < least:
                best, least = k, load
    handle = s.confined[lane, a.size, at, best]
    if handle == _ZERO:
        return wide
    a.window = s.lane_window[lane, best]
    fill_window(s, a.window, 1)
    core.confined_launches += 1
    return handle
