"""The number of the GPU's hardware queues that this process uses.

Launches share 8 of them by default, and work in a queue waits for a long graph in front of it. CUDA reads the number
when a process first uses a GPU, which other libraries may do before an engine does. So the number is set when paellapy
is imported, unless the user has already chosen one.
"""

from __future__ import annotations

import ctypes
import os
import warnings

VARIABLE, ALL = "CUDA_DEVICE_MAX_CONNECTIONS", 32

_late = False  # whether the GPU was in use before the number was set


def ask_for_all() -> None:
    """Lets this process use every queue, unless a number was already chosen."""
    global _late
    if VARIABLE not in os.environ:
        _late = gpu_in_use()
        os.environ[VARIABLE] = str(ALL)


def warn_if_few() -> None:
    """Warns if it was too late to set the number: requests would be slow in bursts for no visible reason."""
    if _late:
        warnings.warn(
            "this process used the GPU before paellapy was imported: its launches share 8 of the GPU's hardware queues "
            f"and wait for each other there in bursts. Import paellapy first, or set {VARIABLE}={ALL} before anything "
            "uses the GPU",
            stacklevel=5,  # the caller that creates the engine
        )


def gpu_in_use() -> bool:
    """Whether any code in this process has a context on a GPU. Loads and starts nothing."""
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
