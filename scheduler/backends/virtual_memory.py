"""Memory of the virtual GPU: NumPy arrays, aligned like a GPU's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualArray, VirtualDevice
from paellapy.scheduler.core.rings import SharedBlock
from paellapy.scheduler.models.capture import GuardedArray, Recorded, Recording, call_model, capturing
from paellapy.scheduler.models.memory import ALIGN, Instance, Memory
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import Bytes, Layout, WeightRange


class VirtualMemory(Memory):
    """NumPy memory, aligned like a GPU's."""

    def __init__(
        self, device_bytes: int, host_bytes: int, shared: bool = False, arena: VirtualMemory | None = None
    ) -> None:
        """`arena`: the arena whose device memory it uses."""
        self._device: Any = aligned_zeros(device_bytes) if arena is None else arena._device[:device_bytes]
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
        raise TypeError(f"a {type(value).__name__} may contain arrays that cannot be moved to another instance")

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


# Weights that come and go on the virtual GPU: real bytes, and copies that take the SM model's time.


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


# Capture on the virtual GPU: launches are recorded with their arrays, and the record of one instance serves the others.


def record(device: VirtualDevice, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks) -> Program:
    """Runs the model's function once and records its launches, between the copies of inputs and outputs."""
    model = instance.model
    recording = Recording(instance, cuts)
    inputs, outputs = instance.device_inputs(batch), instance.device_outputs(batch)
    for name, array in inputs.items():
        recording.copy("h2d", array.view(np.ndarray), instance.inputs[name][:batch])
    with capturing(device, recording):
        call_model(model, _guarded(weights), _guarded(inputs), _guarded(outputs), batch, "while it was captured")
    for name, array in outputs.items():
        recording.copy("d2h", instance.outputs[name][:batch], array.view(np.ndarray))
    nodes = [item.node for item in recording.items]
    return Program(model, instance.index, batch, nodes, True, recording.items, marks=marks)


def moved(program: Program, of: Instance, instance: Instance, marks: Marks) -> Program | None:
    """The recorded launches with the other instance's arrays, if all can be found. Marks do not change the recording.
    """
    here, there = of.memory, instance.memory
    assert isinstance(here, VirtualMemory)
    assert isinstance(there, VirtualMemory)
    if any(item.compute is not None for item in program.body):  # the arrays that it computes on cannot be seen
        return None

    def move(value: Any) -> Any:
        return here.moved(value, there)

    try:
        body = program.body if here is there else [item.moved(move) for item in program.body]
    except TypeError:
        return None
    return program.for_instance(instance.index, body, marks)


def _guarded(arrays: Arrays) -> Arrays:
    return {name: a.view(GuardedArray) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
