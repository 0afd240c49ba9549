"""JSON numbers of a request to arrays: flat or nested, counted before they are read, and long ones in pieces.

Reading JSON holds the interpreter. A text of megabytes is therefore read a piece at a time: between two pieces the
event loop gets its turn, where the text is read in another thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.serving.datatypes import datatype
from paellapy.serving.errors import RequestError, short

MAX_RANK = 64  # of a shape; NumPy's own limit
# What the decoder raises. Its own error does not cover texts that are not UTF-8, nor nesting without end.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PIECE_BYTES = 1 << 15  # a few tenths of a millisecond

_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "b": msgspec.json.Decoder(list[bool]).decode,
    "i": msgspec.json.Decoder(list[int]).decode,
    "u": msgspec.json.Decoder(list[int]).decode,
    "f": msgspec.json.Decoder(list[float]).decode,
}
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def numbers(data: msgspec.Raw | bytes, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """An array of this shape from a JSON list, flat or nested: the protocol allows both.

    >>> numbers(b"[[1, 2], [3, 4]]", np.dtype(np.int8), (2, 2), "x").tolist()
    [[1, 2], [3, 4]]
    """
    text = bytes(data)
    count = math.prod(shape)
    commas = text.count(b",")
    # Numbers have as many commas but one between them, however they are nested: too many are not read.
    if commas + 1 > count and text.startswith(b"["):
        raise RequestError(f"{where} has {commas + 1} values; its shape wants {short(count)}")
    kind = dtype.kind if dtype.kind in _LISTS else "f"  # bfloat16 has a kind of its own
    try:
        if len(text) > PIECE_BYTES and (inner := _inside(text, shape)) is not None:
            found = np.empty(count, dtype)
            at = 0
            for piece in _pieces(inner):
                values = _LISTS[kind](piece)
                found[at : at + len(values)] = _array(values, dtype, kind)
                at += len(values)
            if at != count:
                raise RequestError(f"{where} has {at} values; its shape wants {short(count)}")
        else:
            found = _array(_flat(text, kind, count, where), dtype, kind)
        return found.reshape(shape)
    except msgspec.ValidationError as e:
        raise RequestError(f"{where}: {e}") from None
    except NOT_JSON as e:
        raise RequestError(f"{where}: its data are not JSON: {e}") from None
    except (OverflowError, FloatingPointError):
        raise RequestError(f"{where}: a number is out of the range of {datatype(dtype)}") from None


def _array(values: list[Any], dtype: np.dtype[Any], kind: str) -> NDArray[Any]:
    if dtype.char in "efd":  # NumPy, and "@", would make a number beyond the range infinite without a word
        return np.frombuffer(struct.pack(f"={len(values)}{dtype.char}", *values), dtype)
    if kind == "f":
        with np.errstate(over="raise"):
            return np.array(values, np.float64).astype(dtype)
    return np.array(values, dtype)


def _flat(text: bytes, kind: str, count: int, where: str) -> list[Any]:
    try:
        values = _LISTS[kind](text)
    except msgspec.ValidationError:
        nested = _decode_any(text)
        if not isinstance(nested, list):
            raise
        values = _LISTS[kind](_encode(_flatten(nested, where)))
    if len(values) != count:
        raise RequestError(f"{where} has {len(values)} values; its shape wants {short(count)}")
    return values


def _flatten(nested: list[Any], where: str) -> list[Any]:
    flat: list[Any] = nested
    for _ in range(MAX_RANK):
        if not any(isinstance(each, list) for each in flat):
            return flat
        if not all(isinstance(each, list) for each in flat) or len({len(each) for each in flat}) > 1:
            raise RequestError(f"{where}: the lists of its data differ in length or depth")
        flat = [value for each in flat for value in each]
    raise RequestError(f"{where}: its data are nested too deeply")


def _inside(text: bytes, shape: tuple[int, ...]) -> bytes | None:
    """The numbers between commas, of a flat list or of one nested as the shape is; None: it is neither.

    A text, or an object, among the numbers stays there, and is found when its piece is read.
    """
    structure = text.translate(None, _NOT_STRUCTURE)
    nested = b""
    for n in reversed(shape):
        nested = b"[" + b",".join([nested] * n) + b"]"
    if structure not in (nested, b"[" + b"," * structure.count(b",") + b"]") or b'"' in text or b"{" in text:
        return None
    return text.translate(None, b"[]")


def _pieces(inner: bytes) -> Iterator[bytes]:
    """Lists of some of the numbers each."""
    at = 0
    while at < len(inner):
        end = inner.find(b",", at + PIECE_BYTES)
        end = len(inner) if end < 0 else end
        yield b"[" + inner[at:end] + b"]"
        at = end + 1
