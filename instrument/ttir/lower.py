"""Translates the op tree to steps. Every op is translated before anything runs, so an unknown op is refused early."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paellapy.instrument.errors import UnsupportedOpError
from paellapy.instrument.markers import Marker, Ranges
from paellapy.instrument.ttir import code
from paellapy.instrument.ttir.code import Code, Function, Run, Step
from paellapy.instrument.ttir.constants import constant
from paellapy.instrument.ttir.latency import critical_path
from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.tree import Block, Func, Module, Op, Region, walk
from paellapy.instrument.ttir.types import Array

Builder = Callable[["Lowering", Op, tuple[int, ...], tuple[int, ...]], Run | None]
BUILDERS: dict[str, Builder] = {}

TERMINATORS = {
    "tt.return": "return",
    "scf.yield": "yield",
    "scf.condition": "yield",
    "tt.reduce.return": "yield",
    "tt.scan.return": "yield",
    "tt.map_elementwise.return": "yield",
    "cf.br": "br",
    "cf.cond_br": "cond_br",
}
COMBINES = ("tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return")  # ends of functions of scalars


def builds(*names: str) -> Callable[[Builder], Builder]:
    """Registers the translation of some ops."""

    def register(builder: Builder) -> Builder:
        for name in names:
            BUILDERS[name] = builder
        return builder

    return register


class Scope:
    """Names visible at a point: a region may reuse the names of its siblings, never those of enclosing regions."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent, self.names = parent, dict[str, int]()

    def find(self, name: str) -> int | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@dataclass(slots=True)
class Facts:
    """Known properties of the whole program."""

    serial: bool = False  # blocks wait for each other, so each runs separately
    addresses: bool = False  # pointers are made from numbers, so they may point to arrays that are not arguments
    dot_dtype: str | None = None
    tile: int = 1  # elements of the largest tensor
    loops: list[str] = field(default_factory=list)  # the lines of the loops, in the order of the text
    ranges: Ranges = field(default_factory=Ranges)
    written: set[int] = field(default_factory=set)  # indices of arguments that may be stored to


class Lowering:
    """Translates one module. `pointers` joins slots that may hold the same pointer, to find changed arguments."""

    def __init__(self, module: Module, kernel: str, threads: int) -> None:
        self.module, self.kernel, self.threads, self.facts = module, kernel, threads, Facts()
        self.functions: dict[str, Function] = {}
        self.pointers: dict[tuple[str, int], tuple[str, int]] = {}
        self.stored: set[tuple[str, int]] = set()
        self.stores_anywhere = False
        self.function = Function("")
        self.scope = Scope()
        self.used: set[str] = set()  # names that the current function reads
        self.inner_reads: list[int] = []

    def program(self) -> Function:
        entry = self.lower(self.module.entry)
        roots: dict[tuple[str, int], set[int]] = {}
        for i, slot in enumerate(entry.args):
            roots.setdefault(self.root((entry.name, slot)), set()).add(i)
        for slot_key in self.stored:
            self.facts.written |= roots.get(self.root(slot_key), set())
        if self.stores_anywhere:
            self.facts.written = set(range(len(entry.args)))
        return entry

    # ---- errors ---------------------------------------------------------------------------------------------------

    def line(self, op: Op) -> str:
        return self.module.locations.line(op.loc)

    def refuse(self, op: Op, why: str = "") -> NoReturn:
        raise UnsupportedOpError(
            f"kernel {self.kernel}, {self.line(op)}: the virtual GPU cannot evaluate {op.name}"
            + (f" ({why})" if why else "")
        )

    # ---- which arguments are written --------------------------------------------------------------------------------

    def root(self, key: tuple[str, int]) -> tuple[str, int]:
        while self.pointers.get(key, key) != key:
            key = self.pointers[key]
        return key

    def join(self, *keys: tuple[str, int]) -> None:
        first = self.root(keys[0])
        for key in keys[1:]:
            self.pointers[self.root(key)] = first

    def same_pointer(self, *slots: int) -> None:
        self.join(*[(self.function.name, s) for s in slots])

    def writes(self, slot: int) -> None:
        self.stored.add((self.function.name, slot))

    # ---- functions and blocks ---------------------------------------------------------------------------------------

    def lower(self, func: Func) -> Function:
        if func.name in self.functions:
            return self.functions[func.name]
        saved = self.function, self.scope, self.used
        self.function, self.scope = Function(func.name), Scope()
        self.functions[func.name] = self.function
        self.used = {
            name for op in walk(func.region) for name in (*op.operands, *(a for _, s in op.successors for a in s))
        }
        self.function.args = tuple(self.define(name) for name, _ in func.args)
        for op in walk(func.region):
            if op.name == "tt.return":
                self.function.result_ranks = tuple(len(t.shape) for t in op.in_types)
        self.function.blocks = self.region(func.region)
        done = self.function
        self.function, self.scope, self.used = saved
        return done

    def define(self, name: str) -> int:
        self.function.template.append(None)
        slot = len(self.function.template) - 1
        self.scope.names[name] = slot
        return slot

    def slot(self, name: str, op: Op) -> int:
        found = self.scope.find(name)
        if found is None:
            self.refuse(op, f"{name} is not defined")
        return found

    def region(self, region: Region) -> list[Code]:
        """Translates a region's blocks in a new scope."""
        self.scope = Scope(self.scope)
        labels = {block.label: i for i, block in enumerate(region)}
        codes = [Code(tuple(self.define(a) for a in block.args)) for block in region]
        for block in region:  # successors may read values that their predecessors define
            for op in block.ops:
                for name in op.results:
                    self.define(name)
        combines = any(block.ops and block.ops[-1].name in COMBINES for block in region)
        for block, target in zip(region, codes, strict=True):
            self.block(block, target, codes, labels, combines)
        _mark_dead(codes, self.function.template)
        assert self.scope.parent is not None
        self.scope = self.scope.parent
        return codes

    def block(self, block: Block, target: Code, codes: list[Code], labels: dict[str, int], combines: bool) -> None:
        reads: dict[int, None] = {}
        defined = set(target.args)
        paths = {} if combines else _paths(block.ops)
        for at, op in enumerate(block.ops):
            if (path := paths.get(at)) is not None:
                target.steps.append(LoweredStep(waits(path), "counting"))
            args = tuple(self.slot(name, op) for name in op.operands)
            outs = tuple(self.slot(name, op) for name in op.results)
            reads.update(dict.fromkeys(args))
            if op.name in TERMINATORS:
                target.ends, target.values = TERMINATORS[op.name], args
                for label, names in op.successors:
                    sources = tuple(self.slot(name, op) for name in names)
                    reads.update(dict.fromkeys(sources))
                    successor = labels[label]
                    target.targets.append((successor, sources))
                    for a, b in zip(sources, codes[successor].args, strict=True):
                        self.same_pointer(a, b)
                break
            step = self.step(op, args, outs)
            if step is not None:
                target.steps.append(step)
                reads.update(dict.fromkeys(step.reads))
            defined.update(outs)
        if not target.ends:
            target.ends = "yield"
        constants = self.function.template
        target.free = tuple(s for s in reads if s not in defined and constants[s] is None)

    def step(self, op: Op, args: tuple[int, ...], outs: tuple[int, ...]) -> LoweredStep | None:
        if op.bad_type:
            self.refuse(op, f"type {op.bad_type}")
        for type in (*op.in_types, *op.out_types):
            self.facts.tile = max(self.facts.tile, type.size)
        if op.name in ("arith.constant", "ub.poison"):
            type_ = op.out_types[0] if op.out_types else None
            self.function.template[outs[0]] = constant(op.body if op.name == "arith.constant" else "0", type_)
            return None
        builder = BUILDERS.get(op.name)
        if builder is None:
            self.refuse(op)
        outer, self.inner_reads = self.inner_reads, []
        run = builder(self, op, args, outs)
        inner, self.inner_reads = self.inner_reads, outer
        if run is None:
            return None
        return LoweredStep(run, f"{op.name} at {self.line(op)}", (), (*args, *inner))

    def next_loop(self, op: Op) -> int:
        """The number of a loop, in the order of the text."""
        self.facts.loops.append(self.line(op))
        return len(self.facts.loops) - 1

    def nested(self, region: Region) -> Code:
        """Translates an op's region of one block; outside values that it reads count as read by the op."""
        (block,) = self.region(region)
        self.inner_reads.extend(block.free)
        return block


@dataclass(slots=True)
class LoweredStep(Step):
    reads: tuple[int, ...] = ()


def _mark_dead(codes: list[Code], template: code.Slots) -> None:
    """Marks for each step the slots that it reads last: those defined in its block and read nowhere else."""
    readers: dict[int, set[int]] = {}
    for i, block in enumerate(codes):
        for step in block.steps:
            assert isinstance(step, LoweredStep)
            for slot in step.reads:
                readers.setdefault(slot, set()).add(i)
        for slot in (*block.values, *(s for _, sources in block.targets for s in sources)):
            readers.setdefault(slot, set()).add(-1)
    for i, block in enumerate(codes):
        free = set(block.free)
        seen: set[int] = set()
        for step in reversed(block.steps):
            assert isinstance(step, LoweredStep)
            last = [
                s for s in dict.fromkeys(step.reads)
                if s not in seen and s not in free and template[s] is None and readers[s] == {i}
            ]  # fmt: skip
            seen.update(last)
            step.dead = tuple(last)


def marker_of(op: Op) -> Marker | None:
    """The begin or end of a range that an op stands for, if any."""
    return Marker.of(op.body) if op.name == "tt.elementwise_inline_asm" and "paellapy " in op.body else None


def _paths(ops: Sequence[Op]) -> dict[int, Array]:
    """Waiting times of a straight line, booked where it begins; with markers, from marker to marker."""
    cuts = [0, *(i + 1 for i, op in enumerate(ops) if marker_of(op)), len(ops)]
    booked: dict[int, Array] = {}
    before: Any = 0
    for at, upto in itertools.pairwise(cuts):
        path = critical_path(ops, upto)
        if path is not None and at < len(ops):
            booked[at] = path - before
            before = path
    return booked


def waits(path: Array) -> Run:
    """A step that books the waiting time of the straight line that it begins."""

    def run(active: Active, _: code.Slots) -> None:
        active.path += path

    return run
