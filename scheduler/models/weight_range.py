"""Address ranges for a model's weights, which stay the same while the memory behind them is mapped and unmapped.

Programs are captured with these addresses. The weights lie in one range, in the model's order, which is about the order
in which programs use them; a tensor that is used twice lies there once.
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
# Size of a piece that is copied at a time. A copy engine takes one copy after the other: behind a piece of this size,
# inputs of a request wait for 160 µs. In pieces of 4 MiB an H200's link had 4 % less bandwidth than in pieces of 16 MiB
# (side experiment), behind which inputs would wait twice as long.
COPY_BYTES = 8 << 20


class Layout:
    """The offsets of some tensors and their total length.

    >>> layout = Layout([100, 300])
    >>> layout.offsets, layout.nbytes, layout.end_of(260)
    ([0, 256], 768, 768)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        bump = Bump()
        self.offsets = [bump.take(n) for n in sizes]
        self.nbytes = bump.used

    def end_of(self, offset: int) -> int:
        """The end of the tensor that contains this offset."""
        k = bisect_right(self.offsets, offset)
        return self.offsets[k] if k < len(self.offsets) else self.nbytes


class WeightRange(ABC):
    """The range of one model. It has memory from its creation until `evict`, and again from `bring` on."""

    address: int
    chunk_bytes: int
    held_bytes: int  # GPU memory used while it is mapped
    words: NDArray[np.uint64]  # one per chunk, set when the chunk has arrived

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.there = True

    @property
    def chunks(self) -> int:
        return -(-self.held_bytes // self.chunk_bytes)

    @abstractmethod
    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A device array over part of the range."""

    @abstractmethod
    def bring(self, source: Bytes) -> None:
        """Maps memory and starts copying the weights into it, chunk after chunk. Returns before the copies are done;
        `source` must not change until then.
        """

    @abstractmethod
    def evict(self) -> None:
        """Unmaps the memory. No running work may use it."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until all started copies are done."""

    @abstractmethod
    def write(self, source: Bytes, first: int, end: int) -> None:
        """Copies part of the weights, and waits for the copy."""

    @abstractmethod
    def fill(self, byte: int) -> None:
        """Overwrites the whole range with this byte."""

    @abstractmethod
    def holds(self, source: Bytes) -> bool:
        """Whether the range holds the same bytes as `source`."""

    @abstractmethod
    def free(self) -> None:
        """Gives up the address range for good."""

    def end_at(self, address: int) -> int:
        """How many bytes, from the start, a kernel with this address needs; 0 if it is outside the range."""
        offset = address - self.address
        return self.layout.end_of(offset) if 0 <= offset < self.layout.nbytes else 0


def needs_of(ends: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes that each segment and all segments before it need, from the needs of each node.

    >>> needs_of([0, 512, 256, 1024], [(0, 2), (2, 3), (3, 4)])
    [512, 512, 1024]
    """
    found, most = [], 0
    for first, end in bounds:
        most = max(most, *ends[first:end])
        found.append(most)
    return found


def in_order(least: Sequence[int], most: Sequence[int]) -> list[int]:
    """The needs of the largest number of nodes whose needs do not fall, each the least or the most of its node; 0 for
    other nodes. Where weights lie in their order of use, a need that breaks the order comes from a stale pointer.

    >>> in_order([512, 0, 256, 1024, 256], [768, 0, 256, 1024, 1280])
    [0, 0, 256, 1024, 1280]
    """
    ends: list[int] = []  # entry k: the smallest need with which a chain of k + 1 nodes can end
    links: list[tuple[int, int, Any]] = []  # the last node of that chain, its need, and the link before
    for node, pair in enumerate(zip(least, most, strict=True)):
        for end in sorted({*pair} - {0}, reverse=True):  # the larger first, so that no chain has both
            k = bisect_right(ends, end)
            ends[k : k + 1] = [end]
            links[k : k + 1] = [(node, end, links[k - 1] if k else None)]
    found, link = [0] * len(least), links[-1] if links else None
    while link is not None:
        node, end, link = link
        found[node] = end
    return found
