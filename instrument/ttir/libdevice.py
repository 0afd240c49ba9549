"""The functions of NVIDIA's libdevice (`tt.extern_elementwise`) that kernels commonly call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.instrument.ttir import native
from paellapy.instrument.ttir.elementwise import (
    FLOAT,
    high_product,
    in_double,
    leading_zeros,
    round_half_away,
    rsqrt,
    unsigned,
)

Function = Callable[..., Any]

erfc = in_double(native.erfc)


def _test(fn: Function) -> Function:
    return lambda x: fn(x).astype(np.int32)


def _inverse_erfc(y: Any) -> Any:
    """Newton's method from Winitzki's approximation, in float64, for 0 < y <= 1."""
    w = np.log(y * (2 - y))
    a = 2 / (math.pi * 0.147) + w / 2
    r = np.sqrt(np.maximum(np.sqrt(a * a - w / 0.147) - a, 0))
    for _ in range(4):
        r = r + (erfc(r) - y) / (2 / math.sqrt(math.pi) * np.exp(-r * r))
    return r


def _inverse_erf(x: Any) -> Any:
    y = np.asarray(x, np.float64)
    size = np.abs(y)
    # Near 0 the series: erfc(r) = 1 - y has lost what is small in y.
    series = math.sqrt(math.pi) / 2 * size * (1 + math.pi / 12 * size**2 + 7 * math.pi**2 / 480 * size**4)
    r = np.where(size < 1e-3, series, _inverse_erfc(np.clip(1 - size, 1e-300, 1)))
    r = np.where(size < 1, r, np.where(size == 1, np.inf, np.nan))
    return np.copysign(r, y).astype(x.dtype)


_NAMES: dict[str, Function] = {
    **{
        name: FLOAT[f"math.{name}"][0]
        for name in [
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "cbrt",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "atan2",
            "sinh",
            "cosh",
            "tanh",
            "erf",
            "floor",
            "ceil",
            "trunc",
            "copysign",
            "fma",
        ]
    },
    "rsqrt": rsqrt,
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(x.dtype)),
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "fabs": np.abs,
    "abs": np.abs,
    "llabs": np.abs,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "max": np.maximum,
    "min": np.minimum,
    "fmod": np.fmod,
    "remainder": lambda x, y: x - y * np.rint(x / y),
    "rint": np.rint,
    "nearbyint": np.rint,
    "round": round_half_away,
    "hypot": np.hypot,
    "ldexp": np.ldexp,
    "fdim": lambda x, y: np.maximum(x - y, x.dtype.type(0)),
    "erfc": erfc,
    "erfinv": _inverse_erf,
    "lgamma": in_double(native.lgamma),
    "tgamma": in_double(native.tgamma),
    "normcdf": lambda x: (0.5 * erfc(x.astype(np.float64) * -math.sqrt(0.5))).astype(x.dtype),
    "isnan": _test(np.isnan),
    "isinf": _test(np.isinf),
    "isfinite": _test(np.isfinite),
    "finite": _test(np.isfinite),
    "signbit": _test(np.signbit),
    "saturate": lambda x: np.clip(x, x.dtype.type(0), x.dtype.type(1)),
    "rcp": lambda x: x.dtype.type(1) / x,
    "div": np.divide,
    "fdivide": np.divide,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "popc": lambda x: np.bitwise_count(unsigned(x)).astype(np.int32),
    "popcll": lambda x: np.bitwise_count(unsigned(x)).astype(np.int32),
    "clz": lambda x: leading_zeros(x).astype(np.int32),
    "clzll": lambda x: leading_zeros(x).astype(np.int32),
    "umulhi": lambda a, b: high_product(a, b, False),
    "mulhi": lambda a, b: high_product(a, b, True),
}
# Names as they end in libdevice: `tanhf`, `fast_expf`, `fdiv_rn`, `dsqrt_rn`, `isinfd`, `frcp_rn`.
_CANDIDATES = (
    r"^(?:fast_)?(\w+?)$",
    r"^(?:fast_)?(\w+?)f$",
    r"^(\w+?)d$",
    r"^[fd](\w+?)_r[nzud]$",
    r"^(\w+?)_r[nzud]$",
)


def lookup(symbol: str) -> Function | None:
    """The NumPy function for `__nv_…`, or None.

    >>> lookup("__nv_tanhf") is np.tanh
    True
    """
    name = symbol.strip('"').removeprefix("__nv_")
    for pattern in _CANDIDATES:
        if (m := re.match(pattern, name)) and m[1] in _NAMES:
            return _NAMES[m[1]]
    return None
