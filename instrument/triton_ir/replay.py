"""Compiles a tape to one Python function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir.elementwise import is_elementwise
from paellapy.instrument.triton_ir.machine import COST, BufferRef, Entry, Ref, Replay
from paellapy.instrument.triton_ir.memory import PrefixRead, PrefixStore, StaticLoad, ViewStore, reader, reinterpret
from paellapy.instrument.triton_ir.reduction import Dot, accumulate
from paellapy.instrument.triton_ir.shapes import Transpose
from paellapy.instrument.triton_ir.types import Array, Element, decode

# --- joins products over tiles with known addresses to one large product ----------------------------------------------
# A kernel's loop `acc = dot(a, b, acc)` over tiles of two matrices is unrolled on the tape. Where all tiles are loads
# from memory that does not change, their addresses are joined along k; and where the blocks combine every distinct row
# of tiles with every distinct column, the joined tiles are views of the matrices themselves, or copies with padded
# edges, and one call to BLAS replaces them all.

MAX_JOINED = 1 << 23  # most addresses of one side
WASTE = 2  # largest ratio of computed to needed products, for the sake of one large product


@dataclass(slots=True)
class Side:
    """One operand over the whole chain: joined addresses (tiles, rows, columns), and the index of each block's tile."""

    ref: BufferRef
    load: StaticLoad
    offset: Array
    mask: Array | None

    @property
    def tiles(self) -> int:
        return int(self.offset.shape[0])

    def read(self, order: tuple[int, int, int], shape: tuple[int, ...]) -> Callable[[Array], Any]:
        """A function that reads all tiles, axes in `order`, as one array of `shape`."""
        offset = self.offset.transpose(order).reshape(shape)
        mask = None if self.mask is None else self.mask.transpose(order).reshape(shape)
        return reader(offset, mask, self.load.fill, self.load.element)


def join_products(entries: list[Entry]) -> list[Entry]:
    """Replaces chains of dots by large products; unneeded entries are removed with the tape's dead code."""
    by_id = {entry.id: entry for entry in entries}
    uses = Counter(a.id for entry in entries for a in entry.args if type(a) is Ref)
    inner: set[int] = set()  # dots that only feed the next one of their chain
    chains: dict[int, list[Entry]] = {}
    for entry in entries:
        if type(entry.fn) is not Dot or entry.fn.integer:
            continue
        c = entry.args[2]
        before = chains.get(c.id) if type(c) is Ref and uses[c.id] == 1 else None
        if before is not None and before[-1].fn == entry.fn:
            inner.add(before[-1].id)
            chains[entry.id] = [*before, entry]
        else:
            chains[entry.id] = [entry]
    joined = {}
    for last, chain in chains.items():
        if last not in inner and (replacement := _product(chain, by_id)) is not None:
            joined[last] = replacement
    return [joined.get(entry.id, entry) for entry in entries]


def _product(chain: list[Entry], by_id: dict[int, Entry]) -> Entry | None:
    a = _side([e.args[0] for e in chain], by_id, 2)
    b = _side([e.args[1] for e in chain], by_id, 1)
    last = chain[-1]
    dot = last.fn
    assert isinstance(dot, Dot)
    if a is None or b is None or last.shape is None:
        return None
    nb, (m, _), (_, n) = last.shape[0], dot.a_shape, dot.b_shape
    k = a.offset.shape[2]
    if a.offset.shape[1] != m or b.offset.shape[2] != n or b.offset.shape[1] != k:
        return None
    fn = _crossed(a, b, nb, m, n, k) if a.tiles * b.tiles <= WASTE * nb else _batched(a, b)
    return Entry(last.id, fn, (a.ref, b.ref, chain[0].args[2]), True, last.shape, last.dtype)


@dataclass(slots=True)
class Tiles:
    """One operand of one dot: a load with its addresses, transposed as the dot reads it."""

    ref: BufferRef
    load: StaticLoad
    offset: Array
    mask: Array | None


def _tiles(operand: Any, by_id: dict[int, Entry]) -> Tiles | None:
    """The tiles that an operand loads, if it is a load whose addresses were kept, or its transpose."""
    entry = by_id.get(operand.id) if type(operand) is Ref else None
    if entry is None:
        return None
    if isinstance(entry.fn, Transpose):
        tiles = _tiles(entry.args[0], by_id)
        if tiles is None:
            return None
        turn = entry.fn
        return Tiles(tiles.ref, tiles.load, turn(tiles.offset), None if tiles.mask is None else turn(tiles.mask))
    if not isinstance(entry.fn, StaticLoad) or entry.fn.offset is None:
        return None
    return Tiles(entry.args[0], entry.fn, entry.fn.offset, entry.fn.mask)


def _side(operands: list[Any], by_id: dict[int, Entry], axis: int) -> Side | None:
    """Joins the loads of one operand along `axis`, if they have the same form."""
    parts = [_tiles(operand, by_id) for operand in operands]
    tiles = [t for t in parts if t is not None]
    if len(tiles) < len(parts):
        return None
    first = tiles[0]
    for t in tiles:
        if t.ref != first.ref or t.load.fill != first.load.fill or not _same(t.load.rows, first.load.rows):
            return None
    offsets = [t.offset for t in tiles]
    if sum(o.size for o in offsets) > MAX_JOINED or len({(o.shape[0], o.shape[3 - axis]) for o in offsets}) > 1:
        return None
    mask = None
    if any(t.mask is not None for t in tiles):
        mask = np.concatenate([np.ones(t.offset.shape, np.bool_) if t.mask is None else t.mask for t in tiles], axis)
    return Side(first.ref, first.load, np.concatenate(offsets, axis), mask)


def _same(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _crossed(a: Side, b: Side, nb: int, m: int, n: int, k: int) -> Callable[..., Any]:
    """All rows of tiles times all columns of tiles, then each block's own tile."""
    read_a, read_b = a.read((0, 1, 2), (a.tiles * m, k)), b.read((1, 0, 2), (k, b.tiles * n))
    rows = _index(a, nb)
    columns = _index(b, nb)
    shape = (a.tiles, m, b.tiles, n)

    def product(flat_a: Array, flat_b: Array, c: Any) -> Any:
        x, y = _matrix(read_a(flat_a), (shape[0] * m, k)), _matrix(read_b(flat_b), (k, shape[2] * n))
        tiles = (x @ y).reshape(shape).transpose(0, 2, 1, 3)
        return accumulate(tiles[rows, columns], c)

    return product


def _index(side: Side, nb: int) -> Array:
    if side.load.rows is not None:
        return side.load.rows
    return np.zeros(nb, np.int64) if side.tiles == 1 else np.arange(nb)


def _matrix(x: Any, shape: tuple[int, int]) -> Any:
    """The operand as a matrix; a load that is masked everywhere consists of its fill alone."""
    return x if type(x) is np.ndarray and x.shape == shape else np.broadcast_to(x, shape)


def _batched(a: Side, b: Side) -> Callable[..., Any]:
    """One product per block, over the whole of k."""
    read_a, read_b = a.read((0, 1, 2), a.offset.shape), b.read((0, 1, 2), b.offset.shape)

    def product(flat_a: Array, flat_b: Array, c: Any) -> Any:
        x, y = np.broadcast_to(read_a(flat_a), a_shape), np.broadcast_to(read_b(flat_b), b_shape)
        x = x if rows_a is None else x[rows_a]
        y = y if rows_b is None else y[rows_b]
        return accumulate(x @ y, c)

    a_shape, b_shape, rows_a, rows_b = a.offset.shape, b.offset.shape, a.load.rows, b.load.rows
    return product


def compile_tape(entries: list[Entry], declared: Sequence[Element | None]) -> Replay:
    """The function `replay(flat arguments, cost table)`. Unneeded entries are left out."""
    entries = join_products(entries)
    for entry in entries:
        if isinstance(entry.fn, StaticLoad):
            entry.fn.offset = entry.fn.mask = None
    live: set[int] = set()
    kept: list[tuple[Entry, list[int]]] = []  # with the values that are read there for the last time
    for entry in reversed(entries):
        if entry.pure and entry.id not in live:
            continue
        last = list(dict.fromkeys(a.id for a in entry.args if type(a) is Ref and a.id not in live))
        live.update(last)
        kept.append((entry, last))
    kept.reverse()
    return _Writer(declared, live).write(kept)


class _Writer:
    def __init__(self, declared: Sequence[Element | None], live: set[int]) -> None:
        self.declared, self.live = declared, live
        self.scope: dict[str, Any] = {"reinterpret": reinterpret}
        self.names: dict[int, str] = {}
        self.prologue: dict[str, str] = {}

    def constant(self, value: Any) -> str:
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"k{len(self.scope)}"
            self.scope[name] = value
        return name

    def buffer(self, ref: BufferRef) -> str:
        own = self.declared[ref.index]
        if own is not None and own.storage == ref.element.storage:
            name = f"b{ref.index}"
            self.prologue[name] = f"flat[{ref.index}]"
        else:
            name = f"b{ref.index}_{ref.element.name}"
            self.prologue[name] = f"reinterpret(flat[{ref.index}], {self.constant(ref.element)})"
        return name

    def argument(self, value: Any) -> str:
        if type(value) is Ref:
            return f"t{value.id}"
        if type(value) is BufferRef:
            return self.buffer(value)
        return "cost" if value is COST else self.constant(value)

    def write(self, kept: list[tuple[Entry, list[int]]]) -> Replay:
        body: list[str] = []
        entries = {entry.id: entry for entry, _ in kept}
        skip: set[int] = set()
        for position, (entry, last) in enumerate(kept):
            if entry.id in skip:
                continue
            args = ", ".join(self.argument(a) for a in entry.args)
            target = self.store_target(kept, position)
            if target is not None:
                store = kept[position + 1][0]
                args += f", out={self.constant(target)}.window({self.argument(store.args[0])})"
                skip.add(store.id)
                body.append(f"{self.constant(entry.fn)}({args})")
            else:
                if (donor := self.donor(entry, last, entries)) is not None:
                    args += f", out=t{donor}"
                result = f"t{entry.id} = " if entry.id in self.live else ""
                body.append(f"{result}{self.constant(entry.fn)}({args})")
            dead = [f"t{i}" for i in last]
            if dead:
                body.append("del " + ", ".join(dead))
        lines = [f"{name} = {text}" for name, text in self.prologue.items()] + body + ["pass"]
        source = "def replay(flat, cost):\n" + "".join(f" {line}\n" for line in lines)
        exec(compile(source, "<ttir tape>", "exec"), self.scope)
        return self.scope["replay"]  # type: ignore[no-any-return]

    @staticmethod
    def donor(entry: Entry, last: list[int], entries: dict[int, Entry]) -> int | None:
        """A dying operand whose memory can hold the result of an elementwise call."""
        if type(entry.fn) is not np.ufunc or not entry.owned:
            return None
        for i in last:
            source = entries.get(i)
            if source is not None and source.owned and source.shape == entry.shape and source.dtype == entry.dtype:
                return i
        return None

    @staticmethod
    def store_target(kept: list[tuple[Entry, list[int]]], position: int) -> ViewStore | None:
        """The window of the store that follows directly and is the only reader, if the ufunc can write into it."""
        entry = kept[position][0]
        if type(entry.fn) is not np.ufunc or position + 1 == len(kept):
            return None
        store, last = kept[position + 1]
        plan = store.fn
        if type(plan) is not ViewStore or plan.element.narrow or entry.id not in last or store.args[1] != Ref(entry.id):
            return None
        return plan if entry.shape == plan.shape and entry.dtype == plan.element.storage else None


# Tapes of elementwise kernels without their masked parts: every tile becomes the slice of memory that its mask leaves.
#
# If all loads and stores are cut at the same element, and every operation in between depends only on the same element,
# the elements behind the cut are never stored. So loads are views of the arguments, the last call writes into them, and
# neither fills nor copies remain: `offset < n` costs no more than no mask.


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
