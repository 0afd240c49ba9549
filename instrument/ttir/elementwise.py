"""Elementwise operations: the NumPy functions for each op of `arith` and `math` (and a few of `tt`)."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakSet

import numpy as np

from paellapy.instrument.ttir import native
from paellapy.instrument.ttir.conversion import rounder
from paellapy.instrument.ttir.types import Element
from paellapy.instrument.ttir.values import is_array

Function = Callable[..., Any]

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


def _ceil_divide(a: Any, b: Any) -> Any:
    return -(-a // b)


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


def rsqrt(x: Any) -> Any:
    return x.dtype.type(1) / np.sqrt(x)


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


# op -> (function, floating point operations per element)
FLOAT: dict[str, tuple[Function, int]] = {
    "arith.addf": (np.add, 1),
    "arith.subf": (np.subtract, 1),
    "arith.mulf": (np.multiply, 1),
    "arith.divf": (np.divide, 1),
    "arith.remf": (np.fmod, 1),
    "arith.negf": (np.negative, 1),
    "arith.maxnumf": (np.fmax, 1),
    "arith.minnumf": (np.fmin, 1),
    "arith.maximumf": (np.maximum, 1),
    "arith.minimumf": (np.minimum, 1),
    "math.exp": (np.exp, 1),
    "math.exp2": (np.exp2, 1),
    "math.expm1": (np.expm1, 1),
    "math.log": (np.log, 1),
    "math.log2": (np.log2, 1),
    "math.log10": (np.log10, 1),
    "math.log1p": (np.log1p, 1),
    "math.sqrt": (np.sqrt, 1),
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
    "arith.divsi": divide,
    "arith.ceildivsi": _ceil_divide,
    "arith.floordivsi": np.floor_divide,
    "arith.remsi": np.fmod,
    "arith.divui": _on_unsigned(np.floor_divide),
    "arith.ceildivui": _on_unsigned(lambda a, b: a // b + (a % b != 0)),
    "arith.remui": _on_unsigned(np.remainder),
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
        return lambda x, low, high: np.minimum(np.maximum(x, low), high)
    return lambda x, low, high: np.fmin(np.fmax(x, low), high)


def rounded(fn: Function, element: Element) -> Function:
    """`fn` with its result rounded to `element`'s precision."""
    to = rounder(element)
    return fn if to is None else lambda *args: to(fn(*args))
