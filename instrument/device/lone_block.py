"""The time of a block alone on its SM, from one walk through its machine code as a single warp would run it.

A warp issues its instructions in order. Each instruction encodes how many cycles the next one has to wait, and which
results it waits for; `Latencies` has the time until a result. Loops are walked once and three times, so that a block's
time follows from its iteration counts. These counts are collected where the kernel is evaluated (ttir/latency.py).
ptx/loops.py finds the source's loop that each loop of the machine code was made from, and how far it was unrolled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.loops import machine_counts, turns
from paellapy.instrument.ptx.sass import NO_BARRIER, Instruction, instructions
from paellapy.instrument.records import Records
from paellapy.instrument.ttir.latency import LOOPS

# Cycles until a result is available. Published for Hopper (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper
# GPU Architecture via Microbenchmarking", 2024) or estimated from similar instructions; none is fitted. Loads come from
# L2.
_LATENCY = {
    "load": 270, "shared load": 30, "matrix load": 33, "shuffle": 24, "special": 22, "atomic": 420, "reduction": 30,
    "read special": 25, "constant": 35, "convert": 24, "mma": 33, "double": 48, "vote": 12, "store": 12,
    "shared store": 24, "copy": 24, "bulk copy": 24, "poll": 24, "": 24,
}  # fmt: skip
_BARRIER, _FENCE, _GROUP_MMA, _COPY, _BULK_COPY, _JUMP = 28.0, 500.0, 64.0, 300.0, 520.0, 10.0
_READ, _STORED = 15.0, 20.0  # until operands were read
# Cycles for which an instruction occupies its unit.
_BUSY = {
    "load": 4, "shared load": 4, "matrix load": 4, "shared store": 4, "store": 4, "shuffle": 2, "special": 8,
    "convert": 8, "mma": 16, "double": 16, "atomic": 8, "reduction": 4, "copy": 4,
}  # fmt: skip
_TO_MEMORY = ("load", "shared load", "matrix load", "shared store", "store", "shuffle", "atomic", "reduction", "copy")
_MOST_STEPS = 30_000
_SHORTEST = 3  # instructions between a loop's first and last; shorter ones poll a barrier


@dataclass(frozen=True, slots=True)
class Loop:
    first: int  # index of its first instruction
    last: int  # index of its jump back
    parent: int  # the number of the loop around it, or -1


@dataclass(frozen=True, slots=True)
class Again:
    """A further iteration of one of the source's loops."""

    source: int  # the loop's number
    parent: int  # the number of the loop around it, or -1
    cycles: float
    covered: float  # iterations in the single walk, for each time that the loop is entered


@dataclass(frozen=True, slots=True)
class LoneBlock:
    """Cycles of a walk that goes through each loop once, and of each further iteration of the source's loop."""

    cycles: float
    again: tuple[Again, ...]
    fetched: int  # number of different instructions

    @classmethod
    def of(cls, compiled: Compiled, source_loops: Sequence[str]) -> LoneBlock | None:
        """None for machine code that cannot be interpreted. `source_loops`: the lines of the source's loops."""
        if not compiled.source.arch.startswith("sm_90"):
            return None
        code = instructions(compiled.cubin, compiled.name)
        if not code:
            return None
        loops, others = _loops(code, len(source_loops))
        around = _leads_around(code, loops, others)
        once = {loop.first: 1 for loop in loops}
        cycles, seen = _walk(code, once, around)
        # Source loops without a jump in the machine code were unrolled: the single walk includes them.
        stand_for = turns(code, [(loop.first, loop.last) for loop in loops], seen, compiled, source_loops)
        again = []
        for loop, turn in zip(loops, stand_for, strict=True):
            parent = stand_for[loop.parent].source if loop.parent >= 0 else -1
            longer = (_walk(code, {**once, loop.first: 3}, around)[0] - cycles) / 2
            again.append(Again(turn.source, parent, longer / turn.iterations, turn.covered))
        return cls(cycles, tuple(again), len(seen))

    def cycles_of(self, cost: Records) -> NDArray[np.float64]:
        """Cycles of blocks with the counted loop iterations."""
        found: NDArray[np.float64] = np.full(len(cost), self.cycles)
        for loop in self.again:
            entered = cost[LOOPS[loop.parent]] if 0 <= loop.parent < len(LOOPS) else 1
            if loop.source < len(LOOPS):
                found += loop.cycles * (cost[LOOPS[loop.source]].astype(np.float64) - loop.covered * entered)
        found[found < 0] = 0.0
        return found


def _loops(code: Sequence[Instruction], source_loops: int) -> tuple[list[Loop], list[tuple[int, int]]]:
    """The source's loops, and other backward jumps: slow paths, such as the sine of a huge number."""
    ends: dict[int, int] = {}
    for i, each in enumerate(code):
        if each.kind == "jump" and 0 <= each.target <= i - _SHORTEST:
            ends[each.target] = max(i, ends.get(each.target, 0))
    spans: list[tuple[int, int]] = sorted(ends.items())
    others: list[tuple[int, int]] = []
    # the remainder of an unrolled loop has a loop of its own
    while len(spans) > source_loops and (twin := _unrolled(code, spans)):
        others.append(twin)
        spans.remove(twin)
    if len(spans) > source_loops:
        # slow paths have no loop inside
        idle = [(a, b) for a, b in spans if not any(each.kind in _WORK for each in code[a : b + 1])]
        others += [span for span in idle if not any(span[0] < a and b < span[1] for a, b in spans)]
        spans = [span for span in spans if span not in others]
    spans = spans[: min(source_loops, len(LOOPS))]
    found = []
    for a, b in spans:
        around = [k for k, (c, d) in enumerate(spans) if c < a and b < d]
        found.append(Loop(a, b, around[-1] if around else -1))
    return found, others


def _unrolled(code: Sequence[Instruction], spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The loop for the remainder of another, which has several iterations in one turn."""
    pairs = [(a, b) for a, b in itertools.pairwise(spans) if a[1] < b[0] and a[1] - a[0] > 1.5 * (b[1] - b[0])]
    kinds = {span: set(machine_counts(code[span[0] : span[1] + 1])) for span in spans}
    return next((b for a, b in pairs if kinds[a] == kinds[b]), None)


def _leads_around(code: Sequence[Instruction], loops: Sequence[Loop], others: Sequence[tuple[int, int]]) -> set[int]:
    """Guarded jumps around code that is not walked, and around no loop that is."""
    if any(each.kind == "poll" for each in code):
        return set()  # warp-specialised code: a jump leads from one part to another
    kept = [(loop.first, loop.last) for loop in loops]
    ahead = [(i, each.target) for i, each in enumerate(code) if each.kind == "jump" and each.guarded]
    return {i for i, to in ahead if _holds(i, to, others) and not _holds(i, to, kept)}


def _holds(first: int, last: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(first < a and b < last for a, b in spans)


_WORK = ("store", "shared load", "shared store", "matrix load", "mma", "group mma", "atomic", "reduction", "copy",
         "barrier", "shuffle", "poll")  # fmt: skip


class _Warp:
    """The clock of one warp, and its operations in progress."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready = [0.0] * 8
        self.units: dict[str, float] = {}
        self.copies: list[float] = []  # groups of copies: when each arrives
        self.copying = self.bulk = self.products = 0.0

    def issue(self, each: Instruction) -> None:
        for k in range(6):
            if each.awaits >> k & 1:
                self.now = max(self.now, self.ready[k])
        kind = each.kind
        if busy := _BUSY.get(kind, 0):
            unit = "memory" if kind in _TO_MEMORY else kind
            self.now = max(self.now, self.units.get(unit, 0.0))
            self.units[unit] = self.now + busy * (2 if each.width == 16 and unit == "memory" else 1)
        self._synchronise(each)
        if each.sets != NO_BARRIER:
            late = self.products - self.now if kind == "group mma" else float(_LATENCY.get(kind, 24))
            self.ready[each.sets] = max(self.ready[each.sets], self.now + late)
        if each.frees != NO_BARRIER:
            read = _STORED if kind in ("store", "shared store", "reduction", "bulk copy") else _READ
            self.ready[each.frees] = max(self.ready[each.frees], self.now + read)
        self.now += max(each.stall, 1)

    def _synchronise(self, each: Instruction) -> None:
        kind = each.kind
        if kind == "barrier":
            self.now += _BARRIER
        elif kind == "fence":
            self.now += _FENCE
        elif kind == "copy":
            self.copying = max(self.copying, self.now + _COPY)
        elif kind == "commit":
            self.copies.append(self.copying)
            self.copying = 0.0
        elif kind == "await copies":
            done = self.copies[: len(self.copies) - each.left]
            self.now = max([self.now, *done])
        elif kind == "bulk copy":
            self.bulk = max(self.bulk, self.now + _BULK_COPY)
        elif kind == "poll":
            self.now = max(self.now, self.bulk)
        elif kind == "group mma":
            self.products = max(self.products, self.now) + _GROUP_MMA
        elif kind == "group":
            self.now = max(self.now, self.products)


def _walk(code: Sequence[Instruction], trips: dict[int, int], around: set[int]) -> tuple[float, set[int]]:
    """Cycles until the exit, and the instructions issued."""
    warp, left = _Warp(), dict(trips)
    seen: set[int] = set()
    calls: list[int] = []
    at = 0
    for _ in range(_MOST_STEPS):
        if not 0 <= at < len(code):
            break
        each = code[at]
        seen.add(at)
        warp.issue(each)
        if each.kind == "exit" and not each.guarded:
            break
        at, before = _next(each, at, left, trips, around, calls), at
        if at != before + 1:
            warp.now += _JUMP
    return warp.now, seen


def _next(
    each: Instruction, at: int, left: dict[int, int], trips: dict[int, int], around: set[int], calls: list[int]
) -> int:
    """The next instruction of a warp. Guarded forward jumps are not taken, except around slow paths."""
    if each.kind == "return" and calls:
        return calls.pop()
    if each.kind == "call" and each.target >= 0 and not each.guarded:
        calls.append(at + 1)
        return each.target
    if each.kind != "jump":
        return at + 1
    if each.target <= at:
        if left.get(each.target, 0) > 1:
            left[each.target] -= 1
            return each.target
        left[each.target] = trips.get(each.target, 1)  # for the next iteration of an outer loop
        return at + 1
    return each.target if not each.guarded or at in around else at + 1
