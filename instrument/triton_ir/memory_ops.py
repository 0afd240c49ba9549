"""Translations of ops that touch memory or the outside world."""

from __future__ import annotations

import bisect
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from paellapy.instrument.env import live_instances
from paellapy.instrument.triton_ir import cost, memory
from paellapy.instrument.triton_ir import elementwise as ew
from paellapy.instrument.triton_ir.lower import Lowering, builds
from paellapy.instrument.triton_ir.machine import LOADED, STORED, Active, BufferRef, Buffers, Run, Slots
from paellapy.instrument.triton_ir.memory import Site
from paellapy.instrument.triton_ir.parse import Op, unescaped
from paellapy.instrument.triton_ir.types import ELEMENTS, PAD_NAN, Array, Element, Ints, Ptr, Shape, Value, Window

# --- one memory op while it runs: its place in the source, its cost, and the arguments it accesses --------------------


class Access:
    """One memory op at run time: makes sites, counts bytes, and covers all arguments that a pointer may point into."""

    def __init__(self, low: Lowering, op: Op, shape: Shape, element: Element) -> None:
        self.kernel, self.line, self.name = low.kernel, low.line(op), op.name
        self.shape, self.element = shape, element
        self.bytes = element.size
        for d in shape:
            self.bytes *= d
        self.threads = low.threads
        self.argument_names = [name.removeprefix("%") for name, _ in low.module.entry.args]

    def site(self, active: Active, base: int) -> Site:
        machine = active.machine
        own = machine.buffers.element[base]
        scale = own.size if own else 1
        origin = machine.buffers.origin[base] * scale // self.element.size
        view = machine.buffers.views.get(base)
        return Site(
            self.kernel,
            self.line,
            self.name,
            machine.buffers.name(base, self.argument_names),
            machine.grid,
            machine.ids[active.rows],
            active.rows,
            self.shape,
            origin,
            view and (view[0] * scale // self.element.size, view[1] * scale // self.element.size),
            machine.buffers.warned,
        )

    def bare_site(self, active: Active) -> Site:
        """A site for an op that touches no argument."""
        ids = active.machine.ids[active.rows]
        return Site(self.kernel, self.line, self.name, "", active.machine.grid, ids, active.rows, self.shape)

    def count(self, active: Active, field: int, mask: Value, base: int) -> None:
        if mask is not None:
            active.machine.count(field, mask, self.element.size, self.site(active, base))
        elif field == LOADED:
            active.loaded += self.bytes
        else:
            active.stored += self.bytes

    def count_updates(self, active: Active, p: Ptr, mask: Value) -> None:
        site = self.site(active, p.bases[0])
        active.machine.count_touched(cost.count_updates, p.offset, mask, self.element, self.threads, site)

    def count_waste(self, active: Active, p: Ptr, mask: Value) -> None:
        if not self.shape:
            return  # of a single element, almost all of its sector is unused, and it does not matter
        site = self.site(active, p.bases[0])
        active.machine.count_touched(cost.count_waste, p.offset, mask, self.element, site)

    def each(self, active: Active, p: Ptr, mask: Value) -> list[tuple[int, Value]]:
        """(argument, mask) for every argument the pointer may point into."""
        if p.which is None:
            return [(p.bases[0], mask)]
        call, parts = active.machine.call, []
        for k, base in enumerate(p.bases):
            own = call(np.equal, p.which, np.int32(k))
            parts.append((base, own if mask is None else call(np.logical_and, own, mask)))
        return parts

    def load(self, active: Active, p: Ptr, mask: Value, other: Value) -> Value:
        self.count(active, LOADED, mask, p.bases[0])
        self.count_waste(active, p, mask)
        machine, value = active.machine, None
        for base, own in self.each(active, p, mask):
            part = machine.load(
                base, p.offset, own, other if value is None else None, self.element, self.site(active, base)
            )
            value = part if value is None else machine.call(ew.where, own, part, value)
        return value

    def store(self, active: Active, p: Ptr, value: Value, mask: Value) -> None:
        self.count(active, STORED, mask, p.bases[0])
        self.count_waste(active, p, mask)
        for base, own in self.each(active, p, mask):
            active.machine.store(base, p.offset, value, own, self.element, self.site(active, base))


# --- tiles of arrays with a shape: block pointers and tensor descriptors ----------------------------------------------


@builds("tt.make_tensor_ptr", "tt.make_tensor_descriptor")
def make_window(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """Operands: base, one size and one stride per axis; block pointers also have one offset per axis."""
    block, (out,) = op.out_types[0].block, outs
    rank = len(block)
    low.same_pointer(args[0], out)
    padding = PAD_NAN if "pad_nan" in op.attributes.get("padding", "").lower() else 0
    checked = low.has_tma and op.name == "tt.make_tensor_descriptor"
    access = Access(low, op, (), ELEMENTS["i8"])

    def run(active: Active, slots: Slots) -> None:
        values = [slots[i] for i in args]
        if checked:
            base, strides = values[0], tuple(values[1 + rank : 1 + 2 * rank])
            for k in base.bases if base.which is None else ():
                site = access.site(active, k)
                ref = BufferRef(k, base.element)
                active.machine.effect(memory.check_descriptor, ref, base.offset, base.element.size, site, *strides)
        offsets = tuple(values[1 + 2 * rank : 1 + 3 * rank])
        slots[out] = Window(
            values[0], tuple(values[1 : 1 + rank]), tuple(values[1 + rank : 1 + 2 * rank]), offsets, block, padding
        )

    return run


@builds("tt.advance")
def advance(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (a, *steps), (out,) = args, outs
    low.same_pointer(a, out)

    def run(active: Active, slots: Slots) -> None:
        w = slots[a]
        moved = tuple(active.machine.call(np.add, o, slots[s]) for o, s in zip(w.offsets, steps, strict=True))
        slots[out] = Window(w.base, w.shape, w.strides, moved, w.block, w.padding)

    return run


def _axis(at: Any, n: int, axis: int, rank: int) -> Any:
    """Indices at, at + 1, … of one axis of a tile, for every block; `at` may already hold one index per row."""
    if type(at) is np.ndarray and at.ndim > 1:
        index = at.astype(np.int64).reshape(at.shape[0], -1)
    else:
        index = np.asarray(at, np.int64).reshape(-1, 1) + np.arange(n)
    shape = [1] * rank
    shape[axis] = index.shape[1]
    return index.reshape((-1, *shape))


def window_offset(block: Shape) -> Callable[..., Any]:
    rank = len(block)

    def run(base: Any, *at: Any) -> Any:
        total = np.asarray(base).reshape((-1,) + (1,) * rank)
        for axis, n in enumerate(block):
            stride = np.asarray(at[rank + axis], np.int64).reshape((-1,) + (1,) * rank)
            total = total + _axis(at[axis], n, axis, rank) * stride
        return total

    return run


def window_mask(block: Shape, checked: Shape) -> Callable[..., Any]:
    rank = len(block)

    def run(*at: Any) -> Any:
        mask: Any = np.ones((1,) * (rank + 1), np.bool_)
        for axis in checked:
            index = _axis(at[axis], block[axis], axis, rank)
            size = np.asarray(at[rank + axis], np.int64).reshape((-1,) + (1,) * rank)
            mask = mask & (index >= 0) & (index < size)
        return mask

    return run


def window_access(active: Active, w: Window, at: tuple[Value, ...], checked: Shape, block: Shape) -> tuple[Ptr, Value]:
    """The pointer tensor and the mask of a tile."""
    call = active.machine.call
    offset = call(window_offset(block), w.base.offset, *at, *w.strides)
    mask = call(window_mask(block, checked), *at, *w.shape) if checked else None
    which = None if w.base.which is None else call(lambda v: np.reshape(v, (-1,) + (1,) * len(block)), w.base.which)
    return Ptr(w.base.bases, which, offset, w.base.element), mask


@builds("tt.descriptor_load", "tt.descriptor_gather")
def descriptor_load(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (out,), result = outs, op.out_types[0]
    block = result.shape if op.name == "tt.descriptor_gather" else op.in_types[0].block
    access = Access(low, op, block, result.element)
    rank = len(block)

    def run(active: Active, slots: Slots) -> None:
        w = slots[args[0]]
        at = tuple(slots[i] for i in args[1 : 1 + rank])
        p, mask = window_access(active, w, at, tuple(range(rank)), block)
        other = result.element.compute.type(np.nan if w.padding == PAD_NAN else 0)
        value = access.load(active, p, mask, other)
        if result.shape != block:
            value = active.machine.call(lambda v: v.reshape((v.shape[0], *result.shape)), value)
        slots[out] = value

    return run


@builds("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce")
def descriptor_store(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    value_type = op.in_types[-1]
    block = value_type.shape if op.name == "tt.descriptor_scatter" else op.in_types[0].block
    element, rank = value_type.element, len(block)
    access = Access(low, op, block, element)
    kind = ("fadd" if element.is_float else "add") if op.word == "add" else op.word
    if op.in_types[0].unsigned and kind in ("min", "max"):
        kind = f"u{kind}"

    def run(active: Active, slots: Slots) -> None:
        w = slots[args[0]]
        at, value = tuple(slots[i] for i in args[1 : 1 + rank]), slots[args[1 + rank]]
        if value_type.shape != block:
            value = active.machine.call(
                lambda v: np.broadcast_to(v, (v.shape[0], *value_type.shape)).reshape((-1, *block)), value
            )
        p, mask = window_access(active, w, at, tuple(range(rank)), block)
        if op.name != "tt.descriptor_reduce":
            access.store(active, p, value, mask)
            return
        access.count(active, LOADED, mask, p.bases[0])
        access.count(active, STORED, mask, p.bases[0])
        access.count_updates(active, p, mask)
        for base, own in access.each(active, p, mask):
            ref = BufferRef(base, element)
            active.machine.effect(
                memory.atomic, ref, p.offset, value, own, kind, element, False, access.site(active, base)
            )

    return run


_ANY = ELEMENTS["i8"]


def optional(slots: Slots, args: Ints, position: int) -> Any:
    return slots[args[position]] if len(args) > position else None


@builds("tt.addptr")
def addptr(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (a, i), (out,) = args, outs
    low.same_pointer(a, out)

    def run(active: Active, slots: Slots) -> None:
        p = slots[a]
        slots[out] = Ptr(p.bases, p.which, active.machine.call(np.add, p.offset, slots[i]), p.element)

    return run


@builds("tt.load", "tt.atomic_load")
def load(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    (out,), type_ = outs, op.in_types[0]
    if type_.kind == "block_pointer":
        tile = Access(low, op, type_.block, type_.element)
        checked = op.integers("boundaryCheck")
        nan = op.attributes.get("padding", "1").split()[0] in (str(PAD_NAN), "nan")
        other = type_.element.compute.type(np.nan if nan else 0)

        def run_tile(active: Active, slots: Slots) -> None:
            w = slots[args[0]]
            p, mask = window_access(active, w, w.offsets, checked, w.block)
            slots[out] = tile.load(active, p, mask, other)

        return run_tile
    access = Access(low, op, type_.shape, type_.element)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = access.load(active, slots[args[0]], optional(slots, args, 1), optional(slots, args, 2))

    return run


@builds("tt.store", "tt.atomic_store")
def store(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    type_ = op.in_types[0]
    if type_.kind == "block_pointer":
        tile = Access(low, op, type_.block, type_.element)
        checked = op.integers("boundaryCheck")

        def run_tile(active: Active, slots: Slots) -> None:
            w = slots[args[0]]
            p, mask = window_access(active, w, w.offsets, checked, w.block)
            tile.store(active, p, slots[args[1]], mask)

        return run_tile
    access = Access(low, op, type_.shape, type_.element)

    def run(active: Active, slots: Slots) -> None:
        access.store(active, slots[args[0]], slots[args[1]], optional(slots, args, 2))

    return run


@builds("tt.atomic_rmw")
def atomic_rmw(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    kind, used, type_ = op.word, op.results[0] in low.used, op.in_types[0]
    access, element = Access(low, op, type_.shape, type_.element), type_.element
    (out,) = outs

    def run(active: Active, slots: Slots) -> None:
        p, value, mask = slots[args[0]], slots[args[1]], optional(slots, args, 2)
        access.count(active, LOADED, mask, p.bases[0])
        access.count(active, STORED, mask, p.bases[0])
        access.count_updates(active, p, mask)
        result = None
        for base, own in access.each(active, p, mask):
            site, ref = access.site(active, base), BufferRef(base, element)
            part = active.machine.effect(memory.atomic, ref, p.offset, value, own, kind, element, used, site)
            result = part if result is None else active.machine.call(ew.where, own, part, result)
        slots[out] = result

    return run


@builds("tt.atomic_cas")
def atomic_cas(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.writes(args[0])
    type_ = op.in_types[0]
    access, element = Access(low, op, type_.shape, type_.element), type_.element
    (out,) = outs

    def run(active: Active, slots: Slots) -> None:
        p = slots[args[0]]
        if p.which is not None:
            low.refuse(op, "its pointer may point into several arguments, which is not supported")
        access.count(active, LOADED, None, p.bases[0])
        access.count(active, STORED, None, p.bases[0])
        access.count_updates(active, p, None)
        site, ref = access.site(active, p.bases[0]), BufferRef(p.bases[0], element)
        slots[out] = active.machine.effect(
            memory.compare_and_swap, ref, p.offset, slots[args[1]], slots[args[2]], element, site
        )

    return run


@builds("tt.atomic_poll")
def atomic_poll(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    """Waits until memory holds a value. Blocks take turns; a time-out never happens, because waiting takes no time."""
    low.facts.serial = True
    access = Access(low, op, op.in_types[0].shape, op.in_types[0].element)

    def run(active: Active, slots: Slots) -> None:
        while not np.all(access.load(active, slots[args[0]], None, None) == slots[args[1]]):
            active.machine.give_way(id(op))
        if outs:
            slots[outs[0]] = np.bool_(True)

    return run


def _quoted(op: Op) -> str:
    """The text in an op's body."""
    return unescaped(op.body.split('"')[1]) if '"' in op.body else ""


@builds("tt.assert")
def device_assert(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    message = _quoted(op)
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        active.machine.observe(memory.device_assert, slots[args[0]], message, access.bare_site(active))

    return run


@builds("tt.print")
def device_print(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    prefix = _quoted(op)
    access = Access(low, op, (), _ANY)

    def run(active: Active, slots: Slots) -> None:
        values = [v for v in (slots[i] for i in args) if not isinstance(v, Ptr)]
        active.machine.effect(memory.device_print, prefix, access.bare_site(active), *values)

    return run


@builds("llvm.intr.assume")
def assume(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    site, seen = Access(low, op, (), _ANY), memory.Once()

    def run(active: Active, slots: Slots) -> None:
        holds = slots[args[0]]
        active.machine.observe(memory.check_assumption, holds, site.bare_site(active), seen)

    return run


@builds("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier",
        "tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents")  # fmt: skip
def nothing(low: Lowering, op: Op, args: Ints, outs: Ints) -> None:
    """Barriers need no step: a block's elements move together."""


# --- pointers as numbers (`tt.int_to_ptr`, `tt.ptr_to_int`): tables of addresses, as in grouped products and LoRA -----
# Addresses are those of this process. Memory is read through an address only if it lies in a known array: an argument
# of the launch, an array from `pp.array`, `pp.empty` or `pp.zeros`, or a live PyTorch tensor.

Known = TypeVar("Known", bound=Array)
_BYTES = ELEMENTS["i8"]
_known: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
_seen: dict[int, weakref.ref[Any]] = {}  # tensors, by the addresses of their memory
# Tensors and storages, by the address that was asked for.
_asked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def know(array: Known) -> Known:
    """Lets kernels access an array through its address, as long as it is alive; returns it."""
    _known[array.__array_interface__["data"][0]] = array
    return array


def note_addresses(torch: Any) -> None:
    """Notes the tensors and storages whose address is asked for: tables of addresses are made of these."""
    if hasattr(torch.Tensor.data_ptr, "of_paellapy"):
        return

    def noting(ask: Any, address_of: Any) -> Any:
        @functools.wraps(ask)
        def asked(thing: Any, *args: Any, **kwargs: Any) -> Any:
            found = ask(thing, *args, **kwargs)
            _asked[address_of(found)] = thing
            return found

        asked.of_paellapy = True  # type: ignore[attr-defined]
        return asked

    torch.Tensor.data_ptr = noting(torch.Tensor.data_ptr, int)
    torch.UntypedStorage.data_ptr = noting(torch.UntypedStorage.data_ptr, int)
    torch.Tensor.numpy = noting(torch.Tensor.numpy, lambda array: array.__array_interface__["data"][0])


def memory_at(address: int) -> Array | None:
    """The bytes of a known array or live tensor from this address on."""
    places = Places(())
    start = places.find(address)
    return None if start is None else places.bytes(start)[address - start :]


def _bytes(lowest: Array, size: int) -> Array:
    first = np.lib.stride_tricks.as_strided(lowest, (1,), (lowest.itemsize,)).view(np.int8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,))


def _memory(thing: Any) -> Array | None:
    """The memory of a PyTorch tensor or storage on the CPU."""
    torch: Any = sys.modules["torch"]
    if isinstance(thing, torch.UntypedStorage):
        storage = thing
    elif thing.device.type != "cpu" or thing.layout != torch.strided:
        return None
    else:
        storage = thing.untyped_storage()
    if storage.device.type != "cpu" or not storage.nbytes():  # a tensor that stands for another one has no memory
        return None
    return storage_bytes(storage)


def storage_bytes(storage: Any) -> Array:
    """The memory of a PyTorch storage, which is not noted."""
    torch: Any = sys.modules["torch"]
    as_numpy = getattr(torch.Tensor.numpy, "__wrapped__", torch.Tensor.numpy)
    memory: Array = as_numpy(torch.empty(0, dtype=torch.int8).set_(storage))
    return memory


def _tensors() -> Iterator[Array]:
    """The memory of every live PyTorch tensor on the CPU. To find them takes tenths of a second."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    _seen.clear()
    for thing in live_instances(torch.Tensor):
        if (memory := _memory(thing)) is not None:
            _seen[memory.__array_interface__["data"][0]] = weakref.ref(thing)
            yield memory


def _seen_before() -> Iterator[Array]:
    """The memory of tensors that were found before, as far as they are alive."""
    for found in list(_seen.values()):
        thing = found()
        if thing is not None and (memory := _memory(thing)) is not None:
            yield memory


def _asked_for() -> Iterator[Array]:
    """The memory of tensors whose address was asked for."""
    return (memory for thing in list(_asked.values()) if (memory := _memory(thing)) is not None)


def _whole(array: Array) -> Array:
    """All memory of an argument, of which it may be a view: a kernel may reach the rest by an address."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Places:
    """Arrays in order of their addresses. One of these serves a whole run."""

    def __init__(self, arguments: Iterable[Array]) -> None:
        self._spans: dict[int, Array] = {}
        self._starts: list[int] = []
        self._further = [_tensors, _asked_for]  # more arrays, the dearest first
        self._add([*map(_whole, arguments), *_known.values(), *_seen_before()])

    def _add(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            if array.nbytes:
                low, high = np.lib.array_utils.byte_bounds(array)
                lowest = array[tuple(slice(None, None, -1) if s < 0 else slice(None) for s in array.strides)]
                if low not in self._spans or self._spans[low].size < high - low:
                    self._spans[low] = _bytes(lowest, high - low)
        self._starts = sorted(self._spans)

    def find(self, address: int) -> int | None:
        """The start of the array that contains the address."""
        found = self._find(address)
        if found is None and address in _asked and (memory := _memory(_asked[address])) is not None:
            self._add([memory])
            found = self._find(address)
        while found is None and self._further:
            self._add(self._further.pop()())
            found = self._find(address)
        return found

    def _find(self, address: int) -> int | None:
        for at in range(bisect.bisect_right(self._starts, address) - 1, -1, -1):
            start = self._starts[at]
            if address < start + self._spans[start].size:
                return start
            if address - start > 1 << 40:
                break
        return None

    def bytes(self, start: int) -> Array:
        return self._spans[start]


@builds("tt.int_to_ptr")
def int_to_ptr(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    element = op.out_types[0].element
    low.facts.addresses = True
    (a,), (out,) = args, outs

    def run(active: Active, slots: Slots) -> None:
        slots[out] = _pointer(active.machine.buffers, active.machine.known(slots[a]), element)

    return run


def _pointer(buffers: Buffers, addresses: Any, element: Element) -> Ptr:
    flat = np.asarray(addresses, np.int64)
    distinct, where = np.unique(flat, return_inverse=True)
    if not buffers.places:
        buffers.places.append(Places(f for f in buffers.flat if f is not None))
    places: Places = buffers.places[0]
    starts: dict[int | None, int] = {}
    which, offset = np.empty(len(distinct), np.int32), np.empty(len(distinct), np.int64)
    for k, address in enumerate(distinct.tolist()):
        start = places.find(address)
        if start not in starts:
            memory = np.zeros(0, np.int8) if start is None else places.bytes(start)
            starts[start] = buffers.add(memory, _BYTES, f"(no array at address {address:#x})" if start is None else
                                        f"(the array at address {start:#x})")  # fmt: skip
        which[k] = list(starts).index(start)
        offset[k] = -1 if start is None else (address - start) // element.size
        if start is not None and (address - start) % element.size:
            raise ValueError(
                f"address {address:#x} is not aligned for {element.name}: it must be a multiple of {element.size} "
                "bytes from the start"
            )
    bases = tuple(starts.values())
    shape = flat.shape
    picked = which[where].reshape(shape)[()]
    return Ptr(bases, None if len(bases) == 1 else picked, offset[where].reshape(shape)[()], element)


@builds("tt.ptr_to_int")
def ptr_to_int(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    low.facts.addresses = True
    (a,), (out,) = args, outs

    def run(active: Active, slots: Slots) -> None:
        p, buffers = slots[a], active.machine.buffers
        starts = []
        for base in p.bases:
            memory = buffers.flat[base]
            assert memory is not None
            starts.append(memory.__array_interface__["data"][0])
        known = active.machine.known
        start = np.int64(starts[0]) if p.which is None else np.array(starts, np.int64)[known(p.which)]
        slots[out] = start + known(p.offset) * np.int64(p.element.size)

    return run
