"""Tapes of elementwise kernels without their masked parts: every tile becomes the slice of memory that its mask leaves.

If all loads and stores are cut at the same element, and every operation in between depends only on the same element,
the elements behind the cut are never stored. So loads are views of the arguments, the last call writes into them, and
neither fills nor copies remain: `offset < n` costs no more than no mask.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode
from paellapy.instrument.ttir.elementwise import is_elementwise
from paellapy.instrument.ttir.plans import StaticLoad, ViewStore
from paellapy.instrument.ttir.prefixes import PrefixRead, PrefixStore
from paellapy.instrument.ttir.tape import Entry, Ref
from paellapy.instrument.ttir.types import Array


def shorten(entries: list[Entry]) -> list[Entry] | None:
    """The entries over slices, or None if they do not all have this form."""
    stores = [entry.fn for entry in entries if type(entry.fn) is PrefixStore]
    if not stores:
        return None
    shape, count = stores[0].shape, stores[0].count
    short: list[Entry] = []
    wanted: set[int] = set()
    for entry in reversed(entries):
        if entry.pure and entry.id not in wanted:
            continue
        wanted.update(each.id for each in entry.args if type(each) is Ref)
        made = _short(entry, shape, count)
        if made is None:
            return None
        short.append(made)
    return short[::-1]


def _short(entry: Entry, shape: tuple[int, ...], count: int) -> Entry | None:
    fn = entry.fn
    if type(fn) is StaticLoad:
        read = fn.read
        if type(read) is not PrefixRead or fn.rows is not None or (read.shape, read.count) != (shape, count):
            return None
        return replace(entry, fn=_Slice(read, fn.fragile), shape=(count,))
    args: list[Any] = []
    for each in entry.args:
        own = _operand(each, shape, count)
        if own is None:
            return None
        args.append(own)
    if type(fn) is PrefixStore:
        if (fn.shape, fn.count) != (shape, count):
            return None
        return replace(entry, fn=ViewStore((count,), fn.element, fn.start, (1,)), args=(entry.args[0], args[1]))
    if entry.shape != shape or not is_elementwise(fn):
        return None
    return replace(entry, args=tuple(args), shape=(count,))


def _operand(value: Any, shape: tuple[int, ...], count: int) -> Any:
    """A constant cut to the slice; None if it is an array that would have to grow first."""
    if type(value) is not np.ndarray:
        return value
    if value.size == 1:
        return value.reshape(-1)[0]
    return value.reshape(-1)[:count].copy() if value.size == math.prod(shape) else None


class _Slice:
    """A view of memory, or a copy if the memory may change before it is used."""

    __slots__ = ("_copy", "_element", "_where")

    def __init__(self, read: PrefixRead, fragile: bool) -> None:
        self._where, self._element = slice(read.start, read.start + read.count), read.element
        self._copy = fragile and not read.element.narrow

    def __call__(self, flat: Array) -> Any:
        part = flat[self._where]
        return part.copy() if self._copy else decode(part, self._element)


