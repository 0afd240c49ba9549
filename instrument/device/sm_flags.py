"""Flags of the SM model: words that launches read, and the blocks that did not run because of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.preemption import MOST_EPOCHS
from paellapy.instrument.device.sm_program import Kernel
from paellapy.instrument.device.sm_state import doubled
from paellapy.instrument.errors import LaunchError


class Flags:
    """The flags made so far, and the rows of the state's block numbers that are in use."""

    def __init__(self) -> None:
        self._made = 0
        self._rows = 0
        self._launches = 0  # launches whose remaining blocks were not taken yet

    def make(self, s: lay.State) -> tuple[lay.State, int]:
        """A new flag, at 0: no launch is preempted."""
        self._made += 1
        if self._made == len(s.flag):
            s = s._replace(flag=doubled(s.flag))
        s.flag[self._made] = 0
        return s, self._made

    def check(self, flag: int) -> int:
        if not 1 <= flag <= self._made:
            raise LaunchError(f"no flag {flag}: {self._made} exist; make one with `flag()`")
        return flag

    def keep(self, s: lay.State, kernel: Kernel) -> tuple[lay.State, int]:
        """Reserves room for the numbers of a launch's blocks and of those that do not run; returns its place."""
        under = kernel.under
        assert under is not None
        self.check(under.flag)
        if kernel.cluster > 1:
            raise LaunchError(
                "a launch with clusters cannot be preempted, because the blocks of a cluster run together: use "
                "cluster=1"
            )
        if not 1 <= under.epoch <= MOST_EPOCHS:
            raise LaunchError(f"epoch={under.epoch}: a launch's epoch must be from 1 to {MOST_EPOCHS}")
        if under.blocks.shape != (kernel.n_blocks,):
            raise LaunchError(
                f"{len(under.blocks)} numbers were given for {kernel.n_blocks} blocks: give one per block"
            )
        row = self._rows
        while row + 2 * kernel.n_blocks > len(s.ids):
            s = s._replace(ids=doubled(s.ids))
        s.ids[row : row + kernel.n_blocks] = under.blocks
        self._rows += 2 * kernel.n_blocks
        self._launches += 1
        return s, row

    def left(self, s: lay.State, i: int) -> NDArray[np.int64]:
        """The numbers of the blocks that did not run so far, of the launch in row `i`."""
        if not s.command["flag"][i]:
            raise LaunchError("the launch has no remaining blocks to take: it has no flag, or they were taken already")
        row = s.command["ids"][i] + s.command["blocks"][i]
        return s.ids[row : row + s.command["left"][i]].copy()

    def release(self, s: lay.State, i: int) -> None:
        """Frees the room of the launch in row `i`, which is over."""
        s.command["flag"][i] = 0
        self._launches -= 1
        if self._launches == 0:
            self._rows = 0
