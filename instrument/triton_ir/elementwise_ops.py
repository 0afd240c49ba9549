"""Translations of elementwise ops: arithmetic, comparisons, conversions, and functions written by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir import elementwise, libdevice, ptx_asm
from paellapy.instrument.triton_ir.lower import Lowering, builds, marker_of
from paellapy.instrument.triton_ir.machine import (
    Active,
    Buffers,
    Function,
    Machine,
    Run,
    Slots,
    assign,
    call,
    copy_slot,
    each,
    pure,
    pure_many,
)
from paellapy.instrument.triton_ir.parse import Op, unescaped
from paellapy.instrument.triton_ir.ptx_asm import UnknownPtx
from paellapy.instrument.triton_ir.types import Ints, Ptr, full, is_array


@builds(*elementwise.FLOAT)
def float_op(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn, flops = elementwise.FLOAT[op.name]
    if op.name == "math.fma" and op.out_types[0].element.narrow:
        fn = elementwise.narrow_fma
    return each(elementwise.rounded(fn, op.out_types[0].element), args, outs[0], flops * op.out_types[0].size)


@builds(*elementwise.INTEGER)
def integer_op(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.out_types[0].element.name == "i1":
        if op.name not in elementwise.BOOLEAN:
            low.refuse(op, "on i1")
        return each(elementwise.BOOLEAN[op.name], args, outs[0])
    return each(elementwise.INTEGER[op.name], args, outs[0])


@builds("arith.cmpf")
def compare_float(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.word in ("false", "true"):
        result = np.bool_(op.word == "true")
        return pure(lambda a, b: result, args, outs[0])
    return each(elementwise.FLOAT_PREDICATES[op.word], args, outs[0])


@builds("arith.cmpi")
def compare_integer(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.in_types[0].kind == "pointer":
        low.refuse(op, "on pointers")
    return each(elementwise.integer_predicate(op.word, op.in_types[0].element), args, outs[0])


@builds("tt.clampf")
def clamp(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    fn = elementwise.clamp(op.attributes.get("propagateNan") == "all")
    return each(fn, args, outs[0], 2 * op.out_types[0].size)


@builds(
    "arith.extf", "arith.truncf", "tt.fp_to_fp", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui",
    "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui",
)  # fmt: skip
def convert(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    source, target = op.in_types[0].element, op.out_types[0].element
    if source.is_float and target.is_float and source.compute == target.compute and not target.narrow:
        return copy_slot(args[0], outs[0])  # already held in a type that wide
    return each(elementwise.convert(op.name, source, target, op.attributes.get("rounding", "")), args, outs[0])


@builds("arith.select")
def select(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    condition, a, b = args
    (out,) = outs
    # A condition without a type of its own is a scalar: it needs the tensors' axes behind that of the blocks.
    axes = len(op.out_types[0].shape) if len(op.in_types) == 1 else 0
    where = partial(_where_block, axes) if axes else elementwise.where
    if op.out_types[0].kind == "pointer":
        low.same_pointer(a, b, out)

        def choose_pointer(active: Active, slots: Slots) -> None:
            c, call = slots[condition], active.machine.call
            pair = (slots[a], slots[b])
            bases, whiches = active.common_bases(pair)
            which = None if len(bases) == 1 else call(where, c, *whiches)
            slots[out] = Ptr(bases, which, call(where, c, pair[0].offset, pair[1].offset), pair[0].element)

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
        slots[out] = active.machine.call(where, c, slots[a], slots[b])

    return choose


def _where_block(axes: int, condition: Any, a: Any, b: Any) -> Any:
    if is_array(condition):
        condition = condition.reshape(-1, *(1,) * axes)
    return elementwise.where(condition, a, b)


@builds("tt.extern_elementwise")
def extern(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    symbol = op.attributes.get("symbol", "")
    fn = libdevice.lookup(symbol)
    if fn is None:
        low.refuse(op, f"symbol {symbol}")
    element = op.out_types[0].element
    dtype = element.compute
    rounded = elementwise.rounded(lambda *xs: fn(*xs).astype(dtype, copy=False), element)
    return each(rounded, args, outs[0], op.out_types[0].size)


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
    text = unescaped(op.body.partition('"')[2].rpartition('"')[0])
    try:
        made = ptx_asm.Assembly.of(text, op.attributes.get("constraints", '""').strip('"'))
    except UnknownPtx as e:
        low.refuse(op, f"PTX {e}")
    if not outs or not made.steps:
        if not outs and not made.steps:
            return None
        if made.steps or args:
            low.refuse(op, f"PTX {text!r:.60} without results")
        return partial(_zeros, outs=outs)  # Triton 3.6 gives `griddepcontrol.wait` a result that is never written
    pack = op.integer("packed_element", 1)
    types = [t.element for t in op.in_types[: len(args)]]
    fn = ptx_asm.elementwise(made, types, [t.element for t in op.out_types], pack)
    shapes_in = [t.shape for t in op.in_types[: len(args)]]
    flops = len(made.steps) * op.out_types[0].size

    def run(active: Active, slots: Slots) -> None:
        values = [slots[i] if not shape else active.machine.call(full, slots[i], shape)
                  for i, shape in zip(args, shapes_in, strict=True)]  # fmt: skip
        assign(slots, outs, active.machine.call_many(fn, len(outs), *values))
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

    return pure_many(mapped, args, outs)


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
    return each(elementwise.bitcast(source.element, target.element), args, outs[0])
