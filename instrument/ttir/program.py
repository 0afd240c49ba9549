"""The public object: one TTIR kernel that runs on NumPy arrays."""

from __future__ import annotations

import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any

import numpy as np

from paellapy.instrument.errors import LaunchError, OutOfBoundsError, ViewWarning
from paellapy.instrument.markers import Ranges
from paellapy.instrument.ttir import (  # noqa: F401  (they register translations)
    addresses,
    code,
    control,
    elementwise_ops,
    memory_ops,
    reduction_ops,
    scaled,
    shape_ops,
    windows,
)
from paellapy.instrument.ttir.arguments import Bound, Signature, is_view
from paellapy.instrument.ttir.data_flow import reaches_by_data
from paellapy.instrument.ttir.lower import Facts, Lowering
from paellapy.instrument.ttir.machine import COST_FIELDS, Active, Machine, Mark, Recorder
from paellapy.instrument.ttir.parser import parse
from paellapy.instrument.ttir.replay import compile_tape
from paellapy.instrument.ttir.shorten import shorten
from paellapy.instrument.ttir.tape import Replay, Tape
from paellapy.instrument.ttir.tree import Module
from paellapy.instrument.ttir.turns import take_turns
from paellapy.instrument.ttir.types import Array

COST_DTYPE = np.dtype([(name, np.int64) for name in COST_FIELDS])

CHUNK_ELEMENTS = 1 << 21  # elements of the kernel's largest tensor, over all blocks of a chunk: 16 MiB of addresses
MIN_SPLIT = 1 << 14  # number of elements from which a second, short tape for a partly masked last block pays
TAPE_ENTRIES = 512  # tapes kept per program
TAPE_BYTES = 512 << 20  # most memory for the constants of the tapes


@dataclass(slots=True)
class Recorded:
    """The record of one combination of argument shapes, scalars, grid and blocks; at first only that it was seen."""

    replay: Replay | None = None
    cost: Array | None = None  # the part of the cost that does not depend on data
    bytes: int = 0
    hopeless: bool = False  # its tape grows too large
    split: bool = False  # only its last block is masked: run separately, it lets the others work without copies


class TtirProgram:
    """A kernel's TTIR, translated once, run for any range of blocks.

        program = TtirProgram.parse(text, kernel="add")
        cost = program.run([x, y, out, n], grid=(64, 1, 1))
        cost["bytes_loaded"].sum()
    """

    def __init__(self, module: Module, kernel: str, threads: int = 128) -> None:
        self.kernel = kernel
        self.module = module
        lowering = Lowering(module, kernel, threads)
        self._entry = lowering.program()
        self.facts: Facts = lowering.facts
        names = [name.removeprefix("%") for name, _ in module.entry.args]
        self._signature = Signature(kernel, [t for _, t in module.entry.args], names, self.facts.written)
        self._tapes: OrderedDict[Any, Recorded] = OrderedDict()
        self._tape_bytes = 0
        self._seen: set[Any] = set()  # keys of runs on views that stay within them
        self._lock = Lock()
        # control flow depends on data: nothing can be recorded
        self._dynamic = self.facts.serial or self.facts.addresses
        self._whole = False  # the kernel reaches beyond its views, into their base arrays

    @classmethod
    def parse(cls, text: str, kernel: str, threads: int = 128) -> TtirProgram:
        """Translates TTIR text (`asm["ttir"]` of `triton.compile`). An unknown op raises `UnsupportedOpError`."""
        program = cls(parse(text, kernel), kernel, threads)
        program.facts.ranges = Ranges.in_text(text)
        return program

    @property
    def dot_dtype(self) -> str | None:
        """Element type of the dots' left operand, `f16` for example; None if there is no dot."""
        return self.facts.dot_dtype

    def run(
        self,
        args: Sequence[Any],
        grid: Sequence[int],
        blocks: range | Array | None = None,
        *,
        record: bool = True,
        marks: list[Mark] | None = None,
    ) -> Array:
        """Runs blocks of the grid; returns one row of cost per block (dtype `COST_DTYPE`).

        `blocks` are linear ids, x fastest; None runs all. The second call with the same scalars, shapes and blocks
        folds the parts that do not depend on data, and later calls replay the rest; `record=False` turns that off.
        `marks` receives where ranges begin and end; nothing is recorded then.
        """
        shape = _grid(grid, self.kernel)
        ids = _block_ids(blocks, shape, self.kernel)
        bound = self._signature.bind(args, self._whole)
        if not len(ids):
            return np.zeros(0, COST_DTYPE)
        before = None if self._whole else self._contents(bound, shape, ids)
        try:
            return self._run(bound, shape, ids, record, marks)
        except OutOfBoundsError as error:
            if before is None:
                raise
            # A GPU does not know views: the base array of a view can be accessed.
            for flat, copy in before:
                flat[...] = copy
            cost = self._run(self._signature.bind(args, whole=True), shape, ids, record, marks)
            self._whole = True
            warnings.warn(f"{error}. The element exists in the array that this argument is a view of, so the kernel "
                          "continues, as it would on a GPU", ViewWarning, stacklevel=2)  # fmt: skip
            return cost

    def _contents(
        self, bound: Bound, shape: tuple[int, int, int], ids: range | Array
    ) -> list[tuple[Array, Array]] | None:
        """Copies of the memory that the kernel writes, if it may turn out to reach beyond its views."""
        key = (bound.key, shape, _key_of(ids))
        if key in self._seen or not any(is_view(arg) for arg in bound.args):
            return None
        if not self._reaches_by_data:  # other data may lead beyond the views
            if len(self._seen) >= TAPE_ENTRIES:
                self._seen.clear()
            self._seen.add(key)
        written = [bound.buffers.flat[i] for i in self._signature.written]
        return [(flat, flat.copy()) for flat in written if flat is not None]

    @cached_property
    def _reaches_by_data(self) -> bool:
        return reaches_by_data(self.module)

    def _run(
        self, bound: Bound, shape: tuple[int, int, int], ids: range | Array, record: bool, marks: list[Mark] | None
    ) -> Array:
        size = max(1, CHUNK_ELEMENTS // self.facts.tile)
        with np.errstate(all="ignore"):
            if self.facts.serial:
                cost = self._take_turns(bound, shape, ids, marks)
            elif marks is not None:
                parts = [ids[low : low + size] for low in range(0, len(ids), size)]
                cost = np.concatenate([self._evaluate(Machine, bound, shape, part, marks)[0] for part in parts])
            elif len(ids) <= size:
                cost = self._chunk(bound, shape, ids, record)
            else:
                parts = [ids[low : low + size] for low in range(0, len(ids), size)]
                cost = np.concatenate([self._chunk(bound, shape, part, record) for part in parts])
        return cost.view(COST_DTYPE).reshape(-1)

    def prepare(self, args: Sequence[Any], grid: Sequence[int], blocks: range) -> Callable[[], None] | None:
        """The run of these blocks on these arrays, from its tape; None if there is no tape.

        For callers that run it often, with floating-point warnings off, and do not need its cost.
        """
        shape = _grid(grid, self.kernel)
        bound = self._signature.bind(args, self._whole)
        ids = _block_ids(blocks, shape, self.kernel)
        if len(ids) > max(1, CHUNK_ELEMENTS // self.facts.tile):
            return None
        return self._prepared(bound, shape, blocks)

    def _prepared(self, bound: Bound, grid: tuple[int, int, int], ids: range) -> Callable[[], None] | None:
        known = self._tapes.get((bound.key, grid, _key_of(ids)))
        if known is not None and known.split:
            whole, last = (self._prepared(bound, grid, part) for part in (ids[:-1], ids[-1:]))
            return None if whole is None or last is None else partial(_both, whole, last)
        if known is None or known.replay is None:
            return None
        assert known.cost is not None
        return partial(known.replay, bound.buffers.flat, known.cost.copy())

    def _chunk(
        self, bound: Bound, grid: tuple[int, int, int], ids: range | Array, record: bool, at_once: bool = False
    ) -> Array:
        """Runs some blocks, from a tape if there is one. `at_once`: record even a combination that was not seen before.
        """
        if not record or self._dynamic:
            return self._evaluate(Machine, bound, grid, ids)[0]
        key = (bound.key, grid, _key_of(ids))
        known = self._tapes.get(key)
        if known is not None and known.replay is not None:
            assert known.cost is not None
            cost = known.cost.copy()
            known.replay(bound.buffers.flat, cost)
            return cost
        if known is None and not at_once:
            self._remember(key, Recorded())
            return self._evaluate(Machine, bound, grid, ids)[0]
        if known is not None and known.split:
            parts = (ids[:-1], ids[-1:])
            return np.concatenate([self._chunk(bound, grid, part, record, at_once=True) for part in parts])
        if known is not None and known.hopeless:
            return self._evaluate(Machine, bound, grid, ids)[0]
        return self._record(key, bound, grid, ids)

    def _record(self, key: Any, bound: Bound, grid: tuple[int, int, int], ids: range | Array) -> Array:
        cost, machine = self._evaluate(Recorder, bound, grid, ids)
        assert isinstance(machine, Recorder)
        tape = machine.tape
        if tape is None:
            self._dynamic = True
        elif tape.full:
            self._remember(key, Recorded(hopeless=True))
        elif (short := shorten(tape.entries)) is None and self._splits(tape, len(ids)):
            self._remember(key, Recorded(split=True))
        else:
            entries = tape.entries if short is None else short
            self._remember(key, Recorded(compile_tape(entries, bound.buffers.element), cost, tape.bytes))
        return cost + machine.dynamic_cost

    def _splits(self, tape: Tape, blocks: int) -> bool:
        return tape.ragged and self.facts.dot_dtype is None and blocks * self.facts.tile >= MIN_SPLIT

    def _take_turns(
        self, bound: Bound, grid: tuple[int, int, int], ids: range | Array, marks: list[Mark] | None
    ) -> Array:
        """Runs blocks that wait for each other one by one."""
        cost = np.zeros((len(ids), len(COST_FIELDS)), np.int64)

        def body(row: int) -> Callable[[Callable[[], None]], None]:
            def run(give_way: Callable[[], None]) -> None:
                machine = Machine(self.kernel, bound.buffers, grid, np.asarray([ids[row]], np.int64))
                machine.give_way, machine.marks = give_way, marks
                cost[row] = self._execute(machine, bound)[0]

            return run

        written = [bound.buffers.flat[i] for i in self._signature.written]

        def contents() -> int:
            return hash(tuple(zlib.crc32(flat.data) for flat in written if flat is not None))

        take_turns(self.kernel, [body(row) for row in range(len(ids))], contents)
        return cost

    def _remember(self, key: Any, recorded: Recorded) -> None:
        with self._lock:
            old = self._tapes.pop(key, None)
            self._tape_bytes += recorded.bytes - (old.bytes if old else 0)
            self._tapes[key] = recorded
            while len(self._tapes) > TAPE_ENTRIES or (self._tape_bytes > TAPE_BYTES and len(self._tapes) > 1):
                _, dropped = self._tapes.popitem(last=False)
                self._tape_bytes -= dropped.bytes

    def _evaluate(
        self,
        machine_type: type[Machine],
        bound: Bound,
        grid: tuple[int, int, int],
        ids: range | Array,
        marks: list[Mark] | None = None,
    ) -> tuple[Array, Machine]:
        machine = machine_type(self.kernel, bound.buffers, grid, np.asarray(ids, np.int64))
        machine.marks = marks
        return self._execute(machine, bound), machine

    def _execute(self, machine: Machine, bound: Bound) -> Array:
        linear, (gx, gy, _) = machine.ids, machine.grid
        pid = (linear % gx, linear // gx % gy, linear // (gx * gy))
        active = Active(machine, np.arange(len(linear)), tuple(_uniform(p.astype(np.int32)) for p in pid))
        code.call(self._entry, active, self._signature.values(bound))
        active.settle()
        return machine.cost


def _key_of(ids: range | Array) -> Any:
    return (ids.start, ids.stop, ids.step) if isinstance(ids, range) else ids.tobytes()


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _uniform(x: Array) -> Any:
    return x[0] if (x == x[0]).all() else x


def _grid(grid: Sequence[int], kernel: str) -> tuple[int, int, int]:
    shape = tuple(int(g) for g in grid)
    if not 1 <= len(shape) <= 3 or min(shape) < 0:
        raise LaunchError(f"kernel {kernel}: the grid {tuple(grid)} must have one to three sizes of at least 0")
    return (*shape, *(1,) * (3 - len(shape)))  # type: ignore[return-value]


def _block_ids(blocks: range | Array | None, grid: tuple[int, int, int], kernel: str) -> range | Array:
    total = grid[0] * grid[1] * grid[2]
    if blocks is None:
        return range(total)
    ids = blocks if isinstance(blocks, range) else np.ascontiguousarray(blocks, np.int64).reshape(-1)
    if len(ids) and not (min(ids[0], ids[-1]) >= 0 if isinstance(ids, range) else ids.min() >= 0):
        raise LaunchError(f"kernel {kernel}: a block id is negative: ids must be from 0 to the size of the grid")
    if len(ids) and (max(ids[0], ids[-1]) if isinstance(ids, range) else ids.max()) >= total:
        raise LaunchError(f"kernel {kernel}: a block id is outside the grid {grid} of {total} blocks")
    return ids
