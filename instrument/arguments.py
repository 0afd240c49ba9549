"""Kernel arguments: from Python objects to values and to the facts a kernel is specialised on.

A handler turns one argument into `(value, key)`: the value for the launch, and a small hashable key; equal keys mean
equal machine code. Handlers run on every launch, so they do as little as possible.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from paellapy.instrument.errors import ArgumentError

Handler = Callable[[Any], tuple[Any, Any]]

# NumPy's, CuPy's and PyTorch's names for element types → Triton's.
DTYPES = {
    "bool": "u1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip

# Struct codes of scalar parameters in the kernel's parameter buffer; bfloat16, unknown to `struct`, as its bits.
STRUCT_CODES = {
    "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp16": "e", "bf16": "H", "fp32": "f", "fp64": "d",
}  # fmt: skip


_SIZES = {"B": 1, "b": 1, "h": 2, "H": 2, "e": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8}


def param_layout(codes: list[str]) -> str:
    """A `struct` format of parameters at the offsets the CUDA ABI gives them: each aligned to its own size.

    A code such as "12s@4" is 12 raw bytes aligned to 4.

    >>> param_layout(["Q", "i", "Q"])
    '<Qi4xQ'
    """
    format_, at = "<", 0
    for code in codes:
        code, _, alignment = code.partition("@")
        size = int(code[:-1]) if code.endswith("s") else _SIZES[code]
        pad = -at % (int(alignment) if alignment else size)
        format_ += (f"{pad}x" if pad else "") + code
        at += pad + size
    return format_


def param_offsets(format_: str) -> list[int]:
    """Where each parameter of a layout begins.

    >>> param_offsets("<Qi4xQ")
    [0, 8, 16]
    """
    offsets, at = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", format_):
        if code != "x":
            offsets.append(at)
        at += struct.calcsize(f"<{count}{code}")
    return offsets


class PointerKey:
    """The specialisation facts of one array argument. Compared by identity: there is one per dtype and alignment."""

    __slots__ = ("aligned", "dtype")
    _known: dict[tuple[str, bool], PointerKey] = {}  # noqa: RUF012 - slots forbid a ClassVar default elsewhere

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype, self.aligned = dtype, aligned

    @classmethod
    def of(cls, dtype: str, aligned: bool) -> PointerKey:
        key = cls._known.get((dtype, aligned))
        if key is None:
            key = cls._known[dtype, aligned] = cls(dtype, aligned)
        return key

    def __repr__(self) -> str:
        return f"*{self.dtype}{':16' if self.aligned else ''}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A host-side tensor descriptor in the form that a launch takes: the position of a tile in an array."""

    base: Any  # the array's memory, as the device's handler returns it
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nan_padding: bool = False
    tf32: bool = False


@dataclass(frozen=True, slots=True)
class DescriptorKey:
    """The specialisation facts of a tensor descriptor."""

    dtype: str
    block_shape: tuple[int, ...]


def triton_dtype(dtype: Any) -> str:
    """Triton's name of an element type given as NumPy, CuPy, PyTorch or ml_dtypes dtype, or as a string.

    >>> triton_dtype("float32")
    'fp32'
    """
    name = str(getattr(dtype, "name", dtype)).rsplit(".", 1)[-1]
    found = DTYPES.get(name, name if name in DTYPES.values() else None)
    if found is None:
        raise ArgumentError(
            f"a kernel cannot take arrays of {name}; use one of {', '.join(DTYPES)}",
            field="dtype", given=name, limit=DTYPES,
        )
    return found


def as_type(value: Any) -> Any:
    """An array, a dtype or Triton's MockTensor as the text of its type, for compiling; other values as they are.

    >>> as_type(np.dtype("float32")), as_type(3)
    ('*fp32', 3)
    """
    dtype = getattr(value, "dtype", value if type(value).__name__ == "dtype" or isinstance(value, np.dtype) else None)
    if dtype is None or isinstance(value, np.generic) or type(value).__module__.startswith("triton.language"):
        return value
    address = value.ctypes.data if isinstance(value, np.ndarray) else getattr(value, "data_ptr", int)()
    return f"*{triton_dtype(dtype)}{':1' if address % 16 else ''}"


def of_int(value: int) -> tuple[int, int]:
    """1 is compiled in; for other integers, only divisibility by 16 and the width matter (as in `triton.jit`)."""
    if value == 1:
        return value, 1
    even = 0 if value & 15 else 1
    if -0x80000000 <= value < 0x80000000:
        return value, 2 + even
    if -0x8000000000000000 <= value < 0x8000000000000000:
        return value, 4 + even
    if 0 <= value < 0x10000000000000000:
        return value, 6 + even
    raise ArgumentError(f"integer argument {value} does not fit in 64 bits", field="integer", given=value, limit=64)


def bfloat16_bits(value: float) -> int:
    """The bits of a number rounded to bfloat16.

    >>> hex(bfloat16_bits(1.0))
    '0x3f80'
    """
    return int(np.array(value, ml_dtypes.bfloat16).view(np.uint16))


def of_float(value: float) -> tuple[float, str]:
    return value, "fp32"


def of_bool(value: bool) -> tuple[bool, str]:
    return value, "u1"


def of_none(value: None) -> tuple[None, None]:
    return None, None


SCALARS: dict[type, Handler] = {int: of_int, float: of_float, bool: of_bool, type(None): of_none}


def pointer_keys() -> tuple[dict[Any, PointerKey], Callable[[Any, bool], PointerKey]]:
    """A table dtype → key for aligned arrays, and the function that fills it (and answers for unaligned ones)."""
    aligned: dict[Any, PointerKey] = {}

    def lookup(dtype: Any, is_aligned: bool) -> PointerKey:
        name = triton_dtype(dtype)
        if is_aligned:
            aligned[dtype] = PointerKey.of(name, True)
        return PointerKey.of(name, is_aligned)

    return aligned, lookup


def without_memory(tensor: Any) -> ArgumentError:
    kind = type(tensor).__name__
    return ArgumentError(
        f"a {kind} has no memory, so no kernel can run on it: launch outside of FakeTensorMode and torch.compile, or "
        "use kernel.warmup(…)", field="argument", given=kind,
    )  # fmt: skip


class Handlers(dict[type, Handler]):
    """Argument handlers of one device, by exact type; `missing` finds and remembers the handler of a new type."""

    def __init__(self, known: dict[type, Handler], find: Callable[[type], Handler | None]) -> None:
        super().__init__(known)
        self._find = find

    def missing(self, value: Any) -> tuple[Any, Any]:
        kind = type(value)
        if kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton."):
            return self._descriptor(value)
        if kind.__name__ == "TensorWrapper" and kind.__module__.startswith("triton."):
            return self._reinterpreted(value)
        # tl.constexpr, a @triton.jit function or a kernel of ours, which has that class: constants in a tuple
        if value.__class__.__module__.startswith("triton."):
            return value, (kind, getattr(value, "cache_key", None) or repr(value))
        if isinstance(value, tuple):
            items = [(self.get(type(v)) or self.missing)(v) for v in value]
            values, keys = [v for v, _ in items], tuple(k for _, k in items)
            return (kind(*values) if hasattr(value, "_fields") else tuple(values)), keys
        base = next((b for b in (int, float) if isinstance(value, b)), None)  # an enum member, or numpy.float64
        handler = SCALARS[base] if base else self._find(kind)
        if handler is None:
            remedy = "; pass its value with .item()" if hasattr(kind, "item") else ""
            raise ArgumentError(
                f"a kernel takes arrays, numbers, bool and None, not {kind.__name__}{remedy}",
                field="argument", given=kind.__name__,
            )
        self[kind] = handler
        return handler(value)

    def _reinterpreted(self, given: Any) -> tuple[Any, PointerKey]:
        """The result of `triton.reinterpret(array, dtype)`: the same memory under another element type."""
        value, key = (self.get(type(given.base)) or self.missing)(given.base)
        dtype = triton_dtype(given.dtype)
        if isinstance(value, np.ndarray):
            plain = next(name for name, known in DTYPES.items() if known == dtype)
            value = value.view(plain if hasattr(np, plain) else f"u{value.itemsize}")
        return value, PointerKey.of(dtype, key.aligned)

    def _descriptor(self, given: Any) -> tuple[Descriptor, DescriptorKey]:
        base, key = (self.get(type(given.base)) or self.missing)(given.base)
        shape, strides = tuple(map(int, given.shape)), tuple(map(int, given.strides))
        tf32 = bool(getattr(given, "round_f32_to_tf32", False))
        made = Descriptor(base, shape, strides, getattr(given, "padding", "zero") == "nan", tf32)
        return made, DescriptorKey(key.dtype, tuple(map(int, given.block_shape)))
