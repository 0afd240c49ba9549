"""Translations of ops that compute: elementwise, shapes, reductions, dots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import inline_asm, libdevice, reduction, shapes
from paellapy.instrument.ttir.code import Code, Function, Run, Slots, call
from paellapy.instrument.ttir.conversion import rounder
from paellapy.instrument.ttir.lower import Lowering, builds, copy_slot, each, marker_of, pure
from paellapy.instrument.ttir.machine import Active, Buffers, Machine
from paellapy.instrument.ttir.tree import Op, walk
from paellapy.instrument.ttir.types import Type
from paellapy.instrument.ttir.values import Ptr, full, is_array

Ints = tuple[int, ...]


@builds(*ew.FLOAT)
def float_op(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn, flops = ew.FLOAT[op.name]
    if op.name == "math.fma" and op.out_types[0].element.narrow:
        fn = ew.narrow_fma
    return each(ew.rounded(fn, op.out_types[0].element), args, outs[0], flops * op.out_types[0].size)


@builds(*ew.INTEGER)
def integer_op(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.out_types[0].element.name == "i1":
        if op.name not in ew.BOOLEAN:
            low.refuse(op, "on i1")
        return each(ew.BOOLEAN[op.name], args, outs[0])
    return each(ew.INTEGER[op.name], args, outs[0])


@builds("arith.cmpf")
def compare_float(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.word in ("false", "true"):
        result = np.bool_(op.word == "true")
        return pure(lambda a, b: result, args, outs[0])
    return each(ew.FLOAT_PREDICATES[op.word], args, outs[0])


@builds("arith.cmpi")
def compare_integer(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.in_types[0].kind == "pointer":
        low.refuse(op, "on pointers")
    return each(ew.integer_predicate(op.word, op.in_types[0].element), args, outs[0])


@builds("tt.clampf")
def clamp(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn = ew.clamp(op.attributes.get("propagateNan") == "all")
    return each(fn, args, outs[0], 2 * op.out_types[0].size)


@builds(
    "arith.extf", "arith.truncf", "tt.fp_to_fp", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui",
    "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui",
)  # fmt: skip
def convert(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    source, target = op.in_types[0].element, op.out_types[0].element
    if source.is_float and target.is_float and source.compute == target.compute and not target.narrow:
        return copy_slot(args[0], outs[0])  # already held in a type that wide
    return each(ew.convert(op.name, source, target, op.attributes.get("rounding", "")), args, outs[0])


@builds("arith.select")
def select(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    condition, a, b = args
    (out,) = outs
    if op.out_types[0].kind == "pointer":
        low.same_pointer(a, b, out)

        def choose_pointer(active: Active, slots: Slots) -> None:
            c, call = slots[condition], active.machine.call
            pair = (slots[a], slots[b])
            bases, whiches = active.common_bases(pair)
            which = None if len(bases) == 1 else call(ew.where, c, *whiches)
            slots[out] = Ptr(bases, which, call(ew.where, c, pair[0].offset, pair[1].offset), pair[0].element)

        return choose_pointer

    def choose(active: Active, slots: Slots) -> None:
        c = slots[condition]
        if type(active.machine) is not Machine and is_array(c):  # recorded: a constant choice is free
            if c.all():
                slots[out] = slots[a]
                return
            if not c.any():
                slots[out] = slots[b]
                return
        slots[out] = active.machine.call(ew.where, c, slots[a], slots[b])

    return choose


@builds("tt.extern_elementwise")
def extern(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    symbol = op.attributes.get("symbol", "")
    fn = libdevice.lookup(symbol)
    if fn is None:
        low.refuse(op, f"symbol {symbol}")
    element = op.out_types[0].element
    dtype = element.compute
    return each(ew.rounded(lambda *xs: fn(*xs).astype(dtype, copy=False), element), args, outs[0], op.out_types[0].size)


def _zeros(active: Active, slots: Slots, *, outs: Ints) -> None:
    for out in outs:
        slots[out] = np.int32(0)


@builds("tt.elementwise_inline_asm")
def assembly(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run | None:
    if marker := marker_of(op):
        slot_of_nothing = outs[0] if outs else None

        def mark(active: Active, slots: Slots) -> None:
            active.mark(marker)
            if slot_of_nothing is not None:
                slots[slot_of_nothing] = np.int32(0)

        return mark
    text = op.body.partition('"')[2].rpartition('"')[0]
    try:
        made = inline_asm.Assembly.of(text, op.attributes.get("constraints", '""').strip('"'))
    except inline_asm.UnknownPtx as e:
        low.refuse(op, f"PTX {e}")
    if not outs or not made.steps:
        if not outs and not made.steps:
            return None
        if made.steps or args:
            low.refuse(op, f"PTX {text!r:.60} without results")
        return partial(_zeros, outs=outs)  # Triton 3.6 gives `griddepcontrol.wait` a result that is never written
    pack = op.integer("packed_element", 1)
    types = [t.element for t in op.in_types[: len(args)]]
    fn = inline_asm.elementwise(made, types, [t.element for t in op.out_types], pack)
    shapes_in = [t.shape for t in op.in_types[: len(args)]]
    flops = len(made.steps) * op.out_types[0].size

    def run(active: Active, slots: Slots) -> None:
        values = [slots[i] if not shape else active.machine.call(full, slots[i], shape)
                  for i, shape in zip(args, shapes_in, strict=True)]  # fmt: skip
        found = active.machine.call_many(fn, len(outs), *values)
        for out, value in zip(outs, found, strict=True):
            slots[out] = value
        active.flops += flops

    return run


@builds("tt.map_elementwise")
def map_elementwise(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """Applies a function of scalars to every element, as if to a block: elements may take different branches."""
    pack, before = op.integer("pack", 1), len(low.function.template)
    blocks = low.region(op.regions[0])
    if any(slot < before for block in blocks for slot in block.free):
        low.refuse(op, "its function reads values from outside, which is not supported")
    results = len(outs) * pack
    function = Function("map_elementwise", blocks[0].args, low.function.template, blocks, (0,) * results)
    shape = op.in_types[0].shape

    def mapped(*tensors: Any) -> tuple[Any, ...]:
        whole = np.broadcast_arrays(*[full(t, shape) for t in tensors])
        columns = [w.reshape(-1, pack)[:, k] for w in whole for k in range(pack)]
        count = len(columns[0])
        active = Active(Machine(low.kernel, _NO_BUFFERS, (count, 1, 1), np.arange(count)), np.arange(count), _ORIGIN)
        found = [np.broadcast_to(value, (count,)) for value in call(function, active, columns)]
        rows = [np.stack(found[k : k + pack], 1) for k in range(0, len(found), pack)]
        return tuple(r.reshape(whole[0].shape) for r in rows)

    def run(active: Active, slots: Slots) -> None:
        values = active.machine.call_many(mapped, len(outs), *[slots[i] for i in args])
        for out, value in zip(outs, values, strict=True):
            slots[out] = value

    return run


_NO_BUFFERS = Buffers([], [], [], frozenset())
_ORIGIN = (np.int32(0), np.int32(0), np.int32(0))


@builds("tt.bitcast", "arith.bitcast")
def bitcast(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    source, target = op.in_types[0], op.out_types[0]
    (a,), (out,) = args, outs
    if source.kind == "pointer":
        low.same_pointer(a, out)
        old, new = source.element, target.element

        def rescale(offset: Any) -> Any:
            if np.any(offset * old.size % new.size):
                raise ValueError(
                    f"an unaligned pointer to {old.name} is cast to {new.name}: its offset must be a multiple of "
                    f"{new.size} bytes"
                )
            return offset * old.size // new.size

        def recast(active: Active, slots: Slots) -> None:
            p = slots[a]
            offset = p.offset if old.size == new.size else active.machine.call(rescale, p.offset)
            slots[out] = Ptr(p.bases, p.which, offset, new)

        return recast
    return each(ew.bitcast(source.element, target.element), args, outs[0])


# ---- indices and shapes ----------------------------------------------------------------------------------------------


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


# ---- reductions and products -----------------------------------------------------------------------------------------


def combine_region(low: Lowering, op: Op) -> tuple[reduction.Combine, Code]:
    """A combine region as a function of arrays. It never touches memory, so it runs the same in every mode."""
    body = low.nested(op.regions[0])
    if body.free:
        low.refuse(op, "its combine function reads values from outside, which is not supported")
    template = low.function.template

    def combine(*operands: Any) -> tuple[Any, ...]:
        slots = list(template)
        for slot, value in zip(body.args, operands, strict=True):
            slots[slot] = value
        for step in body.steps:
            step.run(_PURE, slots)
        return tuple(slots[i] for i in body.values)

    return combine, body


class _PureActive:
    """Stands in for the active blocks in code that only does arithmetic."""

    flops = 0

    class machine:
        call = staticmethod(lambda fn, *args: fn(*args))


_PURE: Any = _PureActive()


def combine_flops(op: Op) -> int:
    return sum(ew.FLOAT[o.name][1] for o in walk(op.regions[0]) if o.name in ew.FLOAT)


def rounded_many(fn: Callable[..., Any], types: list[Type]) -> Callable[..., Any]:
    to = rounder(types[0].element)
    return fn if to is None or len(types) > 1 else lambda *xs: to(fn(*xs))


@builds("tt.reduce", "tt.scan")
def reduce_or_scan(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis, shape = op.integer("axis"), op.in_types[0].shape
    scan, reverse = op.name == "tt.scan", op.flag("reverse")
    flops = combine_flops(op) * (op.in_types[0].size - op.in_types[0].size // shape[axis])
    ufunc = reduction.as_ufunc(op.regions[0])
    if ufunc is not None and len(args) == 1:
        one = reduction.scan_ufunc(ufunc, axis, shape, reverse) if scan else reduction.reduce_ufunc(ufunc, axis, shape)
        return pure(rounded_many(one, op.out_types), args, outs[0], flops)
    combine, _ = combine_region(low, op)
    pick = None if scan else reduction.as_arg_reduction(op.regions[0])
    if scan:
        many = reduction.scan_general(combine, axis, shape, reverse)
    elif pick is not None:
        many = reduction.reduce_arg(pick, combine, axis, shape)
    else:
        many = reduction.reduce_general(combine, axis, shape)

    def run(active: Active, slots: Slots) -> None:
        values = active.machine.call_many(many, len(outs), *[slots[i] for i in args])
        for out, value in zip(outs, values, strict=True):
            slots[out] = value
        active.flops += flops

    return run


@builds("tt.dot")
def dot(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    a, b = op.in_types[:2]
    low.facts.dot_dtype = low.facts.dot_dtype or a.element.name
    result = op.out_types[0]
    product = reduction.Dot(a.shape, b.shape, not a.element.is_float, result.element.compute)
    flops = 2 * result.size * a.shape[-1]
    (out,) = outs
    fn = ew.rounded(product, result.element)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[slots[i] for i in args])
        active.dot_flops += flops

    return run
