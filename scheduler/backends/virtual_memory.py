"""Memory of the virtual GPU: NumPy arrays, aligned like a GPU's."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualArray
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.models.lane_memory import ALIGN, Memory


class VirtualMemory(Memory):
    """NumPy memory, aligned like a GPU's."""

    def __init__(
        self, device_bytes: int, host_bytes: int, shared: bool = False, berth: VirtualMemory | None = None
    ) -> None:
        """`berth`: the berth whose device memory it uses."""
        self._device: Any = aligned_zeros(device_bytes) if berth is None else berth._device[:device_bytes]
        self.block = SharedBlock(host_bytes) if shared else None
        self.host = aligned_zeros(host_bytes) if self.block is None else self.block.array[:host_bytes]

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return _part(self._device, offset, shape, dtype)

    def tensor(self, offset: int, host_offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """The slots themselves: a copy to or from the GPU takes its simulated time, and no time of the host."""
        return _part(self.host, host_offset, shape, dtype)

    def moved(self, value: Any, to: VirtualMemory) -> Any:
        """A launch argument with every array of this memory at the same offset of another; arrays elsewhere stay.

        Raises `TypeError` for objects that may contain arrays in ways that are not known here.
        """
        if isinstance(value, np.ndarray):
            at = value.__array_interface__["data"][0]
            for mine, other in ((self._device, to._device), (self.host, to.host)):
                offset = at - mine.__array_interface__["data"][0]
                if 0 <= offset < len(mine):
                    return np.ndarray(value.shape, value.dtype, other, offset, value.strides)
            return value
        if isinstance(value, tuple):
            items = [self.moved(each, to) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if value is None or isinstance(value, int | float | complex | str | bytes | np.generic):
            return value
        raise TypeError(f"a {type(value).__name__} may contain arrays that cannot be moved to another lane")

    def free(self) -> None:
        self._device = self.host = np.empty(0, np.uint8)
        self.block = None


def _part(memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).reshape(shape).view(VirtualArray)


def aligned_zeros(nbytes: int) -> Any:
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]
