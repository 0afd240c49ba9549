"""Execution of steps: `Machine` evaluates them; `Recorder` also records the operations that depend on memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.ptx.ranges import Marker
from paellapy.instrument.triton_ir import memory
from paellapy.instrument.triton_ir.cost import PATH_FIELDS
from paellapy.instrument.triton_ir.elementwise import elementwise
from paellapy.instrument.triton_ir.memory import Site, StaticLoad
from paellapy.instrument.triton_ir.types import (
    Array,
    Element,
    Ptr,
    Sym,
    Value,
    Window,
    is_array,
    merge_blocks,
    take_blocks,
)

# --- the tape: the part of a run that remains once everything that does not depend on memory has been computed --------
# A tape is compiled to one straight Python function of calls; values are dropped after their last use, and a value that
# dies at an elementwise call gives its memory to the result.

MAX_ENTRIES = 20_000
MAX_BYTES = 256 << 20
MAX_KEPT = 256 << 20


@dataclass(slots=True, frozen=True)
class BufferRef:
    """An argument's flat memory, viewed as `element`."""

    index: int
    element: Element


@dataclass(slots=True, frozen=True)
class Ref:
    """An earlier entry's result."""

    id: int


@dataclass(slots=True)
class Entry:
    id: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    pure: bool
    shape: tuple[int, ...] | None = None  # shape of the result, if it is one array
    dtype: Any = None
    owned: bool = False  # the result is fresh memory that no other value uses


@dataclass(slots=True)
class Tape:
    entries: list[Entry] = field(default_factory=list)
    next_id: int = 0
    by_id: dict[int, Entry] = field(default_factory=dict)
    bytes: int = 0  # held by constants and plans
    kept: int = 0  # bytes of addresses kept until products are joined
    full: bool = False  # too large to be worth keeping
    ragged: bool = False  # some load is masked only in the last block

    def _refs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(Ref(a.id) if type(a) is Sym else a for a in args)

    def _add(self, fn: Callable[..., Any], args: Sequence[Any], value: Any, pure: bool) -> Sym:
        self.next_id += 1
        if self.full:
            return Sym(self.next_id, value)
        entry = Entry(self.next_id, fn, self._refs(args), pure)
        if type(fn) is not np.ufunc and pure:
            self._note_views(args, value)
        if type(value) is np.ndarray:
            entry.shape, entry.dtype = value.shape, value.dtype
            entry.owned = type(fn) is np.ufunc and value.flags.c_contiguous
        self.entries.append(entry)
        self.bytes += _constant_bytes(entry)
        if self.bytes > MAX_BYTES or len(self.entries) > MAX_ENTRIES:
            self.full = True
            self.entries.clear()
        self.by_id[entry.id] = entry
        return Sym(self.next_id, value)

    def _note_views(self, args: Sequence[Any], value: Any) -> None:
        """Marks values that are seen through a view, which therefore cannot give their memory away."""
        results = [v for v in (value if type(value) is tuple else (value,)) if type(v) is np.ndarray]
        for a in args:
            if type(a) is Sym and type(a.value) is np.ndarray and any(np.may_share_memory(a.value, r) for r in results):
                self.by_id[a.id].owned = False

    def pure(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Sym:
        return self._add(fn, args, value, True)

    def pure_many(self, fn: Callable[..., Any], args: Sequence[Any], values: tuple[Any, ...]) -> tuple[Sym, ...]:
        whole = self._add(fn, args, values, True)
        return tuple(self._add(_item, (whole, i), value, True) for i, value in enumerate(values))

    def load(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Sym:
        if isinstance(fn, StaticLoad):
            self.ragged |= fn.ragged
        if isinstance(fn, StaticLoad) and fn.offset is not None:
            if self.kept + fn.offset.nbytes > MAX_KEPT:
                fn.offset = fn.mask = None
            else:
                self.kept += fn.offset.nbytes
        return self._add(fn, args, value, True)

    def effect(self, fn: Callable[..., Any], args: Sequence[Any], value: Any) -> Any:
        sym = self._add(fn, args, value, False)
        return None if value is None else sym

    def store(self, plan: Callable[[Array, Any], None], ref: BufferRef, value: Any) -> None:
        self._add(plan, (ref, value), None, False)

    def count(self, field: int, mask: Sym, size: int, site: Site) -> None:
        self._add(memory.count_bytes, (COST, field, mask, size, site), None, False)

    def count_touched(self, count: Callable[..., None], args: Sequence[Any]) -> None:
        self._add(count, (COST, *args), None, False)


class _CostTable:
    """Stands for the cost table of the replay."""


COST = _CostTable()
Replay = Callable[[Sequence[Array | None], Array], None]


def _item(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


def _constant_bytes(entry: Entry) -> int:
    fn = entry.fn.read if isinstance(entry.fn, StaticLoad) else entry.fn
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or ()]
    return sum(x.nbytes for x in (*entry.args, *cells) if type(x) is np.ndarray)


COST_FIELDS = ("bytes_loaded", "bytes_stored", "flops", "dot_flops", *PATH_FIELDS)
LOADED, STORED = range(2)  # places in COST_FIELDS


@dataclass(slots=True, frozen=True)
class Buffers:
    """The pointer arguments of one run: flat memory, the place of an array's first element in it, its element type."""

    flat: list[Array | None]
    origin: list[int]
    element: list[Element | None]
    fragile: frozenset[int]  # arguments that may change while the kernel runs: written, or overlapping written ones
    views: dict[int, tuple[int, int]] = field(default_factory=dict)  # arguments' own parts, where memory has more
    warned: set[tuple[str, str]] = field(default_factory=set)  # places that reached beyond them
    others: list[str] = field(default_factory=list)  # names of arrays beyond the arguments, accessed by their addresses
    places: list[Any] = field(default_factory=list)  # the arrays by their addresses, once a kernel has used one

    def add(self, flat: Array, element: Element, name: str) -> int:
        """Adds an array that is not an argument to this run; returns its index."""
        self.flat.append(flat)
        self.origin.append(0)
        self.element.append(element)
        self.others.append(name)
        return len(self.flat) - 1

    def name(self, index: int, arguments: Sequence[str]) -> str:
        return arguments[index] if index < len(arguments) else self.others[index - len(arguments)]

    def view(self, index: int, element: Element) -> Array:
        flat, own = self.flat[index], self.element[index]
        assert flat is not None
        assert own is not None
        return flat if own.storage == element.storage else memory.reinterpret(flat, element)


@dataclass(slots=True, frozen=True)
class Mark:
    """Some blocks at the begin or end of a range, and the cost of each until then."""

    marker: Marker
    ids: Array
    cost: Array


class Machine:
    """Evaluates directly. Each run of a chunk of blocks has one machine."""

    def __init__(self, kernel: str, buffers: Buffers, grid: tuple[int, int, int], ids: Array) -> None:
        self.kernel, self.buffers, self.grid, self.ids = kernel, buffers, grid, ids
        self.cost = np.zeros((len(ids), len(COST_FIELDS)), np.int64)
        self.marks: list[Mark] | None = None  # where ranges begin and end, if requested
        self.give_way: Callable[[Any], None] = lambda state: None  # called by a block while it waits for others

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    def call_many(self, fn: Callable[..., tuple[Any, ...]], n: int, *args: Any) -> tuple[Any, ...]:
        return fn(*args)

    def known(self, value: Value) -> Any:
        """The value itself, for a decision in control flow."""
        return value

    def effect(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that touches memory or the outside world, in order. `BufferRef`s become the arrays."""
        return fn(*[self.buffers.view(a.index, a.element) if type(a) is BufferRef else a for a in args])

    def observe(self, fn: Callable[..., Any], value: Value, *args: Any) -> None:
        """Calls a function that checks a value; one that is known before the data is checked now, for every replay."""
        fn(value, *args) if type(value) is not Sym else self.effect(fn, value, *args)

    def load(self, base: int, offset: Value, mask: Value, other: Value, element: Element, site: Site) -> Value:
        return memory.gather(self.buffers.view(base, element), offset, mask, other, element, site)

    def store(self, base: int, offset: Value, value: Value, mask: Value, element: Element, site: Site) -> None:
        memory.scatter(self.buffers.view(base, element), offset, value, mask, element, site)

    def count(self, field: int, mask: Value, size: int, site: Site) -> None:
        """Bytes of a masked access: per block, the elements whose mask is set."""
        memory.count_bytes(self.cost, field, mask, size, site)

    def count_touched(self, count: Callable[..., None], *args: Any) -> None:
        """Lets a function of cost.py add to the cost table."""
        count(self.cost, *args)


def _now(value: Any) -> Any:
    """A value in the recording run."""
    return value.value if type(value) is Sym else value


class Recorder(Machine):
    """Evaluates and records. Control flow that depends on memory ends the recording, not the run."""

    def __init__(self, kernel: str, buffers: Buffers, grid: tuple[int, int, int], ids: Array) -> None:
        super().__init__(kernel, buffers, grid, ids)
        self.tape: Tape | None = Tape()
        self.dynamic_cost = np.zeros_like(self.cost)

    def known(self, value: Value) -> Any:
        if type(value) is Sym:
            self.tape = None
        return _now(value)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not any(type(a) is Sym for a in args):
            return fn(*args)
        value = fn(*map(_now, args))
        return value if self.tape is None else self.tape.pure(fn, args, value)

    def call_many(self, fn: Callable[..., tuple[Any, ...]], n: int, *args: Any) -> tuple[Any, ...]:
        if not any(type(a) is Sym for a in args):
            return fn(*args)
        values = fn(*map(_now, args))
        return values if self.tape is None else self.tape.pure_many(fn, args, values)

    def effect(self, fn: Callable[..., Any], *args: Any) -> Any:
        value = super().effect(fn, *map(_now, args))
        return value if self.tape is None else self.tape.effect(fn, args, value)

    def load(self, base: int, offset: Value, mask: Value, other: Value, element: Element, site: Site) -> Value:
        ref = BufferRef(base, element)
        if any(type(x) is Sym for x in (offset, mask, other)):
            at, keep, filler = map(_now, (offset, mask, other))
            value = super().load(base, at, keep, filler, element, site)
            if self.tape is None:
                return value
            return self.tape.load(memory.gather, (ref, offset, mask, other, element, site), value)
        if self.tape is None:
            return super().load(base, offset, mask, other, element, site)
        flat = self.buffers.view(base, element)
        plan = memory.load_plan(offset, mask, other, element, flat.size, site, base in self.buffers.fragile)
        return self.tape.load(plan, (ref,), plan(flat))

    def store(self, base: int, offset: Value, value: Value, mask: Value, element: Element, site: Site) -> None:
        at, now, keep = map(_now, (offset, value, mask))
        flat = self.buffers.view(base, element)
        if self.tape is None or type(offset) is Sym or type(mask) is Sym:
            memory.scatter(flat, at, now, keep, element, site)
            if self.tape is not None:
                self.tape.effect(memory.scatter, (BufferRef(base, element), offset, value, mask, element, site), None)
            return
        plan = memory.store_plan(offset, mask, element, flat.size, site)
        plan(flat, now)
        self.tape.store(plan, BufferRef(base, element), value)

    def count(self, field: int, mask: Value, size: int, site: Site) -> None:
        if type(mask) is not Sym:
            super().count(field, mask, size, site)
        elif self.tape is None:
            super().count(field, mask.value, size, site)
        else:  # a replay adds it to its own table, so it must not be in the static part
            memory.count_bytes(self.dynamic_cost, field, mask.value, size, site)
            self.tape.count(field, mask, size, site)

    def count_touched(self, count: Callable[..., None], *args: Any) -> None:
        dynamic = self.tape is not None and any(type(a) is Sym for a in args)
        count(self.dynamic_cost if dynamic else self.cost, *map(_now, args))
        if self.tape is not None and dynamic:
            self.tape.count_touched(count, args)


class Active:
    """The executing blocks: all of the run, or those that agreed at a branch."""

    __slots__ = ("dot_flops", "flops", "loaded", "machine", "nb", "path", "pid", "rows", "stored")

    def __init__(self, machine: Machine, rows: Array, pid: tuple[Value, Value, Value]) -> None:
        self.machine, self.rows, self.pid, self.nb = machine, rows, pid, len(rows)
        self.flops = self.dot_flops = self.loaded = self.stored = 0
        self.path = np.zeros(len(PATH_FIELDS), np.int64)

    def mark(self, marker: Marker) -> None:
        """Records the position of the active blocks."""
        if self.machine.marks is not None:
            self._settle_so_far()
            self.machine.marks.append(Mark(marker, self.machine.ids[self.rows], self.machine.cost[self.rows]))

    def _settle_so_far(self) -> None:
        self.settle()
        self.flops = self.dot_flops = self.loaded = self.stored = 0
        self.path[:] = 0

    def subset(self, index: Array) -> Active:
        if self.machine.marks is not None:
            self._settle_so_far()  # a mark of the subset counts the cost before it
        return Active(
            self.machine,
            self.rows[index],
            tuple(take_blocks(p, index, self.nb) for p in self.pid),
        )

    def settle(self) -> None:
        """Books the costs that were counted for all active blocks alike."""
        self.machine.cost[self.rows] += (self.loaded, self.stored, self.flops, self.dot_flops, *self.path)

    def select(self, value: Value, index: Array) -> Value:
        """`value` for the blocks at `index` only."""
        if type(value) is Ptr:
            which = None if value.which is None else self.select(value.which, index)
            return Ptr(value.bases, which, self.select(value.offset, index), value.element)
        if type(value) is Window:
            shape, strides, offsets = (
                tuple(self.select(v, index) for v in part) for part in (value.shape, value.strides, value.offsets)
            )
            return Window(self.select(value.base, index), shape, strides, offsets, value.block, value.padding)
        return None if value is None else self.machine.call(take_blocks, value, index, self.nb)

    def merge(self, parts: list[tuple[Array, tuple[Value, ...]]], ranks: Sequence[int]) -> tuple[Value, ...]:
        """Joins the results of groups that took different branches; each part is (positions in this set, values)."""
        if len(parts) == 1:
            return parts[0][1]
        indices = tuple(index for index, _ in parts)
        columns = zip(*[values for _, values in parts], strict=True)
        return tuple(self._merge(indices, rank, column) for rank, column in zip(ranks, columns, strict=True))

    def _merge(self, indices: tuple[Array, ...], rank: int, column: tuple[Value, ...]) -> Value:
        first = column[0]
        if type(first) is Ptr:
            bases, whiches = self.common_bases(column)
            which = None if len(bases) == 1 else self._merge(indices, rank, whiches)
            offset = self._merge(indices, rank, tuple(p.offset for p in column))
            return Ptr(bases, which, offset, first.element)
        if type(first) is Window:
            shape, strides, offsets = (
                tuple(self._merge(indices, 0, vs) for vs in zip(*[getattr(w, name) for w in column], strict=True))
                for name in ("shape", "strides", "offsets")
            )
            base = self._merge(indices, 0, tuple(w.base for w in column))
            return Window(base, shape, strides, offsets, first.block, first.padding)
        return self.machine.call(merge_blocks, self.nb, rank, indices, *column)

    def common_bases(self, pointers: Sequence[Ptr]) -> tuple[tuple[int, ...], tuple[Value, ...]]:
        """One list of bases for pointers into different arguments, and each pointer's index into it."""
        bases = tuple(dict.fromkeys(b for p in pointers for b in p.bases))
        whiches = []
        for p in pointers:
            table = np.array([bases.index(b) for b in p.bases], np.int32)
            whiches.append(table[0] if p.which is None else self.machine.call(table.take, p.which))
        return bases, tuple(whiches)


# --- lowered code: steps over a file of slots, and how blocks of a GPU grid run through them --------------------------
# A step is a closure `run(active blocks, slots)`. Control flow in which the active blocks disagree is handled in one
# way everywhere: the blocks that disagree are split off, run separately, and merged again.

Slots = list[Any]
Run = Callable[[Active, Slots], None]


@dataclass(slots=True)
class Step:
    run: Run
    note: str  # op and line, for unexpected errors
    dead: tuple[int, ...] = ()  # slots read here for the last time


@dataclass(slots=True)
class Code:
    """One basic block. `ends`: how it leaves; `values`: slots it passes on; `targets`: successors, with arguments."""

    args: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    ends: str = ""
    values: tuple[int, ...] = ()
    targets: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    free: tuple[int, ...] = ()  # slots it reads that are defined outside


@dataclass(slots=True)
class Function:
    name: str
    args: tuple[int, ...] = ()
    template: Slots = field(default_factory=list)  # with constants already in their slots
    blocks: list[Code] = field(default_factory=list)
    result_ranks: tuple[int, ...] = ()


def execute(code: Code, active: Active, slots: Slots) -> None:
    step = None
    try:
        for step in code.steps:
            step.run(active, slots)
            for i in step.dead:
                slots[i] = None
    except Exception as error:
        if step is not None and not getattr(error, "__notes__", None):
            error.add_note(f"while evaluating {step.note}")
        raise


def assign(slots: Slots, targets: Sequence[int], values: Sequence[Value]) -> None:
    for target, value in zip(targets, values, strict=True):
        slots[target] = value


def branch(active: Active, slots: Slots, free: Sequence[int], index: Array) -> tuple[Active, Slots]:
    """The state of some of the active blocks, ready to take a different branch."""
    own = list(slots)
    for i in free:
        own[i] = active.select(slots[i], index)
    return active.subset(index), own


def partition(condition: Any) -> tuple[Array, Array]:
    return np.flatnonzero(condition), np.flatnonzero(~condition)


def call(function: Function, active: Active, values: Sequence[Value]) -> tuple[Value, ...]:
    """Runs a function for all active blocks; returns its merged results."""
    slots = list(function.template)
    assign(slots, function.args, values)
    return _follow(function, 0, active, slots)


def _follow(function: Function, index: int, active: Active, slots: Slots) -> tuple[Value, ...]:
    while True:
        code = function.blocks[index]
        execute(code, active, slots)
        if code.ends in ("return", "yield"):
            return tuple(slots[i] for i in code.values)
        if code.ends == "br":
            choice = 0
        else:
            condition = active.machine.known(slots[code.values[0]])
            if is_array(condition) and condition.any() and not condition.all():
                return _fork(function, code, active, slots, np.broadcast_to(condition, (active.nb,)))
            choice = 0 if np.all(condition) else 1
        index, sources = code.targets[choice]
        assign(slots, function.blocks[index].args, [slots[i] for i in sources])


def _fork(function: Function, code: Code, active: Active, slots: Slots, condition: Array) -> tuple[Value, ...]:
    parts = []
    live = [i for i, value in enumerate(slots) if value is not None]
    for (target, sources), index in zip(code.targets, partition(condition), strict=True):
        group, own = branch(active, slots, live, index)
        assign(own, function.blocks[target].args, [own[i] for i in sources])
        parts.append((index, _follow(function, target, group, own)))
        group.settle()
    return active.merge(parts, function.result_ranks)


def if_else(condition: int, then: Code, other: Code | None, outs: Sequence[int], ranks: Sequence[int]) -> Run:
    def one(code: Code | None, active: Active, slots: Slots) -> tuple[Value, ...]:
        if code is None:
            return ()
        execute(code, active, slots)
        return tuple(slots[i] for i in code.values)

    def run(active: Active, slots: Slots) -> None:
        c = active.machine.known(slots[condition])
        if not is_array(c) or c.all() or not c.any():
            assign(slots, outs, one(then if np.all(c) else other, active, slots))
            return
        parts = []
        for code, index in zip((then, other), partition(np.broadcast_to(c, (active.nb,))), strict=True):
            if code is None:
                parts.append((index, ()))
                continue
            group, own = branch(active, slots, code.free, index)
            parts.append((index, one(code, group, own)))
            group.settle()
        assign(slots, outs, active.merge(parts, ranks))

    return run


def for_loop(
    bounds: Sequence[int], initial: Sequence[int], body: Code, outs: Sequence[int], ranks: Sequence[int]
) -> Run:
    induction, carried = body.args[0], body.args[1:]

    def run(active: Active, slots: Slots) -> None:
        low, high, step = (active.machine.known(slots[i]) for i in bounds)
        values = tuple(slots[i] for i in initial)
        if is_array(low) or is_array(high) or is_array(step):
            low, high, step = (np.broadcast_to(x, (active.nb,)) for x in (low, high, step))
            assign(slots, outs, ragged(active, slots, low, high, step, values))
            return
        for i in range(int(low), int(high), int(step)):
            slots[induction] = low.dtype.type(i)
            assign(slots, carried, values)
            execute(body, active, slots)
            values = tuple(slots[i] for i in body.values)
        assign(slots, outs, values)

    def ragged(
        active: Active, slots: Slots, low: Array, high: Array, step: Array, values: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        """Runs a loop with differing trip counts: blocks leave as they finish."""
        trips = np.maximum(0, -((low - high) // step))
        group, own, members = active, slots, np.arange(active.nb)
        parts: list[tuple[Array, tuple[Value, ...]]] = []
        for i in range(int(trips.max())):
            if not (trips > i).all():
                stay, leave = partition(trips > i)
                parts.append((members[leave], tuple(group.select(v, leave) for v in values)))
                values = tuple(group.select(v, stay) for v in values)
                before = group
                group, own = branch(group, own, body.free, stay)
                if before is not active:
                    before.settle()
                members, trips, low, step = members[stay], trips[stay], low[stay], step[stay]
            at = low + low.dtype.type(i) * step
            own[induction] = at[0] if (at == at[0]).all() else at
            assign(own, carried, values)
            execute(body, group, own)
            values = tuple(own[i] for i in body.values)
        if group is not active:
            group.settle()
        return active.merge([*parts, (members, values)], ranks)

    return run


def while_loop(
    initial: Sequence[int], before: Code, after: Code, outs: Sequence[int], ranks: Sequence[int], waits: bool
) -> Run:
    """`before.values` has the condition, then values for `after` or the exit. `waits`: it waits for other blocks."""
    free = tuple(dict.fromkeys((*before.free, *after.free)))

    def run(active: Active, slots: Slots) -> None:
        group, own, members = active, slots, np.arange(active.nb)
        parts: list[tuple[Array, tuple[Value, ...]]] = []
        values = tuple(slots[i] for i in initial)
        while True:
            assign(own, before.args, values)
            execute(before, group, own)
            condition = group.machine.known(own[before.values[0]])
            values = tuple(own[i] for i in before.values[1:])
            if not np.all(condition):
                stay, leave = partition(np.broadcast_to(condition, (group.nb,)))
                if not parts and not len(stay):
                    assign(slots, outs, values)
                    return
                parts.append((members[leave], tuple(group.select(v, leave) for v in values)))
                finished = group
                if len(stay):
                    values = tuple(group.select(v, stay) for v in values)
                    group, own = branch(group, own, free, stay)
                    members = members[stay]
                if finished is not active:
                    finished.settle()
                if not len(stay):
                    assign(slots, outs, active.merge(parts, ranks))
                    return
            assign(own, after.args, values)
            execute(after, group, own)
            values = tuple(own[i] for i in after.values)
            if waits:
                group.machine.give_way((id(after), values))

    return run


# --- steps that most builders make: a value computed from others, or given another name -------------------------------


def pure(fn: Callable[..., Any], args: Sequence[int], out: int, flops: int = 0) -> Run:
    """A step that computes one value from others."""
    if len(args) == 1:
        (a,) = args

        def run1(active: Active, slots: Slots) -> None:
            slots[out] = active.machine.call(fn, slots[a])
            active.flops += flops

        return run1
    if len(args) == 2:
        x, y = args

        def run2(active: Active, slots: Slots) -> None:
            slots[out] = active.machine.call(fn, slots[x], slots[y])
            active.flops += flops

        return run2

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[slots[i] for i in args])
        active.flops += flops

    return run


def pure_many(fn: Callable[..., tuple[Any, ...]], args: Sequence[int], outs: Sequence[int], flops: int = 0) -> Run:
    """A step that computes several values from others."""

    def run(active: Active, slots: Slots) -> None:
        assign(slots, outs, active.machine.call_many(fn, len(outs), *[slots[i] for i in args]))
        active.flops += flops

    return run


def each(fn: Callable[..., Any], args: Sequence[int], out: int, flops: int = 0) -> Run:
    """As `pure`, element by element."""
    return pure(elementwise(fn), args, out, flops)


def copy_slot(source: int, out: int) -> Run:
    """A step that only gives a value another name."""

    def run(active: Active, slots: Slots) -> None:
        slots[out] = slots[source]

    return run
