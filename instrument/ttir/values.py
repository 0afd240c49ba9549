"""The representation of a TTIR value while a range of blocks is evaluated at once.

A number is a NumPy scalar (the same for every block and element) or an array whose axis 0 is the block axis, of size NB
or 1. The tensor's axes follow; an axis has size 1 as long as nothing varies along it, so `tt.broadcast` costs nothing.
A pointer is an argument's index and an offset in elements. While a tape is recorded, a value that depends on memory is
a `Sym`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir.types import Array, Element

PAD_NAN = 2  # a window's padding, in Triton's numbering

Value = Any  # np.generic | Array | Sym | Ptr | Window


class Sym:
    """A value that depends on memory: its number on the tape, and its value in the recording run."""

    __slots__ = ("id", "value")

    def __init__(self, id: int, value: Any) -> None:
        self.id, self.value = id, value


@dataclass(slots=True, frozen=True)
class Ptr:
    """Offset (int64, in elements) into one of the arguments `bases`; `which` selects one if there are several."""

    bases: tuple[int, ...]
    which: Value
    offset: Value
    element: Element


@dataclass(slots=True, frozen=True)
class Window:
    """A block pointer or a tensor descriptor: a tile at `offsets` of an array with `shape` and `strides`."""

    base: Ptr
    shape: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...]
    block: tuple[int, ...]
    padding: Value = None


def is_array(x: Any) -> bool:
    return type(x) is np.ndarray


def full(x: Any, shape: tuple[int, ...]) -> Array:
    """Undoes lazy broadcasting along the tensor axes."""
    if not is_array(x):
        return np.broadcast_to(x, (1, *shape))
    return x if x.shape[1:] == shape else np.broadcast_to(x, x.shape[:1] + shape)


def take_blocks(x: Any, index: Array, nb: int) -> Any:
    """The rows of some blocks; a uniform value stays as it is."""
    return x[index] if is_array(x) and x.shape[0] == nb and x.ndim else x


def merge_blocks(nb: int, rank: int, indices: tuple[Array, ...], *parts: Any) -> Any:
    """Joins rows computed by disjoint groups of blocks; `rank` is the number of the tensor's axes."""
    shape = np.broadcast_shapes((1,) * rank, *[np.shape(p)[1:] for p in parts])
    out = np.empty((nb, *shape), parts[0].dtype)
    for index, part in zip(indices, parts, strict=True):
        out[index] = part
    return out
