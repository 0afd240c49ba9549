"""Accesses whose addresses and masks are known before the data: computed once, replayed at the speed of a copy.

In order of preference: a strided view of the argument (no copy at all), a slice of it where a mask cuts off the end,
runs of consecutive elements copied by one compiled loop, and a gather or scatter over an index array. Bounds are
checked once, here: a plan is for one array size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir import memory, native
from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.memory import Site
from paellapy.instrument.ttir.prefixes import PrefixRead, PrefixStore, prefix
from paellapy.instrument.ttir.types import Array, Element
from paellapy.instrument.ttir.values import is_array

MIN_RUN = 4  # elements per run below which an index array is as fast
MAX_JOINED = 1 << 20  # most addresses of one load that are kept for joining it with others

Shape = tuple[int, ...]
Runs = tuple[Array, Array, Array, Shape]


def reinterpret(flat: Array, element: Element) -> Array:
    """Flat memory as another element type; a remainder that does not fill an element is not accessible."""
    size = element.size
    if flat.itemsize < size:
        flat = flat[: flat.size * flat.itemsize // size * size // flat.itemsize]
    return flat.view(element.storage)


def _affine(offset: Array) -> tuple[int, tuple[int, ...]] | None:
    """start and strides with offset[i] == start + sum(strides * i), or None."""
    start = int(offset[(0,) * offset.ndim])
    strides = []
    expected: Any = start
    for axis, n in enumerate(offset.shape):
        step = int(offset[tuple(1 if i == axis else 0 for i in range(offset.ndim))]) - start if n > 1 else 0
        strides.append(step)
        shape = [1] * offset.ndim
        shape[axis] = n
        expected = expected + np.arange(0, step * n, step).reshape(shape) if step else expected
    return (start, tuple(strides)) if bool((offset == expected).all()) else None


def _collapse(offset: Array, mask: Array | None) -> tuple[Array, Array | None]:
    """Drops axes along which neither address nor mask changes: all blocks that load the same tile share one."""
    for axis in range(offset.ndim):
        first = (slice(None),) * axis + (slice(0, 1),)
        if offset.shape[axis] > 1 and bool((offset == offset[first]).all()):
            if mask is None:
                offset = offset[first]
            elif bool((mask == mask[first]).all()):
                offset, mask = offset[first], mask[first]
    return offset, mask


def _runs(offset: Array, mask: Array | None) -> Runs | None:
    """(memory start, tile start, length) of every stretch of consecutive elements, after moving the best axis last."""
    best, order = -1.0, tuple(range(offset.ndim))
    for axis in range(offset.ndim):
        if offset.shape[axis] > 1:
            share = float(np.mean(np.diff(offset[..., :64, :] if offset.ndim > 2 else offset, axis=axis) == 1))
            if share > best + 1e-9 or (share >= best and axis == offset.ndim - 1):
                best, order = share, (*(a for a in range(offset.ndim) if a != axis), axis)
    flat = offset.transpose(order).ravel()
    if not flat.size:
        return None
    joined = np.empty(flat.size, np.bool_)  # element i continues the run of element i - 1
    joined[0] = False
    np.equal(flat[1:], flat[:-1] + 1, out=joined[1:])
    if mask is not None:
        flags = mask.transpose(order).ravel()
        joined[1:] &= flags[:-1]
        starts = np.flatnonzero(flags & ~joined)
        ends = np.flatnonzero(flags & ~np.append(joined[1:] & flags[1:], False)) + 1
    else:
        starts = np.flatnonzero(~joined)
        ends = np.append(starts[1:], flat.size)
    if not len(starts) or (ends - starts).sum() < MIN_RUN * len(starts):
        return None
    return flat[starts].astype(np.int64), starts.astype(np.int64), (ends - starts).astype(np.int64), order


@dataclass(slots=True)
class StaticLoad:
    """A load with known addresses: distinct tiles are read once and passed to the blocks that want them."""

    read: Callable[[Array], Any]
    rows: Array | None  # index of the tile for each block; None: in order
    element: Element
    fill: Any
    fragile: bool
    offset: Array | None = None  # kept for products (see products.py) until the tape is compiled
    mask: Array | None = None
    ragged: bool = False  # masked only in the last block

    def __call__(self, flat: Array) -> Any:
        tiles = self.read(flat)
        return tiles if self.rows is None else tiles[self.rows]


def load_plan(offset: Any, mask: Any, other: Any, element: Element, size: int, site: Site, fragile: bool) -> StaticLoad:
    """A plan for loading at these addresses. `fragile`: memory may change before the value is used."""
    rank = 1 + len(site.shape)
    offset = offset if is_array(offset) else np.asarray(offset).reshape((1,) * rank)
    if mask is not None and not is_array(mask):
        mask = None if mask else np.zeros((1,) * rank, np.bool_)
    fill = element.compute.type(0) if other is None else other
    if mask is not None:
        offset, mask = np.broadcast_arrays(offset, mask)
    memory.check(offset, mask, size, site)
    if mask is not None and bool(mask.all()):
        mask = None
    if mask is not None and not mask.any():
        return StaticLoad(lambda flat: fill, None, element, fill, fragile)
    ragged = mask is not None and len(mask) > 1 and bool(mask[:-1].all())
    rows = None
    if not _varies(fill):
        fill = np.asarray(fill, element.compute).reshape(-1)[0]
        offset, mask = _collapse(offset, mask)
        offset, mask, rows = _distinct(offset, mask)
    keep = fragile and not element.narrow
    load = StaticLoad(reader(offset, mask, fill, element, keep), rows, element, fill, fragile, ragged=ragged)
    if not fragile and rank == 3 and offset.size <= MAX_JOINED and not _varies(fill):
        load.offset, load.mask = offset, mask
    return load


def _varies(fill: Any) -> bool:
    return is_array(fill) and fill.ndim > 0 and max(fill.shape) > 1


def _distinct(offset: Array, mask: Array | None) -> tuple[Array, Array | None, Array | None]:
    """The distinct tiles among the blocks' tiles, and the index of each block's tile; unchanged where few are shared.
    """
    nb = offset.shape[0]
    if nb < 4 or offset.ndim < 2:
        return offset, mask, None
    flat = offset.reshape(nb, -1)
    weights = np.random.default_rng(1).integers(1, 2**62, flat.shape[1])
    # wraps around; equal tiles have equal digests, and tiles with equal digests are compared below
    digest: Array = flat @ weights
    if mask is not None:
        digest = digest + mask.reshape(nb, -1) @ weights[::-1]
    _, first, rows = np.unique(digest, return_index=True, return_inverse=True)
    if 2 * len(first) > nb:
        return offset, mask, None
    order = np.argsort(first)  # tiles in the order in which blocks first need them
    first, rows = first[order], np.argsort(order)[rows]
    if not bool((offset[first[rows]] == offset).all()):
        return offset, mask, None
    if mask is not None and not bool((mask[first[rows]] == mask).all()):
        return offset, mask, None
    return offset[first], None if mask is None else mask[first], rows


def reader(
    offset: Array, mask: Array | None, fill: Any, element: Element, copy: bool = False
) -> Callable[[Array], Any]:
    """A function from flat memory to the values at `offset`, `fill` where masked; `copy`: never a view of memory."""
    shape, storage = offset.shape, element.storage
    if mask is None and (affine := _affine(offset)) is not None:
        start, steps = affine
        start_bytes, strides = start * element.size, tuple(s * element.size for s in steps)

        def view(flat: Array) -> Any:
            window = np.ndarray(shape, storage, flat, start_bytes, strides)
            return window.copy() if copy else decode(window, element)

        return view
    if mask is not None and not _varies(fill) and (found := prefix(offset, mask)) is not None:
        return PrefixRead(shape, element, *found, fill)
    if (runs := _runs(offset, mask)) is not None:
        return _run_reader(runs, shape, mask, fill, element)
    if mask is None:
        index = np.ascontiguousarray(offset)
        return lambda flat: decode(flat.take(index), element)
    index = np.where(mask, offset, offset[mask][0])
    hidden = ~mask

    def masked(flat: Array) -> Any:
        value = decode(flat.take(index), element)
        np.copyto(value, fill, where=hidden)
        return value

    return masked if not _varies(fill) else lambda flat: np.where(mask, decode(flat.take(index), element), fill)


def _run_reader(runs: Runs, shape: Shape, mask: Array | None, fill: Any, element: Element) -> Callable[[Array], Any]:
    source, target, length, order = runs
    moved = tuple(shape[a] for a in order)
    back = tuple(int(i) for i in np.argsort(order))
    storage, bits = element.storage, element.bits
    varying = mask is not None and _varies(fill)
    raw_fill = None
    if mask is not None and not varying:
        raw_fill = encode(np.asarray(fill, element.compute), element).view(bits).ravel()[0]

    def load(flat: Array) -> Any:
        raw = np.empty(moved, bits)
        if raw_fill is not None:
            raw.fill(raw_fill)
        _copy_runs(flat.view(bits), raw.reshape(-1), source, target, length)
        value = decode(raw.view(storage), element).transpose(back)
        return np.where(mask, value, fill) if mask is not None and varying else value

    return load


def _copy_runs(source: Array, target: Array, source_start: Array, target_start: Array, length: Array) -> None:
    """Copies runs from an array that only this call uses; read-only or not, it is compiled once."""
    source.setflags(write=False)
    native.copy_runs(source, target, source_start, target_start, length)


def store_plan(offset: Any, mask: Any, element: Element, size: int, site: Site) -> Callable[[Array, Any], None]:
    """A function that stores a value into flat memory."""
    full = site.full_shape
    offset = np.broadcast_to(offset, full)
    mask = None if mask is None else np.broadcast_to(mask, full)
    memory.check(offset, mask, size, site)
    if mask is not None and bool(mask.all()):
        mask = None
    if mask is not None and not mask.any():
        return lambda flat, value: None
    if mask is None and (affine := _affine(offset)) is not None:
        start, steps = affine
        if all(step or n == 1 for step, n in zip(steps, full, strict=True)) and _disjoint(steps, full):
            return ViewStore(full, element, start, steps)
    if mask is not None and (found := prefix(offset, mask)) is not None:
        return PrefixStore(full, element, *found)
    if (runs := _runs(offset, mask)) is not None:
        source, target, length, order = runs

        def store(flat: Array, value: Any) -> None:
            raw = encode(np.ascontiguousarray(np.broadcast_to(value, full).transpose(order)), element)
            _copy_runs(raw.view(element.bits).reshape(-1), flat.view(element.bits), target, source, length)

        return store
    if mask is None:
        index = np.ascontiguousarray(offset)

        def scatter(flat: Array, value: Any) -> None:
            flat[index] = encode(np.broadcast_to(value, full), element)

        return scatter
    keep = np.flatnonzero(mask)
    where = offset.ravel()[keep]

    def masked(flat: Array, value: Any) -> None:
        flat[where] = encode(np.broadcast_to(value, full).reshape(-1)[keep], element)

    return masked


def _disjoint(steps: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether no two elements of a strided window share an address (a sufficient test)."""
    reach = 0
    for step, n in sorted((abs(s), n) for s, n in zip(steps, shape, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True


class ViewStore:
    """A store to a strided window; the tape may let the producing ufunc write straight into it."""

    def __init__(self, shape: tuple[int, ...], element: Element, start: int, steps: tuple[int, ...]) -> None:
        self.shape, self.element = shape, element
        self.start_bytes, self.strides = start * element.size, tuple(s * element.size for s in steps)

    def window(self, flat: Array) -> Array:
        return np.ndarray(self.shape, self.element.storage, flat, self.start_bytes, self.strides)

    def __call__(self, flat: Array, value: Any) -> None:
        self.window(flat)[...] = encode(value, self.element)
