"""Addresses of a model's weights that stay the same while the memory behind them comes and goes.

Programs are captured with these addresses in them. The weights lie in one range, in the order in which the model has
them, which is about the order in which programs use them; a tensor that is used twice lies there once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.models.lane_memory import Bump

Bytes = NDArray[np.uint8]


class Layout:
    """Where each of some tensors lies, and how long they are together.

    >>> layout = Layout([100, 300])
    >>> layout.offsets, layout.nbytes, layout.end_of(260)
    ([0, 256], 768, 768)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        bump = Bump()
        self.offsets = [bump.take(n) for n in sizes]
        self.nbytes = bump.used

    def end_of(self, offset: int) -> int:
        """Where the tensor ends in which this offset lies."""
        k = bisect_right(self.offsets, offset)
        return self.offsets[k] if k < len(self.offsets) else self.nbytes


class WeightRange(ABC):
    """One model's. Its memory is there from when it is made until `evict`, and again from `bring` on."""

    address: int
    chunk_bytes: int
    held_bytes: int  # of the GPU's memory, while it is there
    words: NDArray[np.uint64]  # one per chunk, set when the chunk has come

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.there = True

    @property
    def chunks(self) -> int:
        return -(-self.held_bytes // self.chunk_bytes)

    @abstractmethod
    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array of the device over part of it."""

    @abstractmethod
    def bring(self, source: Bytes) -> None:
        """Get memory, and have the weights copied into it, chunk after chunk. Returns before they are there; `source`
        stays as it is until then.
        """

    @abstractmethod
    def evict(self) -> None:
        """Give the memory back. Nothing that runs may use it."""

    @abstractmethod
    def wait(self) -> None:
        """Until all copies that were begun are done."""

    @abstractmethod
    def write(self, source: Bytes, first: int, end: int) -> None:
        """Copy some of the weights at once, and wait for it."""

    @abstractmethod
    def fill(self, byte: int) -> None:
        """Overwrite all of it with this byte."""

    @abstractmethod
    def holds(self, source: Bytes) -> bool:
        """Whether the same bytes are there."""

    @abstractmethod
    def free(self) -> None:
        """For good."""

    def end_at(self, address: int) -> int:
        """How many of the first bytes there must be for a kernel that is given this address; 0: it is not in here."""
        offset = address - self.address
        return self.layout.end_of(offset) if 0 <= offset < self.layout.nbytes else 0


def needs_of(ends: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[int]:
    """From what each node needs to what each segment, and those before it, do.

    >>> needs_of([0, 512, 256, 1024], [(0, 2), (2, 3), (3, 4)])
    [512, 512, 1024]
    """
    found, most = [], 0
    for first, end in bounds:
        most = max(most, *ends[first:end])
        found.append(most)
    return found


def in_order(ends: Sequence[int]) -> list[int]:
    """The same without those that ask for more than a later node does, 0 being none: where weights lie in the order of
    their use, these are mistaken.

    >>> in_order([512, 0, 256, 1024])
    [256, 256, 256, 1024]
    """
    found, least = [], max(ends, default=0)
    for end in reversed(ends):
        least = min(least, end or least)
        found.append(least)
    return found[::-1]
