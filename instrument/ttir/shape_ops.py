"""Translations of ops that make indices or move elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.instrument.ttir import shapes
from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.steps import copy_slot, pure
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.values import Ptr, is_array

Ints = tuple[int, ...]


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


def shape_step(low: Lowering, op: Op, args: Ints, outs: Ints, fn: Callable[..., Any] | None) -> Run:
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
    return shape_step(low, op, args, outs, shapes.splat(len(op.out_types[0].shape)))


@builds("tt.broadcast", "ttg.convert_layout")
def broadcast(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, None)


@builds("tt.expand_dims")
def expand_dims(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, shapes.expand_dims(op.integer("axis")))


@builds("tt.reshape")
def reshape(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, shapes.reshape(op.in_types[0].shape, op.out_types[0].shape))


@builds("tt.trans")
def trans(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, shapes.Transpose(op.integers("order")))


@builds("tt.join")
def join(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, shapes.join(op.in_types[0].shape))


@builds("tt.cat")
def cat(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    return shape_step(low, op, args, outs, shapes.cat(op.in_types[0].shape))


@builds("tt.split")
def split(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    halves = [shapes.half(op.in_types[0].shape, i) for i in range(2)]
    steps = [shape_step(low, op, args, (out,), fn) for out, fn in zip(outs, halves, strict=True)]

    def run(active: Active, slots: Slots) -> None:
        for step in steps:
            step(active, slots)

    return run


@builds("tt.gather")
def gather(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    source, index = (t.shape for t in op.in_types[:2])
    where = f"kernel {low.kernel}, {low.line(op)}"
    return pure(shapes.gather(op.integer("axis"), source, index, where), args, outs[0])


@builds("tt.histogram")
def histogram(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn = shapes.histogram(op.in_types[0].shape, op.out_types[0].size, op.out_types[0].element.compute)
    return pure(fn, args, outs[0])
