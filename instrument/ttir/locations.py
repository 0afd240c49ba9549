"""MLIR locations: `#loc12 = loc("kernel.py":43:11)` and the nested forms, resolved to source lines on demand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paellapy.instrument.ttir.syntax import closing

_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):\d+(?: to .*)?$')
_NAMED = re.compile(r'^"(?:[^"\\]|\\.)*"\((.*)\)$', re.S)
_LIBRARY = re.compile(r"[/\\]triton[/\\](language|runtime|compiler|experimental)[/\\]")


@dataclass(slots=True)
class Locations:
    """The `#loc` table of one module."""

    table: dict[str, str] = field(default_factory=dict)

    def frames(self, loc: str) -> list[str]:
        """Call stack of a location, innermost first, as `file:line` strings."""
        for _ in range(64):  # MLIR cannot print a cycle, but the text may come from elsewhere
            loc = loc.strip()
            if loc.startswith("#"):
                loc = self.table.get(loc, "unknown")
                continue
            if m := _FILE.match(loc):
                return [f"{m[1]}:{m[2]}"]
            if loc.startswith("callsite("):
                body = loc[len("callsite(") : closing(loc, len("callsite(")) - 1]
                callee, _, caller = body.rpartition(" at ")
                return self.frames(callee) + self.frames(caller)
            if loc.startswith("fused"):
                first = loc[loc.find("[") + 1 :].split(",")[0].rstrip("] ")
                loc = first
                continue
            if m := _NAMED.match(loc):
                loc = m[1]
                continue
            return []
        return []

    def line(self, loc: str) -> str:
        """The user's source line: the innermost frame outside Triton's own library, with its callers."""
        frames = self.frames(loc)
        own = [f for f in frames if not _LIBRARY.search(f)] or frames
        unique = list(dict.fromkeys(own))
        return " called from ".join(unique) if unique else "unknown line"
