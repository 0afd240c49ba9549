"""CuPy inside a capture: its calls go to our stream, and its memory comes from the lane's arena."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice


@contextlib.contextmanager
def cupy_in_arena(device: CudaDevice, stream: int | None, take: Any) -> Iterator[None]:
    """Sends CuPy's calls to our stream and takes its memory from the arena, if CuPy is in use."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        yield
        return

    def allocate(nbytes: int) -> Any:
        array = take((nbytes,), np.dtype(np.uint8))
        memory = cupy.cuda.UnownedMemory(array.ptr, nbytes, array, device.index)
        return cupy.cuda.MemoryPointer(memory, 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device.index))
        stack.enter_context(cupy.cuda.using_allocator(allocate))
        if stream is not None:
            stack.enter_context(_cupy_stream(cupy, stream, device.index))
        yield


class _Foreign:
    """One of our streams under CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy_stream(cupy: Any, handle: int, device: int) -> Any:
    """Our stream as a CuPy object: CuPy 14 deprecates the class that older versions need."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(handle))
    return cupy.cuda.ExternalStream(handle, device)
