"""Accesses to consecutive elements whose mask cuts off the end, as `offset < n` does: slices of memory.

Only the elements before the cut are read or written; the caller checks the bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.types import Array, Element


def prefix(offset: Array, mask: Array) -> tuple[int, int] | None:
    """The place of the first element, and the number of elements before the cut; None if the access has another form.
    """
    flat, keep = offset.reshape(-1), mask.reshape(-1)
    count = int(np.count_nonzero(keep))
    if not count or not keep[:count].all():
        return None
    start = int(flat[0])
    if int(flat[count - 1]) != start + count - 1 or not bool((np.diff(flat[:count]) == 1).all()):
        return None
    return start, count


class PrefixRead:
    """A load of `count` consecutive elements into a larger tile, whose remainder is `fill`."""

    __slots__ = ("_fill", "count", "element", "shape", "start")

    def __init__(self, shape: tuple[int, ...], element: Element, start: int, count: int, fill: Any) -> None:
        self.shape, self.element, self.start, self.count = shape, element, start, count
        self._fill = encode(np.asarray(fill, element.compute), element).reshape(-1)[0]

    def __call__(self, flat: Array) -> Any:
        tile = np.empty(self.shape, self.element.storage)
        line = tile.reshape(-1)
        line[: self.count] = flat[self.start : self.start + self.count]
        line[self.count :] = self._fill
        return decode(tile, self.element)


class PrefixStore:
    """A store of a tile's first `count` elements to consecutive addresses."""

    __slots__ = ("count", "element", "shape", "start")

    def __init__(self, shape: tuple[int, ...], element: Element, start: int, count: int) -> None:
        self.shape, self.element, self.start, self.count = shape, element, start, count

    def __call__(self, flat: Array, value: Any) -> None:
        line = np.broadcast_to(value, self.shape).reshape(-1)[: self.count]
        flat[self.start : self.start + self.count] = encode(line, self.element)
