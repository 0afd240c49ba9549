"""The recording of a backend during a trace: blocks, launches, and the segment of each launch."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.records import Records


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
    """The blocks and launches that a backend recorded."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    pieces: list[TracedPiece]
    dropped: int = 0
    unfinished: int = 0
