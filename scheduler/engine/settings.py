"""What an engine is made with: whether its settings make sense, and the backend of its device."""

from __future__ import annotations

import math
import os

from paellapy.instrument.device import CudaDevice, Device, VirtualDevice
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError


def check_settings(
    quantum_us: float, max_active: int | None, memory_bytes: int | None, host_bytes: int | None, sm_windows: int
) -> None:
    if not 1 <= quantum_us < math.inf:
        raise ModelError(f"quantum_us={quantum_us}: a quantum is at least one microsecond")
    if max_active is not None and max_active < 1:
        raise ModelError(f"max_active={max_active}: at least one batch must be able to run")
    if memory_bytes is not None and memory_bytes < 1:
        raise ModelError(f"memory_bytes={memory_bytes}: give the bytes that models may use, or None for most of it")
    if host_bytes is not None and (memory_bytes is None or host_bytes < 0):
        raise ModelError(f"host_bytes={host_bytes}: give 0 or more, and memory_bytes for the GPU with it")
    if sm_windows != 0 and not codes.LEAST_WINDOWS <= sm_windows <= codes.WINDOWS:
        raise ModelError(f"sm_windows={sm_windows}: 0, for none, or {codes.LEAST_WINDOWS} to {codes.WINDOWS}")


def half_of_the_host() -> int:
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def open_backend(device: Device) -> Backend:
    if isinstance(device, VirtualDevice):
        from paellapy.scheduler.backends.virtual import VirtualBackend

        return VirtualBackend(device)
    assert isinstance(device, CudaDevice)
    from paellapy.scheduler.backends.cuda import CudaBackend

    return CudaBackend(device)
