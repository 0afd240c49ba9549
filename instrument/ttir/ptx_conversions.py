"""PTX's `cvt` on whole tensors: between integers and floats, to pairs of narrow floats, and to tf32."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.ttir import casts
from paellapy.instrument.ttir import rounding as rnd
from paellapy.instrument.ttir.ptx_pieces import (
    MODES,
    Function,
    Instruction,
    element_of,
    halves,
    joined,
    read,
    resized,
    write,
)
from paellapy.instrument.ttir.types import ELEMENTS, Array


def convert(i: Instruction) -> Function:
    """The function of a `cvt`; raises `UnknownPtx`."""
    if len(i.types) != 2:
        raise i.unknown()
    target, source = i.types
    if target == "tf32" and source == "f32":
        i.allow("rna", "rn", "rz")
        return _to_tf32(i)
    i.allow(MODES.keys(), "ftz", "sat", "relu", "satfinite")
    to, of = target.removesuffix("x2"), source.removesuffix("x2")
    narrow = {"e4m3", "e5m2"}  # which exist in pairs only
    if {target, source} & {"tf32", *narrow} or (to in narrow) != ("satfinite" in i.modifiers):
        raise i.unknown()
    one = _one(i, to, of)
    if source.endswith("x2"):
        if not target.endswith("x2"):
            raise i.unknown()
        return halves(one, to, of)
    if target.endswith("x2"):
        if element_of(to) is None:
            raise i.unknown()
        return lambda high, low: joined(write(one(read(low, of)), to), write(one(read(high, of)), to))
    # A signed result fills the whole register with its sign.
    stored = "s32" if to in ("s8", "s16") else to
    return lambda bits: write(one(read(bits, of)), stored)


def _one(i: Instruction, to: str, of: str) -> Function:
    """The conversion of numbers."""
    target, source, mode = element_of(to), element_of(of), i.mode
    if target is None:
        kind = f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}"
        if source is not None:
            return lambda value: rnd.to_integer(value, mode or "rz", kind)
        if "sat" not in i.modifiers:
            return lambda value: value.astype(kind)
        limits = np.iinfo(kind)
        return lambda value: np.clip(value, *_within(value.dtype, limits)).astype(kind)
    if target.narrow and (mode in ("ru", "rd") or (mode == "rz" and source is None)):
        raise i.unknown()
    if to == "bf16" and of in ("s64", "u64"):  # not every one is a float of 64 bits
        raise i.unknown()

    def to_float(value: Any) -> Any:
        if "relu" in i.modifiers:
            value = np.maximum(value, value.dtype.type(0))
        if source is None:
            wide = value.astype(f"{value.dtype.kind}8")
            value = rnd.to_float(wide, mode or "rn", "f4" if to == "f32" else "f8")
        elif any(m.endswith("i") for m in i.modifiers if m in MODES):  # a whole number, as a float
            value = rnd.whole(value, mode)
        elif mode == "rz" and target.narrow:
            value = casts.convert("arith.truncf", ELEMENTS["f32"], target, "rtz")(value)
        elif to == "f32" and of == "f64" and mode:
            value = rnd.to_float(value, mode, "f4")
        if "sat" in i.modifiers:
            value = saturated(value)
        return _to_odd(value) if target.narrow and value.dtype == np.float64 else value

    return to_float


def _to_odd(value: Any) -> Any:
    """A float of 64 bits as one of 32 that can be rounded once more: its last bit says that digits were lost."""
    cut = np.asarray(rnd.to_float(value, "rz", "f4"))
    lost = np.isfinite(value) & (cut.astype(np.float64) != value)
    return (cut.view(np.uint32) | lost).view(np.float32)


def saturated(value: Any) -> Any:
    """The number limited to 0 … 1, as `.sat` has it: not a number becomes 0, and so does -0."""
    return np.clip(np.nan_to_num(value), 0, 1) + value.dtype.type(0)


def _within(dtype: Any, limits: Any) -> tuple[int, int]:
    """The limits of an integer type, as far as another one reaches."""
    own = np.iinfo(dtype)
    return max(own.min, limits.min), min(own.max, limits.max)


def _to_tf32(i: Instruction) -> Function:
    """The upper 19 bits of a float32, rounded; `rna` rounds halves away from zero."""

    def run(bits: Array) -> Array:
        word = resized(bits, 4)
        even = (word >> np.uint32(13)) & np.uint32(1)
        more = {"rna": np.uint32(0x1000), "rn": np.uint32(0xFFF) + even, "rz": np.uint32(0)}[i.modifiers[0]]
        finite = (word & np.uint32(0x7F800000)) != 0x7F800000
        return np.where(finite, (word + more) & np.uint32(0xFFFFE000), word)

    return run
