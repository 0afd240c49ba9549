"""Memory for inputs that have no slot yet, from which the core copies them once the model has free slots.

Blocks of memory are used again, because a new one takes longer than the rest of a short request's submission.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import QueueFullError
from paellapy.scheduler.core.processes import SharedBlock

_KEPT_BYTES = 1 << 20  # free blocks of one size that are kept
_LEAST_BYTES = 64  # smallest block of a shared stage

Block = tuple[NDArray[np.uint8], int]  # memory, and its address


class Stage(ABC):
    """Memory that the core can read."""

    @abstractmethod
    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], int, Any]:
        """Memory to write to, its address for the core, and a token for `give`."""

    @abstractmethod
    def give(self, taken: Any) -> None:
        """Frees the memory: the core has read it, or never will."""


class OwnStage(Stage):
    """Memory of the core's own process. Any thread may take and give: every change is one operation on a list."""

    def __init__(self) -> None:
        self._free: dict[int, list[Block]] = {}

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], int, Any]:
        known = self._free.get(nbytes)
        try:
            block = known.pop() if known else _new(nbytes)
        except IndexError:  # another thread took the last one
            block = _new(nbytes)
        return block[0], block[1], block

    def give(self, taken: Block) -> None:
        nbytes = len(taken[0])
        known = self._free.setdefault(nbytes, [])
        if len(known) * nbytes < _KEPT_BYTES:
            known.append(taken)


def _new(nbytes: int) -> Block:
    memory = np.empty(nbytes, np.uint8)
    return memory, int(memory.ctypes.data)


class SharedStage(Stage):
    """Memory of this producer that the engine's process can read, in blocks whose sizes are powers of two.

    A free block keeps its size, because the next request is likely to need the same. Only when none fits are blocks
    split, or merged with their neighbours: otherwise a flood of one model's requests would leave none for the others.
    """

    def __init__(self, block: SharedBlock, engines_address: int) -> None:
        self._memory, self._address = block.array, engines_address
        self._free: dict[int, list[int]] = {}  # places of free blocks, by size; each is a multiple of its size
        at = 0
        while (left := len(self._memory) - at) >= _LEAST_BYTES:
            size = 1 << (left.bit_length() - 1)
            self._free[size] = [at]
            at += size

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], int, Any]:
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        known = self._free.get(size)
        at = known.pop() if known else self._split(size)
        return self._memory[at : at + nbytes], self._address + at, (at, size)

    def give(self, taken: Any) -> None:
        at, size = taken
        self._free.setdefault(size, []).append(at)

    def _split(self, size: int) -> int:
        """Takes a block out of a larger one."""
        larger = self._next(size)
        if larger == 0 and sum(each * len(places) for each, places in self._free.items()) >= size:
            self._merge()
            larger = self._next(size)
        if larger == 0:
            raise QueueFullError(f"all {len(self._memory) >> 20} MiB for waiting inputs are in use; try again later")
        at = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, []).append(at + larger)
        return at

    def _next(self, size: int) -> int:
        """The smallest size of which a block is free, from `size` on; 0 if there is none."""
        return min((each for each, places in self._free.items() if places and each >= size), default=0)

    def _merge(self) -> None:
        """Makes larger blocks of free neighbours: the two halves of a larger block."""
        size = _LEAST_BYTES
        while size < len(self._memory):
            free = set(self._free.get(size, ()))
            whole = [at for at in free if at % (2 * size) == 0 and at + size in free]
            if whole:
                self._free.setdefault(2 * size, []).extend(whole)
                halves = {*whole, *(at + size for at in whole)}
                self._free[size] = [at for at in self._free[size] if at not in halves]
            size *= 2
