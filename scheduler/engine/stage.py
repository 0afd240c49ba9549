"""Stages: memory for inputs that have no slot yet, from which the core copies them once the model has free slots.

Blocks of memory are used again, because a new one takes longer than the rest of a short request's submission.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import QueueFullError
from paellapy.scheduler.core.shared_memory import SharedBlock

_KEPT_BYTES = 1 << 20  # free blocks of one size that are kept

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
    """Memory of this front end that the engine's process can read, in reusable blocks whose sizes are powers of two."""

    def __init__(self, block: SharedBlock, engines_address: int) -> None:
        self._memory, self._address = block.array, engines_address
        self._free: dict[int, list[int]] = {}
        self._used = 0

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], int, Any]:
        size = max(64, 1 << (nbytes - 1).bit_length())
        known = self._free.setdefault(size, [])
        if known:
            at = known.pop()
        elif self._used + size <= len(self._memory):
            at, self._used = self._used, self._used + size
        else:
            raise QueueFullError(
                f"all {len(self._memory) >> 20} MiB for waiting inputs are in use; try again later"
            )
        return self._memory[at : at + nbytes], self._address + at, (at, size)

    def give(self, taken: Any) -> None:
        at, size = taken
        self._free[size].append(at)
