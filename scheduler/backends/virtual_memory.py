"""Memory of the virtual GPU: NumPy arrays, aligned like a GPU's, for instances and for weights that come and go."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualArray
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.models.memory import ALIGN, Memory
from paellapy.scheduler.models.weights import Bytes, Layout, WeightRange

_POISON = 0xFF


class VirtualMemory(Memory):
    """An instance's memory on the GPU, and its slots on the host. `block`: the slots, if other processes map them."""

    def __init__(
        self, device_bytes: int, host_bytes: int, shared: bool = False, arena: VirtualMemory | None = None
    ) -> None:
        """`arena`: the arena whose device memory it uses."""
        self.on_gpu: Any = aligned_zeros(device_bytes) if arena is None else arena.on_gpu[:device_bytes]
        self.block = SharedBlock(host_bytes) if shared else None
        self.host = aligned_zeros(host_bytes) if self.block is None else self.block.array[:host_bytes]

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return _part(self.on_gpu, offset, shape, dtype)

    def tensor(self, offset: int, host_offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """The slots themselves: a copy to or from the GPU takes its simulated time, and no time of the host."""
        return _part(self.host, host_offset, shape, dtype)

    def moved(self, value: Any, to: VirtualMemory) -> Any:
        """A launch argument with every array of this memory at the same offset of another; arrays elsewhere stay.

        Raises `TypeError` for objects that may contain arrays in ways that are not known here.
        """
        if isinstance(value, np.ndarray):
            at = value.__array_interface__["data"][0]
            for mine, other in ((self.on_gpu, to.on_gpu), (self.host, to.host)):
                offset = at - mine.__array_interface__["data"][0]
                if 0 <= offset < len(mine):
                    return np.ndarray(value.shape, value.dtype, other, offset, value.strides)
            return value
        if isinstance(value, tuple):
            items = [self.moved(each, to) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if value is None or isinstance(value, int | float | complex | str | bytes | np.generic):
            return value
        raise TypeError(f"a {type(value).__name__} may contain arrays that cannot be moved to another instance")

    def free(self) -> None:
        self.on_gpu = self.host = np.empty(0, np.uint8)
        self.block = None


class VirtualWeights(WeightRange):
    """Real bytes, and copies that take the SM model's time; `copies` queues them on the GPU.

    Evicted weights are overwritten, so running too early gives wrong results.
    """

    def __init__(self, layout: Layout, chunk_bytes: int, copies: Any) -> None:
        super().__init__(layout)
        self._memory = aligned_zeros(max(1, layout.nbytes))
        self.address = int(self._memory.ctypes.data)
        self.chunk_bytes, self.held_bytes = chunk_bytes, layout.nbytes
        self.words = np.zeros(max(1, self.chunks), np.uint64)
        self._copies = copies

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return _part(self._memory, offset, shape, dtype)

    def bring(self, source: Bytes) -> None:
        for k in range(self.chunks):
            first, end = k * self.chunk_bytes, min((k + 1) * self.chunk_bytes, self.layout.nbytes)
            self._memory[first:end] = source[first:end]
            self._copies.queue(end - first, int(self.words[k:].ctypes.data))
        self.there = True

    def evict(self) -> None:
        self.fill(_POISON)
        self.there = False

    def wait(self) -> None:
        end = time.monotonic() + 60.0
        while self.there and not self.words.all() and time.monotonic() < end:
            time.sleep(0.001)

    def write(self, source: Bytes, first: int, end: int) -> None:
        self._memory[first:end] = source[first:end]

    def fill(self, byte: int) -> None:
        self._memory[:] = byte

    def holds(self, source: Bytes) -> bool:
        return bool(np.array_equal(self._memory[: self.layout.nbytes], source[: self.layout.nbytes]))

    def free(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self.there = False


def _part(memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).reshape(shape).view(VirtualArray)


def aligned_zeros(nbytes: int) -> Any:
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]
