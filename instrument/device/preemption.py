"""What preemption is on every device: a flag that launches look at, and a run of some blocks under it."""

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
    """A word in the device's memory. Launches made under it have numbers; setting it preempts all made so far.

    A block of theirs that starts from then on does not run. Launches made later run, whatever is still on its way.
    """

    def __init__(self) -> None:
        self._epoch = 0  # of the launch made last
        self._word = 0

    def next_epoch(self) -> int:
        """The number of a launch that is about to be made."""
        if self._epoch == MOST_EPOCHS:
            raise LaunchError(f"{MOST_EPOCHS} launches were made under one flag, which is all it can tell apart")
        self._epoch += 1
        return self._epoch

    def set(self) -> None:
        """Preempts the launches made under this flag so far. Returns at once; blocks see it a few µs later."""
        self._word = self._epoch
        self._write(self._word)

    def clear(self) -> None:
        """Lets the blocks run that have not started yet. Those that were kept from running stay out."""
        self._word = 0
        self._write(0)

    def catches(self, epoch: int) -> bool:
        """Whether the launch of this number is preempted now."""
        return self._word >= epoch

    @abstractmethod
    def _write(self, word: int) -> None:
        """Brings the word to where the blocks read it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel is launched with, less which of its blocks run."""

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
        """Whether each of its blocks has ended, or has been kept from running."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when it is over."""

    @abstractmethod
    def count_left(self) -> int:
        """How many of its blocks have not run. For runs that are over."""

    @abstractmethod
    def left(self) -> NDArray[np.int64]:
        """The numbers of these blocks in their grid. For runs that are over."""

    @abstractmethod
    def elapsed_ns(self) -> float:
        """From its first block's start to its last one's end. For runs that are over."""


Part = tuple[int, int]  # the first block and how many
Blocks = Part | Run  # or those that another run has left
