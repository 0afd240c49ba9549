"""The core's clock: clock_gettime, called by its address, which is 0 where a loop has its own time (simulation)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import call_clock
from paellapy.scheduler.core.state import State

CLOCK_MONOTONIC = 1


@part
def monotonic_ns(clock: int, scratch: NDArray[np.int64]) -> int:
    """CLOCK_MONOTONIC in ns, by the address of clock_gettime."""
    call_clock(clock, np.int32(CLOCK_MONOTONIC), scratch.ctypes.data)
    return int(scratch[0] * 1_000_000_000 + scratch[1])


@part
def read_clock(s: State, scratch: NDArray[np.int64]) -> int:
    return monotonic_ns(s.call[0].clock, scratch)
