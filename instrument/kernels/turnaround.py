"""The largest slice that frees the GPU in time: a bound on turnaround, after Tally (ASPLOS'25).

These are pure functions over a kernel's profile. A slice consists of whole waves, because a smaller slice leaves SMs
idle: a GEMM on an H200 was 26 % slower in slices of less than a wave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paellapy.instrument.device.preemption import Part
from paellapy.instrument.errors import ArgumentError

# Time of a wave whose blocks only look at their flag and leave. An estimate: two round trips to L2 and a block's start.
EXIT_NS = 1500.0


@dataclass(frozen=True, slots=True)
class Wave:
    """A kernel's profile: the blocks that the GPU holds at once, and their duration.

    `block_ns` is the time of one block alone on the GPU, if known; it is used for slices of less than a wave. `exit_ns`
    is the time of a wave whose blocks are preempted.
    """

    blocks: int
    time_ns: float
    block_ns: float | None = None
    exit_ns: float = EXIT_NS

    def __post_init__(self) -> None:
        if self.blocks < 1 or not 0 < self.time_ns < math.inf or not 0 < self.exit_ns < math.inf:
            raise ArgumentError(f"{self}: a wave must have at least one block, and times that are finite and above 0")
        if self.block_ns is not None and not 0 < self.block_ns <= self.time_ns:
            raise ArgumentError(f"{self}: block_ns must be above 0 and at most time_ns")

    @classmethod
    def measured(cls, time_ns: float, blocks: int, wave_blocks: int) -> Wave:
        """A profile from the time of a launch alone on the GPU.

        >>> Wave.measured(time_ns=200_000, blocks=1000, wave_blocks=264)
        Wave(blocks=264, time_ns=50000.0, block_ns=None, exit_ns=1500.0)
        """
        return cls(wave_blocks, time_ns / -(-blocks // wave_blocks))

    def slice_ns(self, blocks: int) -> float:
        """The time of a slice alone on the GPU."""
        if blocks >= self.blocks or self.block_ns is None:
            return -(-blocks // self.blocks) * self.time_ns
        return self.block_ns + (self.time_ns - self.block_ns) * blocks / self.blocks

    def drain_ns(self, blocks: int) -> float:
        """The longest time until a slice whose flag was set is gone: one wave ends, and the other blocks leave."""
        return self.time_ns + -(-blocks // self.blocks) * self.exit_ns


@dataclass(frozen=True, slots=True)
class Turnaround:
    """A bound on the time until the GPU is free of a kernel.

    Without a flag this is the time of a slice; with a flag, the time of the running wave and of the blocks that leave.
    `below_wave` allows slices of less than a wave, where even one wave takes longer.

    >>> Turnaround(us=100).parts(1024, Wave(264, time_ns=50_000))
    ((0, 528), (528, 496))
    >>> Turnaround(us=100).parts(1024, Wave(264, time_ns=50_000), flag=True)
    ((0, 1024),)
    """

    us: float
    below_wave: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.us < math.inf:
            raise ArgumentError(f"us={self.us!r}: a turnaround must be a finite number of microseconds above 0")

    def blocks(self, wave: Wave, flag: bool = False) -> int:
        """The largest slice that keeps the bound, in whole waves; one wave if none does."""
        bound_ns = self.us * 1e3
        waves = int((bound_ns - wave.time_ns) // wave.exit_ns) if flag else int(bound_ns // wave.time_ns)
        if waves >= 1:
            return waves * wave.blocks
        if not self.below_wave or wave.block_ns is None or flag:
            return wave.blocks
        growth = (wave.time_ns - wave.block_ns) / wave.blocks  # for each further block
        spare = bound_ns - wave.block_ns
        return max(1, min(wave.blocks, int(spare / growth) if growth > 0 else wave.blocks)) if spare > 0 else 1

    def parts(self, total: int, wave: Wave, flag: bool = False, first: int = 0) -> tuple[Part, ...]:
        """The slices of a launch of `total` blocks: as few as keep the bound, and as equal as whole waves allow."""
        most = self.blocks(wave, flag)
        pieces = -(-total // most)
        unit = wave.blocks if most >= wave.blocks else 1
        each = -(-total // (pieces * unit)) * unit if pieces else 0
        return tuple((first + at, min(each, total - at)) for at in range(0, total, each)) if total else ()
