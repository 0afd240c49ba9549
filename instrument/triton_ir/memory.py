"""Loads, stores and atomics on flat memory, all checked: an address out of bounds raises, and never crashes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from paellapy.instrument.errors import HintWarning, LaunchError, OutOfBoundsError, ViewWarning
from paellapy.instrument.triton_ir import native
from paellapy.instrument.triton_ir.types import Array, Element, Shape, decode, encode, full, is_array


@dataclass(slots=True, frozen=True)
class Site:
    """One access of one op by the active blocks: the data for an error message, and the full shape of the access."""

    kernel: str
    line: str
    op: str
    argument: str
    grid: tuple[int, int, int]
    ids: Array  # linear ids of the active blocks
    rows: Array  # their rows in the cost table of the run
    shape: tuple[int, ...]  # shape of the tensor, without the block axis
    origin: int = 0  # place of the argument's first element in its flat memory
    view: tuple[int, int] | None = None  # the argument's own part of its flat memory, if that is of a larger array
    warned: set[tuple[str, str]] | None = None  # lines and arguments with accesses beyond their views, so far

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (len(self.ids), *self.shape)

    def block(self, row: int) -> str:
        linear = int(self.ids[row if len(self.ids) > row else 0])
        gx, gy, _ = self.grid
        return f"block {linear} (x={linear % gx}, y={linear // gx % gy}, z={linear // (gx * gy)})"

    def beyond_view(self, offset: Array, mask: Any) -> None:
        """Warns of the first access at this place outside the view; a GPU does not know views."""
        place = (self.line, self.argument)
        if self.view is None or self.warned is None or place in self.warned:
            return
        low, high = self.view
        bad = (offset < low) | (offset >= high)
        bad = bad if mask is None else bad & mask
        if bad.any():
            self.warned.add(place)
            first = int(np.broadcast_to(offset, bad.shape)[bad][0]) - self.origin
            text = (
                f"kernel {self.kernel}, {self.line}: {self.op} touches element {first} of argument {self.argument}, "
                f"a view of {high - low} elements. The element exists in the array behind it, so the kernel continues, "
                "as it would on a GPU"
            )
            facts = {"kernel": self.kernel, "line": self.line, "field": self.argument, "given": first}
            warnings.warn(ViewWarning(text, **facts, limit=high - low), stacklevel=2)

    def out_of_bounds(self, offset: Array, bad: Array, size: int) -> NoReturn:
        at = tuple(int(i[0]) for i in np.nonzero(bad))
        index = int(offset[at]) - self.origin
        element = f", tensor element {at[1:]}" if self.shape else ""
        has = f"is a view from element {self.origin} of {size} on" if self.origin else f"has {size} elements"
        raise OutOfBoundsError(
            f"kernel {self.kernel}, {self.line}: {self.op} by {self.block(at[0])}{element} touches element {index} of "
            f"argument {self.argument}, which {has}; mask the access or pass a larger array",
            kernel=self.kernel, line=self.line, op=self.op, field=self.argument, given=index,
        )


def check(offset: Array, mask: Any, size: int, site: Site) -> None:
    """Raises if any unmasked offset lies outside [0, size)."""
    if offset.size and not (offset.min() >= 0 and offset.max() < size):
        bad = (offset < 0) | (offset >= size)
        if mask is not None:
            bad, at = bad & mask, np.broadcast_to(offset, np.broadcast_shapes(offset.shape, np.shape(mask)))
        else:
            at = offset
        if bad.any():
            site.out_of_bounds(at, bad, size)
    if site.view is not None:
        site.beyond_view(offset, mask)


_NO_MASK = np.ones((1, 1), np.bool_)


def rows_of(x: Any, shape: tuple[int, ...]) -> Array:
    """(blocks or 1, elements of the tensor), for the compiled loops."""
    return np.ascontiguousarray(full(x, shape)).reshape(x.shape[0] if is_array(x) else 1, -1)


def gather(flat: Array, offset: Any, mask: Any, other: Any, element: Element, site: Site) -> Any:
    """Loads. Without `other`, masked elements read as 0 (undefined on a GPU)."""
    if mask is not None and not is_array(mask):
        if not mask:
            return element.compute.type(0) if other is None else other
        mask = None
    if mask is None and not is_array(offset):
        check(np.asarray(offset).reshape((1,) * (1 + len(site.shape))), None, flat.size, site)
        return decode(flat[offset], element)
    tensor = np.broadcast_shapes(np.shape(offset)[1:], np.shape(mask)[1:])  # axes may still be lazy
    at, keep = rows_of(offset, tensor), _NO_MASK if mask is None else rows_of(mask, tensor)
    out = np.empty((max(at.shape[0], keep.shape[0]), at.shape[1]), element.bits)
    varying = is_array(other) and other.size > 1
    if mask is not None:
        fill = element.compute.type(0) if other is None or varying else np.asarray(other).reshape(-1)[0]
        out.fill(encode(np.asarray(fill, element.compute), element).view(element.bits).reshape(-1)[0])
    inside = native.gather(flat.view(element.bits), at, keep, mask is not None, out)
    if not inside or site.view is not None:
        check(np.broadcast_to(offset, (at.shape[0], *tensor)), mask, flat.size, site)
    value = decode(out.view(element.storage), element).reshape((out.shape[0], *tensor))
    return np.where(mask, value, other) if varying and mask is not None else value


def broadcast(site: Site, *values: Any) -> list[Array]:
    """All operands at the full (blocks, *tensor) shape."""
    return [np.broadcast_to(v, site.full_shape) for v in values]


def scatter(flat: Array, offset: Any, value: Any, mask: Any, element: Element, site: Site) -> None:
    """Stores. If several elements go to one address, the last in block order wins, which is one of the legal outcomes.
    """
    if mask is not None and not is_array(mask):
        if not mask:
            return
        mask = None
    check(np.broadcast_to(offset, (np.shape(offset) or (1,))[:1] + site.shape), mask, flat.size, site)
    at, keep = rows_of(offset, site.shape), _NO_MASK if mask is None else rows_of(mask, site.shape)
    raw = rows_of(encode(value, element), site.shape).view(element.bits)
    native.scatter(flat.view(element.bits), at, keep, mask is not None, raw)


def count_bytes(cost: Array, field: int, mask: Any, size: int, site: Site) -> None:
    """Adds the bytes of an access to the blocks' rows of a cost table."""
    elements = 1
    for d in site.shape:
        elements *= d
    if not is_array(mask):
        cost[site.rows, field] += size * elements * bool(mask)
        return
    per_block = np.count_nonzero(mask, axis=tuple(range(1, mask.ndim))) if mask.ndim > 1 else mask.astype(np.int64)
    stored = mask.size // mask.shape[0]
    cost[site.rows, field] += per_block * (size * (elements // stored))


def atomic(flat: Array, offset: Any, value: Any, mask: Any, kind: str, element: Element, used: bool, site: Site) -> Any:
    """Read-modify-write in block order, then element order. Returns the old values where `used`."""
    offset, value = broadcast(site, offset, value)
    mask = np.broadcast_to(True if mask is None else mask, site.full_shape)
    check(offset, mask, flat.size, site)
    if not used and kind in ("fadd", "add") and not element.narrow:
        np.add.at(flat, offset[mask], value[mask])
        return None
    index, values = offset[mask], value[mask]
    unsigned = kind in ("umax", "umin")
    memory = flat.view(element.bits) if unsigned else flat
    if element.narrow:
        old = _atomic_narrow(memory, index, values, kind, element)
    else:
        operand = np.ascontiguousarray(values).view(element.bits) if unsigned else np.ascontiguousarray(values)
        old = np.empty(index.size, memory.dtype)
        apply = native.atomic_bits if kind in ("and", "or", "xor") else native.atomic
        apply(memory, index, operand, native.KINDS[kind], old)
    if not used:
        return None
    out = np.zeros(site.full_shape, element.compute)
    out[mask] = old.view(element.compute) if unsigned else old
    return out


def _atomic_narrow(flat: Array, index: Array, values: Array, kind: str, element: Element) -> Array:
    """For floats held wider than stored: one element after the other."""
    combine = {"fadd": np.add, "add": np.add, "max": np.fmax, "min": np.fmin}.get(kind)
    old = np.empty(index.size, element.compute)
    for i, (at, value) in enumerate(zip(index, values, strict=True)):
        old[i] = decode(flat[at : at + 1], element)[0]
        new = value if combine is None else combine(old[i], value)
        flat[at : at + 1] = encode(np.asarray([new], element.compute), element)
    return old


def compare_and_swap(flat: Array, offset: Any, expected: Any, value: Any, element: Element, site: Site) -> Any:
    """`atomic_cas`, bit for bit, in block order."""
    offset, expected, value = broadcast(site, offset, expected, value)
    check(offset, None, flat.size, site)
    raw = [np.ascontiguousarray(encode(v, element)).view(element.bits).ravel() for v in (expected, value)]
    old = np.empty(offset.size, element.bits)
    native.compare_and_swap(flat.view(element.bits), offset.ravel(), *raw, old)
    return decode(old.view(element.storage), element).reshape(site.full_shape)


def device_assert(condition: Any, message: str, site: Site) -> None:
    """`tl.device_assert`: the condition must hold for every active block and element."""
    if condition.all():
        return
    condition = np.asarray(condition)
    row = int(np.argmin(condition.reshape(condition.shape[0], -1).all(1))) if condition.ndim else 0
    raise LaunchError(
        f"kernel {site.kernel}, {site.line}: device_assert failed in {site.block(row)}: {message}",
        kernel=site.kernel, line=site.line, given=message,
    )


# --- what a kernel promises: a GPU's compiler believes it, and nobody else checks -------------------------------------


class Once:
    """Whether a place has warned."""

    warned = False


def _broken(site: Site, promise: str, given: Any, limit: Any, seen: Once) -> None:
    seen.warned = True
    text = f"kernel {site.kernel}, {site.line}: {promise} does not hold; on a GPU the result may be wrong"
    facts = {"kernel": site.kernel, "line": site.line, "field": promise.partition("(")[0], "given": given}
    warnings.warn(HintWarning(text, **facts, limit=limit), stacklevel=2)


def check_assumption(holds: Any, site: Site, seen: Once) -> None:
    """`tl.assume`."""
    if not seen.warned and not np.all(holds):
        _broken(site, "assume(…)", False, True, seen)


_VECTOR = 16  # bytes of the widest access of a thread, the reason for such promises


def check_hint(value: Any, steps: Shape, runs: Shape, size: int, site: Site, seen: Once) -> None:
    """`tl.multiple_of` and `tl.max_contiguous`, as far as one access of a thread needs them.

    `size` is that of a pointer's element, whose promises are in bytes, or 1. Many kernels promise more than what
    holds in their last tile, where it does no harm.
    """
    if seen.warned:
        return None
    x = np.asarray(value)
    x = full(x, site.shape) if x.ndim else x.reshape((1,) * (1 + len(site.shape)))
    for axis, n in enumerate(site.shape):
        run = runs[axis] if axis < len(runs) else 0
        group = min(run, _VECTOR // (size if size > 1 else 4), n)
        if group > 1 and n % group == 0:
            apart = np.diff(np.moveaxis(x, axis + 1, -1).reshape(-1, group), axis=1)
            if not bool(((apart == 1).all(1) | (apart == 0).all(1)).all()):  # equal ones are a filling
                return _broken(site, f"max_contiguous({run})", group, run, seen)
    for axis, step in enumerate(steps):
        if site.shape:
            every = max(1, runs[axis]) if runs else x.shape[axis + 1]
            first = np.moveaxis(x, axis + 1, -1)[..., ::every]
        else:
            first = x
        if step > 1 and bool((first.astype(np.int64) * size % min(step, _VECTOR)).any()):
            return _broken(site, f"multiple_of({step})", int(first.reshape(-1)[0]), step, seen)
    return None


def check_descriptor(flat: Array, offset: Any, size: int, site: Site, *strides: Any) -> None:
    """The rules of the TMA unit for a tensor descriptor that a kernel makes."""
    start = flat.__array_interface__["data"][0] + int(np.asarray(offset).reshape(-1)[0]) * size
    bad = [("base", start, f"begins at address {start:#x}")] if start % _VECTOR else []
    *outer, last = (np.asarray(s).reshape(-1) for s in strides)
    wrong = [s for s in outer if (s * size % _VECTOR).any()]
    bad += [("strides", int(s[0]), f"has a stride of {int(s[0]) * size} bytes") for s in wrong]
    bad += [("strides", int(last[0]), f"has a last stride of {int(last[0])} elements")] if (last != 1).any() else []
    for field, given, why in bad:
        raise LaunchError(
            f"kernel {site.kernel}, {site.line}: a tensor descriptor {why}. A GPU takes bases and strides that are "
            f"multiples of {_VECTOR} bytes, and a last stride of 1: pad the rows, or use tl.load",
            kernel=site.kernel, line=site.line, field=field, given=given, limit=_VECTOR,
        )


def device_print(prefix: str, site: Site, *values: Any) -> None:
    """`tl.device_print`: one line per active block."""
    for row in range(len(site.ids)):
        texts = [str(v[row % v.shape[0]] if is_array(v) and v.ndim else v).replace("\n", " ") for v in values]
        print(f"{site.block(row)} {prefix.strip()} {' '.join(texts)}")


# --- accesses to consecutive elements whose mask cuts off the end, as `offset < n` does: slices of memory -------------
# Only the elements before the cut are read or written; the caller checks the bounds.


def prefix(offset: Array, mask: Array) -> tuple[int, int] | None:
    """The place of the first element, and the number of elements before the cut; None if the access has another form.
    """
    flat, keep = offset.reshape(-1), mask.reshape(-1)
    count = int(np.count_nonzero(keep))
    if not count or not keep[:count].all():
        return None
    start = int(flat[0])
    if int(flat[count - 1]) != start + count - 1 or not bool((np.diff(flat[:count]) == 1).all()):
        return None
    return start, count


class PrefixRead:
    """A load of `count` consecutive elements into a larger tile, whose remainder is `fill`."""

    __slots__ = ("_fill", "count", "element", "shape", "start")

    def __init__(self, shape: tuple[int, ...], element: Element, start: int, count: int, fill: Any) -> None:
        self.shape, self.element, self.start, self.count = shape, element, start, count
        self._fill = encode(np.asarray(fill, element.compute), element).reshape(-1)[0]

    def __call__(self, flat: Array) -> Any:
        tile = np.empty(self.shape, self.element.storage)
        line = tile.reshape(-1)
        line[: self.count] = flat[self.start : self.start + self.count]
        line[self.count :] = self._fill
        return decode(tile, self.element)


class PrefixStore:
    """A store of a tile's first `count` elements to consecutive addresses."""

    __slots__ = ("count", "element", "shape", "start")

    def __init__(self, shape: tuple[int, ...], element: Element, start: int, count: int) -> None:
        self.shape, self.element, self.start, self.count = shape, element, start, count

    def __call__(self, flat: Array, value: Any) -> None:
        line = np.broadcast_to(value, self.shape).reshape(-1)[: self.count]
        flat[self.start : self.start + self.count] = encode(line, self.element)


# --- accesses whose addresses and masks are known before the data: computed once, replayed at the speed of a copy -----
# In order of preference: a strided view of the argument (no copy at all), a slice of it where a mask cuts off the end,
# runs of consecutive elements copied by one compiled loop, and a gather or scatter over an index array. Bounds are
# checked once, here: a plan is for one array size.

MIN_RUN = 4  # elements per run below which an index array is as fast
MAX_JOINED = 1 << 20  # most addresses of one load that are kept for joining it with others

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
    offset: Array | None = None  # kept for products until the tape is compiled
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
    check(offset, mask, size, site)
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
    check(offset, mask, size, site)
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
