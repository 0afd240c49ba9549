"""Datatypes of the protocol and their names in NumPy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.models.model import TensorSpec
from paellapy.serving.errors import RequestError, short

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def datatype(dtype: np.dtype[Any]) -> str:
    """The protocol's name of a NumPy type.

    >>> datatype(np.dtype("float16")), datatype(np.dtype(str))
    ('FP16', 'BYTES')
    """
    return "BYTES" if dtype.kind in "SU" else NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Where:
    """A tensor of a request, for errors."""

    model: str
    tensor: str
    kind: str = "input"

    def error(self, said: str, field: str, limit: Any = None, given: Any = None) -> RequestError:
        message = f"model {self.model!r}, {self.kind} {self.tensor!r}: {said}"
        return RequestError(message, field=f"{self.kind}s.{self.tensor}.{field}", limit=limit, given=given)

    def wrong_count(self, given: int, wanted: int) -> RequestError:
        return self.error(f"there are {given} values; the shape needs {short(wanted)}", "data", wanted, given)


def check_datatype(name: str, wanted: np.dtype[Any], where: Where) -> None:
    """Raises RequestError unless the request's datatype is the model's."""
    if name == datatype(wanted):
        return
    if name not in DTYPES and name != "BYTES":
        said = f"the datatype {name!r} does not exist; send {datatype(wanted)}"
    else:
        said = f"the datatype is {datatype(wanted)}, not {name}"
    raise where.error(said, "datatype", datatype(wanted), name)


def check_servable(model: Served) -> None:
    """Raises ModelError unless the protocol has a name for the type of every tensor."""
    for kind, specs in (("input", model.takes), ("output", model.gives)):
        for key, spec in specs.items():
            if spec.dtype not in NAMES and not spec.is_text:
                raise ModelError(
                    f"model {model.name!r}, {kind} {key!r} has the type {spec.dtype.name}, which the protocol cannot "
                    f"carry: use one of {', '.join(DTYPES)}"
                )


# Texts and bytes: in JSON a list of strings; in binary, each with its length before it.

_decode_texts = msgspec.json.Decoder(list[str]).decode


def json_texts(data: msgspec.Raw, dtype: np.dtype[Any], shape: tuple[int, ...], where: Where) -> NDArray[Any]:
    """An array of texts from a JSON list, flat or nested."""
    count = math.prod(shape)
    try:
        try:
            found = _decode_texts(data)
        except msgspec.ValidationError:
            nested = _decode_any(data)
            found = _decode_texts(_encode(_flatten(nested if isinstance(nested, list) else [nested], where)))
    except NOT_JSON as e:
        raise where.error(f"its data is not a JSON list of strings: {e}", "data") from None
    if len(found) != count:
        raise where.wrong_count(len(found), count)
    return _of_objects([each.encode() for each in found] if dtype.kind == "S" else found, shape)


def binary_texts(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], where: Where) -> NDArray[Any]:
    """An array of texts, each behind its length in four bytes."""
    found: list[Any] = []
    at = 0
    for k in range(math.prod(shape)):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            raise where.error(f"its bytes end inside element {k}", "binary_data_size", at + 4 + size, len(data))
        each = bytes(data[at + 4 : at + 4 + size])
        at += 4 + size
        try:
            found.append(each if dtype.kind == "S" else each.decode())
        except UnicodeDecodeError as e:
            said = f"element {k} is no text: {e.reason} at byte {e.start}; send UTF-8"
            raise where.error(said, "data", "UTF-8", e.start) from None
    if at != len(data):
        raise where.error(f"{len(data) - at} bytes follow its last element", "binary_data_size", at, len(data))
    return _of_objects(found, shape)


def text_bytes(array: NDArray[Any]) -> bytes:
    """BYTES: each element is its length in four bytes, followed by the text."""
    parts = (each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1))
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def text_values(array: NDArray[Any], where: Where) -> list[str]:
    """The elements as JSON strings."""
    try:
        return [each.decode() if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
    except UnicodeDecodeError:
        raise where.error("it is no text: ask for it with binary_data", "binary_data", True, False) from None


def _of_objects(values: list[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    found = np.empty(len(values), object)
    found[:] = values
    return found.reshape(shape)


# Values of one request as JSON values and bytes, for another process.


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [datatype(value.dtype), list(value.shape), value.tobytes()] if isinstance(value, np.ndarray | np.generic)
        else {"": value}
        for key, value in values.items()
    }  # fmt: skip


def unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value[""] if isinstance(value, dict) else np.frombuffer(value[2], DTYPES[value[0]]).reshape(value[1])
        for key, value in values.items()
    }


def told_specs(specs: Mapping[str, TensorSpec]) -> list[list[Any]]:
    """The tensors of a model as JSON values, for another process."""
    return [[key, list(s.shape), _TEXTS.get(s.dtype.kind) or datatype(s.dtype), s.low, s.high]
            for key, s in specs.items()]  # fmt: skip


def specs_told(told: Iterable[list[Any]]) -> dict[str, TensorSpec]:
    kinds = {**DTYPES, **{name: np.dtype(kind) for kind, name in _TEXTS.items()}}
    return {key: TensorSpec(tuple(shape), kinds[kind], low=low, high=high) for key, shape, kind, low, high in told}


_TEXTS = {"S": "bytes", "U": "str"}


# JSON numbers of a request to arrays: flat or nested, counted before they are read, and long lists in pieces.
#
# Reading JSON holds the interpreter. Megabytes of text are therefore read piece by piece in a thread: between two
# pieces the event loop can run.

MAX_RANK = 64  # NumPy's limit on dimensions
# Errors of the decoder: its own class does not cover invalid UTF-8 or unlimited nesting.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PIECE_BYTES = 1 << 15  # takes a few tenths of a millisecond

_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "b": msgspec.json.Decoder(list[bool]).decode,
    "i": msgspec.json.Decoder(list[int]).decode,
    "u": msgspec.json.Decoder(list[int]).decode,
    "f": msgspec.json.Decoder(list[float]).decode,
}
_SPACE = b" \t\r\n"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def numbers(data: msgspec.Raw | bytes, dtype: np.dtype[Any], shape: tuple[int, ...], where: Where) -> NDArray[Any]:
    """An array of this shape from a JSON list, flat or nested: the protocol allows both.

    >>> numbers(b"[[1, 2], [3, 4]]", np.dtype(np.int8), (2, 2), Where("m", "x")).tolist()
    [[1, 2], [3, 4]]
    """
    text = memoryview(data)
    count = math.prod(shape)
    kind = dtype.kind if dtype.kind in _LISTS else "f"  # bfloat16 has another kind
    try:
        if len(text) > PIECE_BYTES:
            return _long_array(text, dtype, kind, shape, where).reshape(shape)
        short_text = bytes(text)
        commas = short_text.count(b",")
        # n numbers have n - 1 commas between them, however they are nested; a longer list is not read.
        if commas + 1 > count and short_text.startswith(b"["):
            raise where.wrong_count(commas + 1, count)
        return _array(_flat(short_text, kind, count, where), dtype, kind).reshape(shape)
    except msgspec.ValidationError as e:
        raise where.error(str(e), "data") from None
    except NOT_JSON as e:
        raise where.error(f"its data is not a JSON list of numbers: {e}", "data") from None
    except (OverflowError, FloatingPointError):
        raise where.error(f"a number is outside the range of {datatype(dtype)}", "data", datatype(dtype)) from None


def _long_array(
    text: memoryview, dtype: np.dtype[Any], kind: str, shape: tuple[int, ...], where: Where
) -> NDArray[Any]:
    """The numbers of a long list. Its brackets and commas are checked before any number is read."""
    count = math.prod(shape)
    commas, at = 0, 0
    wanted = b""  # the brackets and commas of a list of this shape
    differs = False
    for piece in _pieces(text, where):
        marks = piece.translate(None, _NOT_STRUCTURE)
        commas += marks.count(b",")
        if not at:
            wanted = _brackets(shape) if marks.startswith(b"[[") else _brackets((count,))
        differs = differs or wanted[at : at + len(marks)] != marks
        at += len(marks)
    if commas + 1 != count:
        raise where.wrong_count(commas + 1, count)
    if differs or at != len(wanted):
        raise where.error("its data is not a flat list, nor nested as its shape says", "data", shape)
    found = np.empty(count, dtype)
    at = 0
    for piece in _pieces(text, where):
        values = _LISTS[kind](b"[" + piece.translate(None, b"[]").rstrip(_SPACE).removesuffix(b",") + b"]")
        found[at : at + len(values)] = _array(values, dtype, kind)
        at += len(values)
    return found


def _brackets(shape: tuple[int, ...]) -> bytes:
    """
    >>> _brackets((2, 2))
    b'[[,],[,]]'
    """
    nested = b""
    for n in reversed(shape):
        nested = b"[" + (nested + b",") * (n - 1) + nested + b"]"
    return nested


def number_bytes(text: bytes, dtype: np.dtype[Any], count: int) -> bytes | None:
    """The bytes of `numbers`, for a short flat list of floats; None: it is another list, or has an error."""
    if dtype.char not in "efd" or len(text) > PIECE_BYTES or text.count(b",") + 1 > count:
        return None
    try:
        values = _LISTS["f"](text)
        return struct.pack(f"={count}{dtype.char}", *values)
    except (*NOT_JSON, OverflowError, struct.error):  # struct.error: there are fewer
        return None


def _array(values: list[Any], dtype: np.dtype[Any], kind: str) -> NDArray[Any]:
    if dtype.char in "efd":  # NumPy, and "@", would silently turn a number outside the range into infinity
        return np.frombuffer(struct.pack(f"={len(values)}{dtype.char}", *values), dtype)
    if kind == "f":
        with np.errstate(over="raise"):
            return np.array(values, np.float64).astype(dtype)
    return np.array(values, dtype)


def _flat(text: bytes, kind: str, count: int, where: Where) -> list[Any]:
    try:
        values = _LISTS[kind](text)
    except msgspec.ValidationError:
        nested = _decode_any(text)
        if not isinstance(nested, list):
            raise
        values = _LISTS[kind](_encode(_flatten(nested, where)))
    if len(values) != count:
        raise where.wrong_count(len(values), count)
    return values


def _flatten(nested: list[Any], where: Where) -> list[Any]:
    flat: list[Any] = nested
    for _ in range(MAX_RANK):
        if not any(isinstance(each, list) for each in flat):
            return flat
        if not all(isinstance(each, list) for each in flat) or len({len(each) for each in flat}) > 1:
            raise where.error("the lists in its data differ in length or depth", "data")
        flat = [value for each in flat for value in each]
    raise where.error("its data is nested deeper than its shape", "data", MAX_RANK)


def _pieces(text: memoryview, where: Where) -> Iterator[bytes]:
    """Parts of a long list, each but the last up to a comma."""
    at = 0
    while at < len(text):
        piece = bytes(text[at : at + PIECE_BYTES])
        if at + len(piece) < len(text):
            end = piece.rfind(b",") + 1
            if not end:
                raise where.error("a number of its data is too long", "data", PIECE_BYTES)
            piece = piece[:end]
        yield piece
        at += len(piece)
