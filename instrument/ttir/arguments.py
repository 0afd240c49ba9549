"""Arguments of one run: arrays become flat memory, scalars take the kernel's types."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.ttir.conversion import rounder
from paellapy.instrument.ttir.machine import Buffers
from paellapy.instrument.ttir.types import Array, Element, Type
from paellapy.instrument.ttir.values import PAD_NAN, Ptr, Window

_PLAIN = (int, float)  # and not zero: 0.0 and -0.0 would be the same key


@dataclass(slots=True, frozen=True)
class Bound:
    """Arguments of one run. `key` has all that a tape depends on: scalars, sizes, overlaps with written arrays."""

    args: Sequence[Any]
    buffers: Buffers
    key: tuple[Any, ...]


class Signature:
    """A kernel's parameters. Binding is part of every launch, so it does as little as possible."""

    def __init__(self, kernel: str, types: Sequence[Type], names: Sequence[str], written: Collection[int]) -> None:
        self.kernel, self.names, self.types = kernel, names, types
        self.elements = [t.element if t.kind in ("pointer", "descriptor") else None for t in types]
        self.written = tuple(i for i in sorted(written) if self.elements[i] is not None)

    def bind(self, args: Sequence[Any], whole: bool = False) -> Bound:
        """Flattens the arrays, and checks them against the signature.

        `whole`: the memory of a view is that of its base array, as on a GPU, which does not know views.
        """
        if len(args) != len(self.types):
            names = ", ".join(self.names)
            raise ArgumentError(
                f"kernel {self.kernel} takes {len(self.types)} arguments ({names}), but {len(args)} were given"
            )
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
            if self.types[i].kind == "descriptor":
                arg = arg.base
            if whole and isinstance(arg, np.ndarray) and arg.base is not None:
                flat, origins[i] = self._storage(i, arg, element)
            elif type(arg) is np.ndarray and arg.dtype == element.storage and arg.flags.c_contiguous:
                flat = arg.reshape(-1)
            else:
                flat, origins[i] = self._flatten(i, arg, element)
            flats[i] = flat
            key.append((flat.size, origins[i]))
            if self.types[i].kind == "descriptor":
                key.append((args[i].shape, args[i].strides, args[i].nan_padding))
            start = flat.__array_interface__["data"][0]
            spans[i] = (start, start + flat.nbytes)
        fragile = set(self.written)
        for j in self.written:
            low, high = spans[j]
            fragile.update(i for i, (start, end) in spans.items() if start < high and low < end)
            written = flats[j]
            if written is not None and not written.flags.writeable:
                raise ArgumentError(
                    f"kernel {self.kernel}: argument {self.names[j]} is written, but the array is read-only: pass a "
                    "writable array"
                )
        key.append(frozenset(fragile))
        return Bound(args, Buffers(flats, origins, list(self.elements), key[-1]), tuple(key))

    def values(self, bound: Bound) -> list[Any]:
        """The values of the kernel's arguments at its entry."""
        out: list[Any] = []
        for i, (arg, element) in enumerate(zip(bound.args, self.elements, strict=True)):
            if element is None:
                out.append(self._scalar(i, arg, self.types[i].element))
            else:
                pointer = Ptr((i,), None, np.int64(bound.buffers.origin[i]), element)
                out.append(pointer if self.types[i].kind == "pointer" else self._window(i, arg, pointer))
        return out

    def _window(self, i: int, descriptor: Any, base: Ptr) -> Window:
        shape, strides = (tuple(np.int64(n) for n in each) for each in (descriptor.shape, descriptor.strides))
        padding = np.int32(PAD_NAN) if descriptor.nan_padding else None
        return Window(base, shape, strides, (), self.types[i].block, padding)

    def _storage(self, i: int, arg: Array, element: Element) -> tuple[Array, int]:
        """The whole memory of the base array of `arg`, and the place of `arg` in it."""
        root = arg
        while isinstance(root.base, np.ndarray):
            root = root.base
        own, origin = self._flatten(i, arg, element)
        low, high = byte_bounds(root)
        before = own.__array_interface__["data"][0] - low
        lowest = root[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in root.strides)]
        if before % element.size or not root.size:
            return own, origin
        first = as_strided(lowest.view(f"u{root.itemsize}"), (1,), (root.itemsize,)).view(np.uint8)
        flat = as_strided(first, ((high - low) // element.size * element.size,), (1,), writeable=arg.flags.writeable)
        return flat.view(element.storage), origin + before // element.size

    def _refuse(self, i: int, why: str) -> ArgumentError:
        return ArgumentError(f"kernel {self.kernel}: argument {self.names[i]} {why}")

    def _flatten(self, i: int, arg: Any, element: Element) -> tuple[Array, int]:
        """An array's memory as one axis, from its lowest to its highest element, and the place of its first element."""
        if not isinstance(arg, np.ndarray):
            raise self._refuse(i, f"is a pointer to {element.name}; pass a NumPy array")
        bits = (
            arg.dtype.kind in "iub" and arg.dtype.itemsize == element.size and (element.narrow or not element.is_float)
        )
        if arg.dtype != element.memory and not bits:
            raise self._refuse(i, f"points to {element.name}, but the array holds {arg.dtype}: convert the array")
        if arg.flags.c_contiguous or not arg.size:
            return arg.reshape(-1).view(element.storage), 0
        arg = arg.view(element.bits)  # NumPy's own functions do not know the types of ml_dtypes
        if any(s % arg.itemsize for s in arg.strides):
            raise self._refuse(i, "has strides that are not whole elements: pass a copy")
        steps = [s // arg.itemsize for s in arg.strides]
        origin = -sum(s * (n - 1) for s, n in zip(steps, arg.shape, strict=True) if s < 0)
        span = 1 + sum(abs(s) * (n - 1) for s, n in zip(steps, arg.shape, strict=True))
        lowest = arg[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in steps)]
        flat = as_strided(lowest, (span,), (arg.itemsize,), writeable=arg.flags.writeable)
        return flat.view(element.storage), origin

    def _scalar(self, i: int, arg: Any, element: Element) -> Any:
        if (isinstance(arg, np.ndarray) and arg.ndim) or not isinstance(
            arg, bool | int | float | np.generic | np.ndarray
        ):
            raise self._refuse(i, f"must be a scalar {element.name}, not {type(arg).__name__}")
        if element.is_float:
            value = element.compute.type(float(arg))
            to = rounder(element)
            return value if to is None else to(value)
        if element.name == "i1":
            return np.bool_(arg)
        bits = 8 * element.size
        number = int(arg)
        if not -(2 ** (bits - 1)) <= number < 2**bits:
            raise self._refuse(i, f"is {number}, which does not fit in {element.name}")
        number &= 2**bits - 1
        return element.compute.type(number - 2**bits if number >= 2 ** (bits - 1) else number)


def is_view(arg: Any) -> bool:
    """Whether an array is a view of part of a larger one."""
    arg = getattr(arg, "base", None) if hasattr(arg, "nan_padding") else arg
    root = arg
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(arg, np.ndarray) or root is arg:
        return False
    if arg.flags.forc:
        return bool(root.nbytes > arg.nbytes)
    low, high = byte_bounds(arg)  # its elements may share memory
    return bool(root.nbytes > high - low)
