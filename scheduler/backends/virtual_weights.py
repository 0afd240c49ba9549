"""Weights that come and go on the virtual GPU: real bytes, and copies that take the SM model's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualArray
from paellapy.scheduler.backends.virtual_memory import aligned_zeros
from paellapy.scheduler.models.recording import Recorded
from paellapy.scheduler.models.weight_range import Bytes, Layout, WeightRange

_POISON = 0xFF


class VirtualWeights(WeightRange):
    """`copies` queues copies on the GPU. Evicted weights are overwritten, so running too early gives wrong results."""

    def __init__(self, layout: Layout, chunk_bytes: int, copies: Any) -> None:
        super().__init__(layout)
        self._memory = aligned_zeros(max(1, layout.nbytes))
        self.address = int(self._memory.ctypes.data)
        self.chunk_bytes, self.held_bytes = chunk_bytes, layout.nbytes
        self.words = np.zeros(max(1, self.chunks), np.uint64)
        self._copies = copies

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._memory[offset : offset + nbytes].view(dtype).reshape(shape).view(VirtualArray)

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


def needed_end(item: Recorded, weights: WeightRange) -> int:
    """The end of the weights that an item needs; all weights where PyTorch computes a whole program at once."""
    if item.compute is not None:
        return weights.layout.nbytes
    return max((weights.end_at(int(a.ctypes.data)) for a in _arrays((item.values, item.source))), default=0)


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _arrays(each)
