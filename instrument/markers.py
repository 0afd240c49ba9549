"""Markers of ranges in kernels: a line of PTX that does nothing, which the range pass turns into events.

A range is a named part of a kernel. Its begin and its end are marked with a `.pragma`, which survives every compiler
on the way and which assemblers ignore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paellapy.instrument.errors import ArgumentError

_TEXT = re.compile(r'\.pragma\s+\\?"paellapy (begin|end) (block|warp) ([^"\\]+)\\?"')
_NAME = re.compile(r"[\w .,:/+*()<>=-]{1,60}")
MOST_NAMES = 1 << 15


@dataclass(frozen=True, slots=True)
class Marker:
    """One begin or end. `per_warp`: noted by every warp that passes, not only by the block's first."""

    begins: bool
    per_warp: bool
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(f"a range has a name of 1 to 60 letters, digits and spaces, not {self.name!r}")

    @property
    def ptx(self) -> str:
        kind, who = "begin" if self.begins else "end", "warp" if self.per_warp else "block"
        return f'.pragma "paellapy {kind} {who} {self.name}";'

    @classmethod
    def of(cls, text: str) -> Marker | None:
        """The marker in a line of PTX, also as MLIR quotes it."""
        found = _TEXT.search(text.replace("\\22", '"'))
        return cls(found[1] == "begin", found[2] == "warp", found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges of one kernel: names in the order in which they first appear, and whether warps note theirs."""

    names: tuple[str, ...] = ()
    per_warp: bool = False

    @classmethod
    def in_text(cls, text: str) -> Ranges:
        """Of a kernel's PTX or TTIR."""
        found = _TEXT.findall(text.replace("\\22", '"')) if "paellapy " in text else []
        return cls(tuple(dict.fromkeys(name for _, _, name in found)), any(who == "warp" for _, who, _ in found))

    def lanes(self, threads: int) -> int:
        """Places for events of a block: one, or one for each of its warps."""
        return -(-threads // 32) if self.per_warp else 1
