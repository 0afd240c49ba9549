"""Preemption on every device: a flag that launches look at, and a run of some blocks under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import LaunchError

MOST_EPOCHS = 2**32 - 1  # a flag is a word of 32 bits


class Flag(ABC):
    """A word in the device's memory. Launches made under it are numbered; setting it preempts all launches made so far.

    Blocks of these launches that have not started do not run. Launches made later run, even if the flag is still being
    set.
    """

    def __init__(self) -> None:
        self._epoch = 0  # number of the latest launch
        self._word = 0
        self._highest = 0  # the highest number that it was ever set to

    def next_epoch(self) -> int:
        """The number for the next launch."""
        if self._epoch == MOST_EPOCHS:
            raise LaunchError(f"{MOST_EPOCHS} launches were made under one flag, its maximum: make a new flag")
        self._epoch += 1
        return self._epoch

    def set(self) -> None:
        """Preempts the launches made under this flag so far. Returns at once; blocks see the flag a few µs later."""
        self._word = self._highest = self._epoch
        self._write(self._word)

    def clear(self) -> None:
        """Lets blocks run that have not started yet. Blocks that were kept from running stay out."""
        self._word = 0
        self._write(0)

    def catches(self, epoch: int) -> bool:
        """Whether the launch of this number is preempted now."""
        return self._word >= epoch

    def has_caught(self, epoch: int) -> bool:
        """Whether the launch of this number may have been preempted at any time."""
        return self._highest >= epoch

    @abstractmethod
    def _write(self, word: int) -> None:
        """Writes the word to the place where blocks read it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel's launch parameters, without the selection of blocks."""

    grid: tuple[int, int, int]
    values: Sequence[Any]
    stream: Any
    block: tuple[int, ...] = ()
    shared_bytes: int = 0

    @property
    def blocks(self) -> int:
        x, y, z = self.grid
        return x * y * z


class Run(ABC):
    """One launch of some blocks under a flag."""

    epoch: int

    @abstractmethod
    def over(self) -> bool:
        """Whether each of its blocks has ended, or was kept from running."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until it is over."""

    @abstractmethod
    def count_left(self) -> int:
        """The number of its blocks that have not run. For runs that are over."""

    @abstractmethod
    def left(self) -> NDArray[np.int64]:
        """The numbers of these blocks in their grid. For runs that are over."""

    @abstractmethod
    def elapsed_ns(self) -> float:
        """The time from its first block's start to its last block's end. For runs that are over."""


Part = tuple[int, int]  # the first block and the number of blocks
Blocks = Part | Run  # the last: the remaining blocks of another run
