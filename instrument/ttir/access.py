"""Translations of the ops that touch memory or steer control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from instrument.ttir import code, memory
from instrument.ttir import elementwise as ew
from instrument.ttir.code import Run, Slots
from instrument.ttir.lower import Lowering, builds, waits_for_memory
from instrument.ttir.machine import LOADED, STORED, Active
from instrument.ttir.memory import Site
from instrument.ttir.parser import Op
from instrument.ttir.tape import BufferRef
from instrument.ttir.types import ELEMENTS, Element
from instrument.ttir.values import Ptr, Value, Window

Ints = tuple[int, ...]
Shape = tuple[int, ...]
PAD_NAN = 2
_ANY = ELEMENTS["i8"]


class Access:
    """One memory op at run time: makes sites, counts bytes, and spreads over the arguments a pointer may point into."""

    def __init__(self, low: Lowering, op: Op, shape: Shape, element: Element) -> None:
        self.kernel, self.line, self.name = low.kernel, low.line(op), op.name
        self.shape, self.element = shape, element
        self.bytes = element.size
        for d in shape:
            self.bytes *= d
        self.argument_names = [name for name, _ in low.module.entry.args]

    def site(self, active: Active, base: int) -> Site:
        machine = active.machine
        own = machine.buffers.element[base]
        origin = machine.buffers.origin[base] * (own.size if own else 1) // self.element.size
        return Site(
            self.kernel,
            self.line,
            self.name,
            self.argument_names[base],
            machine.grid,
            machine.ids[active.rows],
            active.rows,
            self.shape,
            origin,
        )

    def bare_site(self, active: Active) -> Site:
        """For ops that touch no argument."""
        ids = active.machine.ids[active.rows]
        return Site(self.kernel, self.line, self.name, "", active.machine.grid, ids, active.rows, self.shape)

    def count(self, active: Active, field: int, mask: Value, base: int) -> None:
        if mask is not None:
            active.machine.count(field, mask, self.element.size, self.site(active, base))
        elif field == LOADED:
            active.loaded += self.bytes
        else:
            active.stored += self.bytes

    def each(self, active: Active, p: Ptr, mask: Value) -> list[tuple[int, Value]]:
        """(argument, mask) for every argument the pointer may point into."""
        if p.which is None:
            return [(p.bases[0], mask)]
        call, parts = active.machine.call, []
        for k, base in enumerate(p.bases):
            own = call(np.equal, p.which, np.int32(k))
            parts.append((base, own if mask is None else call(np.logical_and, own, mask)))
        return parts

    def load(self, active: Active, p: Ptr, mask: Value, other: Value) -> Value:
        self.count(active, LOADED, mask, p.bases[0])
        machine, value = active.machine, None
        for base, own in self.each(active, p, mask):
            part = machine.load(
                base, p.offset, own, other if value is None else None, self.element, self.site(active, base)
            )
            value = part if value is None else machine.call(ew.where, own, part, value)
        return value

    def store(self, active: Active, p: Ptr, value: Value, mask: Value) -> None:
        self.count(active, STORED, mask, p.bases[0])
        for base, own in self.each(active, p, mask):
            active.machine.store(base, p.offset, value, own, self.element, self.site(active, base))


def optional(slots: Slots, args: Ints, position: int) -> Any:
    return slots[args[position]] if len(args) > position else None


# ---- pointers --------------------------------------------------------------------------------------------------------


@builds("tt.addptr")
def addptr(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (a, i), (out,) = args, outs
    low.same_pointer(a, out)

    def run(active: Active, slots: Slots) -> None:
        p = slots[a]
        slots[out] = Ptr(p.bases, p.which, active.machine.call(np.add, p.offset, slots[i]), p.element)

    return run


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
    """The pointer tensor and mask a tile stands for."""
    call = active.machine.call
    offset = call(window_offset(block), w.base.offset, *at, *w.strides)
    mask = call(window_mask(block, checked), *at, *w.shape) if checked else None
    which = None if w.base.which is None else call(lambda v: np.reshape(v, (-1,) + (1,) * len(block)), w.base.which)
    return Ptr(w.base.bases, which, offset, w.base.element), mask


# ---- loads and stores ------------------------------------------------------------------------------------------------


@builds("tt.load")
def load(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (out,), type_ = outs, op.in_types[0]
    if type_.kind == "block_pointer":
        tile = Access(low, op, type_.block, type_.element)
        checked = op.integers("boundaryCheck")
        nan = op.attributes.get("padding", "1").split()[0] in (str(PAD_NAN), "nan")
        other = type_.element.compute.type(np.nan if nan else 0)

        def run_tile(active: Active, slots: Slots) -> None:
            w = slots[args[0]]
            p, mask = window_access(active, w, w.offsets, checked, w.block)
            slots[out] = tile.load(active, p, mask, other)

        return run_tile
    access = Access(low, op, type_.shape, type_.element)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = access.load(active, slots[args[0]], optional(slots, args, 1), optional(slots, args, 2))

    return run


@builds("tt.store")
def store(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    type_ = op.in_types[0]
    if type_.kind == "block_pointer":
        tile = Access(low, op, type_.block, type_.element)
        checked = op.integers("boundaryCheck")

        def run_tile(active: Active, slots: Slots) -> None:
            w = slots[args[0]]
            p, mask = window_access(active, w, w.offsets, checked, w.block)
            tile.store(active, p, slots[args[1]], mask)

        return run_tile
    access = Access(low, op, type_.shape, type_.element)

    def run(active: Active, slots: Slots) -> None:
        access.store(active, slots[args[0]], slots[args[1]], optional(slots, args, 2))

    return run


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
        for base, own in access.each(active, p, mask):
            ref = BufferRef(base, element)
            active.machine.effect(
                memory.atomic, ref, p.offset, value, own, kind, element, False, access.site(active, base)
            )

    return run


@builds("tt.atomic_rmw")
def atomic_rmw(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    kind, used, type_ = op.word, op.results[0] in low.used, op.in_types[0]
    access, element = Access(low, op, type_.shape, type_.element), type_.element
    (out,) = outs

    def run(active: Active, slots: Slots) -> None:
        p, value, mask = slots[args[0]], slots[args[1]], optional(slots, args, 2)
        access.count(active, LOADED, mask, p.bases[0])
        access.count(active, STORED, mask, p.bases[0])
        result = None
        for base, own in access.each(active, p, mask):
            site, ref = access.site(active, base), BufferRef(base, element)
            part = active.machine.effect(memory.atomic, ref, p.offset, value, own, kind, element, used, site)
            result = part if result is None else active.machine.call(ew.where, own, part, result)
        slots[out] = result

    return run


@builds("tt.atomic_cas")
def atomic_cas(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    type_ = op.in_types[0]
    access, element = Access(low, op, type_.shape, type_.element), type_.element
    (out,) = outs

    def run(active: Active, slots: Slots) -> None:
        p = slots[args[0]]
        if p.which is not None:
            raise NotImplementedError("atomic_cas on a pointer that may point into several arguments")
        access.count(active, LOADED, None, p.bases[0])
        access.count(active, STORED, None, p.bases[0])
        site, ref = access.site(active, p.bases[0]), BufferRef(p.bases[0], element)
        slots[out] = active.machine.effect(
            memory.compare_and_swap, ref, p.offset, slots[args[1]], slots[args[2]], element, site
        )

    return run


# ---- the outside world -----------------------------------------------------------------------------------------------


@builds("tt.assert")
def device_assert(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    message = op.body.split('"')[1] if '"' in op.body else ""
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        condition = slots[args[0]]
        site = access.bare_site(active)
        active.machine.effect(memory.device_assert, condition, message, site)

    return run


@builds("tt.print")
def device_print(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    prefix = op.body.split('"')[1] if '"' in op.body else ""
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        values = [v for v in (slots[i] for i in args) if not isinstance(v, Ptr)]
        active.machine.effect(memory.device_print, prefix, access.bare_site(active), *values)

    return run


@builds("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "llvm.intr.assume", "tt.debug_barrier")
def nothing(low: Lowering, op: Op, args: Ints, outs: Ints) -> None:
    """Barriers hold by construction: a block's elements move together."""


# ---- control flow ----------------------------------------------------------------------------------------------------


def ranks(op: Op) -> Ints:
    return tuple(len(t.shape) for t in op.out_types)


@builds("scf.if")
def scf_if(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    regions = [low.nested(region) for region in op.regions]
    for region in regions:
        for a, b in zip(region.values, outs, strict=True):
            low.same_pointer(a, b)
    return code.if_else(args[0], regions[0], regions[1] if len(regions) > 1 else None, outs, ranks(op))


@builds("scf.for")
def scf_for(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.flag("unsigned"):
        low.refuse(op, "unsigned bounds")
    body = low.nested(op.regions[0])
    for slots in zip(args[3:], body.args[1:], body.values, outs, strict=True):
        low.same_pointer(*slots)
    return code.for_loop(args[:3], args[3:], body, outs, ranks(op))


@builds("scf.while")
def scf_while(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    before, after = (low.nested(region) for region in op.regions)
    for slots in zip(args, before.args, after.values, strict=True):
        low.same_pointer(*slots)
    for slots in zip(before.values[1:], after.args, outs, strict=True):
        low.same_pointer(*slots)
    waits = waits_for_memory(op)
    low.facts.serial |= waits
    return code.while_loop(args, before, after, outs, ranks(op), waits)


@builds("tt.call")
def call(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    name = op.body.strip().removeprefix("@").split("(")[0].strip('" ')
    func = low.module.funcs.get(name)
    if func is None:
        low.refuse(op, f"function {name} is not in the module")
    callee = low.lower(func)
    caller = low.function.name
    for a, b in zip(args, callee.args, strict=True):
        low.join((caller, a), (callee.name, b))
    for block in callee.blocks:
        if block.ends == "return":
            for a, b in zip(block.values, outs, strict=True):
                low.join((callee.name, a), (caller, b))

    def run(active: Active, slots: Slots) -> None:
        code.assign(slots, outs, code.call(callee, active, [slots[i] for i in args]))

    return run
