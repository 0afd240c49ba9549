"""Elementwise operations: the NumPy functions for each op of `arith` and `math` (and a few of `tt`)."""

from __future__ import annotations

from types import FunctionType
from typing import Any
from weakref import WeakSet

import numpy as np

from paellapy.instrument.triton_ir import native
from paellapy.instrument.triton_ir.types import Element, Function, decode, encode, is_array, narrowed, rounder

_elementwise: WeakSet[Function] = WeakSet()


def elementwise(fn: Function) -> Function:
    """Marks a function whose result elements depend only on the same elements of its arguments."""
    if type(fn) is not np.ufunc:
        _elementwise.add(fn)
    return fn


def is_elementwise(fn: Function) -> bool:
    if type(fn) is np.ufunc:
        return fn.signature is None  # a matrix product has a signature
    return type(fn) is FunctionType and fn in _elementwise


def unsigned(x: Any) -> Any:
    """The same bits as unsigned integers."""
    return x.view(np.uint8) if x.dtype == np.bool_ else x.view(f"u{x.dtype.itemsize}")


def signed(x: Any) -> Any:
    return x.view(f"i{x.dtype.itemsize}")


def _on_unsigned(fn: Function) -> Function:
    return lambda a, b: signed(fn(unsigned(a), unsigned(b)))


def divide(a: Any, b: Any) -> Any:
    """Signed division truncates towards zero; NumPy's floors."""
    q = a // b
    return np.add(q, (q * b != a) & ((a < 0) != (b < 0)), dtype=q.dtype)


def _by_zero(fn: Function, result: Function) -> Function:
    """An integer division that gives what a GPU does for a divisor of 0; NumPy gives 0. PTX leaves it open."""

    def run(a: Any, b: Any) -> Any:
        found = fn(a, b)
        if np.all(b):
            return found
        patched: Any = np.where(b == 0, result(a), found)
        return patched[()]

    return run


def _quotient_by_zero(a: Any) -> Any:
    return np.asarray(-1).astype(a.dtype)


def _remainder_by_zero(a: Any) -> Any:
    return a


def high_product(a: Any, b: Any, sign: bool) -> Any:
    """The upper half of a product of twice the width."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide: Any = np.int64 if sign else np.uint64
        x, y = (a, b) if sign else (unsigned(a), unsigned(b))
        product = x.astype(wide) * y.astype(wide) >> wide(bits)
        return product.astype(f"u{a.dtype.itemsize}").view(a.dtype)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = unsigned(a), unsigned(b)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    high = x1 * y1 + (middle >> shift) + ((middle & low) + x0 * y1 >> shift)
    if sign:
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.view(a.dtype)


def in_double(loop: Function) -> Function:
    """A function of the C library that NumPy lacks, as a compiled loop in float64."""

    def run(x: Any) -> Any:
        wide = np.ascontiguousarray(x, np.float64).reshape(-1)
        out = np.empty_like(wide)
        loop(wide, out)
        return out.astype(x.dtype, copy=False).reshape(x.shape)[()]

    return run


erf = in_double(native.erf)


@elementwise
def where(condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b) if is_array(condition) else (a if condition else b)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    whole = np.broadcast_arrays(a, b, c)
    rows = [np.ascontiguousarray(x).reshape(-1) for x in whole]
    out = np.empty_like(rows[0])
    native.fma(*rows, out)
    return out.reshape(whole[0].shape)[()]


def narrow_fma(a: Any, b: Any, c: Any) -> Any:
    """`fma` for numbers below 32 bits, in float32 with a harmless second rounding.

    Rounding to odd keeps the information beyond the last bit in that bit, so that the second rounding sees it.
    """
    exact = fma(*(np.asarray(x, np.float64) for x in (a, b, c)))
    near = np.asarray(exact.astype(np.float32))
    odd = near.view(np.uint32) & np.uint32(1)
    towards = np.nextafter(near, np.where(exact > near, np.float32(np.inf), np.float32(-np.inf)))
    return np.where((exact == near) | (odd != 0) | ~np.isfinite(exact), near, towards)[()]


def _flushed(x: Any) -> Any:
    """Denormal float32 as zeros: for functions that PTX has only as `.approx.ftz`, as Triton lowers them."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)[()]


def sqrt(x: Any) -> Any:
    return np.sqrt(_flushed(x))


def rsqrt(x: Any) -> Any:
    return x.dtype.type(1) / np.sqrt(_flushed(x))


def exp2(x: Any) -> Any:
    return _flushed(np.exp2(x))


@elementwise
def approx_divide(x: Any, y: Any) -> Any:
    """PTX's div.approx.f32, to the last bits. It multiplies by the reciprocal, which vanishes for divisors above 2¹²⁶.
    """
    large = (np.abs(y) > 2.0**126) & np.isfinite(y)
    return np.where(large, x * np.copysign(np.zeros_like(y), y), np.divide(x, y))


def round_half_away(x: Any) -> Any:
    size = np.abs(x)
    whole = np.floor(size)  # size + 0.5 would be rounded before it is cut
    return np.copysign(whole + (size - whole >= 0.5).astype(x.dtype), x)


def leading_zeros(x: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    u = unsigned(x)
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < bits:
            u = u | (u >> u.dtype.type(shift))
    return (bits - np.bitwise_count(u)).astype(x.dtype)


def _trailing_zeros(x: Any) -> Any:
    return np.bitwise_count(unsigned(~x & (x - x.dtype.type(1)))).astype(x.dtype)


def _with_ordered_zeros(pick: Any, of_zeros: Any) -> Function:
    """PTX takes -0.0 as less than +0.0; with NumPy either zero may come out, depending on the number of elements."""

    def run(x: Any, y: Any) -> Any:
        found, equal = pick(x, y), np.equal(x, y)
        if equal.any():
            found = np.where(equal & (found == 0), of_zeros(x, y), found)
        return found

    run.nin = 2  # type: ignore[attr-defined]  # as of a ufunc
    return run


max_number, max_nan = (_with_ordered_zeros(pick, np.add) for pick in (np.fmax, np.maximum))
min_number, min_nan = (_with_ordered_zeros(pick, lambda x, y: -(-x - y)) for pick in (np.fmin, np.minimum))

# op -> (function, floating point operations per element)
FLOAT: dict[str, tuple[Function, int]] = {
    "arith.addf": (np.add, 1),
    "arith.subf": (np.subtract, 1),
    "arith.mulf": (np.multiply, 1),
    "arith.divf": (np.divide, 1),
    "arith.remf": (np.fmod, 1),
    "arith.negf": (np.negative, 1),
    "arith.maxnumf": (max_number, 1),
    "arith.minnumf": (min_number, 1),
    "arith.maximumf": (max_nan, 1),
    "arith.minimumf": (min_nan, 1),
    "math.exp": (np.exp, 1),
    "math.exp2": (exp2, 1),
    "math.expm1": (np.expm1, 1),
    "math.log": (np.log, 1),
    "math.log2": (np.log2, 1),
    "math.log10": (np.log10, 1),
    "math.log1p": (np.log1p, 1),
    "math.sqrt": (sqrt, 1),
    "math.rsqrt": (rsqrt, 2),
    "math.cbrt": (np.cbrt, 1),
    "math.sin": (np.sin, 1),
    "math.cos": (np.cos, 1),
    "math.tan": (np.tan, 1),
    "math.asin": (np.arcsin, 1),
    "math.acos": (np.arccos, 1),
    "math.atan": (np.arctan, 1),
    "math.atan2": (np.arctan2, 1),
    "math.sinh": (np.sinh, 1),
    "math.cosh": (np.cosh, 1),
    "math.tanh": (np.tanh, 1),
    "math.erf": (erf, 1),
    "math.powf": (np.power, 1),
    "math.absf": (np.abs, 1),
    "math.floor": (np.floor, 1),
    "math.ceil": (np.ceil, 1),
    "math.trunc": (np.trunc, 1),
    "math.round": (round_half_away, 1),
    "math.roundeven": (np.rint, 1),
    "math.copysign": (np.copysign, 1),
    "math.fma": (fma, 2),
    "tt.precise_sqrt": (np.sqrt, 1),
    "tt.precise_divf": (np.divide, 1),
    "tt.approx_divf": (approx_divide, 1),
}

INTEGER: dict[str, Function] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divsi": _by_zero(divide, _quotient_by_zero),
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.floordivsi": np.floor_divide,
    "arith.remsi": _by_zero(np.fmod, _remainder_by_zero),
    "arith.divui": _by_zero(_on_unsigned(np.floor_divide), _quotient_by_zero),
    "arith.ceildivui": _on_unsigned(lambda a, b: a // b + (a % b != 0)),
    "arith.remui": _by_zero(_on_unsigned(np.remainder), _remainder_by_zero),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": _on_unsigned(np.right_shift),
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maxui": _on_unsigned(np.maximum),
    "arith.minui": _on_unsigned(np.minimum),
    "math.absi": np.abs,
    "math.ctpop": lambda x: np.bitwise_count(unsigned(x)).astype(x.dtype),
    "math.ctlz": leading_zeros,
    "math.cttz": _trailing_zeros,
    "tt.mulhiui": lambda a, b: high_product(a, b, False),
    "tt.mulhisi": lambda a, b: high_product(a, b, True),
}

# i1 holds 0 or -1 where it is signed, and wraps at one bit.
BOOLEAN: dict[str, Function] = {
    "arith.addi": np.bitwise_xor,
    "arith.subi": np.bitwise_xor,
    "arith.muli": np.bitwise_and,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": np.bitwise_and,
    "arith.minsi": np.bitwise_or,
    "arith.maxui": np.bitwise_or,
    "arith.minui": np.bitwise_and,
}


def _not(fn: Function) -> Function:
    return lambda a, b: ~fn(a, b)


def _ordered_unequal(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


def _unsigned_compare(fn: Function) -> Function:
    return lambda a, b: fn(unsigned(a), unsigned(b))


FLOAT_PREDICATES: dict[str, Function] = {
    "oeq": np.equal,
    "ogt": np.greater,
    "oge": np.greater_equal,
    "olt": np.less,
    "ole": np.less_equal,
    "one": _ordered_unequal,
    "ord": _not(_unordered),
    "ueq": _not(_ordered_unequal),
    "ugt": _not(np.less_equal),
    "uge": _not(np.less),
    "ult": _not(np.greater_equal),
    "ule": _not(np.greater),
    "une": np.not_equal,
    "uno": _unordered,
}

INTEGER_PREDICATES: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "slt": np.less,
    "sle": np.less_equal,
    "sgt": np.greater,
    "sge": np.greater_equal,
    "ult": _unsigned_compare(np.less),
    "ule": _unsigned_compare(np.less_equal),
    "ugt": _unsigned_compare(np.greater),
    "uge": _unsigned_compare(np.greater_equal),
}

_SIGNED_TRUE = {"slt": "sgt", "sle": "sge", "sgt": "slt", "sge": "sle"}  # a signed true is -1, so the order is reversed


def integer_predicate(name: str, element: Element) -> Function:
    return INTEGER_PREDICATES[_SIGNED_TRUE.get(name, name) if element.name == "i1" else name]


def clamp(propagate_nan: bool) -> Function:
    if propagate_nan:
        return lambda x, low, high: min_nan(max_nan(x, low), high)
    return lambda x, low, high: min_number(max_number(x, low), high)


def rounded(fn: Function, element: Element) -> Function:
    """`fn` with its result rounded to `element`'s precision."""
    to = rounder(element)
    return fn if to is None else lambda *args: to(fn(*args))


# --- casts: the NumPy functions that convert values of one element type to another, or reinterpret their bits ---------


def _towards_zero(x: Any, target: Element) -> Any:
    raw = np.asarray(narrowed(x, target))
    bits = raw.view(target.bits)
    over = np.abs(raw.astype(x.dtype)) > np.abs(x)
    out = np.where(over, bits - target.bits.type(1), bits).astype(target.bits)
    value = decode(out.view(target.storage), target)
    return value if is_array(x) else value[()]


def to_integer(sign: bool, target: Element) -> Function:
    """As PTX's `cvt.rzi`: rounds towards zero, and clamps to the range.

    The instruction has no 8-bit results; the compiler takes the lower half of 16 bits. NaN gives 0, or where either
    side has 64 bits the highest bit alone (PTX ISA, `cvt`).
    """
    wide = f"{'i' if sign else 'u'}{max(2, target.size)}"
    return lambda x: round_to_integer(x, "rz", wide).astype(f"u{target.size}").view(target.compute)[()]


def _to_odd(x: Any) -> Any:
    """A number as float32 for a second rounding: an inexact one has an odd last bit, so that no tie arises."""
    x = x if x.dtype.kind == "f" else x.astype(f"{x.dtype.kind}8")
    below, above = (np.asarray(to_float(x, mode, "f4")) for mode in ("rd", "ru"))
    towards_zero = np.where(below < 0, above, below)
    return (towards_zero.view(np.uint32) | (below != above)).astype(np.uint32).view(np.float32)[()]


def convert(name: str, source: Element, target: Element, rounding: str = "") -> Function:
    """The conversion op `name` from `source` to `target`."""
    if name in ("arith.extf", "arith.truncf", "tt.fp_to_fp"):
        if target.narrow:
            if rounding == "rtz":
                return lambda x: _towards_zero(x, target)
            to = rounder(target)
            assert to is not None
            if source.size == 8 and target.size == 2:  # `cvt.rn.bf16.f64` rounds once; to fp8 there are two steps
                return lambda x: to(_to_odd(x))
            return to
        return lambda x: x.astype(target.compute)
    if name in ("arith.sitofp", "arith.uitofp") and target.size == 2 and source.size >= 4:
        sign = name == "arith.sitofp"  # `cvt.rn.bf16.s32` rounds once
        return rounded(lambda x: _to_odd(x if sign else unsigned(x)), target)
    if name in ("arith.extui", "arith.uitofp"):
        return rounded(lambda x: unsigned(x).astype(target.compute), target)
    if name in ("arith.fptoui", "arith.fptosi"):
        return to_integer(name == "arith.fptosi", target)
    if target.name == "i1" and name == "arith.trunci":
        return lambda x: (x & x.dtype.type(1)).astype(np.bool_)
    if source.name == "i1" and name in ("arith.extsi", "arith.sitofp"):
        return lambda x: np.negative(x.astype(target.compute))
    return rounded(lambda x: x.astype(target.compute), target)


def bitcast(source: Element, target: Element) -> Function:
    """Same bits, other type."""
    if not source.narrow and not target.narrow:
        return lambda x: x.view(target.compute)
    return lambda x: decode(encode(x, source).view(target.storage), target)


# --- arithmetic and conversions that round in a given direction: to nearest (rn), to zero (rz), up (ru), down (rd) ----

_WHOLE = {"rn": np.rint, "rz": np.trunc, "ru": np.ceil, "rd": np.floor}


def _turned(nearest: Any, rest: Any, mode: str) -> Any:
    """The nearest number moved by one step where `rest`, the sign of the rounding error, requires it."""
    up, down = np.inf, -np.inf
    if mode == "rn":
        return nearest
    if mode == "rz":
        wrong = np.where(nearest > 0, rest < 0, rest > 0) & (nearest != 0)
        towards = np.where(nearest > 0, down, up)
    else:
        wrong = rest > 0 if mode == "ru" else rest < 0
        towards = np.full(np.shape(nearest), up if mode == "ru" else down)
    moved = np.nextafter(nearest, towards.astype(nearest.dtype))
    return np.where(wrong & np.isfinite(rest), moved, nearest)[()]


def _limited(found: Any, exact: Any, mode: str) -> Any:
    """Infinity that comes of rounding finite numbers (where not `exact`) is the largest number in some directions."""
    if mode == "rn":
        return found
    inwards = {"rz": np.isinf(found), "ru": found == -np.inf, "rd": found == np.inf}[mode] & ~exact
    return np.where(inwards, np.copysign(np.finfo(found.dtype).max, found), found)[()]


def _product_rest(a: Any, b: Any, p: Any) -> Any:
    """The rounding error of a · b rounded to p, times a power of 2: of tiny numbers, it would underflow."""
    (a, i), (b, j) = np.frexp(a), np.frexp(b)
    return fma(a, b, -np.ldexp(p, -(i + j)))


def _sum_rest(a: Any, b: Any, s: Any) -> Any:
    """The rounding error of a + b rounded to s (Knuth's two-sum)."""
    t = s - a
    return (a - (s - t)) + (b - t)


def _add(a: Any, b: Any) -> tuple[Any, Any]:
    s = a + b
    return s, _sum_rest(a, b, s)


def _mul(a: Any, b: Any) -> tuple[Any, Any]:
    p = a * b
    return p, _product_rest(a, b, p)


def _div(a: Any, b: Any) -> tuple[Any, Any]:
    q = a / b
    return q, np.where(q == 0, a, -_product_rest(q, b, a)) * np.sign(b)


def _sqrt(a: Any) -> tuple[Any, Any]:
    r = np.sqrt(a)
    return r, -_product_rest(r, r, a)


def _rsqrt(a: Any) -> tuple[Any, Any]:
    r = (1 / np.sqrt(np.asarray(a, np.float64))).astype(a.dtype)[()]
    return r, fma(-r * a, r, np.ones_like(a))


def _fma(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    r = fma(a, b, c)
    if a.dtype == np.float32:  # its products are exact in float64
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    p = a * b
    s = p + c
    of_p = fma(a, b, -p)
    rest = (s - r) + (_sum_rest(p, c, s) + of_p)
    return r, np.where((rest == 0) & (of_p == 0), _product_rest(a, b, p), rest)  # where that of p may have underflowed


_PARTS: dict[str, Function] = {
    "add": _add,
    "sub": lambda a, b: _add(a, -b),
    "mul": _mul,
    "div": _div,
    "rcp": lambda a: _div(np.ones_like(a), a),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "fma": _fma,
}


def directed(name: str, mode: str) -> Function:
    """An operation with its result rounded in a direction.

    >>> float(directed("div", "ru")(np.float32(1), np.float32(3))) > 1 / 3
    True
    """

    def run(*xs: Any) -> Any:
        nearest, rest = _PARTS[name](*xs)
        found = _turned(nearest, rest, mode)
        exact = ~np.logical_and.reduce(np.broadcast_arrays(*(np.isfinite(x) for x in xs)))
        if name in ("div", "rcp", "rsqrt"):
            exact = exact | (xs[-1] == 0)
        if mode == "rd" and name in ("add", "sub", "fma"):
            found = np.where((nearest == 0) & (rest == 0) & _any_below(name, *xs), -np.zeros_like(found), found)[()]
        return _limited(found, exact, mode)

    return run


def _any_below(name: str, *xs: Any) -> Any:
    """Whether a sum that is 0 has an addend other than +0: rounded down, it is -0."""
    first, second = (xs[0] * xs[1], xs[2]) if name == "fma" else (xs[0], -xs[1] if name == "sub" else xs[1])
    return (first != 0) | (second != 0) | np.signbit(first) | np.signbit(second)


def whole(x: Any, mode: str) -> Any:
    """A float rounded to a whole number."""
    return _WHOLE[mode](x)


def round_to_integer(x: Any, mode: str, target: str) -> Any:
    """A float as an integer of NumPy type `target`, saturated as in PTX's `cvt`."""
    limits = np.iinfo(target)
    found = whole(x, mode)
    low, high = x.dtype.type(limits.min), x.dtype.type(2.0 ** (8 * limits.dtype.itemsize - (target[0] == "i")))
    inside = (found > low) & (found < high)
    wide = limits.dtype.itemsize == 8 or x.dtype == np.float64
    missing = np.array(1 << (8 * limits.dtype.itemsize - 1) if wide else 0, f"u{limits.dtype.itemsize}")
    ends = np.where(found >= high, limits.max, np.where(found <= low, limits.min, missing.view(limits.dtype)))
    return np.where(inside, np.where(inside, found, 0).astype(limits.dtype), ends)[()]


def to_float(x: Any, mode: str, target: str) -> Any:
    """An integer or a wider float as a float of NumPy type `target`."""
    nearest = np.asarray(x.astype(target))
    if x.dtype.kind == "f":
        return _limited(_turned(nearest, x - nearest.astype(x.dtype), mode), ~np.isfinite(x), mode)
    # Integers in two halves, each exact in float64: the remainder after subtracting the nearest float.
    high, low = (x >> 32).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return _turned(nearest, (high - nearest.astype(np.float64)) + low, mode)
