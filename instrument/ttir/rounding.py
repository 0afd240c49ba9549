"""Arithmetic and conversions that round in a given direction: to nearest (rn), to zero (rz), up (ru), down (rd)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.instrument.ttir.elementwise import fma

Function = Callable[..., Any]

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


def to_integer(x: Any, mode: str, target: str) -> Any:
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
