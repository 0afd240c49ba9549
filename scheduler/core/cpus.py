"""The number of CPUs available to this process, which decides whether a thread may spin."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus(quota: Path = _QUOTA) -> float:
    """The number of CPUs that this process may use at once, including the quota of its container."""
    found = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return min(found, int(allowed) / int(period))
    except (OSError, ValueError):  # there is no quota, or it is "max"
        return found
