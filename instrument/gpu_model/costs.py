"""Converts the evaluator's counts to input for the SM model: traffic, arithmetic and waiting time of every block.

A block first waits; then its traffic and arithmetic flow at rates shared with all running blocks. The waiting time
follows from its machine code, walked through as a lone block would run it; on parts without a profile
for that, from its longest chain of dependent loads, reductions and products. A kernel that was measured on the real
part has a correction factor, which scales the waiting time; other kernels use the uncorrected estimate.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model import tables
from paellapy.instrument.gpu_model.parts import PROFILES, Part, Timing, occupancy
from paellapy.instrument.gpu_model.tables import unfinished_launches
from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.sass import NO_BARRIER, Instruction, instructions, machine_counts, turns
from paellapy.instrument.records import PRODUCTS, Records
from paellapy.instrument.triton_ir.cost import LOOPS, SHARES
from paellapy.instrument.triton_ir.lower import Facts

# --- costs of blocks: given for all alike or one by one, and kept in the SM model's table while they are in use -------


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block's work: numbers for all blocks alike, or one value per block.

    `bytes` is traffic to memory, beyond L2. `tensor_flops` counts fp16: tf32 counts double, fp8 half. `wait_ns` is the
    time the block waits regardless of other work (dependent loads, barriers), before its work flows.
    """

    bytes: ArrayLike = 0.0
    flops: ArrayLike = 0.0
    tensor_flops: ArrayLike = 0.0
    wait_ns: ArrayLike = 0.0


class Costs:
    """The rows of the state's cost table that are in use. A state that needs more room is replaced by a larger one."""

    def __init__(self) -> None:
        self.epoch = 0  # rows of an earlier epoch have moved, or are gone
        self._rows = 0
        self._known: dict[tuple[float, ...], int] = {}

    def of_launch(
        self, s: tables.State, base: int, n_blocks: int, cost: BlockCost | None, duration_ns: ArrayLike | None
    ) -> tuple[tables.State, int, int]:
        """The first row of the blocks' costs, and the distance of rows. Costs equal for all blocks have one row."""
        if cost is None and isinstance(duration_ns, int | float):
            key: tuple[float, ...] = (duration_ns,)
        elif cost is not None and duration_ns is None:
            key = (cost.bytes, cost.flops, cost.tensor_flops, cost.wait_ns)  # type: ignore[assignment]
        else:
            key = ()
        known = self._known.get(key) if all(isinstance(value, int | float) for value in key) else None
        if known is not None:
            return s, known, 0
        table = cost_table(n_blocks, cost, duration_ns)
        s, row = self.keep(s, base, table)
        if len(table) == 1 and all(isinstance(value, int | float) for value in key):
            self._known[key] = row
        return s, row, int(len(table) > 1)

    def keep(self, s: tables.State, base: int, table: NDArray[np.float64]) -> tuple[tables.State, int]:
        """Adds these rows; returns their place. Commands before handle `base` are forgotten."""
        if self._rows + len(table) > len(s.cost):
            s = self._make_room(s, base, len(table))
        row = self._rows
        self._rows += len(table)
        s.cost[row : self._rows] = table
        return s, row

    def _make_room(self, s: tables.State, base: int, n: int) -> tables.State:
        """Keeps only rows that unfinished launches use, in an array at least twice as large."""
        self.epoch += 1
        self._known.clear()
        rows = unfinished_launches(s, base)
        lengths = np.where(s.command["cost_stride"][rows] > 0, s.command["blocks"][rows], 1)
        kept = [s.cost[row : row + k] for row, k in zip(s.command["cost"][rows], lengths, strict=True)]
        self._rows = int(lengths.sum())
        size = len(s.cost)
        while 2 * (self._rows + n) > size:
            size *= 2
        cost = np.zeros((size, tables.COST_COLUMNS))
        if kept:
            cost[: self._rows] = np.concatenate(kept)
        s.command["cost"][rows] = np.cumsum(lengths) - lengths
        return s._replace(cost=cost)


def cost_table(n_blocks: int, cost: BlockCost | None, duration_ns: ArrayLike | None) -> NDArray[np.float64]:
    """The core's cost rows: one for all blocks, or one for each."""
    if cost is not None and duration_ns is None:
        values = (cost.bytes, cost.flops, cost.tensor_flops, cost.wait_ns)
        given = [np.asarray(value, np.float64) for value in values]
    elif cost is None and duration_ns is not None:
        given = [np.asarray(duration_ns, np.float64)]
    else:
        raise LaunchError("a launch takes either a cost or a duration_ns: give exactly one", field="cost")
    for column in given:
        if column.shape not in ((), (n_blocks,)) or not (np.isfinite(column) & (column >= 0)).all():
            raise LaunchError(
                f"costs must be zero or more: one number, or one for each of the {n_blocks} blocks",
                field="cost", limit=n_blocks,
            )
    table = np.zeros((n_blocks if any(column.ndim for column in given) else 1, tables.COST_COLUMNS))
    table[:, tables.DURATION] = given[0] if cost is None else -1.0
    if cost is not None:
        table[:, : tables.POOLS] = np.stack(np.broadcast_arrays(*given[: tables.POOLS]), axis=-1)
        table[:, tables.WAIT_NS] = given[tables.POOLS]
    return table


# --- the time of a block alone on its SM, from one walk through its machine code as a single warp would run it --------
# A warp issues its instructions in order. Each instruction encodes how many cycles the next one has to wait, and which
# results it waits for; `Latencies` has the time until a result. Loops are walked once and three times, so that a
# block's time follows from its iteration counts. These counts are collected where the kernel is evaluated
# (triton_ir/cost.py). `turns` in ptx/sass.py finds the source's loop that each loop of the machine code was made from,
# and how far it was unrolled.

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


# `wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3`, `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32`: the types
# are those of the result and of both operands.
_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma)\.(?:sp\.)?sync\.[\w.:]+")
_TYPES = frozenset(("f16", "bf16", "tf32", "f32", "f64", "e4m3", "e5m2", "s8", "u8", "s32"))
_DOT = re.compile(r"= tt\.dot (?:.*?inputPrecision = (?:tf32|bf16)(x\d)?)?.*? : tensor<(?:\d+x)+(\w+)")


@functools.lru_cache(256)
def product_of(ptx: str, ttir: str) -> str:
    """The operands of a kernel's products, of PRODUCTS; "" for none, or for several kinds."""
    instructions = (text.split(".") for text in _INSTRUCTION.findall(ptx))
    kinds = {[word for word in words if word in _TYPES][1] for words in instructions}
    dots = {found.groups("") for found in _DOT.finditer(ttir)}
    if "tcgen05.mma" in ptx or len(kinds) > 1 or len(dots) > 1:
        return ""
    if not kinds:  # fp32 as such, or tiles too small for tensor cores
        return "fma" if dots else ""
    found = kinds.pop() + (dots.pop()[0] if dots else "")
    return found if found in PRODUCTS else ""


L2_SHARE = 0.8  # fraction of L2 that a kernel's arrays can fill and still be found there by its next launch


@dataclass(frozen=True, slots=True)
class CostModel:
    """The part's timing and the factors of the kernels measured on it."""

    part: Part
    timing: Timing
    factors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def for_part(cls, part: Part) -> CostModel:
        path = PROFILES / f"{part.name}.json"
        factors = json.loads(path.read_text()).get("kernels", {}) if path.exists() else {}
        return cls(part, Timing.for_part(part), factors)

    def wait_ns(self, cost: Records, threads: int) -> NDArray[np.float64]:
        """The waiting time of each block beyond its fixed overhead and its products, before any correction."""
        t = self.timing
        wait: NDArray[np.float64] = (
            t.load_ns * cost["loads"]
            + t.atomic_ns * cost["atomics"]
            + t.reduction_ns * cost["reductions"]
            + t.element_ns * cost["elements"] / threads
            + t.instruction_ns * cost["instructions"]
        )
        return wait

    def block_cost(
        self, compiled: Compiled, cost: Records, values: Sequence[Any], threads: int, facts: Facts
    ) -> BlockCost:
        """The cost of one launch's blocks."""
        return self.of_kernel(compiled, threads, facts).block_cost(cost, values)

    def of_kernel(self, compiled: Compiled, threads: int, facts: Facts) -> KernelCost:
        """The cost model of one kernel, with all facts looked up that its launches need."""
        kind = product_of(compiled.source.ptx, compiled.source.ttir)
        rate = self.part.tensor_tflops(kind)
        weight = self.part.fp16_tensor_tflops / rate if rate else 1.0
        label = compiled.source.metadata.get("label", "")
        # From the plain kernel: the cost must not depend on what the kernel reports.
        lone = LoneBlock.of(compiled.source.build(PassConfig()), facts.loops) if self.timing.cycle_ns else None
        cluster = compiled.source.cluster
        per_sm = occupancy(self.part, threads, compiled.registers, compiled.shared_bytes, cluster).blocks_per_sm
        ordinary, held = kind == "fma", per_sm * self.part.sms
        return KernelCost(self, threads, weight, ordinary, self.factor(label), cluster, held, lone)

    def factor(self, label: str) -> float:
        """The kernel's own factor; if it was measured with other constants, their geometric mean; otherwise 1."""
        if label in self.factors:
            return self.factors[label]
        stem = label.partition("][")[0]
        alike = [f for known, f in self.factors.items() if known.partition("][")[0] == stem]
        return float(np.exp(np.mean(np.log(alike)))) if alike and stem else 1.0


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost model of one kernel."""

    model: CostModel
    threads: int
    tensor_weight: float
    ordinary_products: bool  # tensor cores do not multiply full fp32: products run on the ordinary units
    factor: float
    cluster: int
    resident: int  # blocks that the GPU holds at once
    lone: LoneBlock | None = None

    def block_cost(self, cost: Records, values: Sequence[Any]) -> BlockCost:
        """The cost of one launch's blocks; `values` are its arguments."""
        # Blocks mostly cost the same: then one row is enough, and a launch takes the host much less time.
        alike = len(cost) > 1 and bool((cost[1:] == cost[0]).all())
        count = len(cost)
        if alike:
            cost = cost[:1]
        part, timing = self.model.part, self.model.timing
        flops = np.maximum(cost["flops"], 2.0 * cost["elements"])  # peak rates count two flops per instruction
        tensor = cost["dot_flops"] * self.tensor_weight
        if self.ordinary_products:
            flops, tensor = flops + timing.fma_product_cost * cost["dot_flops"], np.zeros_like(tensor)
        traffic = self._traffic(cost, count if alike else 1, values)
        if self.lone is not None:
            wait = self.factor * self._beside_flow(self.lone, cost, traffic, flops, tensor)
        else:
            # A product's latency is hidden behind its arithmetic once that takes longer.
            busy = tensor / timing.sm_rates(part)[2]
            latency = np.maximum(timing.dot_ns * cost["dots"] - busy, 0.0)
            wait = self.factor * (self.model.wait_ns(cost, self.threads) + latency)
        # Atomic updates of one line wait for each other: those of all blocks that are on the GPU at once.
        turns = float(cost["pressure"].sum()) / SHARES * (count if alike else 1)
        wait += timing.sector_update_ns * turns * min(1.0, self.resident / (count * self.cluster))
        columns = [traffic, flops, tensor, wait]
        if self.cluster > 1:  # the blocks of a cluster share one program's work, but each of them waits
            columns = [np.repeat(c if i == 3 else c / self.cluster, self.cluster) for i, c in enumerate(columns)]
        return BlockCost(*(_one_or_all(c) for c in columns))

    def _beside_flow(
        self,
        lone: LoneBlock,
        cost: Records,
        traffic: NDArray[np.float64],
        flops: NDArray[np.float64],
        tensor: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The time that a lone block takes beyond its traffic and arithmetic, which flow at an SM's full rates."""
        part, timing = self.model.part, self.model.timing
        total_ns = lone.cycles_of(cost) * timing.cycle_ns + lone.fetched * timing.fetch_ns
        rates = timing.sm_rates(part)
        flow_ns = np.max([work / rate for work, rate in zip((traffic, flops, tensor), rates, strict=True)], axis=0)
        wait: NDArray[np.float64] = np.maximum(total_ns - flow_ns, 0.0)
        return wait

    def alone_ns(self, cost: Records) -> NDArray[np.float64]:
        """The time of these costs for a block alone on its SM; it never decreases as costs grow."""
        part, timing = self.model.part, self.model.timing
        per_ns = (part.bandwidth_gbps, part.fp32_tflops * 1e3, part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency)
        moved = (cost["bytes_loaded"] + cost["bytes_stored"]) / timing.l2_speedup
        work = (moved, np.maximum(cost["flops"], 2.0 * cost["elements"]), cost["dot_flops"] * self.tensor_weight)
        busy = [w * part.sms / rate for w, rate in zip(work, per_ns, strict=True)]
        wait = self.model.wait_ns(cost, self.threads) + timing.dot_ns * cost["dots"]
        found: NDArray[np.float64] = self.factor * wait + busy[0] + busy[1] + busy[2]
        return found

    def _traffic(self, cost: Records, times: int, values: Sequence[Any]) -> NDArray[np.float64]:
        """Bytes in units of memory traffic: bytes from L2 count for less."""
        part, timing = self.model.part, self.model.timing
        touched: NDArray[np.float64] = (cost["bytes_loaded"] + cost["bytes_stored"] + cost["wasted"]).astype(float)
        total = float(touched.sum()) * times
        distinct = min(total, float(sum(v.nbytes for v in values if isinstance(v, np.ndarray))))
        if total == 0.0:
            return np.zeros(len(cost))
        from_memory = distinct if distinct > L2_SHARE * part.l2_bytes else 0.0
        share = (from_memory + (total - from_memory) / timing.l2_speedup) / total
        return np.multiply(touched, share)


def _one_or_all(column: NDArray[np.float64]) -> Any:
    """One number if all blocks cost the same, which the SM model then stores once."""
    return float(column[0]) if (column == column[0]).all() else column
