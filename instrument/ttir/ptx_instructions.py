"""PTX instructions evaluated on whole tensors: the ones that kernels commonly write by hand.

Instructions and modifiers that are not named below are refused when the kernel is translated.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import libdevice
from paellapy.instrument.ttir import rounding as rnd
from paellapy.instrument.ttir.ptx_conversions import convert, saturated
from paellapy.instrument.ttir.ptx_pieces import MODES, Function, Instruction, element_of, halves, read, resized, write
from paellapy.instrument.ttir.types import Array

_FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": ew.fma, "mad": ew.fma,
    "max": np.fmax, "min": np.fmin, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rsqrt": ew.rsqrt,
    "rcp": lambda x: x.dtype.type(1) / x, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
_INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "max": np.maximum,
    "min": np.minimum, "neg": np.negative, "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "div": ew.divide, "rem": np.fmod,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32), "clz": lambda x: ew.leading_zeros(x).astype(np.uint32),
    "brev": lambda x: libdevice._NAMES["brev"](x.view(f"i{x.dtype.itemsize}")),
}  # fmt: skip
_PREDICATE: dict[str, Function] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    "mov": lambda a: np.asarray(a) != 0,
}  # fmt: skip
_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
# A comparison of floats with NaN is false, or true if its name ends in `u`.
_COMPARE_FLOATS: dict[str, Function] = {
    **{name: _COMPARE[name] for name in ("eq", "lt", "le", "gt", "ge")}, "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _arithmetic(i: Instruction) -> Function:
    kind = i.types[-1] if i.types else ""
    if kind.endswith("x2"):
        return halves(_plain(i, kind[:-2]), kind[:-2], kind[:-2])
    if "wide" in i.modifiers and i.name in ("mul", "mad"):
        return _wide(i, kind)
    fn, out = _plain(i, kind), "u32" if i.name in ("popc", "clz") else kind
    return lambda *args: write(fn(*(read(a, kind) for a in args)), out)


def _wide(i: Instruction, kind: str) -> Function:
    """A product of twice the width."""
    i.allow("wide")
    if i.operands[3:] and i.operands[3][:1] in "-0123456789":
        raise i.unknown()  # a number has no width of its own
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 4}"

    def run(a: Array, b: Array, *c: Array) -> Array:
        product = read(a, kind).astype(dtype) * read(b, kind).astype(dtype)
        return write(product + read(c[0], wide) if c else product, wide)

    return run


def _plain(i: Instruction, kind: str) -> Function:
    if element_of(kind) is None:
        fn = _integer(i, kind)
    else:
        nan = ("NaN",) if i.name in ("min", "max") else ()
        i.allow(MODES.keys(), "ftz", "approx", "full", "sat", *nan)
        if i.mode not in ("", "rn") and i.name in ("add", "sub", "mul", "div", "fma", "sqrt", "rcp"):
            fn = rnd.directed(i.name, i.mode)
        elif "NaN" in i.modifiers:
            fn = {"max": np.maximum, "min": np.minimum}[i.name]
        elif i.name in _FLOAT:
            fn = _FLOAT[i.name]
        else:
            raise i.unknown()
    if isinstance(fn, np.ufunc) and fn.nin != len(i.operands) - 1:
        raise i.unknown()
    if "sat" not in i.modifiers:
        return fn
    return lambda *args: saturated(fn(*args))


def _integer(i: Instruction, kind: str) -> Function:
    i.allow("lo", "hi")
    if "hi" in i.modifiers:
        if i.name != "mul":
            raise i.unknown()
        return lambda a, b: ew.high_product(a, b, kind[0] == "s")
    if i.name not in _INTEGER:
        raise i.unknown()
    return _INTEGER[i.name]


def _shift(i: Instruction) -> Function:
    kind = i.types[-1]
    bits = int(kind[1:])

    def run(a: Array, n: Array) -> Array:
        value, by = read(a, kind), np.minimum(resized(n, 4), np.uint32(bits))
        small = np.minimum(by, np.uint32(bits - 1)).astype(value.dtype)
        moved = value << small if i.name == "shl" else value >> small
        gone = (value >> value.dtype.type(bits - 1)) if i.name == "shr" and kind[0] == "s" else np.zeros_like(value)
        return write(np.where(by >= bits, gone, moved), kind)

    return run


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out, bits = np.zeros_like(a), int(np.ravel(table)[0])
    for k in range(8):
        if bits >> k & 1:
            out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return out


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    s = selector.astype(np.uint64)
    out: Array = np.zeros(1, np.uint64)
    for k in range(4):
        nibble = s >> np.uint64(4 * k)
        byte = pool >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        out = out | np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * k)
    return out.astype(np.uint32)


def _extract(i: Instruction) -> Function:
    kind = i.types[-1]
    bits = int(kind[1:])

    def run(a: Array, at: Array, count: Array) -> Array:
        value = read(a, kind)
        limited = (np.minimum(resized(v, 4) & np.uint32(255), np.uint32(bits)) for v in (at, count))
        at, count = (v.astype(value.dtype) for v in limited)
        gone = at == bits  # of a signed number, the sign remains
        down = value >> np.where(gone, bits - 1, at)
        if kind[0] == "u":
            down = np.where(gone, 0, down).astype(value.dtype)
        rest = np.minimum(bits - count, bits - 1).astype(value.dtype)
        out = down << rest >> rest
        return write(np.where(count == 0, np.zeros_like(out), out), kind)

    return run


def _insert(a: Array, b: Array, at: Array, count: Array) -> Array:
    kind = b.dtype.type
    mask = np.where(count >= 8 * b.dtype.itemsize, kind(0) - kind(1), (kind(1) << count.astype(b.dtype)) - kind(1))
    mask = mask << at.astype(b.dtype)
    inserted: Array = (b & ~mask) | (a.astype(b.dtype) << at.astype(b.dtype) & mask)
    return inserted


def _funnel(i: Instruction) -> Function:
    def run(low: Array, high: Array, by: Array) -> Array:
        n = by.astype(np.uint64) & np.uint64(31) if "wrap" in i.modifiers else np.minimum(by, 32).astype(np.uint64)
        pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        moved = pair << n >> np.uint64(32) if "l" in i.modifiers else pair >> n
        return moved.astype(np.uint32)

    return run


def meaning(i: Instruction) -> Function:
    """The function of an instruction on the bits of its sources; raises `UnknownPtx`."""
    if i.types == ("pred",) and i.name in _PREDICATE:
        return _PREDICATE[i.name]
    if i.name in ("mov", "not") and i.types and i.types[-1] in ("b8", "b16", "b32", "b64", "u16", "u32", "u64", "s32",
                                                                   "s16", "s64", "f32", "f64"):  # fmt: skip
        return (lambda a: a) if i.name == "mov" else (lambda a: ~a)
    special = {"shl": _shift, "shr": _shift, "cvt": convert, "bfe": _extract, "shf": _funnel}
    if i.name in special and i.types:
        return special[i.name](i)
    if i.name == "lop3" and i.modifiers == ("b32",):
        return _lop3
    if i.name == "prmt" and i.modifiers == ("b32",):
        return _prmt
    if i.name == "bfi":
        return _insert
    if i.name == "selp":
        return lambda a, b, p: np.where(p, a, b)
    if i.name == "setp":
        return _compare(i)
    return _arithmetic(i)


def _compare(i: Instruction) -> Function:
    kind = i.types[-1] if i.types else ""
    floats = element_of(kind) is not None
    compare = (_COMPARE_FLOATS if floats else _COMPARE).get(i.modifiers[0])
    if compare is None or not kind or "|" in i.operands[0] or len(i.operands) != 3:
        raise i.unknown()
    i.allow(i.modifiers[0], "ftz")
    if "ftz" in i.modifiers:
        return lambda a, b: compare(_flushed(read(a, kind)), _flushed(read(b, kind)))
    return lambda a, b: compare(read(a, kind), read(b, kind))


def _flushed(value: Array) -> Array:
    """Numbers below the normal ones as 0."""
    return np.where(np.abs(value) < np.finfo(value.dtype).tiny, np.zeros_like(value), value)
