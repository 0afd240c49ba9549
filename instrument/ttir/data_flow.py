"""Whether data decide which ops of a kernel run, or where it accesses memory: sizes and numbers do not tell then."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paellapy.instrument.ttir.polling import called
from paellapy.instrument.ttir.tree import Module, Op, Region, walk

_READS = re.compile(r"tt\.(load|atomic_\w+|(experimental_)?descriptor_(load|gather))$")
_BY_POINTER = re.compile(r"tt\.(load|store|atomic_\w+)$")
_BY_INDEX = re.compile(r"tt\.(experimental_)?descriptor_\w+$")
_MASKS = {"tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2}  # the position of the mask

Name = tuple[str, str]  # a function, and a value in it
Pairs = Iterable[tuple[str, str]]


def follows_data(module: Module) -> bool:
    """Whether the bounds of a loop, the condition of a branch or the mask of an access depend on memory."""
    known, every = _from_memory(module)
    return any((name, value) in known for name, op in every for value in _decides(op))


def reaches_by_data(module: Module) -> bool:
    """Whether the addresses that a kernel accesses depend on memory."""
    known, every = _from_memory(module)
    return any((name, value) in known for name, op in every for value in (*_decides(op), *_places(op)))


def _from_memory(module: Module) -> tuple[set[Name], list[tuple[str, Op]]]:
    """The values that depend on memory, and every op with its function."""
    uses: dict[Name, list[Name]] = {}
    for source, target in _flow(module):
        uses.setdefault(source, []).append(target)
    every = [(name, op) for name, func in module.funcs.items() for op in walk(func.region)]
    found = [(name, result) for name, op in every if _READS.match(op.name) for result in op.results]
    known = set(found)
    while found:
        new = [target for target in uses.get(found.pop(), ()) if target not in known]
        known.update(new)
        found += new
    return known, every


def _decides(op: Op) -> list[str]:
    """The operands by which an op decides which others run and how often, or which elements it accesses."""
    if op.name in ("scf.if", "scf.condition", "cf.cond_br"):
        return op.operands[:1]
    if op.name in _MASKS:  # the access of a block pointer has none
        return op.operands[_MASKS[op.name] :][:1]
    return op.operands[:3] if op.name == "scf.for" else []


def _places(op: Op) -> list[str]:
    """The operands by which an op decides where it accesses memory."""
    if _BY_POINTER.match(op.name):
        return op.operands[:1]
    if not _BY_INDEX.match(op.name):
        return []
    return op.operands if _READS.match(op.name) else op.operands[:-1]  # the last is stored


def _flow(module: Module) -> Iterator[tuple[Name, Name]]:
    """Pairs of values of which the second depends on the first."""
    for name, func in module.funcs.items():
        for op in walk(func.region):
            if op.name == "tt.call" and called(op) in module.funcs:
                callee = module.funcs[called(op)]
                for value, (argument, _) in zip(op.operands, callee.args, strict=True):
                    yield (name, value), (callee.name, argument)
                for block in callee.region:
                    if block.ops[-1].name == "tt.return":
                        for value, result in zip(block.ops[-1].operands, op.results, strict=True):
                            yield (callee.name, value), (name, result)
            else:
                yield from (((name, value), (name, target)) for value, target in _within(op))
        for value, target in _between(func.region):
            yield (name, value), (name, target)


def _within(op: Op) -> Pairs:
    """The dependences that an op makes within its function."""
    if op.name == "scf.for":
        (body,) = op.regions[0]
        yield from ((bound, body.args[0]) for bound in op.operands[:3])
        for values in (op.operands[3:], _yielded(op.regions[0])):
            yield from zip(values, body.args[1:], strict=True)
            yield from zip(values, op.results, strict=True)
    elif op.name == "scf.while":
        before, after = (region[0] for region in op.regions)
        passed = before.ops[-1].operands[1:]
        yield from zip(op.operands, before.args, strict=True)
        yield from zip(_yielded(op.regions[1]), before.args, strict=True)
        yield from zip(passed, after.args, strict=True)
        yield from zip(passed, op.results, strict=True)
    elif op.name == "scf.if":
        yield from ((op.operands[0], result) for result in op.results)
        for region in op.regions:
            yield from zip(_yielded(region), op.results, strict=True)
    else:
        yield from ((value, result) for value in op.operands for result in op.results)


def _yielded(region: Region) -> list[str]:
    """The values that a region hands on; one that hands on nothing need not say so."""
    last = region[0].ops[-1]
    return last.operands if last.name == "scf.yield" else []


def _between(region: Region) -> Pairs:
    """The values that branches pass to basic blocks."""
    arguments = {block.label: block.args for block in region}
    for block in region:
        for op in block.ops[-1:]:
            for label, values in op.successors:
                yield from zip(values, arguments.get(label, ()), strict=False)
