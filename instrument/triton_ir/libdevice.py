"""The functions of NVIDIA's libdevice (`tt.extern_elementwise`) by name."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import re
from functools import cache, partial
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir import elementwise as rnd
from paellapy.instrument.triton_ir import native
from paellapy.instrument.triton_ir.elementwise import (
    FLOAT,
    high_product,
    in_double,
    leading_zeros,
    round_half_away,
    rsqrt,
    signed,
    unsigned,
)
from paellapy.instrument.triton_ir.types import Function

# --- Bessel functions: of the first and second kind from the C library, modified ones from their series ---------------


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    for name in ("jn", "yn"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, (ctypes.c_int, ctypes.c_double)
    return library


def _each(name: str, order: Any, x: Any) -> Any:
    function = getattr(_library(), name)
    return np.vectorize(lambda n, v: function(int(n), float(v)), otypes=[np.float64])(order, x)[()]


def bessel_j(order: Any, x: Any) -> Any:
    return _each("jn", order, x)


def bessel_y(order: Any, x: Any) -> Any:
    return _each("yn", order, x)


def bessel_i(order: int, x: Any) -> Any:
    """The sum of (x/2)^(2k+n) / (k! (k+n)!); all terms have the same sign, so nothing cancels.

    >>> round(float(bessel_i(1, np.float64(1.0))), 6)
    0.565159
    """
    half = np.asarray(x, np.float64) / 2
    term = half**order
    total = term
    largest = float(np.max(np.abs(np.where(np.isfinite(half), half, 0)), initial=0.0))
    for k in range(1, 40 + int(4 * largest)):
        term = term * half / k * half / (k + order)
        total = total + term
        if not bool((np.abs(term) > np.abs(total) * 1e-17).any()):
            break
    return total[()] if isinstance(total, np.ndarray) else total


erfc = in_double(native.erfc)


def _test(fn: Function) -> Function:
    return lambda x: fn(x).astype(np.int32)


def _wide(fn: Function) -> Function:
    """Computes in float64, and returns the type of the first argument."""
    return lambda *xs: fn(*(np.asarray(x, np.float64) for x in xs)).astype(xs[0].dtype)[()]


def _inverse_erfc(y: Any) -> Any:
    """Newton's method from Winitzki's approximation, in float64, for 0 < y <= 1."""
    w = np.log(y * (2 - y))
    a = 2 / (math.pi * 0.147) + w / 2
    r = np.sqrt(np.maximum(np.sqrt(a * a - w / 0.147) - a, 0))
    for _ in range(4):
        r = r + (erfc(r) - y) / (2 / math.sqrt(math.pi) * np.exp(-r * r))
    return r


def _inverse_erf(y: Any) -> Any:
    size = np.abs(y)
    # Near 0 the series is used: erfc(r) = 1 - y has lost the small digits of y.
    series = math.sqrt(math.pi) / 2 * size * (1 + math.pi / 12 * size**2 + 7 * math.pi**2 / 480 * size**4)
    r = np.where(size < 1e-3, series, _inverse_erfc(np.clip(1 - size, 1e-300, 1)))
    return np.copysign(np.where(size < 1, r, np.where(size == 1, np.inf, np.nan)), y)


def _erfc_inverse(y: Any) -> Any:
    inner = np.where(y <= 1, _inverse_erfc(np.clip(y, 1e-300, 1)), -_inverse_erfc(np.clip(2 - y, 1e-300, 1)))
    ends = np.where(y == 0, np.inf, np.where(y == 2, -np.inf, np.nan))
    return np.where((y > 0) & (y < 2), inner, ends)


def _scaled_erfc(x: Any) -> Any:
    """exp(x²) erfc(x); beyond 20 by its asymptotic series, where erfc alone underflows."""
    far = np.maximum(x, 20.0)
    z = 1 / (2 * far**2)
    series = (1 - z * (1 - 3 * z * (1 - 5 * z * (1 - 7 * z)))) / (far * math.sqrt(math.pi))
    near = np.minimum(x, 20.0)
    return np.where(x > 20, series, np.exp(near * near) * erfc(near))


def _bits(dtype: str, target: str) -> Function:
    return lambda x: x.astype(dtype, copy=False).view(target)


def _reversed(x: Any) -> Any:
    u = unsigned(x)
    out = np.zeros_like(u)
    for _ in range(8 * u.dtype.itemsize):
        out = (out << u.dtype.type(1)) | (u & u.dtype.type(1))
        u = u >> u.dtype.type(1)
    return out.view(x.dtype)


def _bytes_of(x: Any, y: Any, selector: Any) -> Any:
    """`__byte_perm`: selects each of four bytes from the eight bytes of two words."""
    pool = unsigned(x).astype(np.uint64) | unsigned(y).astype(np.uint64) << np.uint64(32)
    s, out = unsigned(selector).astype(np.uint64), np.uint64(0)
    for i in range(4):
        at = (s >> np.uint64(4 * i)) & np.uint64(7)
        out = out | ((pool >> (at * np.uint64(8))) & np.uint64(0xFF)) << np.uint64(8 * i)
    return out.astype(np.uint32).view(np.int32)


def _sine_by_quarters(x: Any, quarters: int) -> Any:
    """sin(π(x + quarters/2)), exact where it is 0 or ±1: π times a number is never exact."""
    part = np.fmod(x, 2.0)
    near = np.rint(2 * part)
    angle, quarter = math.pi * (part - near / 2), np.remainder(near + quarters, 4)
    found = np.where(np.remainder(quarter, 2) == 1, np.cos(angle), np.sin(angle))
    return np.where(quarter >= 2, -found, found) + 0.0  # no -0


def _sine_of_pi(x: Any) -> Any:
    found = _sine_by_quarters(x, 0)
    return np.where(found == 0, np.copysign(0.0, x), found)


def _remainder(x: Any, y: Any) -> Any:
    """x - ny for the whole number n nearest to x / y; of two, the even one."""
    size = np.abs(y)
    rest = np.fmod(np.abs(x), 2 * size)
    below = rest - size
    below = np.where(below >= size - below, below - size, below)
    rest = np.where(rest > size - rest, below, rest)
    return np.where(np.signbit(x), -rest, rest)


def _exponent(x: Any) -> Any:
    return np.floor(np.log2(np.abs(x.astype(np.float64)))) if x.dtype == np.float32 else np.frexp(x)[1] - 1.0


def _logb(x: Any) -> Any:
    inner = np.where(x == 0, -np.inf, _exponent(x))
    return np.where(np.isfinite(x), inner, np.abs(x)).astype(x.dtype)[()]


def _integer_exponent(x: Any) -> Any:
    zero, huge = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    inner = np.nan_to_num(_exponent(x), nan=0, posinf=0, neginf=0).astype(np.int32)
    return np.where(x == 0, zero, np.where(np.isinf(x), huge, np.where(np.isnan(x), zero, inner)))


def _find_first(x: Any) -> Any:
    low = x & -x
    return np.where(x == 0, 0, 8 * x.dtype.itemsize - leading_zeros(low)).astype(np.int32)


def _halving(add: int, kind: str) -> Function:
    def run(a: Any, b: Any) -> Any:
        x, y = (v.view(kind).astype(np.int64) for v in (a, b))
        return ((x + y + add) >> 1).astype(np.int64).astype(np.uint32).view(np.int32)

    return run


def _difference(kind: str) -> Function:
    def run(a: Any, b: Any, c: Any) -> Any:
        x, y = (v.view(kind).astype(np.int64) for v in (a, b))
        return (np.abs(x - y).astype(np.uint32) + unsigned(c)).view(np.int32)

    return run


def _low_24(kind: str) -> Function:
    def run(a: Any, b: Any) -> Any:
        x, y = ((v.view(np.uint32) << np.uint32(8)).view(kind) >> 8 for v in (a, b))
        return (x.astype(np.int64) * y.astype(np.int64)).astype(np.uint64).astype(np.uint32).view(np.int32)

    return run


def _norm(*xs: Any) -> Any:
    return np.sqrt(sum(x * x for x in xs))


_SAME = (
    "exp exp2 expm1 log log2 log10 log1p sqrt cbrt sin cos tan asin acos atan atan2 sinh cosh tanh erf floor ceil "
    "trunc copysign fma"
)
FUNCTIONS: dict[str, Function] = {
    **{name: FLOAT[f"math.{name}"][0] for name in _SAME.split()},
    "rsqrt": rsqrt,
    "rcbrt": _wide(lambda x: 1 / np.cbrt(x)),
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(x.dtype)),
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "sinpi": _wide(_sine_of_pi),
    "cospi": _wide(lambda x: _sine_by_quarters(x, 1)),
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "fabs": np.abs,
    "abs": np.abs,
    "llabs": np.abs,
    "fmax": rnd.max_number,
    "fmin": rnd.min_number,
    "max": np.maximum,
    "min": np.minimum,
    "fmod": np.fmod,
    "remainder": _wide(_remainder),
    "rint": np.rint,
    "nearbyint": np.rint,
    "llrint": lambda x: rnd.round_to_integer(x, "rn", "i8"),
    "llround": lambda x: rnd.round_to_integer(round_half_away(x), "rz", "i8"),
    "round": round_half_away,
    "nextafter": np.nextafter,
    "hypot": np.hypot,
    "rhypot": _wide(lambda x, y: 1 / np.hypot(x, y)),
    "norm3d": _wide(_norm),
    "norm4d": _wide(_norm),
    "rnorm3d": _wide(lambda *xs: 1 / _norm(*xs)),
    "rnorm4d": _wide(lambda *xs: 1 / _norm(*xs)),
    "ldexp": np.ldexp,
    "scalbn": np.ldexp,
    "logb": _logb,
    "ilogb": _integer_exponent,
    "fdim": lambda x, y: np.where(x <= y, x.dtype.type(0), x - y)[()],
    "erfc": erfc,
    "erfcx": _wide(_scaled_erfc),
    "erfinv": _wide(_inverse_erf),
    "erfcinv": _wide(_erfc_inverse),
    "lgamma": in_double(native.lgamma),
    "tgamma": in_double(native.tgamma),
    "normcdf": _wide(lambda x: 0.5 * erfc(x * -math.sqrt(0.5))),
    "normcdfinv": _wide(lambda y: -math.sqrt(2) * _erfc_inverse(2 * y)),
    "cyl_bessel_i0": _wide(partial(bessel_i, 0)),
    "cyl_bessel_i1": _wide(partial(bessel_i, 1)),
    **{f"j{n}": _wide(partial(bessel_j, n)) for n in (0, 1)},
    **{f"y{n}": _wide(partial(bessel_y, n)) for n in (0, 1)},
    "jn": lambda n, x: bessel_j(n, x.astype(np.float64)).astype(x.dtype),
    "yn": lambda n, x: bessel_y(n, x.astype(np.float64)).astype(x.dtype),
    "isnan": _test(np.isnan),
    "isinf": _test(np.isinf),
    "isfinite": _test(np.isfinite),
    "finite": _test(np.isfinite),
    "signbit": _test(np.signbit),
    "saturate": lambda x: np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)),
    "rcp": lambda x: x.dtype.type(1) / x,
    "rcp64h": lambda x: ((1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64),
    "div": np.divide,
    "fdivide": np.divide,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "popc": lambda x: np.bitwise_count(unsigned(x)).astype(np.int32),
    "popcll": lambda x: np.bitwise_count(unsigned(x)).astype(np.int32),
    "clz": lambda x: leading_zeros(x).astype(np.int32),
    "clzll": lambda x: leading_zeros(x).astype(np.int32),
    "ffs": _find_first,
    "ffsll": _find_first,
    "brev": _reversed,
    "brevll": _reversed,
    "byte_perm": _bytes_of,
    "umulhi": lambda a, b: high_product(a, b, False),
    "mulhi": lambda a, b: high_product(a, b, True),
    "umul64hi": lambda a, b: high_product(a, b, False),
    "mul64hi": lambda a, b: high_product(a, b, True),
    "mul24": _low_24("i4"),
    "umul24": _low_24("u4"),
    "hadd": _halving(0, "i4"),
    "rhadd": _halving(1, "i4"),
    "uhadd": _halving(0, "u4"),
    "urhadd": _halving(1, "u4"),
    "sad": _difference("i4"),
    "usad": _difference("u4"),
    "float_as_int": _bits("f4", "i4"),
    "float_as_uint": _bits("f4", "i4"),
    "int_as_float": _bits("i4", "f4"),
    "uint_as_float": _bits("i4", "f4"),
    "double_as_longlong": _bits("f8", "i8"),
    "longlong_as_double": _bits("i8", "f8"),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "double2loint": lambda x: x.view(np.int64).astype(np.uint64).astype(np.uint32).view(np.int32),
    "hiloint2double": lambda h, low: (h.astype(np.int64) << 32 | unsigned(low).astype(np.int64)).view(np.float64),
}
# Names with their suffixes in libdevice: `tanhf`, `fast_expf`, `isinfd`.
_CANDIDATES = (r"^(?:fast_)?(\w+?)$", r"^(?:fast_)?(\w+?)f$", r"^(\w+?)d$")
_TYPES = {"int": "i4", "uint": "u4", "ll": "i8", "ull": "u8", "float": "f4", "double": "f8"}
_CONVERSION = re.compile(r"^(int|uint|ll|ull|float|double)2(int|uint|ll|ull|float|double)_(r[nzud])$")
_DIRECTED = re.compile(r"^(?:[fd](add|sub|mul|div|rcp|sqrt|rsqrt)|(fma)f?)_(r[nzud])$")


def lookup(symbol: str) -> Function | None:
    """The NumPy function for `__nv_…`, or None.

    >>> lookup("__nv_tanhf") is np.tanh
    True
    """
    name = symbol.strip('"').removeprefix("__nv_")
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if m := _CONVERSION.match(name):
        source, target, mode = _TYPES[m[1]], _TYPES[m[2]], m[3]
        if target[0] == "f":
            return lambda x: rnd.to_float(x.view(source) if source[0] == "u" else x, mode, target)
        return lambda x: signed(rnd.round_to_integer(x, mode, target))
    if m := _DIRECTED.match(name):
        return rnd.directed(m[1] or m[2], m[3])
    for pattern in _CANDIDATES:
        if (m := re.match(pattern, name)) and m[1] in FUNCTIONS:
            return FUNCTIONS[m[1]]
    return None
