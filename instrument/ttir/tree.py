"""The op tree of a TTIR module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from paellapy.instrument.ttir.locations import Locations
from paellapy.instrument.ttir.types import Type


@dataclass(slots=True)
class Block:
    label: str
    args: list[str]
    ops: list[Op] = field(default_factory=list)


Region = list[Block]


@dataclass(slots=True)
class Op:
    """One operation. `body` is the text between name and types; `operands` are the values it reads, in order."""

    name: str
    results: list[str]
    operands: list[str]
    body: str
    in_types: list[Type]
    out_types: list[Type]
    attributes: dict[str, str]
    loc: str = "unknown"
    regions: list[Region] = field(default_factory=list)
    successors: list[tuple[str, list[str]]] = field(default_factory=list)
    bad_type: str = ""

    def integer(self, name: str, default: int | None = None) -> int:
        text = self.attributes.get(name)
        if text is None:
            if default is None:
                raise KeyError(f"{self.name} has no attribute {name}")
            return default
        return int(text.split(":")[0])

    def integers(self, name: str) -> tuple[int, ...]:
        """The integers of `array<i32: 1, 0>` or `[1, 0]`."""
        text = self.attributes.get(name, "")
        return tuple(int(x) for x in re.findall(r"-?\d+", re.sub(r"array<\w+:?|: *i\d+", "", text)))

    def flag(self, name: str) -> bool:
        return self.attributes.get(name, "false").startswith("true")

    @property
    def word(self) -> str:
        """The first bare word of the body: a comparison's predicate, an atomic's kind, an axis."""
        m = re.match(r"[\s(]*([A-Za-z_]\w*)", self.body)
        return m[1] if m else ""


@dataclass(slots=True)
class Func:
    name: str
    args: list[tuple[str, Type]]
    region: Region
    public: bool
    loc: str = "unknown"


@dataclass(slots=True)
class Module:
    funcs: dict[str, Func]
    locations: Locations

    @property
    def entry(self) -> Func:
        public = [f for f in self.funcs.values() if f.public]
        return (public or list(self.funcs.values()))[0]


def walk(region: Region) -> Iterator[Op]:
    """All ops of a region, including nested ones."""
    for block in region:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from walk(inner)
