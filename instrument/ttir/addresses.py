"""Pointers as numbers (`tt.int_to_ptr`, `tt.ptr_to_int`): tables of addresses, as in grouped products and LoRA.

Addresses are those of this process. Memory is read through an address only if it lies in a known array: an argument of
the launch, an array from `pp.array`, `pp.empty` or `pp.zeros`, or a live PyTorch tensor.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from paellapy.instrument.live_instances import live_instances
from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import Active, Buffers
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.types import ELEMENTS, Array, Element
from paellapy.instrument.ttir.values import Ptr

Ints = tuple[int, ...]
_BYTES = ELEMENTS["i8"]
_known: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
_seen: dict[int, weakref.ref[Any]] = {}  # tensors, by the addresses of their memory


def know(array: Array) -> None:
    """Lets kernels access an array through its address, as long as it is alive."""
    _known[array.__array_interface__["data"][0]] = array


def _bytes(lowest: Array, size: int) -> Array:
    first = np.lib.stride_tricks.as_strided(lowest, (1,), (lowest.itemsize,)).view(np.int8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,))


def _memory(thing: Any) -> Array | None:
    """The memory of a PyTorch tensor on the CPU."""
    torch: Any = sys.modules["torch"]
    if thing.device.type != "cpu" or thing.layout != torch.strided:
        return None
    storage = thing.untyped_storage()
    if storage.device.type != "cpu" or not storage.nbytes():  # a tensor that stands for another one has no memory
        return None
    memory: Array = torch.empty(0, dtype=torch.int8).set_(storage).numpy()
    return memory


def _tensors() -> Iterator[Array]:
    """The memory of every live PyTorch tensor on the CPU. To find them takes tenths of a second."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    _seen.clear()
    for thing in live_instances(torch.Tensor):
        if (memory := _memory(thing)) is not None:
            _seen[memory.__array_interface__["data"][0]] = weakref.ref(thing)
            yield memory


def _seen_before() -> Iterator[Array]:
    """The memory of tensors that were found before, as far as they are alive."""
    for found in list(_seen.values()):
        thing = found()
        if thing is not None and (memory := _memory(thing)) is not None:
            yield memory


def _whole(array: Array) -> Array:
    """All memory of an argument, of which it may be a view: a kernel may reach the rest by an address."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Places:
    """Arrays in order of their addresses. One of these serves a whole run."""

    def __init__(self, buffers: Buffers) -> None:
        self._spans: dict[int, Array] = {}
        self._starts: list[int] = []
        self._all = False
        self._add([*(_whole(f) for f in buffers.flat if f is not None), *_known.values(), *_seen_before()])

    def _add(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            if array.nbytes:
                low, high = np.lib.array_utils.byte_bounds(array)
                lowest = array[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in array.strides)]
                if low not in self._spans or self._spans[low].size < high - low:
                    self._spans[low] = _bytes(lowest, high - low)
        self._starts = sorted(self._spans)

    def find(self, address: int) -> int | None:
        """The start of the array that contains the address."""
        found = self._find(address)
        if found is None and not self._all:
            self._all = True
            self._add(_tensors())
            found = self._find(address)
        return found

    def _find(self, address: int) -> int | None:
        for at in range(bisect.bisect_right(self._starts, address) - 1, -1, -1):
            start = self._starts[at]
            if address < start + self._spans[start].size:
                return start
            if address - start > 1 << 40:
                break
        return None

    def bytes(self, start: int) -> Array:
        return self._spans[start]


@builds("tt.int_to_ptr")
def int_to_ptr(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    element = op.out_types[0].element
    low.facts.addresses = True
    (a,), (out,) = args, outs

    def run(active: Active, slots: Slots) -> None:
        slots[out] = _pointer(active.machine.buffers, active.machine.known(slots[a]), element)

    return run


def _pointer(buffers: Buffers, addresses: Any, element: Element) -> Ptr:
    flat = np.asarray(addresses, np.int64)
    distinct, where = np.unique(flat, return_inverse=True)
    if not buffers.places:
        buffers.places.append(Places(buffers))
    places: Places = buffers.places[0]
    starts: dict[int | None, int] = {}
    which, offset = np.empty(len(distinct), np.int32), np.empty(len(distinct), np.int64)
    for k, address in enumerate(distinct.tolist()):
        start = places.find(address)
        if start not in starts:
            memory = np.zeros(0, np.int8) if start is None else places.bytes(start)
            starts[start] = buffers.add(memory, _BYTES, f"(no array at address {address:#x})" if start is None else
                                        f"(the array at address {start:#x})")  # fmt: skip
        which[k] = list(starts).index(start)
        offset[k] = -1 if start is None else (address - start) // element.size
        if start is not None and (address - start) % element.size:
            raise ValueError(
                f"address {address:#x} is not aligned for {element.name}: it must be a multiple of {element.size} "
                "bytes from the start"
            )
    bases = tuple(starts.values())
    shape = flat.shape
    picked = which[where].reshape(shape)[()]
    return Ptr(bases, None if len(bases) == 1 else picked, offset[where].reshape(shape)[()], element)


@builds("tt.ptr_to_int")
def ptr_to_int(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.facts.addresses = True
    (a,), (out,) = args, outs

    def run(active: Active, slots: Slots) -> None:
        p, buffers = slots[a], active.machine.buffers
        starts = []
        for base in p.bases:
            memory = buffers.flat[base]
            assert memory is not None
            starts.append(memory.__array_interface__["data"][0])
        known = active.machine.known
        start = np.int64(starts[0]) if p.which is None else np.array(starts, np.int64)[known(p.which)]
        slots[out] = start + known(p.offset) * np.int64(p.element.size)

    return run
