"""Execution of steps: `Machine` evaluates them; `Recorder` also records the operations that depend on memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.markers import Marker
from paellapy.instrument.ttir import memory, plans
from paellapy.instrument.ttir.latency import PATH_FIELDS
from paellapy.instrument.ttir.memory import Site
from paellapy.instrument.ttir.tape import BufferRef, Tape
from paellapy.instrument.ttir.types import Array, Element
from paellapy.instrument.ttir.values import Ptr, Sym, Value, Window, merge_blocks, take_blocks

COST_FIELDS = ("bytes_loaded", "bytes_stored", "flops", "dot_flops", *PATH_FIELDS)
LOADED, STORED = range(2)  # places in COST_FIELDS


@dataclass(slots=True, frozen=True)
class Buffers:
    """The pointer arguments of one run: flat memory, the place of an array's first element in it, its element type."""

    flat: list[Array | None]
    origin: list[int]
    element: list[Element | None]
    fragile: frozenset[int]  # arguments that may change while the kernel runs: written, or overlapping written ones
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
        return flat if own.storage == element.storage else plans.reinterpret(flat, element)


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
        self.give_way: Callable[[], None] = lambda: None  # called by a block while it waits for others

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

    def load(self, base: int, offset: Value, mask: Value, other: Value, element: Element, site: Site) -> Value:
        return memory.gather(self.buffers.view(base, element), offset, mask, other, element, site)

    def store(self, base: int, offset: Value, value: Value, mask: Value, element: Element, site: Site) -> None:
        memory.scatter(self.buffers.view(base, element), offset, value, mask, element, site)

    def count(self, field: int, mask: Value, size: int, site: Site) -> None:
        """Bytes of a masked access: per block, the elements whose mask is set."""
        memory.count_bytes(self.cost, field, mask, size, site)


    def count_touched(self, count: Callable[..., None], *args: Any) -> None:
        """Lets a function of sectors.py add to the cost table."""
        count(self.cost, *args)


class Recorder(Machine):
    """Evaluates and records. Control flow that depends on memory ends the recording, not the run."""

    def __init__(self, kernel: str, buffers: Buffers, grid: tuple[int, int, int], ids: Array) -> None:
        super().__init__(kernel, buffers, grid, ids)
        self.tape: Tape | None = Tape()
        self.dynamic_cost = np.zeros_like(self.cost)

    def known(self, value: Value) -> Any:
        if type(value) is Sym:
            self.tape = None
            return value.value
        return value

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not any(type(a) is Sym for a in args):
            return fn(*args)
        value = fn(*[a.value if type(a) is Sym else a for a in args])
        return value if self.tape is None else self.tape.pure(fn, args, value)

    def call_many(self, fn: Callable[..., tuple[Any, ...]], n: int, *args: Any) -> tuple[Any, ...]:
        if not any(type(a) is Sym for a in args):
            return fn(*args)
        values = fn(*[a.value if type(a) is Sym else a for a in args])
        return values if self.tape is None else self.tape.pure_many(fn, args, values)

    def effect(self, fn: Callable[..., Any], *args: Any) -> Any:
        value = super().effect(fn, *[a.value if type(a) is Sym else a for a in args])
        return value if self.tape is None else self.tape.effect(fn, args, value)

    def load(self, base: int, offset: Value, mask: Value, other: Value, element: Element, site: Site) -> Value:
        ref = BufferRef(base, element)
        if any(type(x) is Sym for x in (offset, mask, other)):
            at, keep, fill = (x.value if type(x) is Sym else x for x in (offset, mask, other))
            value = memory.gather(self.buffers.view(base, element), at, keep, fill, element, site)
            if self.tape is None:
                return value
            return self.tape.load(memory.gather, (ref, offset, mask, other, element, site), value)
        if self.tape is None:
            return super().load(base, offset, mask, other, element, site)
        flat = self.buffers.view(base, element)
        plan = plans.load_plan(offset, mask, other, element, flat.size, site, base in self.buffers.fragile)
        return self.tape.load(plan, (ref,), plan(flat))

    def store(self, base: int, offset: Value, value: Value, mask: Value, element: Element, site: Site) -> None:
        at, now, keep = (x.value if type(x) is Sym else x for x in (offset, value, mask))
        flat = self.buffers.view(base, element)
        if self.tape is None or type(offset) is Sym or type(mask) is Sym:
            memory.scatter(flat, at, now, keep, element, site)
            if self.tape is not None:
                self.tape.effect(memory.scatter, (BufferRef(base, element), offset, value, mask, element, site), None)
            return
        plan = plans.store_plan(offset, mask, element, flat.size, site)
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
        now = [a.value if type(a) is Sym else a for a in args]
        dynamic = self.tape is not None and any(type(a) is Sym for a in args)
        count(self.dynamic_cost if dynamic else self.cost, *now)
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
