"""Requests of the Open Inference Protocol v2: JSON, and the binary tensor extension.

A request's tensors have the batch as their leading axis, as the model's metadata says (`[-1, …]`); a single item may
also be sent without that axis. `decode` makes all checks, so that its result can be written into slots.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.engine.request_checks import check_ranges
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving.datatypes import check_datatype
from paellapy.serving.errors import RequestError, short
from paellapy.serving.numbers import NOT_JSON, number_bytes, numbers
from paellapy.serving.repeats import LONGEST, Repeated, find, keep, parts, starts_at

Parameters = dict[str, Any]

PRIORITY_LEVELS = 1 << 30  # 1 goes first, as in Triton; the engine's own priorities are in reverse order
DEFAULT_LEVEL = 10  # level of a request without a priority
MOST_TIMEOUT_US = 10**15  # 31 years: as nanoseconds it still fits into 64 bits
NUMBER_BYTES = 48  # per number of JSON: up to 24 digits with sign and exponent, a comma, and blanks of a pretty printer
BESIDE_BYTES = 1 << 16  # allowed besides the numbers: names, parameters, an id
_UNSUPPORTED = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


class RequestTensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RequestedOutput(msgspec.Struct):
    name: str
    parameters: Parameters = {}


class RequestBody(msgspec.Struct):
    inputs: list[RequestTensor]
    id: str = ""
    outputs: list[RequestedOutput] = []
    parameters: Parameters = {}


class Output(msgspec.Struct, frozen=True):
    """One tensor of the answer, and its encoding."""

    name: str
    binary: bool
    classes: int = 0  # the classification extension: number of best classes, sent as texts


class Request(msgspec.Struct, frozen=True):  # creating a Struct takes a fraction of a dataclass's time
    """A request whose tensors all fit the model."""

    id: str
    items: int
    batched: bool  # its tensors have a batch axis, and so will the answer's
    inputs: dict[str, NDArray[Any]]  # [items, …]
    outputs: list[Output]
    priority: int | None  # the engine's: larger goes first; None: the model's own
    timeout_us: float | None
    repeated: Repeated | None = None  # its JSON, if that may be sent again
    tail: memoryview | None = None  # the bytes of its inputs, in place of `inputs`: valid while its body is

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The inputs as arrays."""
        return self.inputs if self.tail is None or self.repeated is None else self.repeated.arrays(self.tail)


_decode = msgspec.json.Decoder(RequestBody).decode


def largest_request(model: Model) -> int:
    """Largest size in bytes of a valid request to the model, in JSON or binary."""
    values = sum(math.prod(spec.shape) for spec in model.inputs.values())
    return BESIDE_BYTES + model.max_batch * values * NUMBER_BYTES


def decode(model: Model, body: bytes | memoryview, header_length: str | None, as_bytes: bool = False) -> Request:
    """A request of the model; RequestError says what is wrong with an invalid one. `as_bytes`: the inputs of one item
    whose JSON is known may stay bytes.
    """
    header, tail = split(memoryview(body), header_length)
    around: tuple[bytes, bytes] | None = None  # the parts of a known JSON that do not change
    text = b""  # its list of numbers, which does
    if len(tail):
        if len(header) <= LONGEST:
            around = bytes(header), b""
    else:
        around, text = parts(bytes(header))
    if around is not None and (repeated := find(model, around, len(tail))) is not None:
        number, items, outputs, level, timeout_us = repeated.meaning
        if as_bytes and items == 1 and not model.ranges:
            stays = tail if len(tail) else _known_bytes(repeated, text)
            if stays is not None:
                priority = engine_priority(model, level)
                return Request(number, 1, True, {}, outputs, priority, timeout_us, repeated, stays)
        found = repeated.arrays(tail) if len(tail) else _known_numbers(repeated, text)
        if found is not None:
            if model.ranges:
                check_ranges(model, found)
            priority = engine_priority(model, level)
            return Request(number, items, True, found, outputs, priority, timeout_us, repeated)
    try:
        request = _decode(header)
    except NOT_JSON as e:
        raise RequestError(f"the body is not a v2 inference request: {e}") from None
    binary = BinaryTensors(tail)
    arrays: dict[str, NDArray[Any]] = {}
    for tensor in request.inputs:
        spec = model.inputs.get(tensor.name)
        if spec is None or tensor.name in arrays:
            problem = "is not an input of" if spec is None else "appears twice in a request to"
            takes = ", ".join(model.inputs)
            raise RequestError(f"{short(tensor.name)} {problem} model {model.name!r}; it takes {takes}")
        arrays[tensor.name] = _array(tensor, spec, binary, model)
    if missing := [key for key in model.inputs if key not in arrays]:
        raise RequestError(f"model {model.name!r} needs the missing input {', '.join(missing)}")
    binary.check_used()
    if model.ranges:
        check_ranges(model, arrays)
    items, batched = _batch(model, arrays)
    if not batched:
        arrays = {key: array[np.newaxis] for key, array in arrays.items()}
    outputs = _outputs(model, request)
    level, timeout_us = _scheduling(request.parameters)
    repeated = None
    if around is not None and batched and _comes_again(request, arrays, header, tail, around):
        repeated = Repeated(arrays, (request.id, items, outputs, level, timeout_us), len(tail))
        keep(model, around, repeated)
    return Request(request.id, items, batched, arrays, outputs, engine_priority(model, level), timeout_us, repeated)


def _comes_again(
    request: RequestBody, arrays: dict[str, NDArray[Any]], header: memoryview, tail: memoryview,
    around: tuple[bytes, bytes],
) -> bool:  # fmt: skip
    """Whether the JSON keeps its meaning with other numbers: all numbers follow it, or form its one list."""
    if len(tail):
        unset = all(isinstance(tensor.data, msgspec.UnsetType) for tensor in request.inputs)
        return unset and not any(a.dtype.kind == "b" for a in arrays.values())
    data = request.inputs[0].data
    return len(arrays) == 1 and isinstance(data, msgspec.Raw) and starts_at(data, header, around)


def _known_bytes(repeated: Repeated, text: bytes) -> memoryview | None:
    _, dtype, count, _, _ = repeated.tensors[0]
    found = number_bytes(text, dtype, count)
    return None if found is None else memoryview(found)


def _known_numbers(repeated: Repeated, text: bytes) -> dict[str, NDArray[Any]] | None:
    """The numbers as arrays; None: they do not fit, and the full check will say why."""
    name, dtype, _, _, shape = repeated.tensors[0]
    try:
        return {name: numbers(text, dtype, shape, name)}
    except RequestError:
        return None


def split(body: memoryview, header_length: str | None) -> tuple[memoryview, memoryview]:
    """The JSON, and the bytes that follow it."""
    if header_length is None:
        return body, body[len(body) :]
    # int() would also accept "+5", " 5 " and "1_000".
    if not (header_length.isascii() and header_length.isdigit()) or len(header_length) > 18:
        raise RequestError(f"Inference-Header-Content-Length: {header_length[:40]!r} is not a whole number of bytes")
    length = int(header_length)
    if length > len(body):
        raise RequestError(f"Inference-Header-Content-Length is {length}, but the body has {len(body)} bytes")
    return body[:length], body[length:]


class BinaryTensors:
    """The bytes after the JSON: tensors one after another, in the order of the request's inputs."""

    def __init__(self, tail: memoryview) -> None:
        self._tail, self._at = tail, 0

    def take(self, size: int, where: str) -> memoryview:
        if self._at + size > len(self._tail):
            left = len(self._tail) - self._at
            raise RequestError(f"{where}: binary_data_size is {size}, but only {left} bytes are left in the body")
        self._at += size
        return self._tail[self._at - size : self._at]

    def check_used(self) -> None:
        if left := len(self._tail) - self._at:
            raise RequestError(f"{left} bytes at the end of the body belong to no input; check each binary_data_size")


def _array(tensor: RequestTensor, spec: TensorSpec, binary: BinaryTensors, model: Model) -> NDArray[Any]:
    where = f"model {model.name!r}, input {tensor.name!r}"
    check_datatype(tensor.datatype[:40], spec.dtype, where)
    for name in _UNSUPPORTED:
        if name in tensor.parameters:
            raise RequestError(f"{where}: {name} is not supported; send the tensor in the body")
    shape = tuple(tensor.shape)
    if shape != spec.shape and (shape[1:] != spec.shape or not shape or shape[0] < 1):
        wanted = ", ".join(map(str, ("n", *spec.shape)))
        raise RequestError(f"{where} has shape {short(tensor.shape)}; the model takes [{wanted}] with n ≥ 1")
    if shape != spec.shape and shape[0] > model.max_batch:  # before its numbers are read: the shape may be any
        raise RequestError(
            f"model {model.name!r} takes up to {model.max_batch} items per request, not {short(shape[0])}: split the "
            "batch"
        )
    count = math.prod(shape)
    size = tensor.parameters.get("binary_data_size")
    if size is None:
        if isinstance(tensor.data, msgspec.UnsetType):
            raise RequestError(f'{where} has neither "data" nor the parameter "binary_data_size": send one')
        return numbers(tensor.data, spec.dtype, shape, where)
    if not isinstance(tensor.data, msgspec.UnsetType):
        raise RequestError(f'{where} has both "data" and the parameter "binary_data_size": send one')
    if not isinstance(size, int) or isinstance(size, bool) or size != count * spec.dtype.itemsize:
        raise RequestError(
            f"{where}: binary_data_size is {short(size)}, but shape {short(tensor.shape)} of {tensor.datatype} takes "
            f"{short(count * spec.dtype.itemsize)} bytes"
        )
    piece = binary.take(size, where)
    if spec.dtype.kind == "b":  # NumPy's operations need bytes that are 0 or 1
        return np.frombuffer(piece, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(piece, spec.dtype).reshape(shape)


def _batch(model: Model, arrays: dict[str, NDArray[Any]]) -> tuple[int, bool]:
    """The number of items in the request, and whether its tensors have a batch axis."""
    found = {key: a.shape[0] if a.ndim > len(model.inputs[key].shape) else None for key, a in arrays.items()}
    counts = set(found.values())
    if len(counts) > 1:
        said = ", ".join(f"{key}: {'no batch axis' if n is None else n}" for key, n in found.items())
        raise RequestError(f"model {model.name!r}: all inputs must have the same batch size ({said})")
    items = counts.pop()
    return items or 1, items is not None


def _outputs(model: Model, request: RequestBody) -> list[Output]:
    everything = _flag(request.parameters, "binary_data_output", False)
    if not request.outputs:
        return [Output(key, everything) for key in model.outputs]
    found: dict[str, Output] = {}
    for each in request.outputs:
        spec = model.outputs.get(each.name)
        if spec is None or each.name in found:
            problem = "is not an output of" if spec is None else "is asked for twice of"
            raise RequestError(f"{short(each.name)} {problem} model {model.name!r}; it has {', '.join(model.outputs)}")
        for name in _UNSUPPORTED:
            if name in each.parameters:
                raise RequestError(f"output {each.name!r}: {name} is not supported; outputs are sent in the body")
        classes = each.parameters.get("classification", 0)
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
            raise RequestError(f"output {each.name!r}: classification={short(classes)} must be a whole number ≥ 0")
        if classes and (len(spec.shape) != 1 or spec.dtype.kind not in "fiu"):
            raise RequestError(f"output {each.name!r} has no classes: only vectors of floats or integers have them")
        found[each.name] = Output(each.name, _flag(each.parameters, "binary_data", everything), classes)
    return list(found.values())


def _flag(parameters: Parameters, name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} is {short(value)}; it must be true or false")
    return value


def _scheduling(parameters: Parameters) -> tuple[int | None, float | None]:
    """The priority and the timeout in microseconds."""
    level, timeout_us = parameters.get("priority"), parameters.get("timeout")
    if level is not None and (type(level) is not int or not 0 <= level <= PRIORITY_LEVELS):
        said = f"it must be a whole number up to {PRIORITY_LEVELS}: 1 goes first, then 2 …; 0 means none"
        raise RequestError(f"the parameter priority is {short(level)}; {said}")
    if timeout_us is not None and (type(timeout_us) not in (int, float) or not 0 <= timeout_us <= MOST_TIMEOUT_US):
        said = f"it must be microseconds up to {MOST_TIMEOUT_US}; 0 means none"
        raise RequestError(f"the parameter timeout is {short(timeout_us)}; {said}")
    return level, timeout_us or None


def engine_priority(model: Model, level: int | None) -> int | None:
    """The engine's priority for the protocol's level; None: the model's own."""
    return model.priority + DEFAULT_LEVEL - level if level else None
