"""Translates the op tree to steps. Every op is translated before anything runs, so an unknown op is refused early."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from paellapy.instrument.errors import UnsupportedOpError
from paellapy.instrument.ptx.ranges import Marker, Ranges
from paellapy.instrument.triton_ir import machine, memory
from paellapy.instrument.triton_ir.cost import critical_path, once_through
from paellapy.instrument.triton_ir.machine import Active, Code, Function, Run, Slots, Step
from paellapy.instrument.triton_ir.parse import Block, Func, Module, Op, Region, walk
from paellapy.instrument.triton_ir.types import ELEMENTS, Array, Element, Ints, Ptr, Type, decode

# --- `arith.constant`: parses the value in its text -------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:0x[0-9A-Fa-f]+|[\w.]+(?:[eE][-+]\d+)?)")


def constant(text: str, type: Type | None) -> Any:
    """A scalar for a splat, an array with a leading block axis for a list.

    >>> from paellapy.instrument.triton_ir.types import parse_type
    >>> constant("dense<0xFF800000>", parse_type("tensor<4xf32>"))
    np.float32(-inf)
    """
    element = type.element if type else ELEMENTS["i1"]
    shape = type.shape if type else ()
    text = text.strip()
    if text.startswith("dense<"):
        text = text[6:-1].strip()
    if text.startswith('"0x'):
        raw = np.frombuffer(bytes.fromhex(text[3:-1]), element.storage)
        return decode(raw.reshape((1, *shape)), element)
    if text.startswith("["):
        return np.array([_number(x, element) for x in _NUMBER.findall(text)], element.compute).reshape((1, *shape))
    return _number(text, element)


def _number(text: str, element: Element) -> Any:
    if text in ("true", "false"):
        return np.bool_(text == "true") if element.name == "i1" else element.compute.type(-(text == "true"))
    if re.match(r"[-+]?0x", text):  # a bit pattern, as MLIR prints infinities and NaN
        bits = np.array([int(text, 16)], np.uint64).astype(element.bits)
        return decode(bits.view(element.storage), element)[0]
    if element.is_float:
        return element.compute.type(float(text))
    wrapped = int(text) & (2 ** (8 * element.size) - 1)
    return np.array([wrapped], np.uint64).astype(element.bits).view(element.compute)[0]


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


_HINTS = {"tt.divisibility", "tt.contiguity"}  # of `tl.multiple_of` and `tl.max_contiguous`


class Lowering:
    """Translates one module. `pointers` joins slots that may hold the same pointer, to find changed arguments."""

    def __init__(self, module: Module, kernel: str, threads: int, has_tma: bool = True) -> None:
        self.module, self.kernel, self.threads, self.facts = module, kernel, threads, Facts()
        self.has_tma = has_tma  # tensor descriptors go to a unit that is particular about them
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
            + (f" ({why})" if why else ""), kernel=self.kernel, line=self.line(op), op=op.name
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
        if _HINTS & op.attributes.keys():
            run = self._checked(op, run, outs[0])
        return LoweredStep(run, f"{op.name} at {self.line(op)}", (), (*args, *inner))

    def _checked(self, op: Op, run: Run, out: int) -> Run:
        """The op, and a check of the promises about its result."""
        steps, runs = (op.dense(f"tt.{name}") for name in ("divisibility", "contiguity"))
        line, shape, seen = self.line(op), op.out_types[0].shape, memory.Once()

        def checked(active: Active, slots: Slots) -> None:
            run(active, slots)
            value, size = slots[out], 1
            if isinstance(value, Ptr):
                value, size = value.offset, value.element.size
            on, rows = active.machine, active.rows
            site = memory.Site(self.kernel, line, op.name, "", on.grid, on.ids[rows], rows, shape)
            on.observe(memory.check_hint, value, steps, runs, size, site, seen)

        return checked

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


def _mark_dead(codes: list[Code], template: machine.Slots) -> None:
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

    def run(active: Active, _: machine.Slots) -> None:
        active.path += path

    return run


# --- loops that poll memory: another block can end them, so blocks must take turns ------------------------------------

_PAST_L1 = re.compile(r"\bc[vg]\b")  # cache modifiers of loads that see what other SMs write
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
    if op.name == "tt.load" and any(_PAST_L1.search(v) for k, v in op.attributes.items() if k.startswith("cache")):
        return True
    return op.name in _ATOMICS or op.flag("isVolatile")


def called(op: Op) -> str:
    """The name of the function that a `tt.call` calls; a name in quotation marks may have parentheses."""
    name = op.body.strip().removeprefix("@")
    return name.split('"')[1] if name.startswith('"') else name.split("(")[0].strip()


# --- translations of control flow ops ---------------------------------------------------------------------------------


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
    return machine.if_else(args[0], regions[0], regions[1] if len(regions) > 1 else None, outs, ranks(op))


@builds("scf.for")
def scf_for(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    if op.flag("unsigned"):
        low.refuse(op, "unsigned bounds")
    number = low.next_loop(op)
    body = low.nested(op.regions[0])
    body.steps.insert(0, counts_loop(number))
    for slots in zip(args[3:], body.args[1:], body.values, outs, strict=True):
        low.same_pointer(*slots)
    return machine.for_loop(args[:3], args[3:], body, outs, ranks(op))


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
    return machine.while_loop(args, before, after, outs, ranks(op), for_others)


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
        machine.assign(slots, outs, machine.call(callee, active, [slots[i] for i in args]))

    return run


# --- whether data decide which ops of a kernel run, or where it accesses memory: sizes and numbers do not tell then ---

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
