"""Translations of control flow ops."""

from __future__ import annotations

from paellapy.instrument.ttir import code
from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.latency import once_through
from paellapy.instrument.ttir.lower import LoweredStep, Lowering, builds, waits
from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.polling import called, waits_for_memory
from paellapy.instrument.ttir.tree import Op

Ints = tuple[int, ...]
Shape = tuple[int, ...]


def ranks(op: Op) -> Ints:
    return tuple(len(t.shape) for t in op.out_types)


def counts_loop(number: int) -> LoweredStep:
    return LoweredStep(waits(once_through(number)), "counting")


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
    number = low.next_loop(op)
    body = low.nested(op.regions[0])
    body.steps.insert(0, counts_loop(number))
    for slots in zip(args[3:], body.args[1:], body.values, outs, strict=True):
        low.same_pointer(*slots)
    return code.for_loop(args[:3], args[3:], body, outs, ranks(op))


@builds("scf.while")
def scf_while(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    number = low.next_loop(op)
    before, after = (low.nested(region) for region in op.regions)
    before.steps.insert(0, counts_loop(number))
    for slots in zip(args, before.args, after.values, strict=True):
        low.same_pointer(*slots)
    for slots in zip(before.values[1:], after.args, outs, strict=True):
        low.same_pointer(*slots)
    for_others = waits_for_memory(op, low.module)
    low.facts.serial |= for_others
    return code.while_loop(args, before, after, outs, ranks(op), for_others)


@builds("tt.call")
def call(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    name = called(op)
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
