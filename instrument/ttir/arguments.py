"""Arguments of one run: arrays become flat memory, scalars take the kernel's types."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instrument.errors import ArgumentError
from instrument.ttir.machine import Buffers
from instrument.ttir.types import Array, Element, Type, rounder
from instrument.ttir.values import Ptr


@dataclass(slots=True, frozen=True)
class Bound:
    values: list[Any]  # what the kernel's arguments are
    buffers: Buffers
    key: tuple[Any, ...]  # everything a tape depends on


def bind(
    kernel: str, args: Sequence[Any], types: Sequence[Type], names: Sequence[str], written: Collection[int]
) -> Bound:
    """Check the arguments against the kernel's signature and flatten the arrays."""
    if len(args) != len(types):
        raise ArgumentError(f"kernel {kernel} takes {len(types)} arguments ({', '.join(names)}), not {len(args)}")
    values: list[Any] = []
    flats: list[Array | None] = []
    origins: list[int] = []
    elements: list[Element | None] = []
    key: list[Any] = []
    spans: list[tuple[int, int] | None] = []
    for i, (arg, type_) in enumerate(zip(args, types, strict=True)):
        if type_.kind == "pointer":
            flat, origin = _flatten(kernel, names[i], arg, type_.element)
            if i in written and not flat.flags.writeable:
                raise ArgumentError(f"kernel {kernel}: argument {names[i]} is written, but the array is read-only")
            start = flat.__array_interface__["data"][0]
            values.append(Ptr((i,), None, np.int64(origin), type_.element))
            flats.append(flat)
            origins.append(origin)
            elements.append(type_.element)
            spans.append((start, start + flat.nbytes))
            key.append((flat.size, origin))
        else:
            value = _scalar(kernel, names[i], arg, type_.element)
            values.append(value)
            flats.append(None)
            origins.append(0)
            elements.append(None)
            spans.append(None)
            key.append(value.tobytes())
    fragile = set(written)
    for i, span in enumerate(spans):
        if span is not None and i not in fragile and any(_overlap(span, spans[j]) for j in written):
            fragile.add(i)
    key.append(frozenset(fragile))
    return Bound(values, Buffers(flats, origins, elements, key[-1]), tuple(key))


def _overlap(a: tuple[int, int], b: tuple[int, int] | None) -> bool:
    return b is not None and a[0] < b[1] and b[0] < a[1]


def _flatten(kernel: str, name: str, arg: Any, element: Element) -> tuple[Array, int]:
    """An array's memory as one axis, from its lowest to its highest element, and where its first element lies in it."""
    if not isinstance(arg, np.ndarray):
        raise ArgumentError(f"kernel {kernel}: argument {name} is a pointer to {element.name}; pass a NumPy array")
    if arg.dtype.itemsize != element.size:
        raise ArgumentError(f"kernel {kernel}: argument {name} points to {element.name}, the array holds {arg.dtype}")
    if arg.flags.c_contiguous:
        return arg.reshape(-1).view(element.storage), 0
    if any(s % arg.itemsize for s in arg.strides):
        raise ArgumentError(f"kernel {kernel}: argument {name}: the array's strides are not whole elements")
    steps = [s // arg.itemsize for s in arg.strides]
    origin = -sum(s * (n - 1) for s, n in zip(steps, arg.shape, strict=True) if s < 0)
    span = 1 + sum(abs(s) * (n - 1) for s, n in zip(steps, arg.shape, strict=True))
    lowest = arg[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in steps)]
    flat = np.lib.stride_tricks.as_strided(lowest, (span,), (arg.itemsize,), writeable=arg.flags.writeable)
    return flat.view(element.storage), origin


def _scalar(kernel: str, name: str, arg: Any, element: Element) -> Any:
    if (isinstance(arg, np.ndarray) and arg.ndim) or not isinstance(arg, bool | int | float | np.generic | np.ndarray):
        raise ArgumentError(f"kernel {kernel}: argument {name} is a scalar {element.name}, not {type(arg).__name__}")
    if element.is_float:
        value = element.compute.type(float(arg))
        to = rounder(element)
        return value if to is None else to(value)
    if element.name == "i1":
        return np.bool_(arg)
    bits = 8 * element.size
    number = int(arg)
    if not -(2 ** (bits - 1)) <= number < 2**bits:
        raise ArgumentError(f"kernel {kernel}: argument {name}: {number} does not fit {element.name}")
    number &= 2**bits - 1
    return element.compute.type(number - 2**bits if number >= 2 ** (bits - 1) else number)
