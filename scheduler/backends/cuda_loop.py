"""The core's loop on a real GPU, entirely compiled: it spins, sleeps and wakes without the interpreter.

A loop that slept in Python would need the GIL to wake up, and would have to wait for the server's own thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.jit import compiled
from paellapy.instrument.jit_call import call_with
from paellapy.scheduler.core.atomics import call_write, load_at, store_at
from paellapy.scheduler.core.clocks import read_clock
from paellapy.scheduler.core.codes import FAIL_MODE
from paellapy.scheduler.core.lanes import reading_matters
from paellapy.scheduler.core.loop import arm
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.step import run, wake_fronts
from paellapy.scheduler.core.tables import Words

_ZERO = np.uint64(0)
INTERRUPTED, BROKEN = 1, 2


@compiled
def serve(
    s: State, stop: Words, linger_ns: int, scratch: NDArray[np.int64], armed: Words, bell: int, read: int,
    reported: bool,
) -> int:  # fmt: skip
    """Runs the core until `stop[0]` is set (INTERRUPTED), or a launch fails that was not `reported` yet (BROKEN).

    After `linger_ns` without work, it sleeps by reading the eventfd `bell`; `read` is the address of the C function.
    Before that, it arms the bell and looks once more: messages posted before are seen, later ones ring the bell.
    """
    core = s.core[0]
    while True:
        if run(s, stop, linger_ns, scratch) != 0:
            return INTERRUPTED
        if core.mode == FAIL_MODE and core.error != 0 and not reported:
            return BROKEN
        arm(armed.ctypes.data, reading_matters(s))
        happened = call_with(s.call[0].step, s, read_clock(s, scratch))
        wake_fronts(s, scratch)
        # A live request may expire, so the loop sleeps only if there is none.
        if happened == 0 and core.live == 0 and core.flight == 0 and load_at(stop.ctypes.data) == _ZERO:
            # read() has the same signature
            call_write(np.uint64(read), np.int32(bell), scratch[3:].ctypes.data, np.uint64(8))
        store_at(armed.ctypes.data, _ZERO)
