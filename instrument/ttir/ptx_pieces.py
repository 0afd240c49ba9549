"""Pieces of PTX written by hand: their instructions, and registers read and written as numbers of a type.

A register is an array of bits; each instruction interprets it as the type in its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.types import ELEMENTS, Array, Element

Function = Callable[..., Any]
MODES = {"rn": "rn", "rz": "rz", "rm": "rd", "rp": "ru", "rni": "rn", "rzi": "rz", "rmi": "rd", "rpi": "ru"}
_FLOATS = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}
_TOKEN = re.compile(r"\{[^{}]*\}|[^,]+")
_TYPE = re.compile(r"(?:(?:[subf]|bf|tf)\d+|e4m3|e5m2)(?:x2)?|pred")


class UnknownPtx(Exception):
    """An instruction that cannot be evaluated here; the message is the instruction."""


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # "p", "!p" or none

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(m for m in self.modifiers if _TYPE.fullmatch(m))

    @property
    def mode(self) -> str:
        """The direction of rounding; "" if none is given."""
        return next((MODES[m] for m in self.modifiers if m in MODES), "")

    def unknown(self) -> UnknownPtx:
        return UnknownPtx(".".join((self.name, *self.modifiers)))

    def allow(self, *modifiers: str | Set[str]) -> None:
        """Refuses the instruction if it has a modifier, other than a type, that is not among these."""
        known: set[str] = set()
        known.update(*({m} if isinstance(m, str) else m for m in modifiers))
        if not set(self.modifiers) - set(self.types) <= known:
            raise self.unknown()


def parse(text: str) -> list[Instruction]:
    """The instructions of a piece of PTX, without declarations, comments and outer braces."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).replace("\\n", " ").replace("\\t", " ")
    found = []
    for line in text.split(";"):
        line = line.strip()
        while line[:1] in ("{", "}") and not re.match(r"\{[^{}]*\}\s*,", line):
            line = line[1:].strip()
        if not line or line.startswith(".reg"):
            continue
        m = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([\w.]+)(?:\s+(.*))?", line, re.S)
        if m is None:
            raise UnknownPtx(line)
        name, *modifiers = m[3].split(".")
        operands = tuple(t.strip() for t in _TOKEN.findall(m[4] or ""))
        found.append(Instruction(name, tuple(modifiers), operands, (m[1] + m[2]) if m[2] else ""))
    return found


def element_of(kind: str) -> Element | None:
    """The element type of a PTX type of floats; None for other types."""
    return ELEMENTS.get(_FLOATS.get(kind, ""))


def read(bits: Array, kind: str) -> Any:
    """A register as numbers of a PTX type."""
    element = element_of(kind)
    if element is not None:
        return decode(resized(bits, element.size).view(element.storage), element)
    size = int(kind[1:]) // 8
    return resized(bits, size).view(f"{'i' if kind[0] == 's' else 'u'}{size}")


def write(value: Any, kind: str) -> Array:
    """Numbers as a register of a PTX type."""
    element = element_of(kind)
    if element is not None:
        raw: Array = np.ascontiguousarray(encode(np.asarray(value, element.compute), element))
        return raw.view(f"u{element.size}")
    size = int(kind[1:]) // 8
    whole: Array = np.ascontiguousarray(value)
    return whole.astype(f"{whole.dtype.kind}{size}").view(f"u{size}") if whole.dtype.kind in "iu" else whole


def resized(bits: Array, size: int) -> Array:
    return bits if bits.dtype.itemsize == size else bits.astype(f"u{size}")


def halves(fn: Function, target: str, source: str) -> Function:
    """An instruction on the two numbers in each register (`f16x2`, `e4m3x2`)."""

    def half(bits: Array, kind: str, shift: int) -> Array:
        size = _size(kind)
        word = resized(bits, 2 * size)
        part: Array = (word >> word.dtype.type(shift * 8 * size)).astype(f"u{size}")
        return part

    def run(*words: Array) -> Array:
        low, high = (write(fn(*(read(half(w, source, k), source) for w in words)), target) for k in (0, 1))
        return joined(low, high)

    return run


def _size(kind: str) -> int:
    element = element_of(kind)
    return element.size if element else int(kind[1:]) // 8


def joined(low: Array, high: Array) -> Array:
    """Two numbers in one register."""
    size = low.dtype.itemsize
    wide = np.dtype(f"u{2 * size}")
    both: Array = low.astype(wide) | high.astype(wide) << wide.type(8 * size)
    return both
