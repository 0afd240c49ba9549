"""`tt.reduce` and `tt.scan` with any combine region; the common ones become one NumPy call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir import elementwise as ew
from paellapy.instrument.triton_ir.lower import Lowering, builds
from paellapy.instrument.triton_ir.machine import Active, Code, Run, Slots, pure, pure_many
from paellapy.instrument.triton_ir.parse import Op, Region, walk
from paellapy.instrument.triton_ir.types import Array, Ints, Type, full, is_array, rounder

Combine = Callable[..., tuple[Any, ...]]

CACHED = 1 << 17  # elements of a tensor whose temporaries fit in a core's cache

UFUNCS = {
    "arith.addf": np.add,
    "arith.addi": np.add,
    "arith.mulf": np.multiply,
    "arith.muli": np.multiply,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
}


def as_ufunc(region: Region) -> np.ufunc | None:
    """The ufunc that a combine region stands for: one op on its two arguments."""
    block = region[0]
    if len(region) != 1 or len(block.ops) != 2 or len(block.args) != 2:
        return None
    op = block.ops[0]
    if sorted(op.operands) != sorted(block.args) or block.ops[1].operands != op.results:
        return None
    if op.in_types and op.in_types[0].element.name == "i1" and op.name not in ("arith.andi", "arith.ori", "arith.xori"):
        return None
    return UFUNCS.get(op.name)


def as_arg_reduction(region: Region) -> Callable[..., Any] | None:
    """argmax or argmin with ties to the left: `(v1 == v2 and i1 < i2) or v1 > v2` selects."""
    block = region[0]
    if len(region) != 1 or len(block.args) != 4:
        return None
    ops = block.ops[:-1]
    names = [op.name.removeprefix("arith.") + (":" + op.word if "cmp" in op.name else "") for op in ops]
    v1, i1, v2, i2 = block.args
    reads = ([v1, v2], [i1, i2], None, [v1, v2], None, [v1, v2], [i1, i2])  # the condition of the select is left out
    if len(ops) != len(reads) or any(r is not None and op.operands[-2:] != r for op, r in zip(ops, reads, strict=True)):
        return None
    for pick, comparisons in ((np.argmax, ("cmpf:oeq cmpf:ogt", "cmpi:eq cmpi:sgt")),
                              (np.argmin, ("cmpf:oeq cmpf:olt", "cmpi:eq cmpi:slt"))):  # fmt: skip
        for comparison in comparisons:
            equal, better = comparison.split()
            if names == [equal, "cmpi:slt", "andi", better, "ori", "select", "select"]:
                return pick
    return None


def _pieces(x: Array, axis: int, at: slice | int) -> Array:
    return x[(slice(None),) * axis + (at,)]


def reduce_ufunc(ufunc: np.ufunc, axis: int, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Reduce along a tensor axis. An axis of two (sort, interleave) is one elementwise call."""
    a, n = axis + 1, shape[axis]
    if n == 1:
        return lambda x: full(x, shape).reshape((-1, *shape[:axis], *shape[axis + 1 :]))
    if n == 2:
        return lambda x: ufunc(_pieces(full(x, shape), a, 0), _pieces(full(x, shape), a, 1))

    def run(x: Any) -> Any:
        x = full(x, shape)
        return ufunc.reduce(x, axis=a, dtype=x.dtype)

    return run


def reduce_arg(pick: Callable[..., Any], combine: Combine, axis: int, shape: tuple[int, ...]) -> Combine:
    """argmax/argmin with ties to the left, if the indices grow along the axis; otherwise the region itself decides."""
    a = axis + 1
    general = reduce_general(combine, axis, shape)

    def run(x: Any, index: Any) -> tuple[Any, ...]:
        x, index = full(x, shape), full(index, shape)
        if index.shape[0] > x.shape[0] or not bool((np.diff(index, axis=a) > 0).all()):
            return general(x, index)
        at = np.expand_dims(pick(x, axis=a), a)
        best = np.take_along_axis(x, at, a).squeeze(a)
        if x.dtype.kind == "f" and bool(np.isnan(best).any()):  # NumPy picks a NaN if there is one
            return general(x, index)
        index = np.broadcast_to(index, x.shape[:1] + index.shape[1:])
        return best, np.take_along_axis(index, at, a).squeeze(a)

    return run


def _whole(xs: tuple[Any, ...], shape: tuple[int, ...]) -> list[Array]:
    """Operands at full shape, for the blocks of all of them."""
    arrays = [full(x, shape) for x in xs]
    nb = max(x.shape[0] for x in arrays)
    return [np.broadcast_to(x, (nb, *shape)) for x in arrays]


def _aligned(xs: list[Array], axis: int) -> list[Array]:
    """Operands with the axis in front, so that neighbours along it are whole rows of memory."""
    return [np.ascontiguousarray(np.moveaxis(x, axis + 1, 0)) for x in xs]


def reduce_general(combine: Combine, axis: int, shape: tuple[int, ...]) -> Combine:
    """Any associative region: neighbours are combined until one is left."""

    size = int(np.prod(shape))

    def part(operands: list[Array]) -> tuple[Array, ...]:
        xs = _aligned(operands, axis)
        n = shape[axis]
        while n > 1:
            n //= 2
            combined = combine(*[x[0::2] for x in xs], *[x[1::2] for x in xs])
            xs = [np.broadcast_to(y, (n, *x.shape[1:])) for x, y in zip(xs, combined, strict=True)]
        return tuple(x[0] for x in xs)

    def run(*operands: Any) -> tuple[Any, ...]:
        xs = _whole(operands, shape)
        nb, step = len(xs[0]), max(1, CACHED // size)  # in pieces whose temporaries stay in the cache
        parts = [part([x[low : low + step] for x in xs]) for low in range(0, nb, step)]
        return parts[0] if len(parts) == 1 else tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    return run


def scan_ufunc(ufunc: np.ufunc, axis: int, shape: tuple[int, ...], reverse: bool) -> Callable[[Any], Any]:
    a = axis + 1

    def run(x: Any) -> Any:
        x = full(x, shape)
        out = ufunc.accumulate(np.flip(x, a) if reverse else x, axis=a, dtype=x.dtype)
        return np.flip(out, a) if reverse else out

    return run


def scan_general(combine: Combine, axis: int, shape: tuple[int, ...], reverse: bool) -> Combine:
    """Hillis and Steele: log2(n) rounds of combining with the element 1, 2, 4, … to the left."""

    def run(*operands: Any) -> tuple[Any, ...]:
        xs = _aligned(_whole(operands, shape), axis)
        if reverse:
            xs = [x[::-1] for x in xs]
        distance = 1
        while distance < shape[axis]:
            ys = combine(*[x[:-distance] for x in xs], *[x[distance:] for x in xs])
            xs = [
                np.concatenate((x[:distance], np.broadcast_to(y, (len(x) - distance, *x.shape[1:]))))
                for x, y in zip(xs, ys, strict=True)
            ]
            distance *= 2
        if reverse:
            xs = [x[::-1] for x in xs]
        return tuple(np.moveaxis(x, 0, axis + 1) for x in xs)

    return run


@dataclass(slots=True, frozen=True)
class Dot:
    """Matrix product plus accumulator, in at least float32 (tf32 is not emulated); integers in float64, exactly."""

    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    integer: bool
    dtype: np.dtype[Any]

    def __call__(self, a: Any, b: Any, c: Any) -> Any:
        a, b = full(a, self.a_shape), full(b, self.b_shape)
        if self.integer:
            a, b = a.astype(np.float64), b.astype(np.float64)
        if b.ndim == 3 and b.shape[0] == 1 and a.shape[0] > 1:  # one right operand for all blocks: one large product
            r = (a.reshape(-1, self.a_shape[1]) @ b[0]).reshape(a.shape[0], self.a_shape[0], self.b_shape[1])
        else:
            r = a @ b
        return accumulate(r.astype(self.dtype, copy=False), c)


def accumulate(r: Any, c: Any) -> Any:
    """r + c, in r's own memory if it can hold the result."""
    if not is_array(c):
        return r if c == 0 else r + c
    if c.shape[0] > r.shape[0]:
        return r + c
    r += c
    return r


# --- translations of reductions, scans and dots -----------------------------------------------------------------------


def combine_region(low: Lowering, op: Op) -> tuple[Combine, Code]:
    """A combine region as a function of arrays. It never touches memory, so it runs the same in every mode."""
    body = low.nested(op.regions[0])
    if body.free:
        low.refuse(op, "its combine function reads values from outside, which is not supported")
    template = low.function.template

    def combine(*operands: Any) -> tuple[Any, ...]:
        slots = list(template)
        for slot, value in zip(body.args, operands, strict=True):
            slots[slot] = value
        for step in body.steps:
            step.run(_PURE, slots)
        return tuple(slots[i] for i in body.values)

    return combine, body


class _PureActive:
    """Stands in for the active blocks in code that only does arithmetic."""

    flops = 0

    class machine:
        call = staticmethod(lambda fn, *args: fn(*args))


_PURE: Any = _PureActive()


def combine_flops(op: Op) -> int:
    return sum(ew.FLOAT[o.name][1] for o in walk(op.regions[0]) if o.name in ew.FLOAT)


def rounded_many(fn: Callable[..., Any], types: list[Type]) -> Callable[..., Any]:
    to = rounder(types[0].element)
    return fn if to is None or len(types) > 1 else lambda *xs: to(fn(*xs))


@builds("tt.reduce", "tt.scan")
def reduce_or_scan(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis, shape = op.integer("axis"), op.in_types[0].shape
    scan, reverse = op.name == "tt.scan", op.flag("reverse")
    flops = combine_flops(op) * (op.in_types[0].size - op.in_types[0].size // shape[axis])
    ufunc = as_ufunc(op.regions[0])
    if ufunc is not None and len(args) == 1:
        one = scan_ufunc(ufunc, axis, shape, reverse) if scan else reduce_ufunc(ufunc, axis, shape)
        return pure(rounded_many(one, op.out_types), args, outs[0], flops)
    combine, _ = combine_region(low, op)
    pick = None if scan else as_arg_reduction(op.regions[0])
    if scan:
        many = scan_general(combine, axis, shape, reverse)
    elif pick is not None:
        many = reduce_arg(pick, combine, axis, shape)
    else:
        many = reduce_general(combine, axis, shape)
    return pure_many(many, args, outs, flops)


@builds("tt.dot")
def dot(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    a, b = op.in_types[:2]
    low.facts.dot_dtype = low.facts.dot_dtype or a.element.name
    result = op.out_types[0]
    product = Dot(a.shape, b.shape, not a.element.is_float, result.element.compute)
    flops = 2 * result.size * a.shape[-1]
    return product_step(ew.rounded(product, result.element), args, outs[0], flops)


def product_step(fn: Callable[..., Any], places: Sequence[int | None], out: int, flops: int) -> Run:
    """A step that multiplies matrices; an operand without a place is None."""

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[None if i is None else slots[i] for i in places])
        active.dot_flops += flops

    return run


# --- `tl.dot_scaled`: products of narrow floats, with a scale for each group along k (the OCP formats) ----------------

# fp4 (e2m1): sign, two bits of exponent, one of fraction.
_FP4 = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_TEXT = re.compile(r"lhs = (\w+) rhs = (\w+)")


@dataclass(frozen=True, slots=True)
class Operand:
    """One side: its elements as float32, with k along `axis` (counted from the end), and its scales with k last."""

    type: Type
    format: str
    scale: Type | None
    axis: int
    packed_along_k: bool

    def value(self, x: Any, scale: Any) -> Any:
        x = full(x, self.type.shape)
        axis = self.axis
        if self.format == "e2m1":
            bits = x.view(np.uint8)
            pair = _FP4[np.stack([bits & 15, bits >> 4], -1)]  # low half first
            along = axis if self.packed_along_k else -3 - axis
            pair = np.moveaxis(pair, -1, along % (x.ndim) + 1)
            shape = list(x.shape)
            shape[along % x.ndim] *= 2
            x = pair.reshape(shape)
        if self.scale is None:
            return x
        s = full(scale, self.scale.shape)
        if not self.scale.element.is_float:  # e8m0: an exponent; 255 stands for NaN
            e = s.view(np.uint8).astype(np.float64)
            s = np.where(e == 255, np.nan, np.exp2(e - 127)).astype(np.float32)
        s = np.repeat(s, x.shape[axis] // s.shape[-1], axis=-1)
        return x * (s if axis == -1 else np.swapaxes(s, -1, -2))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.format != "e2m1":
            return self.type.shape
        shape = list(self.type.shape)
        shape[self.axis if self.packed_along_k else -3 - self.axis] *= 2
        return tuple(shape)


def _operands(op: Op) -> tuple[Operand, Operand, list[int | None]]:
    """Both sides, and the positions of a, its scales, b, its scales and c among the op's operands."""
    m = _TEXT.search(op.body)
    assert m is not None
    names = re.findall(r"(%[\w$.\-#]+)( scale)?", op.body.partition(" lhs = ")[0])
    types, at, places = iter(op.in_types), 0, []
    sides: list[tuple[Type, Type | None]] = []
    for _ in range(2):
        scaled = bool(names[at][1])
        places += [at, at + 1 if scaled else None]
        sides.append((next(types), next(types) if scaled else None))
        at += 1 + scaled
    places.append(at)
    packed = [op.attributes.get(name, "true") != "false" for name in ("lhs_k_pack", "rhs_k_pack")]
    a = Operand(sides[0][0], m[1], sides[0][1], -1, packed[0])
    b = Operand(sides[1][0], m[2], sides[1][1], -2, packed[1])
    return a, b, places


@builds("tt.dot_scaled")
def dot_scaled(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    a, b, places = _operands(op)
    result = op.out_types[0]
    low.facts.dot_dtype = low.facts.dot_dtype or ("f8" if a.format[0] == b.format[0] == "e" else "bf16")
    product: Callable[..., Any] = Dot(a.shape, b.shape, False, result.element.compute)
    flops = 2 * result.size * a.shape[-1]

    def fn(x: Any, sx: Any, y: Any, sy: Any, c: Any) -> Any:
        return product(a.value(x, sx), b.value(y, sy), c)

    return product_step(fn, [None if p is None else args[p] for p in places], outs[0], flops)
