"""Translations of ops that make indices or move elements. Values have the block axis in front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import OutOfBoundsError
from paellapy.instrument.triton_ir.lower import Lowering, builds
from paellapy.instrument.triton_ir.machine import Active, Run, Slots, copy_slot, pure
from paellapy.instrument.triton_ir.parse import Op
from paellapy.instrument.triton_ir.types import Function, Ints, Ptr, Shape, full, is_array


@dataclass(slots=True, frozen=True)
class Transpose:
    order: Shape

    def __call__(self, x: Any) -> Any:
        return x.transpose((0, *(o + 1 for o in self.order))) if is_array(x) else x


@builds("tt.get_program_id")
def program_id(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis, (out,) = "xyz".index(op.word), outs

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.pid[axis]

    return run


@builds("tt.get_num_programs")
def num_programs(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis, (out,) = "xyz".index(op.word), outs

    def run(active: Active, slots: Slots) -> None:
        slots[out] = np.int32(active.machine.grid[axis])

    return run


@builds("tt.make_range")
def make_range(low: Lowering, op: Op, args: Ints, outs: Ints) -> None:
    low.function.template[outs[0]] = np.arange(op.integer("start"), op.integer("end"), dtype=np.int32)[None]


def shape_step(low: Lowering, op: Op, args: Ints, outs: Ints, fn: Function | None) -> Run:
    """A step that moves elements without changing them, for numbers and pointers; None if nothing moves."""
    (out,) = outs
    if op.out_types[0].kind != "pointer":
        return copy_slot(args[0], out) if fn is None else pure(fn, args, out)
    low.same_pointer(*args, out)

    def move(active: Active, slots: Slots) -> None:
        pointers = [slots[i] for i in args]
        bases, whiches = active.common_bases(pointers)
        call = active.machine.call
        offset = pointers[0].offset if fn is None else call(fn, *[p.offset for p in pointers])
        which = None if len(bases) == 1 else whiches[0] if fn is None else call(fn, *whiches)
        slots[out] = Ptr(bases, which, offset, pointers[0].element)

    return move


@builds("tt.unsplat")
def unsplat(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """A tensor of one element as a scalar."""
    return shape_step(low, op, args, outs, lambda x: x.reshape(-1) if is_array(x) else x)


@builds("tt.splat")
def splat(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    shape = (-1, *(1 for _ in op.out_types[0].shape))
    return shape_step(low, op, args, outs, lambda x: x.reshape(shape) if is_array(x) else x)


@builds("tt.broadcast", "ttg.convert_layout")
def broadcast(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, None)


@builds("tt.expand_dims")
def expand_dims(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis = op.integer("axis") + 1
    return shape_step(low, op, args, outs, lambda x: np.expand_dims(x, axis) if is_array(x) else x)


@builds("tt.reshape")
def reshape(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    old, new = op.in_types[0].shape, op.out_types[0].shape
    return shape_step(
        low, op, args, outs, lambda x: full(x, old).reshape((x.shape[0], *new)) if is_array(x) else x
    )


@builds("tt.trans")
def trans(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, Transpose(op.integers("order")))


@builds("tt.join")
def join(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    shape = op.in_types[0].shape
    return shape_step(
        low, op, args, outs, lambda a, b: np.stack(np.broadcast_arrays(full(a, shape), full(b, shape)), -1)
    )


@builds("tt.cat")
def cat(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    shape = op.in_types[0].shape
    return shape_step(
        low, op, args, outs, lambda a, b: np.concatenate(np.broadcast_arrays(full(a, shape), full(b, shape)), 1)
    )


def _half(shape: Shape, i: int) -> Function:
    return lambda x: full(x, shape)[..., i] if is_array(x) else x


@builds("tt.split")
def split(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    shape = op.in_types[0].shape
    steps = [shape_step(low, op, args, (out,), _half(shape, i)) for i, out in enumerate(outs)]

    def run(active: Active, slots: Slots) -> None:
        for step in steps:
            step(active, slots)

    return run


@builds("tt.gather")
def gather(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    source, index = (t.shape for t in op.in_types[:2])
    where = f"kernel {low.kernel}, {low.line(op)}"
    return pure(_gather(op.integer("axis"), source, index, where), args, outs[0])


@builds("tt.histogram")
def histogram(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn = _histogram(op.in_types[0].shape, op.out_types[0].size, op.out_types[0].element.compute)
    return pure(fn, args, outs[0])


def _gather(axis: int, source: Shape, index: Shape, where: str) -> Function:
    a = axis + 1

    def run(x: Any, at: Any) -> Any:
        x, at = full(x, source), full(at, index)
        nb = max(x.shape[0], at.shape[0])
        x, at = np.broadcast_to(x, (nb, *source)), np.broadcast_to(at, (nb, *index))
        if at.size and (at.min() < 0 or at.max() >= source[axis]):
            bad = int(at[(at < 0) | (at >= source[axis])][0])
            raise OutOfBoundsError(
                f"{where}: tl.gather takes element {bad} along axis {axis}, which has {source[axis]}; keep the indices "
                "within it", field="index", given=bad, limit=source[axis]
            )
        return np.take_along_axis(x, at, a)

    return run


def _histogram(shape: Shape, bins: int, dtype: Any) -> Function:
    def run(x: Any, mask: Any = None) -> Any:
        x = full(x, shape)
        nb = max(x.shape[0], mask.shape[0]) if is_array(mask) else x.shape[0]
        keep = (x >= 0) & (x < bins)
        if mask is not None:
            keep = keep & full(mask, shape)
        x = np.broadcast_to(x, (nb, *shape)) + np.arange(nb).reshape((-1,) + (1,) * len(shape)) * bins
        counts = np.bincount(x[np.broadcast_to(keep, x.shape)].ravel(), minlength=nb * bins)
        return counts.reshape(nb, bins).astype(dtype)

    return run
