"""Markers of ranges in kernels: lines of PTX without effect, which the range pass turns into events.

A range is a named part of a kernel. Its begin and its end are marked with a `.pragma`, which all compilers preserve and
which assemblers ignore. Where the pass stores a record of events, it leaves a comment that says which (`Sites`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.records import RANGE_END

_TEXT = re.compile(r'\.pragma\s+\\?"paellapy (begin|end) (block|warp) ([^"\\]+)\\?"')
_NAME = re.compile(r"[\w .,:/+*()<>=-]{1,60}")
_SITE = re.compile(r"// paellapy record (\d+):([-+\d |]+)")


@dataclass(frozen=True, slots=True)
class Marker:
    """One begin or end. `per_warp`: recorded by every warp that passes, not only by the block's first."""

    begins: bool
    per_warp: bool
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(f"range name {self.name!r}: it must have 1 to 60 letters, digits and spaces")

    @property
    def ptx(self) -> str:
        kind, who = "begin" if self.begins else "end", "warp" if self.per_warp else "block"
        return f'.pragma "paellapy {kind} {who} {self.name}";'

    @classmethod
    def of(cls, text: str) -> Marker | None:
        """The marker in a line of PTX, also in MLIR's quoting."""
        found = _TEXT.search(text.replace("\\22", '"'))
        return cls(found[1] == "begin", found[2] == "warp", found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges of one kernel: names in order of first appearance, and whether warps record their own."""

    names: tuple[str, ...] = ()
    per_warp: bool = False

    @classmethod
    def in_text(cls, text: str) -> Ranges:
        """The ranges in a kernel's PTX or TTIR."""
        found = _TEXT.findall(text.replace("\\22", '"')) if "paellapy " in text else []
        return cls(tuple(dict.fromkeys(name for _, _, name in found)), any(who == "warp" for _, who, _ in found))

    def lanes(self, threads: int) -> int:
        """Lanes of events per block: one, or one for each of its warps."""
        return -(-threads // 32) if self.per_warp else 1


Moments = tuple[tuple[int, ...], ...]  # of one record: for each of its clocks the tags of the events


@dataclass(frozen=True, slots=True)
class Sites:
    """The places in a kernel's code that store a record, by number.

    >>> sites = Sites(((((0,), (0 | RANGE_END, 1))),))
    >>> sites.comment(0), Sites.in_text(sites.comment(0)) == sites
    ('// paellapy record 0: +0 | -0 +1', True)
    """

    moments: tuple[Moments, ...] = ()

    @classmethod
    def in_text(cls, text: str) -> Sites:
        """The sites in PTX after the passes."""
        found = {int(number): _moments(rest) for number, rest in _SITE.findall(text)}
        return cls(tuple(found[number] for number in range(len(found))))

    def comment(self, number: int) -> str:
        words = (" ".join(f"{'-' if tag & RANGE_END else '+'}{tag & ~RANGE_END}" for tag in tags)
                 for tags in self.moments[number])  # fmt: skip
        return f"// paellapy record {number}: {' | '.join(words)}"


def _moments(text: str) -> Moments:
    return tuple(
        tuple(int(word[1:]) | (RANGE_END if word[0] == "-" else 0) for word in moment.split())
        for moment in text.split("|")
    )
