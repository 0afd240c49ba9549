"""Checks the settings of an engine, and creates the backend of its device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from paellapy.instrument.device import CudaDevice, Device, VirtualDevice
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.params import is_finite_number
from paellapy.scheduler.core.priorities import shortened


def check_settings(
    quantum_us: float, max_active: int | None, memory_bytes: int | None, host_bytes: int | None, sm_windows: int
) -> None:
    check_quantum(quantum_us)
    if max_active is not None and (not _is_number(max_active) or max_active < 1):
        raise ModelError(
            f"max_active={shortened(max_active)}: the number of batches that share the GPU must be at least 1, or None"
        )
    for name, given in (("memory_bytes", memory_bytes), ("host_bytes", host_bytes)):
        if given is not None and not _is_number(given):
            raise ModelError(f"{name}={shortened(given)}: the number of bytes must be an integer, such as 24 << 30")
    if memory_bytes is not None and memory_bytes < 1:
        raise ModelError(
            f"memory_bytes={memory_bytes}: the number of bytes must be at least 1, or None for most of the GPU's memory"
        )
    if host_bytes is not None and (memory_bytes is None or host_bytes < 0):
        raise ModelError(
            f"host_bytes={host_bytes}: the number of bytes must be at least 0, and memory_bytes must be given with it"
        )
    if not _is_number(sm_windows) or (sm_windows != 0 and not codes.LEAST_WINDOWS <= sm_windows <= codes.WINDOWS):
        raise ModelError(
            f"sm_windows={shortened(sm_windows)}: the number must be 0, for none, or {codes.LEAST_WINDOWS} to "
            f"{codes.WINDOWS}"
        )


def check_quantum(quantum_us: float, whose: str = "") -> None:
    if not is_finite_number(quantum_us) or quantum_us < 1:
        raise ModelError(
            f"{whose}quantum_us={shortened(quantum_us)}: the duration of a segment must be a number of at least 1 µs"
        )


def _is_number(given: Any) -> bool:
    """Whether it is a whole number that the core's tables can hold; 24e9 is one too."""
    whole = given.is_integer() if isinstance(given, float) else isinstance(given, int | np.integer)
    return bool(whole and not isinstance(given, bool) and abs(given) < codes.NEVER)


def half_of_the_host() -> int:
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def open_backend(device: Device) -> Backend:
    if isinstance(device, VirtualDevice):
        from paellapy.scheduler.backends.virtual import VirtualBackend

        return VirtualBackend(device)
    assert isinstance(device, CudaDevice)
    from paellapy.scheduler.backends.cuda import CudaBackend

    return CudaBackend(device)
