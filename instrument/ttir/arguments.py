"""Arguments of one run: arrays become flat memory, scalars take the kernel's types."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.ttir.conversion import rounder
from paellapy.instrument.ttir.machine import Buffers
from paellapy.instrument.ttir.types import Array, Element, Type
from paellapy.instrument.ttir.values import Ptr

_PLAIN = (int, float)  # and not zero: 0.0 and -0.0 would be the same key


@dataclass(slots=True, frozen=True)
class Bound:
    """Arguments of one run. `key` is everything a tape depends on: scalars, sizes, what overlaps what is written."""

    args: Sequence[Any]
    buffers: Buffers
    key: tuple[Any, ...]


class Signature:
    """A kernel's parameters. Binding is on the path of every launch, so it does no more than it must."""

    def __init__(self, kernel: str, types: Sequence[Type], names: Sequence[str], written: Collection[int]) -> None:
        self.kernel, self.names, self.types = kernel, names, types
        self.elements = [t.element if t.kind == "pointer" else None for t in types]
        self.written = tuple(i for i in sorted(written) if self.elements[i] is not None)

    def bind(self, args: Sequence[Any]) -> Bound:
        """Flatten the arrays, and check them against the signature."""
        if len(args) != len(self.types):
            names = ", ".join(self.names)
            raise ArgumentError(f"kernel {self.kernel} takes {len(self.types)} arguments ({names}), not {len(args)}")
        flats: list[Array | None] = [None] * len(args)
        origins = [0] * len(args)
        key: list[Any] = []
        spans: dict[int, tuple[int, int]] = {}
        for i, (arg, element) in enumerate(zip(args, self.elements, strict=True)):
            if element is None:
                key.append(
                    arg if type(arg) in _PLAIN and arg else self._scalar(i, arg, self.types[i].element).tobytes()
                )
                continue
            if type(arg) is np.ndarray and arg.dtype == element.storage and arg.flags.c_contiguous:
                flat = arg.reshape(-1)
            else:
                flat, origins[i] = self._flatten(i, arg, element)
            flats[i] = flat
            key.append((flat.size, origins[i]))
            start = flat.__array_interface__["data"][0]
            spans[i] = (start, start + flat.nbytes)
        fragile = set(self.written)
        for j in self.written:
            low, high = spans[j]
            fragile.update(i for i, (start, end) in spans.items() if start < high and low < end)
            if not args[j].flags.writeable:
                raise ArgumentError(
                    f"kernel {self.kernel}: argument {self.names[j]} is written, but the array is read-only"
                )
        key.append(frozenset(fragile))
        return Bound(args, Buffers(flats, origins, self.elements, key[-1]), tuple(key))

    def values(self, bound: Bound) -> list[Any]:
        """What the kernel's arguments are at its entry."""
        out: list[Any] = []
        for i, (arg, element) in enumerate(zip(bound.args, self.elements, strict=True)):
            if element is None:
                out.append(self._scalar(i, arg, self.types[i].element))
            else:
                out.append(Ptr((i,), None, np.int64(bound.buffers.origin[i]), element))
        return out

    def _refuse(self, i: int, why: str) -> ArgumentError:
        return ArgumentError(f"kernel {self.kernel}: argument {self.names[i]} {why}")

    def _flatten(self, i: int, arg: Any, element: Element) -> tuple[Array, int]:
        """An array's memory as one axis, from its lowest to its highest element, and where its first element lies."""
        if not isinstance(arg, np.ndarray):
            raise self._refuse(i, f"is a pointer to {element.name}; pass a NumPy array")
        bits = (
            arg.dtype.kind in "iub" and arg.dtype.itemsize == element.size and (element.narrow or not element.is_float)
        )
        if arg.dtype != element.memory and not bits:
            raise self._refuse(i, f"points to {element.name}, the array holds {arg.dtype}")
        if arg.flags.c_contiguous or not arg.size:
            return arg.reshape(-1).view(element.storage), 0
        if any(s % arg.itemsize for s in arg.strides):
            raise self._refuse(i, "has strides that are not whole elements")
        steps = [s // arg.itemsize for s in arg.strides]
        origin = -sum(s * (n - 1) for s, n in zip(steps, arg.shape, strict=True) if s < 0)
        span = 1 + sum(abs(s) * (n - 1) for s, n in zip(steps, arg.shape, strict=True))
        lowest = arg[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in steps)]
        flat = np.lib.stride_tricks.as_strided(lowest, (span,), (arg.itemsize,), writeable=arg.flags.writeable)
        return flat.view(element.storage), origin

    def _scalar(self, i: int, arg: Any, element: Element) -> Any:
        if (isinstance(arg, np.ndarray) and arg.ndim) or not isinstance(
            arg, bool | int | float | np.generic | np.ndarray
        ):
            raise self._refuse(i, f"is a scalar {element.name}, not {type(arg).__name__}")
        if element.is_float:
            value = element.compute.type(float(arg))
            to = rounder(element)
            return value if to is None else to(value)
        if element.name == "i1":
            return np.bool_(arg)
        bits = 8 * element.size
        number = int(arg)
        if not -(2 ** (bits - 1)) <= number < 2**bits:
            raise self._refuse(i, f"is {number}, which does not fit {element.name}")
        number &= 2**bits - 1
        return element.compute.type(number - 2**bits if number >= 2 ** (bits - 1) else number)
