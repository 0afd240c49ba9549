"""Loops that poll memory: another block can end them, so blocks must take turns."""

from __future__ import annotations

from paellapy.instrument.ttir.tree import Module, Op, Region, walk

_ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_poll", "tt.atomic_load")


def waits_for_memory(loop: Op, module: Module) -> bool:
    """Whether another block can end a loop: its condition reads memory, or depends on values that its body polls."""
    if any(op.name in ("tt.load", *_ATOMICS) for op in walk(loop.regions[0])):
        return True
    before, after = (region[0] for region in loop.regions)
    known: set[str] = set()  # names whose values depend on a poll
    while True:
        size = len(known)
        _follow_polls(loop.regions[1], known, module)
        _follow_polls(loop.regions[0], known, module)
        handed = (before.args, after.ops[-1].operands), (after.args, before.ops[-1].operands[1:])
        for names, values in handed:
            known.update(a for a, value in zip(names, values, strict=True) if value in known)
        if len(known) == size:
            return before.ops[-1].operands[0] in known


def _follow_polls(region: Region, known: set[str], module: Module) -> None:
    """Adds the results that depend on names in `known`, or on memory that other blocks may change meanwhile."""
    for op in walk(region):
        whole = (op, *(inner for region in op.regions for inner in walk(region)))
        if any(polls(each, module) or not known.isdisjoint(each.operands) for each in whole):
            known.update(op.results)


def polls(op: Op, module: Module) -> bool:
    """Whether an op reads memory so as to see concurrent writes of other blocks."""
    if op.name == "tt.call":
        func = module.funcs.get(called(op))
        return func is not None and any(polls(inner, module) for inner in walk(func.region))
    return op.name in _ATOMICS or op.flag("isVolatile")


def called(op: Op) -> str:
    """The name of the function that a `tt.call` calls; a name in quotation marks may have parentheses."""
    name = op.body.strip().removeprefix("@")
    return name.split('"')[1] if name.startswith('"') else name.split("(")[0].strip()
