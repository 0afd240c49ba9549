"""How many of the GPU's hardware queues this process uses.

Launches share 8 of them unless CUDA is told otherwise, and in one queue what comes behind a long graph waits for it.
CUDA reads the number when a process first uses a GPU, which other libraries may do before an engine does: so it is set
when paellapy is imported. Whoever has chosen a number keeps it.
"""

from __future__ import annotations

import ctypes
import os
import warnings

VARIABLE, ALL = "CUDA_DEVICE_MAX_CONNECTIONS", 32

_late = False  # the GPU was in use before the number was set


def ask_for_all() -> None:
    """Has this process use every queue, unless a number was chosen."""
    global _late
    if VARIABLE not in os.environ:
        _late = gpu_in_use()
        os.environ[VARIABLE] = str(ALL)


def warn_if_few() -> None:
    """Says so where it was too late: requests would be slow in bursts, and nobody would know why."""
    if _late:
        warnings.warn(
            "this process used the GPU before paellapy was imported: its launches share 8 of the GPU's hardware queues "
            f"and wait for each other there in bursts. Import paellapy first, or set {VARIABLE}={ALL} before anything "
            "uses the GPU",
            stacklevel=5,  # whoever makes the engine
        )


def gpu_in_use() -> bool:
    """Whether something in this process has a context on a GPU. Loads and starts nothing."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count, device, flags, active = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):  # not initialised
        return False
    for i in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), i):
            continue
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if not state and active.value:
            return True
    return False
