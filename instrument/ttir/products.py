"""Joins products over tiles with known addresses to one large product.

A kernel's loop `acc = dot(a, b, acc)` over tiles of two matrices is unrolled on the tape. Where all tiles are loads
from memory that does not change, their addresses are joined along k; and where the blocks combine every distinct row of
tiles with every distinct column, the joined tiles are views of the matrices themselves, or copies with padded edges,
and one call to BLAS replaces them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir.plans import StaticLoad, reader
from paellapy.instrument.ttir.reduction import Dot, accumulate
from paellapy.instrument.ttir.shapes import Transpose
from paellapy.instrument.ttir.tape import BufferRef, Entry, Ref
from paellapy.instrument.ttir.types import Array

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
