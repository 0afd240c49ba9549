"""The tape: the part of a run that remains once everything that does not depend on memory has been computed.

A tape is compiled to one straight Python function of calls; values are dropped after their last use, and a value that
dies at an elementwise call gives its memory to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.ttir import memory
from paellapy.instrument.ttir.memory import Site
from paellapy.instrument.ttir.plans import StaticLoad
from paellapy.instrument.ttir.types import Array, Element
from paellapy.instrument.ttir.values import Sym

MAX_ENTRIES = 20_000
MAX_BYTES = 256 << 20
MAX_KEPT = 256 << 20


@dataclass(slots=True, frozen=True)
class BufferRef:
    """An argument's flat memory, viewed as `element`."""

    index: int
    element: Element


@dataclass(slots=True, frozen=True)
class Ref:
    """An earlier entry's result."""

    id: int


@dataclass(slots=True)
class Entry:
    id: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    pure: bool
    shape: tuple[int, ...] | None = None  # shape of the result, if it is one array
    dtype: Any = None
    owned: bool = False  # the result is fresh memory that no other value uses


@dataclass(slots=True)
class Tape:
    entries: list[Entry] = field(default_factory=list)
    next_id: int = 0
    by_id: dict[int, Entry] = field(default_factory=dict)
    bytes: int = 0  # held by constants and plans
    kept: int = 0  # bytes of addresses kept until products are joined
    full: bool = False  # too large to be worth keeping
    ragged: bool = False  # some load is masked only in the last block

    def _refs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(Ref(a.id) if type(a) is Sym else a for a in args)

    def _add(self, fn: Callable[..., Any], args: Sequence[Any], value: Any, pure: bool) -> Sym:
        self.next_id += 1
        if self.full:
            return Sym(self.next_id, value)
        entry = Entry(self.next_id, fn, self._refs(args), pure)
        if type(fn) is not np.ufunc and pure:
            self._note_views(args, value)
        if type(value) is np.ndarray:
            entry.shape, entry.dtype = value.shape, value.dtype
            entry.owned = type(fn) is np.ufunc and value.flags.c_contiguous
        self.entries.append(entry)
        self.bytes += _constant_bytes(entry)
        if self.bytes > MAX_BYTES or len(self.entries) > MAX_ENTRIES:
            self.full = True
            self.entries.clear()
        self.by_id[entry.id] = entry
        return Sym(self.next_id, value)

    def _note_views(self, args: Sequence[Any], value: Any) -> None:
        """Marks values that are seen through a view, which therefore cannot give their memory away."""
        results = [v for v in (value if type(value) is tuple else (value,)) if type(v) is np.ndarray]
        for a in args:
            if type(a) is Sym and type(a.value) is np.ndarray and any(np.may_share_memory(a.value, r) for r in results):
                self.by_id[a.id].owned = False

    def pure(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Sym:
        return self._add(fn, args, value, True)

    def pure_many(self, fn: Callable[..., Any], args: Sequence[Any], values: tuple[Any, ...]) -> tuple[Sym, ...]:
        whole = self._add(fn, args, values, True)
        return tuple(self._add(_item, (whole, i), value, True) for i, value in enumerate(values))

    def load(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Sym:
        if isinstance(fn, StaticLoad):
            self.ragged |= fn.ragged
        if isinstance(fn, StaticLoad) and fn.offset is not None:
            if self.kept + fn.offset.nbytes > MAX_KEPT:
                fn.offset = fn.mask = None
            else:
                self.kept += fn.offset.nbytes
        return self._add(fn, args, value, True)

    def effect(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Any:
        sym = self._add(fn, args, value, False)
        return None if value is None else sym

    def store(self, plan: Callable[[Array, Any], None], ref: BufferRef, value: Any) -> None:
        self._add(plan, (ref, value), None, False)

    def count(self, field: int, mask: Sym, size: int, site: Site) -> None:
        self._add(memory.count_bytes, (COST, field, mask, size, site), None, False)

    def count_touched(self, count: Callable[..., None], args: Sequence[Any]) -> None:
        self._add(count, (COST, *args), None, False)


class _CostTable:
    """Stands for the cost table of the replay."""


COST = _CostTable()
Replay = Callable[[Sequence[Array | None], Array], None]


def _item(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


def _constant_bytes(entry: Entry) -> int:
    fn = entry.fn.read if isinstance(entry.fn, StaticLoad) else entry.fn
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or ()]
    return sum(x.nbytes for x in (*entry.args, *cells) if type(x) is np.ndarray)
