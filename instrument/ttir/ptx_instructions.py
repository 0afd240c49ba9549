"""PTX instructions evaluated on whole tensors: the ones that kernels commonly write by hand.

A register is an array of bits; each instruction interprets it as the type in its name. Instructions that are not in the
tables below are refused by name when the kernel is translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir import casts, libdevice
from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import rounding as rnd
from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.types import ELEMENTS, Array, Element

Function = Callable[..., Any]
_MODES = {"rn": "rn", "rz": "rz", "rm": "rd", "rp": "ru", "rni": "rn", "rzi": "rz", "rmi": "rd", "rpi": "ru"}
_FLOATS = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64"}
_TOKEN = re.compile(r"\{[^{}]*\}|[^,]+")


class UnknownPtx(Exception):
    """An instruction that cannot be evaluated here; the message is the instruction."""


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # "p", "!p" or none

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(m for m in self.modifiers if re.fullmatch(r"(?:[subf]|bf)\d+(?:x2)?|pred", m))


def parse(text: str) -> list[Instruction]:
    """The instructions of a piece of PTX, without declarations, comments and outer braces."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).replace("\\n", " ").replace("\\t", " ")
    found = []
    for line in text.split(";"):
        line = line.strip()
        while line[:1] in ("{", "}") and not re.match(r"\{[^{}]*\}\s*,", line):
            line = line[1:].strip()
        if not line or line.startswith(".reg"):
            continue
        m = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([\w.]+)(?:\s+(.*))?", line, re.S)
        if m is None:
            raise UnknownPtx(line)
        name, *modifiers = m[3].split(".")
        operands = tuple(t.strip() for t in _TOKEN.findall(m[4] or ""))
        found.append(Instruction(name, tuple(modifiers), operands, (m[1] + m[2]) if m[2] else ""))
    return found


_FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": ew.fma, "mad": ew.fma,
    "max": np.fmax, "min": np.fmin, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rsqrt": ew.rsqrt,
    "rcp": lambda x: x.dtype.type(1) / x, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
_INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "max": np.maximum,
    "min": np.minimum, "neg": np.negative, "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "div": np.floor_divide, "rem": np.remainder,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32), "clz": lambda x: ew.leading_zeros(x).astype(np.uint32),
    "brev": lambda x: libdevice._NAMES["brev"](x.view(f"i{x.dtype.itemsize}")),
}  # fmt: skip
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
            "hs": np.greater_equal}  # fmt: skip


def _element(kind: str) -> Element | None:
    return ELEMENTS.get(_FLOATS.get(kind, ""))


def _read(bits: Array, kind: str) -> Any:
    """A register as numbers of a PTX type."""
    element = _element(kind)
    if element is not None:
        return decode(resized(bits, element.size).view(element.storage), element)
    size = int(kind[1:]) // 8
    return resized(bits, size).view(f"{'i' if kind[0] == 's' else 'u'}{size}")


def _write(value: Any, kind: str) -> Array:
    element = _element(kind)
    if element is not None:
        raw: Array = np.ascontiguousarray(encode(np.asarray(value, element.compute), element))
        return raw.view(f"u{element.size}")
    size = int(kind[1:]) // 8
    whole: Array = np.ascontiguousarray(value)
    return whole.astype(f"{whole.dtype.kind}{size}").view(f"u{size}") if whole.dtype.kind in "iu" else whole


def resized(bits: Array, size: int) -> Array:
    return bits if bits.dtype.itemsize == size else bits.astype(f"u{size}")


def _halves(fn: Function, kind: str) -> Function:
    """An instruction on both halves of a 32-bit register (`f16x2`)."""

    def run(*words: Array) -> Array:
        low = _write(fn(*(_read((w & np.uint32(0xFFFF)).astype(np.uint16), kind) for w in words)), kind)
        high = _write(fn(*(_read((w >> np.uint32(16)).astype(np.uint16), kind) for w in words)), kind)
        return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)

    return run


def _arithmetic(i: Instruction) -> Function:
    kind = i.types[-1] if i.types else ""
    if kind.endswith("x2"):
        return _halves(_plain(i, kind[:-2]), kind[:-2])
    fn = _plain(i, kind)
    out = kind
    if i.name == "mul" and "wide" in i.modifiers:
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return lambda a, b: _write(
            _read(a, kind).astype(f"{kind[0].replace('s', 'i')}{int(kind[1:]) // 4}")
            * _read(b, kind).astype(f"{kind[0].replace('s', 'i')}{int(kind[1:]) // 4}"),
            wide,
        )
    if i.name in ("popc", "clz"):
        out = "u32"
    saturate = "sat" in i.modifiers and _element(kind) is not None

    def run(*args: Array) -> Array:
        value = fn(*(_read(a, kind) for a in args))
        return _write(np.clip(np.nan_to_num(value), 0, 1) if saturate else value, out)

    return run


def _plain(i: Instruction, kind: str) -> Function:
    if _element(kind) is not None:
        mode = next((_MODES[m] for m in i.modifiers if m in _MODES), "rn")
        if mode != "rn" and i.name in ("add", "sub", "mul", "div", "fma", "sqrt", "rcp"):
            return rnd.directed(i.name, mode)
        table = _FLOAT
    else:
        table = _INTEGER
        if i.name == "mul" and "hi" in i.modifiers:
            return lambda a, b: ew.high_product(a, b, kind[0] == "s")
    if i.name not in table:
        raise UnknownPtx(".".join((i.name, *i.modifiers)))
    return table[i.name]


def _shift(i: Instruction) -> Function:
    kind = i.types[-1]
    bits = int(kind[1:])

    def run(a: Array, n: Array) -> Array:
        value, by = _read(a, kind), np.minimum(resized(n, 4), np.uint32(bits))
        small = np.minimum(by, np.uint32(bits - 1)).astype(value.dtype)
        moved = value << small if i.name == "shl" else value >> small
        gone = (value >> value.dtype.type(bits - 1)) if i.name == "shr" and kind[0] == "s" else np.zeros_like(value)
        return _write(np.where(by >= bits, gone, moved), kind)

    return run


def _convert(i: Instruction) -> Function:
    target, source = i.types[0], i.types[1]
    packed = target.endswith("x2")
    to, mode = target.removesuffix("x2"), next((_MODES[m] for m in i.modifiers if m in _MODES), "")
    if packed and to not in _FLOATS:
        raise UnknownPtx(".".join((i.name, *i.modifiers)))

    def one(bits: Array) -> Array:
        value = _read(bits, source)
        if "relu" in i.modifiers:
            value = np.maximum(value, value.dtype.type(0))
        if _element(to) is not None:
            if value.dtype.kind in "iu":
                return _write(rnd.to_float(value.astype(f"{value.dtype.kind}8"), mode or "rn", "f8"), to)
            if mode == "rz" and _element(to).narrow:  # type: ignore[union-attr]
                element = ELEMENTS[to]
                return _write(casts.convert("arith.truncf", ELEMENTS["f32"], element, "rtz")(value), to)
            rounded = rnd.to_float(value, mode, "f4") if to == "f32" and source == "f64" and mode else value
            return _write(rounded, to)
        kind = f"{'i' if to[0] == 's' else 'u'}{max(int(to[1:]), 16 if _element(source) else 8) // 8}"
        if value.dtype.kind == "f":
            return _write(rnd.to_integer(value, mode or "rz", kind), to)
        if "sat" in i.modifiers:
            limits = np.iinfo(f"{kind[0]}{int(to[1:]) // 8}")
            value = np.clip(value.astype(np.int64), limits.min, limits.max)
        return _write(value, to)

    if not packed:
        return one
    return lambda high, low: one(low).astype(np.uint32) | one(high).astype(np.uint32) << np.uint32(16)


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
        value = _read(a, kind[0].replace("s", "u") + kind[1:])
        at, count = (np.minimum(resized(v, 4) & np.uint32(255), np.uint32(bits)) for v in (at, count))
        left = np.maximum(np.int64(bits) - at - count, 0)
        top = value << np.minimum(left, bits - 1).astype(value.dtype)
        signed = _read(top, kind)
        out = signed >> np.minimum(np.int64(bits) - count, bits - 1).astype(signed.dtype)
        return _write(np.where(count == 0, np.zeros_like(out), out), kind)

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
    if i.name in ("mov", "not") and i.types and i.types[-1] in ("b8", "b16", "b32", "b64", "u16", "u32", "u64", "s32",
                                                                   "s16", "s64", "f32", "f64"):  # fmt: skip
        return (lambda a: a) if i.name == "mov" else (lambda a: ~a)
    special = {"shl": _shift, "shr": _shift, "cvt": _convert, "bfe": _extract, "shf": _funnel}
    if i.name in special and i.types:
        return special[i.name](i)
    if i.name == "lop3":
        return _lop3
    if i.name == "prmt" and i.modifiers == ("b32",):
        return _prmt
    if i.name == "bfi":
        return _insert
    if i.name == "selp":
        return lambda a, b, p: np.where(p, a, b)
    if i.name == "setp":
        kind, compare = i.types[-1], _COMPARE.get(i.modifiers[0])
        if compare is not None and len(i.modifiers) == 2:
            return lambda a, b: compare(_read(a, kind), _read(b, kind))
    return _arithmetic(i)
