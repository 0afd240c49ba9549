"""Bessel functions: of the first and second kind from the C library, modified ones from their series."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import Any

import numpy as np


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
