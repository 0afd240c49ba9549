"""Translations of ops that touch memory or the outside world."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import memory
from paellapy.instrument.ttir.access import Access
from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import LOADED, STORED, Active
from paellapy.instrument.ttir.syntax import unescaped
from paellapy.instrument.ttir.tape import BufferRef
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.types import ELEMENTS
from paellapy.instrument.ttir.values import PAD_NAN, Ptr, Sym
from paellapy.instrument.ttir.windows import window_access

Ints = tuple[int, ...]
Shape = tuple[int, ...]
_ANY = ELEMENTS["i8"]


def optional(slots: Slots, args: Ints, position: int) -> Any:
    return slots[args[position]] if len(args) > position else None


@builds("tt.addptr")
def addptr(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (a, i), (out,) = args, outs
    low.same_pointer(a, out)

    def run(active: Active, slots: Slots) -> None:
        p = slots[a]
        slots[out] = Ptr(p.bases, p.which, active.machine.call(np.add, p.offset, slots[i]), p.element)

    return run


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
        access.count_updates(active, p, mask)
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
            low.refuse(op, "its pointer may point into several arguments, which is not supported")
        access.count(active, LOADED, None, p.bases[0])
        access.count(active, STORED, None, p.bases[0])
        access.count_updates(active, p, None)
        site, ref = access.site(active, p.bases[0]), BufferRef(p.bases[0], element)
        slots[out] = active.machine.effect(
            memory.compare_and_swap, ref, p.offset, slots[args[1]], slots[args[2]], element, site
        )

    return run


@builds("tt.atomic_load")
def atomic_load(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (out,), type_ = outs, op.in_types[0]
    access = Access(low, op, type_.shape, type_.element)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = access.load(active, slots[args[0]], optional(slots, args, 1), None)

    return run


@builds("tt.atomic_store")
def atomic_store(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    access = Access(low, op, op.in_types[0].shape, op.in_types[0].element)

    def run(active: Active, slots: Slots) -> None:
        access.store(active, slots[args[0]], slots[args[1]], optional(slots, args, 2))

    return run


@builds("tt.atomic_poll")
def atomic_poll(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """Waits until memory holds a value. Blocks take turns; a time-out never happens, because waiting takes no time."""
    low.facts.serial = True
    access = Access(low, op, op.in_types[0].shape, op.in_types[0].element)

    def run(active: Active, slots: Slots) -> None:
        while not np.all(access.load(active, slots[args[0]], None, None) == slots[args[1]]):
            active.machine.give_way()
        if outs:
            slots[outs[0]] = np.bool_(True)

    return run


@builds("tt.assert")
def device_assert(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    message = unescaped(op.body.split('"')[1]) if '"' in op.body else ""
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        condition, site = slots[args[0]], access.bare_site(active)
        if type(condition) is Sym:
            active.machine.effect(memory.device_assert, condition, message, site)
        else:  # known before the data: checked now, for every replay
            memory.device_assert(condition, message, site)

    return run


@builds("tt.print")
def device_print(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    prefix = unescaped(op.body.split('"')[1]) if '"' in op.body else ""
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        values = [v for v in (slots[i] for i in args) if not isinstance(v, Ptr)]
        active.machine.effect(memory.device_print, prefix, access.bare_site(active), *values)

    return run


@builds("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "llvm.intr.assume", "tt.debug_barrier",
        "tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents")  # fmt: skip
def nothing(low: Lowering, op: Op, args: Ints, outs: Ints) -> None:
    """Barriers need no step: a block's elements move together."""
