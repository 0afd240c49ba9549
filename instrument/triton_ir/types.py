"""TTIR types, and how each element type is stored in memory and held during computation.

Floats below 32 bits are held as float32 rounded to their own precision: NumPy's half arithmetic and ml_dtypes' loops
are several times slower than float32's, dots need float32 anyway, and a float32 result rounded once more is the
correctly rounded one for +, -, *, / and sqrt (24 >= 2 * 11 + 2 bits).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from paellapy.instrument.triton_ir import native

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Ints = tuple[int, ...]  # slots of operands or results
Function = Callable[..., Any]  # of NumPy values


@dataclass(frozen=True, slots=True)
class Element:
    """One scalar type."""

    name: str
    memory: np.dtype[Any]  # in the user's arrays
    compute: np.dtype[Any]  # while evaluating
    storage: np.dtype[Any]  # in flat memory: `memory`, or plain bits where NumPy has no such type
    bits: np.dtype[Any]  # unsigned integer of the same size
    size: int
    is_float: bool
    narrow: bool  # computed in a wider type than it is stored in
    limit: float | None  # largest number, if narrowing saturates


def _element(name: str, memory: Any, compute: Any = None, limit: float | None = None) -> Element:
    stored = np.dtype(memory)
    wide = np.dtype(memory if compute is None else compute)
    bits = np.dtype(f"u{stored.itemsize}")
    own = stored.num <= np.dtype(np.float16).num  # type numbers of ml_dtypes lie beyond NumPy's own
    return Element(
        name,
        stored,
        wide,
        stored if own else bits,
        bits,
        stored.itemsize,
        stored.kind == "f" or not own,
        wide != stored,
        limit,
    )


# NVIDIA's conversions to fp8 saturate (cvt.rn.satfinite); ml_dtypes would give NaN or infinity.
ELEMENTS = {
    e.name: e
    for e in (
        _element("f64", np.float64),
        _element("f32", np.float32),
        _element("f16", np.float16, np.float32),
        _element("bf16", ml_dtypes.bfloat16, np.float32),
        _element("f8E4M3FN", ml_dtypes.float8_e4m3fn, np.float32, 448.0),
        _element("f8E5M2", ml_dtypes.float8_e5m2, np.float32, 57344.0),
        _element("f8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, np.float32, 240.0),
        _element("f8E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, np.float32, 57344.0),
        _element("f8E4M3B11FNUZ", ml_dtypes.float8_e4m3b11fnuz, np.float32, 30.0),
        _element("i1", np.bool_),
        _element("i8", np.int8),
        _element("i16", np.int16),
        _element("i32", np.int32),
        _element("i64", np.int64),
        _element("index", np.int64),
    )
}


@dataclass(frozen=True, slots=True)
class Type:
    """`kind` is value, pointer, block_pointer or descriptor; `element` is what a value holds or a pointer points to."""

    kind: str
    shape: tuple[int, ...]
    element: Element
    block: tuple[int, ...] = ()
    unsigned: bool = False  # of a descriptor, whose type alone says so; elsewhere the op does

    @property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """`tensor<128x!tt.ptr<f32>>`, `i32`, `!tt.ptr<tensor<16x16xf32>>`, `!tt.tensordesc<16x16xf32>`; else KeyError."""
    text = text.strip()
    if text.startswith("tensor<"):
        depth_comma = _top_comma(text[7:-1])
        body = text[7:-1] if depth_comma < 0 else text[7 : 7 + depth_comma]
        dims, element = _dims(body)
        inner = parse_type(element)
        return Type(inner.kind, dims, inner.element, inner.block)
    if text.startswith("!tt.ptr<"):
        body = text[8:-1]
        comma = _top_comma(body)
        inner = parse_type(body if comma < 0 else body[:comma])
        if inner.shape:
            return Type("block_pointer", (), inner.element, inner.shape)
        return Type("pointer", (), inner.element)
    if text.startswith("!tt.tensordesc<"):
        body = text[15:-1]
        if body.startswith("tensor<"):
            inner = parse_type(body[: body.index(">") + 1])
            return Type("descriptor", (), inner.element, inner.shape, "xui" in body)
        comma = _top_comma(body)
        dims, element = _dims(body if comma < 0 else body[:comma])
        return Type("descriptor", (), ELEMENTS[_signless(element)], dims, element.startswith("ui"))
    return Type("value", (), ELEMENTS[_signless(text)])


def _signless(name: str) -> str:
    return re.sub(r"^[us]i(\d+)$", r"i\1", name)


def _dims(body: str) -> tuple[tuple[int, ...], str]:
    m = re.match(r"(?:\d+x)*", body)
    dims = m[0] if m else ""
    return tuple(int(d) for d in dims.split("x") if d), body[len(dims) :]


def _top_comma(text: str) -> int:
    depth = 0
    for i, c in enumerate(text):
        if c == "<":
            depth += 1
        elif c == ">":
            depth -= 1
        elif c == "," and depth == 0:
            return i
    return -1


# --- the representation of a TTIR value while a range of blocks is evaluated at once ----------------------------------
# A number is a NumPy scalar (the same for every block and element) or an array whose axis 0 is the block axis, of size
# NB or 1. The tensor's axes follow; an axis has size 1 as long as nothing varies along it, so `tt.broadcast` costs
# nothing. A pointer is an argument's index and an offset in elements. While a tape is recorded, a value that depends on
# memory is a `Sym`.

PAD_NAN = 2  # a window's padding, in Triton's numbering

Value = Any  # np.generic | Array | Sym | Ptr | Window


class Sym:
    """A value that depends on memory: its number on the tape, and its value in the recording run."""

    __slots__ = ("id", "value")

    def __init__(self, id: int, value: Any) -> None:
        self.id, self.value = id, value


@dataclass(slots=True, frozen=True)
class Ptr:
    """Offset (int64, in elements) into one of the arguments `bases`; `which` selects one if there are several."""

    bases: tuple[int, ...]
    which: Value
    offset: Value
    element: Element


@dataclass(slots=True, frozen=True)
class Window:
    """A block pointer or a tensor descriptor: a tile at `offsets` of an array with `shape` and `strides`."""

    base: Ptr
    shape: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...]
    block: tuple[int, ...]
    padding: Value = None


def is_array(x: Any) -> bool:
    return type(x) is np.ndarray


def full(x: Any, shape: tuple[int, ...]) -> Array:
    """Undoes lazy broadcasting along the tensor axes."""
    if not is_array(x):
        return np.broadcast_to(x, (1, *shape))
    return x if x.shape[1:] == shape else np.broadcast_to(x, x.shape[:1] + shape)


def take_blocks(x: Any, index: Array, nb: int) -> Any:
    """The rows of some blocks; a uniform value stays as it is."""
    return x[index] if is_array(x) and x.shape[0] == nb and x.ndim else x


def merge_blocks(nb: int, rank: int, indices: tuple[Array, ...], *parts: Any) -> Any:
    """Joins rows computed by disjoint groups of blocks; `rank` is the number of the tensor's axes."""
    shape = np.broadcast_shapes((1,) * rank, *[np.shape(p)[1:] for p in parts])
    out = np.empty((nb, *shape), parts[0].dtype)
    for index, part in zip(indices, parts, strict=True):
        out[index] = part
    return out


# --- conversions between memory and computation: widening loaded values, rounding stored ones -------------------------

MIN_COMPILED = 64  # number of elements from which a compiled loop is faster than NumPy's conversion


def decode(raw: Any, element: Element) -> Any:
    """Converts memory contents (array or scalar of `element.storage`) to the compute type."""
    if not element.narrow:
        return raw
    if type(raw) is np.ndarray and raw.size >= MIN_COMPILED:
        if element.name == "f16":
            raw = np.ascontiguousarray(raw)
            out = np.empty(raw.shape, np.float32)
            native.from_half(raw.view(np.uint16).reshape(-1), out.view(np.uint32).reshape(-1))
            return out
        if element.size == 1:
            raw = np.ascontiguousarray(raw)
            out = np.empty(raw.shape, np.float32)
            native.look_up(_table(element), raw.reshape(-1), out.reshape(-1))
            return out
    return raw.view(element.memory).astype(element.compute)


@cache
def _table(element: Element) -> Array:
    return np.arange(256, dtype=np.uint8).view(element.memory).astype(np.float32)


def narrowed(value: Any, element: Element) -> Any:
    """Compute values as `element.memory`, rounded to nearest even and saturated where the hardware saturates."""
    if element.limit is not None:
        value = np.clip(value, np.float32(-element.limit), np.float32(element.limit))
    if element.name == "f16" and type(value) is np.ndarray and value.size >= MIN_COMPILED and value.dtype == np.float32:
        value = np.ascontiguousarray(value)
        out = np.empty(value.shape, np.uint16)
        native.to_half(value.reshape(-1), value.view(np.uint32).reshape(-1), out.reshape(-1))
        return out.view(np.float16)
    return value.astype(element.memory)


def encode(value: Any, element: Element) -> Any:
    """Converts compute values to memory contents (`element.storage`)."""
    return narrowed(value, element).view(element.storage) if element.narrow else value


def rounder(element: Element) -> Callable[[Any], Any] | None:
    """A function that rounds compute values to `element`'s precision, or None if they already have it."""
    if not element.narrow:
        return None

    def round_to(value: Any) -> Any:
        return decode(narrowed(value, element).view(element.storage), element)

    return round_to
