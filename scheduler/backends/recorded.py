"""What a backend recorded during a trace: blocks, launches, and which segment each launch belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.records import Records


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A segment as the trace sees it: launch ids, and, where each replay has ids of its own, nothing else."""

    lane: int
    size: int
    segment: int
    launches: tuple[int, ...]
    replayed: bool  # the same ids come again with every run of the lane


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """What a backend recorded."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    pieces: list[TracedPiece]
    dropped: int = 0
    unfinished: int = 0
