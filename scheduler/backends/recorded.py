"""The recording of a backend during a trace: blocks, launches, and the segment of each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paellapy.instrument.records import WORK, Records
from paellapy.instrument.traces.ranges import TracedRanges


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A segment in a trace, with its launch ids; each replay may have ids of its own."""

    lane: int
    size: int
    segment: int
    launches: tuple[int, ...]
    replayed: bool  # whether every run of the lane has the same ids


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """The blocks and launches that a backend recorded; on a real GPU with their ranges and their work."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    pieces: list[TracedPiece]
    dropped: int = 0
    unfinished: int = 0
    ranges: TracedRanges = field(default_factory=TracedRanges)
    count_work: Callable[[], Records] = lambda: np.zeros(0, WORK)
