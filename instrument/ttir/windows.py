"""Tiles of arrays with a shape: block pointers and tensor descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.instrument.ttir import memory
from paellapy.instrument.ttir.access import Access
from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import LOADED, STORED, Active
from paellapy.instrument.ttir.tape import BufferRef
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.values import PAD_NAN, Ptr, Value, Window

Ints = tuple[int, ...]
Shape = tuple[int, ...]


@builds("tt.make_tensor_ptr", "tt.make_tensor_descriptor")
def make_window(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """Operands: base, one size and one stride per axis; block pointers also have one offset per axis."""
    block, (out,) = op.out_types[0].block, outs
    rank = len(block)
    low.same_pointer(args[0], out)
    padding = PAD_NAN if "pad_nan" in op.attributes.get("padding", "").lower() else 0

    def run(active: Active, slots: Slots) -> None:
        values = [slots[i] for i in args]
        offsets = tuple(values[1 + 2 * rank : 1 + 3 * rank])
        slots[out] = Window(
            values[0], tuple(values[1 : 1 + rank]), tuple(values[1 + rank : 1 + 2 * rank]), offsets, block, padding
        )

    return run


@builds("tt.advance")
def advance(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (a, *steps), (out,) = args, outs
    low.same_pointer(a, out)

    def run(active: Active, slots: Slots) -> None:
        w = slots[a]
        moved = tuple(active.machine.call(np.add, o, slots[s]) for o, s in zip(w.offsets, steps, strict=True))
        slots[out] = Window(w.base, w.shape, w.strides, moved, w.block, w.padding)

    return run


def _axis(at: Any, n: int, axis: int, rank: int) -> Any:
    """Indices at, at + 1, … of one axis of a tile, for every block; `at` may already hold one index per row."""
    if type(at) is np.ndarray and at.ndim > 1:
        index = at.astype(np.int64).reshape(at.shape[0], -1)
    else:
        index = np.asarray(at, np.int64).reshape(-1, 1) + np.arange(n)
    shape = [1] * rank
    shape[axis] = index.shape[1]
    return index.reshape((-1, *shape))


def window_offset(block: Shape) -> Callable[..., Any]:
    rank = len(block)

    def run(base: Any, *at: Any) -> Any:
        total = np.asarray(base).reshape((-1,) + (1,) * rank)
        for axis, n in enumerate(block):
            stride = np.asarray(at[rank + axis], np.int64).reshape((-1,) + (1,) * rank)
            total = total + _axis(at[axis], n, axis, rank) * stride
        return total

    return run


def window_mask(block: Shape, checked: Shape) -> Callable[..., Any]:
    rank = len(block)

    def run(*at: Any) -> Any:
        mask: Any = np.ones((1,) * (rank + 1), np.bool_)
        for axis in checked:
            index = _axis(at[axis], block[axis], axis, rank)
            size = np.asarray(at[rank + axis], np.int64).reshape((-1,) + (1,) * rank)
            mask = mask & (index >= 0) & (index < size)
        return mask

    return run


def window_access(active: Active, w: Window, at: tuple[Value, ...], checked: Shape, block: Shape) -> tuple[Ptr, Value]:
    """The pointer tensor and the mask of a tile."""
    call = active.machine.call
    offset = call(window_offset(block), w.base.offset, *at, *w.strides)
    mask = call(window_mask(block, checked), *at, *w.shape) if checked else None
    which = None if w.base.which is None else call(lambda v: np.reshape(v, (-1,) + (1,) * len(block)), w.base.which)
    return Ptr(w.base.bases, which, offset, w.base.element), mask


@builds("tt.descriptor_load", "tt.descriptor_gather")
def descriptor_load(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (out,), result = outs, op.out_types[0]
    block = result.shape if op.name == "tt.descriptor_gather" else op.in_types[0].block
    access = Access(low, op, block, result.element)
    rank = len(block)

    def run(active: Active, slots: Slots) -> None:
        w = slots[args[0]]
        at = tuple(slots[i] for i in args[1 : 1 + rank])
        p, mask = window_access(active, w, at, tuple(range(rank)), block)
        other = result.element.compute.type(np.nan if w.padding == PAD_NAN else 0)
        value = access.load(active, p, mask, other)
        if result.shape != block:
            value = active.machine.call(lambda v: v.reshape((v.shape[0], *result.shape)), value)
        slots[out] = value

    return run


@builds("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce")
def descriptor_store(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    value_type = op.in_types[-1]
    block = value_type.shape if op.name == "tt.descriptor_scatter" else op.in_types[0].block
    element, rank = value_type.element, len(block)
    access = Access(low, op, block, element)
    kind = ("fadd" if element.is_float else "add") if op.word == "add" else op.word
    if op.in_types[0].unsigned and kind in ("min", "max"):
        kind = f"u{kind}"

    def run(active: Active, slots: Slots) -> None:
        w = slots[args[0]]
        at, value = tuple(slots[i] for i in args[1 : 1 + rank]), slots[args[1 + rank]]
        if value_type.shape != block:
            value = active.machine.call(
                lambda v: np.broadcast_to(v, (v.shape[0], *value_type.shape)).reshape((-1, *block)), value
            )
        p, mask = window_access(active, w, at, tuple(range(rank)), block)
        if op.name != "tt.descriptor_reduce":
            access.store(active, p, value, mask)
            return
        access.count(active, LOADED, mask, p.bases[0])
        access.count(active, STORED, mask, p.bases[0])
        access.count_updates(active, p, mask)
        for base, own in access.each(active, p, mask):
            ref = BufferRef(base, element)
            active.machine.effect(
                memory.atomic, ref, p.offset, value, own, kind, element, False, access.site(active, base)
            )

    return run
