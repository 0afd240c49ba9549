"""Loads, stores and atomics on flat memory, all checked: an address out of bounds raises, and never crashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from paellapy.instrument.errors import LaunchError, OutOfBoundsError
from paellapy.instrument.ttir import native
from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.types import Array, Element
from paellapy.instrument.ttir.values import full, is_array


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

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (len(self.ids), *self.shape)

    def block(self, row: int) -> str:
        linear = int(self.ids[row if len(self.ids) > row else 0])
        gx, gy, _ = self.grid
        return f"block {linear} (x={linear % gx}, y={linear // gx % gy}, z={linear // (gx * gy)})"

    def out_of_bounds(self, offset: Array, bad: Array, size: int) -> NoReturn:
        at = tuple(int(i[0]) for i in np.nonzero(bad))
        index = int(offset[at]) - self.origin
        element = f", tensor element {at[1:]}" if self.shape else ""
        has = f"is a view from element {self.origin} of {size} on" if self.origin else f"has {size} elements"
        raise OutOfBoundsError(
            f"kernel {self.kernel}, {self.line}: {self.op} by {self.block(at[0])}{element} touches element {index} of "
            f"argument {self.argument}, which {has}; mask the access or pass a larger array"
        )


def check(offset: Array, mask: Any, size: int, site: Site) -> None:
    """Raises if any unmasked offset lies outside [0, size)."""
    if not offset.size or (offset.min() >= 0 and offset.max() < size):
        return
    bad = (offset < 0) | (offset >= size)
    if mask is not None:
        bad, offset = bad & mask, np.broadcast_to(offset, np.broadcast_shapes(offset.shape, np.shape(mask)))
    if bad.any():
        site.out_of_bounds(offset, bad, size)


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
    if not native.gather(flat.view(element.bits), at, keep, mask is not None, out):
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
    raise LaunchError(f"kernel {site.kernel}, {site.line}: device_assert failed in {site.block(row)}: {message}")


def device_print(prefix: str, site: Site, *values: Any) -> None:
    """`tl.device_print`: one line per active block."""
    for row in range(len(site.ids)):
        texts = [str(v[row % v.shape[0]] if is_array(v) and v.ndim else v).replace("\n", " ") for v in values]
        print(f"{site.block(row)} {prefix.strip()} {' '.join(texts)}")
