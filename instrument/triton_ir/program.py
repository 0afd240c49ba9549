"""The public object: one TTIR kernel that runs on NumPy arrays."""

from __future__ import annotations

import contextvars
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

from paellapy.instrument.errors import ArgumentError, LaunchError, OutOfBoundsError
from paellapy.instrument.ptx.ranges import Ranges

# These modules register translations.
from paellapy.instrument.triton_ir import elementwise_ops, memory_ops, reduction, shapes  # noqa: F401
from paellapy.instrument.triton_ir.lower import Facts, Lowering, reaches_by_data
from paellapy.instrument.triton_ir.machine import (
    COST_FIELDS,
    Active,
    Buffers,
    Machine,
    Mark,
    Recorder,
    Replay,
    Tape,
    call,
)
from paellapy.instrument.triton_ir.parse import Module, parse
from paellapy.instrument.triton_ir.replay import compile_tape, shorten
from paellapy.instrument.triton_ir.types import PAD_NAN, Array, Element, Ptr, Type, Window, rounder

# --- arguments of one run: arrays become flat memory, scalars take the kernel's types ---------------------------------

_PLAIN = (int, float)  # and not zero: 0.0 and -0.0 would be the same key


@dataclass(slots=True, frozen=True)
class Bound:
    """Arguments of one run. `key` has all that a tape depends on: scalars, sizes, overlaps with written arrays."""

    args: Sequence[Any]
    buffers: Buffers
    key: tuple[Any, ...]


class Signature:
    """A kernel's parameters. Binding is part of every launch, so it does as little as possible."""

    def __init__(self, kernel: str, types: Sequence[Type], names: Sequence[str], written: Collection[int]) -> None:
        self.kernel, self.names, self.types = kernel, names, types
        self.elements = [t.element if t.kind in ("pointer", "descriptor") else None for t in types]
        self.written = tuple(i for i in sorted(written) if self.elements[i] is not None)

    def bind(self, args: Sequence[Any], whole: bool = False) -> Bound:
        """Flattens the arrays, and checks them against the signature.

        `whole`: the memory of a view is that of its base array, as on a GPU, which does not know views.
        """
        if len(args) != len(self.types):
            names = ", ".join(self.names)
            raise ArgumentError(
                f"kernel {self.kernel} takes {len(self.types)} arguments ({names}), but {len(args)} were given",
                kernel=self.kernel, field="arguments", given=len(args), limit=len(self.types),
            )
        flats: list[Array | None] = [None] * len(args)
        origins = [0] * len(args)
        views: dict[int, tuple[int, int]] = {}
        key: list[Any] = []
        spans: dict[int, tuple[int, int]] = {}
        for i, (arg, element) in enumerate(zip(args, self.elements, strict=True)):
            if element is None:
                key.append(
                    arg if type(arg) in _PLAIN and arg else self._scalar(i, arg, self.types[i].element).tobytes()
                )
                continue
            if self.types[i].kind == "descriptor":
                arg = arg.base
            if whole and isinstance(arg, np.ndarray) and arg.base is not None:
                flat, origins[i], own = self._storage(i, arg, element)
                if own[1] - own[0] < flat.size:
                    views[i] = own
            elif type(arg) is np.ndarray and arg.dtype == element.storage and arg.flags.c_contiguous:
                flat = arg.reshape(-1)
            else:
                flat, origins[i] = self._flatten(i, arg, element)
            flats[i] = flat
            key.append((flat.size, origins[i]))
            if self.types[i].kind == "descriptor":
                key.append((args[i].shape, args[i].strides, args[i].nan_padding))
            start = flat.__array_interface__["data"][0]
            spans[i] = (start, start + flat.nbytes)
        fragile = set(self.written)
        for j in self.written:
            low, high = spans[j]
            fragile.update(i for i, (start, end) in spans.items() if start < high and low < end)
            written = flats[j]
            if written is not None and not written.flags.writeable:
                raise ArgumentError(
                    f"kernel {self.kernel}: argument {self.names[j]} is written, but the array is read-only: pass a "
                    "writable array", kernel=self.kernel, field=self.names[j]
                )
        key.append(frozenset(fragile))
        return Bound(args, Buffers(flats, origins, list(self.elements), key[-1], views), tuple(key))

    def values(self, bound: Bound) -> list[Any]:
        """The values of the kernel's arguments at its entry."""
        out: list[Any] = []
        for i, (arg, element) in enumerate(zip(bound.args, self.elements, strict=True)):
            if element is None:
                out.append(self._scalar(i, arg, self.types[i].element))
            else:
                pointer = Ptr((i,), None, np.int64(bound.buffers.origin[i]), element)
                out.append(pointer if self.types[i].kind == "pointer" else self._window(i, arg, pointer))
        return out

    def _window(self, i: int, descriptor: Any, base: Ptr) -> Window:
        shape, strides = (tuple(np.int64(n) for n in each) for each in (descriptor.shape, descriptor.strides))
        padding = np.int32(PAD_NAN) if descriptor.nan_padding else None
        return Window(base, shape, strides, (), self.types[i].block, padding)

    def _storage(self, i: int, arg: Array, element: Element) -> tuple[Array, int, tuple[int, int]]:
        """The whole memory of the base array of `arg`, and in it the first element of `arg` and the bounds of `arg`."""
        root = arg
        while isinstance(root.base, np.ndarray):
            root = root.base
        own, origin = self._flatten(i, arg, element)
        low, high = byte_bounds(root)
        before = own.__array_interface__["data"][0] - low
        lowest = root[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in root.strides)]
        if before % element.size or not root.size:
            return own, origin, (0, own.size)
        first = as_strided(lowest.view(f"u{root.itemsize}"), (1,), (root.itemsize,)).view(np.uint8)
        flat = as_strided(first, ((high - low) // element.size * element.size,), (1,), writeable=arg.flags.writeable)
        skipped = before // element.size
        return flat.view(element.storage), origin + skipped, (skipped, skipped + own.size)

    def _refuse(self, i: int, why: str, **facts: Any) -> ArgumentError:
        name = self.names[i]
        return ArgumentError(f"kernel {self.kernel}: argument {name} {why}", kernel=self.kernel, field=name, **facts)

    def _flatten(self, i: int, arg: Any, element: Element) -> tuple[Array, int]:
        """An array's memory as one axis, from its lowest to its highest element, and the place of its first element."""
        if not isinstance(arg, np.ndarray):
            raise self._refuse(i, f"is a pointer to {element.name}; pass a NumPy array", given=type(arg))
        bits = (
            arg.dtype.kind in "iub" and arg.dtype.itemsize == element.size and (element.narrow or not element.is_float)
        )
        if arg.dtype != element.memory and not bits:
            said = f"points to {element.name}, but the array holds {arg.dtype}: convert the array"
            raise self._refuse(i, said, given=arg.dtype, limit=element.name)
        if arg.flags.c_contiguous or not arg.size:
            return arg.reshape(-1).view(element.storage), 0
        arg = arg.view(element.bits)  # NumPy's own functions do not know the types of ml_dtypes
        if any(s % arg.itemsize for s in arg.strides):
            raise self._refuse(i, "has strides that are not whole elements: pass a copy")
        steps = [s // arg.itemsize for s in arg.strides]
        origin = -sum(s * (n - 1) for s, n in zip(steps, arg.shape, strict=True) if s < 0)
        span = 1 + sum(abs(s) * (n - 1) for s, n in zip(steps, arg.shape, strict=True))
        lowest = arg[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in steps)]
        flat = as_strided(lowest, (span,), (arg.itemsize,), writeable=arg.flags.writeable)
        return flat.view(element.storage), origin

    def _scalar(self, i: int, arg: Any, element: Element) -> Any:
        if (isinstance(arg, np.ndarray) and arg.ndim) or not isinstance(
            arg, bool | int | float | np.generic | np.ndarray
        ):
            raise self._refuse(i, f"must be a scalar {element.name}, not {type(arg).__name__}", given=type(arg))
        if element.is_float:
            value = element.compute.type(float(arg))
            to = rounder(element)
            return value if to is None else to(value)
        if element.name == "i1":
            return np.bool_(arg)
        bits = 8 * element.size
        number = int(arg)
        if not -(2 ** (bits - 1)) <= number < 2**bits:
            raise self._refuse(i, f"is {number}, which does not fit in {element.name}", given=number)
        number &= 2**bits - 1
        return element.compute.type(number - 2**bits if number >= 2 ** (bits - 1) else number)


def is_view(arg: Any) -> bool:
    """Whether an array is a view of part of a larger one."""
    arg = getattr(arg, "base", None) if hasattr(arg, "nan_padding") else arg
    root = arg
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(arg, np.ndarray) or root is arg:
        return False
    if arg.flags.forc:
        return bool(root.nbytes > arg.nbytes)
    low, high = byte_bounds(arg)  # its elements may share memory
    return bool(root.nbytes > high - low)


# --- blocks that wait for each other: each runs separately, and gives way while it waits ------------------------------
# In lockstep a spin lock would livelock, since the owner cannot leave the loop before the others do; one block after
# the other, a grid-wide barrier would deadlock. So a block in a waiting loop is parked and others get their turn. Only
# one runs at any time. A thread runs blocks one after the other until one of them waits; then the next thread takes
# over.

MAX_RESIDENT = 4096  # blocks started at once where the GPU is unknown; more than any GPU holds
MAX_ROUNDS = 200  # turns of every waiting block without any finishing, before memory is checked
MAX_LOOKS = 5_000  # checks with changed memory but without a finished block, after which the kernel counts as endless
STILL_ROUNDS = 2  # turns of every waiting block in which nothing changes: then nothing ever will

Wait = Callable[[Any], None]  # called by a block while it waits, with its loop and the values that the loop carries
Body = Callable[[Wait], None]  # one block


class Turns:
    """The blocks still to be started, and the number of finished ones."""

    def __init__(self, bodies: list[Body]) -> None:
        self.todo: Iterator[Body] = iter(bodies)
        self.left = len(bodies)  # not yet started
        self.done = 0

    def next(self) -> Body | None:
        body = next(self.todo, None)
        self.left -= body is not None
        return body


class Worker:
    """A thread that runs blocks; `resume` lets it continue until none is left or its block waits."""

    def __init__(self, turns: Turns) -> None:
        self.finished = False
        self.still = False  # in its last turn the block came back to the same loop with the same values
        self.error: BaseException | None = None
        self._turns, self._cancelled = turns, False
        self._state: Any = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()  # it holds NumPy's error state
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            while not self._cancelled and (body := self._turns.next()) is not None:
                body(self.give_way)
                self._turns.done += 1
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self._back.release()

    def give_way(self, state: Any) -> None:
        """Called by the block itself."""
        self.still, self._state = same_values(state, self._state), state
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Unwinds a block that will never finish."""
        if not self.finished:
            self._cancelled = True
            self._go.release()
        self._thread.join()


class _Cancelled(BaseException):
    """Raised inside a cancelled block."""


def same_values(a: Any, b: Any) -> bool:
    """Whether two states of a waiting block are equal; other objects than numbers and pointers are not compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, Ptr):
        return a.bases == b.bases and same_values((a.which, a.offset), (b.which, b.offset))
    if isinstance(a, np.ndarray | np.generic):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    return a is b or (isinstance(a, int | str) and a == b)


def take_turns(kernel: str, bodies: list[Body], memory: Callable[[], int], fits: Callable[[int], bool]) -> None:
    """Runs all bodies to their ends; each receives a function to call while it waits.

    `fits(n)` says whether the GPU has room for one more block while n blocks have not ended. `memory` returns a number
    that stands for the contents of the memory that the kernel writes. Blocks that take work from a queue may loop many
    times before one of them finishes, and changes of memory show that they make progress. If neither memory nor any
    block changes while each has its turns, they wait for ever.
    """
    turns = Turns(bodies)
    workers: list[Worker] = []
    waiting: deque[Worker] = deque()
    idle, still, done, seen, looks = 0, 0, 0, memory(), 0
    try:
        while turns.left or waiting:
            full = not turns.left or not fits(len(waiting))
            if full:
                worker = waiting.popleft()
            else:
                worker = Worker(turns)
                workers.append(worker)
            worker.resume()
            if not worker.finished:
                waiting.append(worker)
            idle = 0 if turns.done > done else idle + 1
            done, looks = turns.done, looks if idle else 0
            still = still + 1 if full and idle and worker.still else 0
            if still >= STILL_ROUNDS * len(waiting) or idle > MAX_ROUNDS * max(1, len(waiting)):
                before, seen = seen, memory()
                quiet = still > 0 and before == seen
                looks += idle > MAX_ROUNDS * max(1, len(waiting))
                if quiet or looks > MAX_LOOKS:
                    raise _stuck(kernel, len(waiting), len(bodies) if turns.left else None, quiet)
                idle, still = 1, 0
    finally:
        for worker in workers:
            worker.cancel()


def _stuck(kernel: str, waiting: int, total: int | None, quiet: bool) -> LaunchError:
    field, given, limit = "wait" if quiet else "poll", waiting, None
    if not quiet:
        why = f"poll in a loop, and none has finished in {MAX_LOOKS * MAX_ROUNDS:,} turns; bound that loop"
    elif total is not None:
        field, given, limit = "grid", total, waiting
        why = (
            f"fill the GPU and wait for the other {total - waiting}, which start only when one of them ends: launch "
            f"at most {waiting} blocks"
        )
    else:
        why = (
            "wait for memory that no block changes any more: release the lock, set the flag, or let the barrier "
            "count the blocks of this launch"
        )
    text = f"kernel {kernel}: {waiting} blocks {why}"
    return LaunchError(text, kernel=kernel, field=field, given=given, limit=limit)


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

    def __init__(self, module: Module, kernel: str, threads: int = 128, has_tma: bool = True) -> None:
        self.kernel = kernel
        # fits(n): whether the GPU has room for one more block while n blocks have not ended.
        self.fits: Callable[[int], bool] = lambda running: running < MAX_RESIDENT
        self.module = module
        lowering = Lowering(module, kernel, threads, has_tma)
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
        self._warned: set[tuple[str, str]] = set()  # lines and arguments that reached beyond a view
        self._whole = False  # the kernel reaches beyond its views, into their base arrays

    @classmethod
    def parse(cls, text: str, kernel: str, threads: int = 128, has_tma: bool = True) -> TtirProgram:
        """Translates TTIR text (`asm["ttir"]` of `triton.compile`). An unknown op raises `UnsupportedOpError`."""
        program = cls(parse(text, kernel), kernel, threads, has_tma)
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
        bound = self._bind(args)
        if not len(ids):
            return np.zeros(0, COST_DTYPE)
        before = None if self._whole else self._contents(bound, shape, ids)
        try:
            return self._run(bound, shape, ids, record, marks)
        except OutOfBoundsError:
            if before is None:
                raise
            # A GPU does not know views: the base array of a view can be accessed.
            for flat, copy in before:
                flat[...] = copy
            self._whole = True
            try:
                return self._run(self._bind(args), shape, ids, record, marks)
            except OutOfBoundsError:
                self._whole = False
                raise

    def _bind(self, args: Sequence[Any]) -> Bound:
        bound = self._signature.bind(args, self._whole)
        return replace(bound, buffers=replace(bound.buffers, warned=self._warned)) if self._whole else bound

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
        bound = self._bind(args)
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

        def body(row: int) -> Body:
            def run(give_way: Wait) -> None:
                machine = Machine(self.kernel, bound.buffers, grid, np.asarray([ids[row]], np.int64))
                machine.give_way, machine.marks = give_way, marks
                cost[row] = self._execute(machine, bound)[0]

            return run

        written = [bound.buffers.flat[i] for i in self._signature.written]

        def contents() -> int:
            return hash(tuple(zlib.crc32(flat.data) for flat in written if flat is not None))

        take_turns(self.kernel, [body(row) for row in range(len(ids))], contents, self.fits)
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
        call(self._entry, active, self._signature.values(bound))
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
        raise LaunchError(
            f"kernel {kernel}: the grid {tuple(grid)} must have one to three sizes of at least 0",
            kernel=kernel, field="grid", given=tuple(grid),
        )
    return (*shape, *(1,) * (3 - len(shape)))  # type: ignore[return-value]


def _block_ids(blocks: range | Array | None, grid: tuple[int, int, int], kernel: str) -> range | Array:
    total = grid[0] * grid[1] * grid[2]
    if blocks is None:
        return range(total)
    ids = blocks if isinstance(blocks, range) else np.ascontiguousarray(blocks, np.int64).reshape(-1)
    if len(ids) and not (min(ids[0], ids[-1]) >= 0 if isinstance(ids, range) else ids.min() >= 0):
        raise LaunchError(
            f"kernel {kernel}: a block id is negative: ids must be from 0 to the size of the grid",
            kernel=kernel, field="ids", limit=0,
        )
    if len(ids) and (max(ids[0], ids[-1]) if isinstance(ids, range) else ids.max()) >= total:
        raise LaunchError(
            f"kernel {kernel}: a block id is outside the grid {grid} of {total} blocks",
            kernel=kernel, field="ids", limit=total,
        )
    return ids
