"""Casts: the NumPy functions that convert values of one element type to another, or reinterpret their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode, encode, narrowed, rounder
from paellapy.instrument.ttir.elementwise import Function, rounded, unsigned
from paellapy.instrument.ttir.types import Element
from paellapy.instrument.ttir.values import is_array


def _towards_zero(x: Any, target: Element) -> Any:
    raw = np.asarray(narrowed(x, target))
    bits = raw.view(target.bits)
    over = np.abs(raw.astype(x.dtype)) > np.abs(x)
    out = np.where(over, bits - target.bits.type(1), bits).astype(target.bits)
    value = decode(out.view(target.storage), target)
    return value if is_array(x) else value[()]


def to_integer(sign: bool, source: Element, target: Element) -> Function:
    """As PTX's `cvt.rzi`: rounds towards zero, and clamps to the range.

    The instruction has no 8-bit results; the compiler takes the lower half of 16 bits. NaN gives 0, or where either
    side has 64 bits the highest bit alone (PTX ISA, `cvt`).
    """
    size = max(2, target.size)
    limits = np.iinfo(f"{'i' if sign else 'u'}{size}")
    not_a_number = 1 << (8 * size - 1) if 8 in (size, source.size) else 0
    nan_bits = np.array(not_a_number, f"u{size}").view(limits.dtype)

    def run(x: Any) -> Any:
        low, high = x.dtype.type(limits.min), x.dtype.type(2.0 ** (8 * size - sign))
        inside = (x > low) & (x < high)
        whole = np.where(inside, x, x.dtype.type(0)).astype(limits.dtype)
        ends = np.where(x >= high, limits.max, np.where(x <= low, limits.min, nan_bits))
        return np.where(inside, whole, ends).astype(f"u{target.size}").view(target.compute)[()]

    return run


def convert(name: str, source: Element, target: Element, rounding: str = "") -> Function:
    """The conversion op `name` from `source` to `target`."""
    if name in ("arith.extf", "arith.truncf", "tt.fp_to_fp"):
        if target.narrow:
            if rounding == "rtz":
                return lambda x: _towards_zero(x, target)
            to = rounder(target)
            assert to is not None
            return to
        return lambda x: x.astype(target.compute)
    if name in ("arith.extui", "arith.uitofp"):
        return rounded(lambda x: unsigned(x).astype(target.compute), target)
    if name in ("arith.fptoui", "arith.fptosi"):
        return to_integer(name == "arith.fptosi", source, target)
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
