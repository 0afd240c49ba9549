"""How many CPUs there are for this process: whether a thread may spin is decided by that."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus(quota: Path = _QUOTA) -> float:
    """So many at once, also by what its container is allowed."""
    found = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return min(found, int(allowed) / int(period))
    except (OSError, ValueError):  # there is none, or it says "max"
        return found
