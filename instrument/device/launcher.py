"""Launchers: kernels loaded on a device; and captures, which take their launches in place of the device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.preemption import Blocks, Run, Work
from paellapy.instrument.errors import ArgumentError, LaunchError
from paellapy.instrument.ptx.compiled import Compiled

_MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)  # in x, y and z, on every GPU


def check_grid(kernel: str, grid: Sequence[int]) -> None:
    """Raises ArgumentError for an invalid grid; an empty grid is valid."""
    if any(extent < 0 for extent in grid):
        raise ArgumentError(f"kernel {kernel!r}: grid {tuple(grid)} has a negative extent: extents must be at least 0")
    if any(extent > most for extent, most in zip(grid, _MOST_BLOCKS, strict=False)):
        most = " × ".join(f"{n:,}" for n in _MOST_BLOCKS)
        raise ArgumentError(f"kernel {kernel!r}: grid {tuple(grid)} is too large: a GPU takes {most} blocks at most")


class Launcher(ABC):
    """A kernel loaded on a device, ready to be launched with bound values."""

    compiled: Compiled
    result: Any = None  # of `kernel[grid](…)` for a Triton kernel

    @abstractmethod
    def __call__(
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
    ) -> Any:
        """Launches on the device's current stream. `part` = (first, count) runs only these blocks of the grid."""

    def under(self, flag: Any, work: Work, blocks: Blocks) -> Run:
        """Launches some blocks under a flag, on the work's own stream. For kernels built with `preempt`."""
        raise LaunchError(f"{type(self).__name__} does not support launches under a flag")


class Capture(ABC):
    """Stands in for the device in one thread while a function's launches are captured instead of run."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.passing = False  # set while the capture itself launches
        self.notify_word = 0  # address to which a launch at level `notify` writes, instead of a word of the device

    @property
    def mine(self) -> bool:
        """Whether this thread is being captured; other threads are not affected."""
        return self._thread == threading.get_ident()

    @property
    def active(self) -> bool:
        """Whether the capture handles a call made now in this thread."""
        return not self.passing and self._thread == threading.get_ident()

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory that the captured work may use each time it is replayed."""

    @abstractmethod
    def launch(
        self,
        launcher: Any,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...],
        shared_bytes: int,
        part: tuple[int, int] | None,
    ) -> Any: ...

    @abstractmethod
    def refuse(self, doing: str) -> None:
        """Raises an error for an operation that cannot be replayed."""
