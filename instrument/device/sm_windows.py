"""Windows of the SM model: the SMs that a launch may use, and the blocks that fit there."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.occupancy import footprint, occupancy
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.sm_place import attach_within
from paellapy.instrument.device.sm_program import Kernel, Program
from paellapy.instrument.device.sm_state import doubled
from paellapy.instrument.errors import LaunchError


class Windows:
    """The windows made so far, and the sizes of blocks that were checked in them."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._made: dict[tuple[int, int], int] = {}
        self._footprints: dict[tuple[int, int, int, int, int], tuple[int, int, int, int]] = {}

    def make(self, s: lay.State, first: int, n: int) -> tuple[lay.State, int]:
        """The number of the window of `n` SMs from `first` on."""
        sms = self._part.sms
        if not (0 <= first < sms and 1 <= n <= sms):
            raise LaunchError(f"a window of {n} SMs from SM {first} on: choose 1 to {sms} of SMs 0 to {sms - 1}")
        if (first, n) not in self._made:
            number = len(self._made) + 1
            if number == len(s.window):
                s = s._replace(window=doubled(s.window))
            s.window[number] = (first, n, 0)
            self._made[first, n] = number
            attach_within(s)
        return s, self._made[first, n]

    def check_program(self, s: lay.State, program: Program) -> None:
        """Checks a program that may come from another model of the same part."""
        self.check(int(program.commands["window"][0]))
        if program.clusters and not s.gpu["place_within"][0]:
            attach_within(s)

    def check(self, window: int) -> None:
        if not 0 <= window <= len(self._made):
            raise LaunchError(f"no window {window}: {len(self._made)} exist; create one with `window(first, n)`")

    def footprint(self, s: lay.State, kernel: Kernel, window: int) -> tuple[int, int, int, int]:
        """Warps of a block, and the threads, registers and shared bytes that it takes from its SM."""
        n_blocks, cluster = kernel.n_blocks, kernel.cluster
        threads, registers, shared = kernel.threads, kernel.registers, kernel.shared_bytes
        key = (threads, registers, shared, cluster, window)
        if key not in self._footprints:
            occupancy(self._part, threads, registers, shared, cluster)  # refuses a block that fits in no SM or no GPC
            self.check(window)
            if window > 0 and cluster > 1:
                self._check_cluster(s, threads, registers, shared, cluster, window)
            if cluster > 1:
                attach_within(s)
            block = footprint(self._part.sm, threads, registers, shared)
            self._footprints[key] = (block.warps, block.threads, block.registers, block.shared_bytes)
        if n_blocks < 1 or n_blocks % cluster:
            raise LaunchError(
                f"a grid of {n_blocks} blocks in clusters of {cluster}: the blocks must be a positive multiple of the "
                "cluster"
            )
        return self._footprints[key]

    def _check_cluster(
        self, s: lay.State, threads: int, registers: int, shared: int, cluster: int, window: int
    ) -> None:
        """Refuses a cluster that no GPC's part of the window could hold, since it would wait for ever."""
        each = occupancy(self._part.sm, threads, registers, shared).blocks_per_sm
        sms = _most_in_a_gpc(s, window)
        if sms * each < cluster:
            raise LaunchError(
                f"a cluster of {cluster} blocks fits in no GPC's part of window {window}: at most {sms} of its SMs are "
                f"in one GPC, with {each} such blocks each; choose a larger window or a smaller cluster"
            )


def _most_in_a_gpc(s: lay.State, window: int) -> int:
    """The largest number of the window's SMs that are in one GPC."""
    first, n = s.window[window, lay.W_FIRST], s.window[window, lay.W_SMS]
    sms = (first + np.arange(n)) % len(s.free)
    return int(np.bincount(np.searchsorted(s.gpc, sms, side="right")).max())
