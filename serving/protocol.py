"""Requests of the Open Inference Protocol v2: JSON, and the binary tensor extension.

A request's tensors have the batch as their leading axis, as the model's metadata says (`[-1, …]`); a single item may
also be sent without that axis. `decode` makes all checks, so that its result can be written into slots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.request_values import check_ranges
from paellapy.scheduler.models.model import TensorSpec
from paellapy.serving.errors import RequestError, short
from paellapy.serving.limits import BESIDE_BYTES, TEXT_BYTES
from paellapy.serving.tensors import (
    NOT_JSON,
    PIECE_BYTES,
    Where,
    binary_texts,
    check_datatype,
    datatype,
    json_texts,
    number_bytes,
    numbers,
    text_bytes,
    text_values,
)

# Requests whose JSON was seen before. Clients send the same JSON again and again, around tensors that differ.
#
# The JSON was checked the first time, and its meaning does not depend on the tensors. If the tensors follow it in
# binary, only their length is checked again; if they are one flat list of numbers inside it, only that list is read.

REMEMBERED = 256  # per model
LONGEST = 4096  # bytes; longer JSON is not remembered
PIECE_VALUES = 1 << 12  # of an answer; to write them as JSON takes a few tenths of a millisecond

Pieces = list[bytes | bytearray | memoryview]  # of an answer; the memory of memoryviews may be the engine's
Around = tuple[bytes, bytes]  # the JSON before and after the part that may differ


class Repeated:
    """The JSON of a model's requests: the place of its tensors in the bytes that follow, and its meaning."""

    __slots__ = ("answer", "meaning", "nbytes", "tensors")

    def __init__(self, arrays: Mapping[str, NDArray[Any]], meaning: Any, nbytes: int) -> None:
        """`arrays` follow one another in this order, `nbytes` in all; `meaning` is any object of the caller's."""
        self.tensors: list[tuple[str, np.dtype[Any], int, int, tuple[int, ...]]] = []
        self.nbytes = nbytes
        at = 0
        for name, array in arrays.items():
            self.tensors.append((name, array.dtype, array.size, at, array.shape))
            at += array.nbytes
        self.meaning = meaning
        # The answer's JSON around its lists of values is the same each time too.
        self.answer: list[bytes] | None = None

    def pieces(self, names: Iterable[str], tail: memoryview) -> Sequence[memoryview]:
        """The bytes of the tensors of these names, without their conversion to arrays."""
        if len(self.tensors) == 1:
            return (tail,)
        place = {name: slice(at, at + count * dtype.itemsize) for name, dtype, count, at, _ in self.tensors}
        return [tail[place[name]] for name in names]

    def arrays(self, tail: memoryview) -> dict[str, NDArray[Any]]:
        return {
            name: np.frombuffer(tail, dtype, count, offset).reshape(shape)
            for name, dtype, count, offset, shape in self.tensors
        }


_repeats: dict[int, dict[Around, Repeated]] = {}  # by id(model), for as long as the model lives


def parts(body: bytes) -> tuple[Around | None, bytes]:
    """The JSON around its first list, and that list. `starts_at` tells whether the list is a tensor's data.

    >>> parts(b'{"data": [1, 2], "x": 3}')
    ((b'{"data": ', b', "x": 3}'), b'[1, 2]')
    """
    start = body.find(b"[", body.find(b'"data"') + 1)
    end = body.find(b"]", start) + 1
    if start < 0 or end <= 0 or len(body) - (end - start) > LONGEST:
        return None, b""
    return (body[:start], body[end:]), body[start:end]


def starts_at(value: msgspec.Raw, body: memoryview, around: Around) -> bool:
    """Whether this value lies exactly between the parts of `around`; then another list there changes only the numbers.

    Its text alone is not enough: the same list may also stand elsewhere.
    """
    before, after = around
    place = _address(value) - _address(body)
    return place == len(before) and len(memoryview(value)) == len(body) - len(before) - len(after)


def _address(of: Any) -> int:
    return int(np.frombuffer(of, np.uint8).ctypes.data)


def find(model: Served, around: Around, nbytes: int) -> Repeated | None:
    """The remembered JSON, if as many bytes of tensors follow it as before."""
    known = _repeats.get(id(model))
    found = None if known is None else known.get(around)
    return found if found is not None and found.nbytes == nbytes else None


def keep(model: Served, around: Around, repeated: Repeated) -> None:
    known = _repeats.get(id(model))
    if known is None:
        known = _repeats.setdefault(id(model), {})  # another thread may be here too
        finalize(model, _repeats.pop, id(model), None).atexit = False
    if len(known) >= REMEMBERED:  # e.g. by a client that numbers its requests
        known.clear()
    known[around] = repeated


HEADER_LENGTH = "Inference-Header-Content-Length"

Parameters = dict[str, Any]

PRIORITY_LEVELS = 1 << 30  # 1 goes first, as in Triton; the engine's own priorities are in reverse order
DEFAULT_LEVEL = 10  # level of a request without a priority
MOST_TIMEOUT_US = 10**15  # 31 years: as nanoseconds it still fits into 64 bits
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
    length: int = 0  # of inputs that were padded to the model's largest; 0: lengths do not vary

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The inputs as arrays."""
        return self.inputs if self.tail is None or self.repeated is None else self.repeated.arrays(self.tail)


_decode = msgspec.json.Decoder(RequestBody).decode


def decode(model: Served, body: bytes | memoryview, header_length: str | None, as_bytes: bool = False) -> Request:
    """A request of the model; RequestError says what is wrong with an invalid one. `as_bytes`: the inputs of one item
    whose JSON is known may stay bytes.
    """
    header, tail = split(memoryview(body), header_length)
    around: tuple[bytes, bytes] | None = None  # the parts of a known JSON that do not change
    text = b""  # its list of numbers, which does
    lists: dict[int, memoryview] = {}  # long lists of numbers, by their place in the JSON without them
    if len(header) > PIECE_BYTES:
        header, lists = _without_lists(header, model.takes)
    elif len(tail):
        if len(header) <= LONGEST:
            around = bytes(header), b""
    else:
        around, text = parts(bytes(header))
    if around is not None and (repeated := find(model, around, len(tail))) is not None:
        number, items, outputs, level, timeout_us = repeated.meaning
        if as_bytes and items == 1 and not model.ranges and model.lengths is None:
            stays = tail if len(tail) else _known_bytes(repeated, text)
            if stays is not None:
                priority = engine_priority(model.priority, level)
                return Request(number, 1, True, {}, outputs, priority, timeout_us, repeated, stays)
        found = repeated.arrays(tail) if len(tail) else _known_numbers(repeated, text)
        if found is not None:
            found, length = _padded(model, found)
            if model.ranges:
                check_ranges(model, found)
            priority = engine_priority(model.priority, level)
            return Request(number, items, True, found, outputs, priority, timeout_us, repeated, length=length)
    request = _parsed(header, lists)
    arrays = _tensors(model, request, tail)
    items, batched = _batch(model, arrays)
    if not batched:
        arrays = {key: array[np.newaxis] for key, array in arrays.items()}
    given, (arrays, length) = arrays, _padded(model, arrays)
    if model.ranges:
        check_ranges(model, arrays)
    outputs = _outputs(model, request)
    level, timeout_us = scheduling(request.parameters)
    repeated = None
    lasts = around is not None and batched and not has_texts(model.takes)
    if around is not None and lasts and _comes_again(request, given, header, tail, around):
        repeated = Repeated(given, (request.id, items, outputs, level, timeout_us), len(tail))
        keep(model, around, repeated)
    priority = engine_priority(model.priority, level)
    return Request(request.id, items, batched, arrays, outputs, priority, timeout_us, repeated, length=length)


def _padded(model: Served, arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], int]:
    """Inputs of any length at the model's largest, and their length; 0 where lengths do not vary."""
    if model.lengths is None or model.has_steps:  # the engine pads what the function before it returns
        return arrays, 0
    return model.lengths.padded(model.name, model.inputs, arrays)


def _tensors(model: Served, request: RequestBody, tail: memoryview) -> dict[str, NDArray[Any]]:
    """The request's inputs by name."""
    binary = BinaryTensors(tail)
    arrays: dict[str, NDArray[Any]] = {}
    for tensor in request.inputs:
        spec = model.takes.get(tensor.name)
        if spec is None or tensor.name in arrays:
            problem = "is not an input of" if spec is None else "appears twice in a request to"
            takes = ", ".join(model.takes)
            said = f"{short(tensor.name)} {problem} model {model.name!r}; it takes {takes}"
            raise RequestError(said, field="inputs", limit=list(model.takes), given=tensor.name)
        arrays[tensor.name] = _array(tensor, spec, binary, model)
    mask = model.lengths.mask if model.lengths is not None and model.before is None else None
    if missing := [key for key in model.takes if key not in arrays and key != mask]:
        said = f"model {model.name!r} needs the missing input {', '.join(missing)}"
        raise RequestError(said, field="inputs", limit=list(model.takes), given=list(arrays))
    binary.check_used()
    return arrays


def _parsed(header: memoryview, lists: dict[int, memoryview]) -> RequestBody:
    """The decoded JSON, with the long lists that were cut out of it."""
    try:
        request = _decode(header)
    except NOT_JSON as e:
        raise RequestError(f"the body is not a v2 inference request: {e}", field="body") from None
    for tensor in request.inputs if lists else ():
        if isinstance(tensor.data, msgspec.Raw):
            cut = lists.pop(_address(tensor.data) - _address(header), None)
            tensor.data = tensor.data if cut is None else msgspec.Raw(cut)
    if lists:
        raise RequestError("a long list of numbers is not the data of an input", field="body")
    return request


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
        return {name: numbers(text, dtype, shape, Where("", name))}
    except RequestError:
        return None


def split(body: memoryview, header_length: str | None) -> tuple[memoryview, memoryview]:
    """The JSON, and the bytes that follow it."""
    if header_length is None:
        return body, body[len(body) :]
    # int() would also accept "+5", " 5 " and "1_000".
    if not (header_length.isascii() and header_length.isdigit()) or len(header_length) > 18:
        said = f"{HEADER_LENGTH}: {header_length[:40]!r} is not a whole number of bytes"
        raise RequestError(said, field=HEADER_LENGTH, given=header_length)
    length = int(header_length)
    if length > len(body):
        said = f"{HEADER_LENGTH} is {length}, but the body has {len(body)} bytes"
        raise RequestError(said, field=HEADER_LENGTH, limit=len(body), given=length)
    return body[:length], body[length:]


# Long JSON is mostly lists of numbers. They are cut out before the rest is decoded: the decoder holds the interpreter,
# so it gets no long text, whatever a client sends.

SEARCHED_BYTES = 1 << 20  # at once for quotation marks
CUT_BYTES = 512  # length from which a text between two quotation marks is searched for a list
EDGE_BYTES = 4096  # of such a text, at both ends, in which its list begins and ends
_BEGIN = re.compile(rb"\s*:\s*(\[[\s\[]*)")
_END = re.compile(rb"[^\s\[\]{},]([\s\[\]{},]*)\Z")


def has_texts(specs: Mapping[str, TensorSpec]) -> bool:
    return any(spec.is_text for spec in specs.values())


def _without_lists(
    header: memoryview, takes: Mapping[str, TensorSpec]
) -> tuple[memoryview, dict[int, memoryview]]:
    """The JSON with `null` in place of long lists of numbers, and these lists by their place in it. RequestError: the
    rest is longer than any request for these inputs needs.
    """
    kept, lists = bytearray(), dict[int, memoryview]()
    most = BESIDE_BYTES + 2 * CUT_BYTES * len(takes) + has_texts(takes) * TEXT_BYTES
    begin = 0  # of the part that is not kept yet
    previous = -1  # place of the last quotation mark

    def keep(upto: int) -> None:
        nonlocal begin
        if len(kept) + upto - begin > most:
            said = f"the JSON has more than {most:,} bytes beside its numbers: send long texts as binary tensors"
            raise RequestError(said, field="body", limit=most, given=len(kept) + upto - begin)
        kept.extend(header[begin:upto])
        begin = upto

    for mark in _quotation_marks(header):
        if mark - previous > CUT_BYTES and previous >= 0:
            found = _list_in(header, previous + 1, mark)
            if found is not None:
                keep(found[0])
                lists[len(kept)] = header[found[0] : found[1]]
                kept += b"null"
                begin = found[1]
        previous = mark
        if mark - begin > EDGE_BYTES:
            keep(mark)
    keep(len(header))
    return memoryview(bytes(kept)), lists


def _quotation_marks(text: memoryview) -> Iterator[int]:
    """The places of all quotation marks, and the text's end. NumPy searches without the interpreter."""
    for at in range(0, len(text), SEARCHED_BYTES):
        marks = np.flatnonzero(np.frombuffer(text[at : at + SEARCHED_BYTES], np.uint8) == ord('"'))
        for k in range(0, len(marks), PIECE_VALUES):
            for mark in marks[k : k + PIECE_VALUES].tolist():
                yield at + mark
    yield len(text)


def _list_in(text: memoryview, begin: int, end: int) -> tuple[int, int] | None:
    """Begin and end of the list that follows a name between these places."""
    first = _BEGIN.match(bytes(text[begin : min(end, begin + EDGE_BYTES)]))
    edge = max(begin, end - EDGE_BYTES)
    last = _END.search(bytes(text[edge:end]))
    if first is None or last is None:
        return None
    at = edge + last.start(1)
    for closed in last[1].replace(b"[", b"{").split(b"]")[: first[1].count(b"[")]:
        if closed.strip():  # another list or object
            return None
        at += len(closed) + 1
    return (begin + first.start(1), at) if at <= end else None


class BinaryTensors:
    """The bytes after the JSON: tensors one after another, in the order of the request's inputs."""

    def __init__(self, tail: memoryview) -> None:
        self._tail, self._at = tail, 0

    def take(self, size: int, where: Where) -> memoryview:
        if self._at + size > len(self._tail):
            left = len(self._tail) - self._at
            raise where.error(
                f"binary_data_size is {size}, but only {left} bytes are left", "binary_data_size", left, size
            )
        self._at += size
        return self._tail[self._at - size : self._at]

    def check_used(self) -> None:
        if left := len(self._tail) - self._at:
            said = f"{left} bytes at the end of the body belong to no input; check each binary_data_size"
            raise RequestError(said, field="body", limit=self._at, given=len(self._tail))


def _array(tensor: RequestTensor, spec: TensorSpec, binary: BinaryTensors, model: Served) -> NDArray[Any]:
    where = Where(model.name, tensor.name)
    check_datatype(tensor.datatype[:40], spec.dtype, where)
    for name in _UNSUPPORTED:
        if name in tensor.parameters:
            raise where.error(f"{name} is not supported; send the tensor in the body", name)
    shape, wants = tuple(tensor.shape), spec.shape
    if model.lengths is not None and model.before is None:
        wants = model.lengths.wanted(tensor.name, wants, shape)
    if shape != wants and (shape[1:] != wants or not shape or shape[0] < 1):
        wanted = ", ".join(map(str, ("n", *wants)))
        said = f"the shape is {short(tensor.shape)}; the model takes [{wanted}] with n ≥ 1"
        raise where.error(said, "shape", ("n", *wants), tensor.shape)
    if shape != wants and shape[0] > model.max_batch:  # before its numbers are read: the shape may be any
        said = f"a request has up to {model.max_batch} items, not {short(shape[0])}: split the batch"
        raise where.error(said, "shape", model.max_batch, shape[0])
    count = math.prod(shape)
    size = tensor.parameters.get("binary_data_size")
    if size is None:
        if isinstance(tensor.data, msgspec.UnsetType):
            raise where.error('send "data" or the parameter "binary_data_size"', "data")
        if spec.is_text:
            return json_texts(tensor.data, spec.dtype, shape, where)
        return numbers(tensor.data, spec.dtype, shape, where)
    if not isinstance(tensor.data, msgspec.UnsetType):
        raise where.error('send "data" or the parameter "binary_data_size", not both', "data")
    if spec.is_text and isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return binary_texts(binary.take(size, where), spec.dtype, shape, where)
    if not isinstance(size, int) or isinstance(size, bool) or size != count * spec.dtype.itemsize:
        wanted_bytes = count * spec.dtype.itemsize
        said = f"binary_data_size is {short(size)}, but the shape takes {wanted_bytes} bytes of {tensor.datatype}"
        raise where.error(said, "binary_data_size", wanted_bytes, size)
    piece = binary.take(size, where)
    if spec.dtype.kind == "b":  # NumPy's operations need bytes that are 0 or 1
        return np.frombuffer(piece, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(piece, spec.dtype).reshape(shape)


def _batch(model: Served, arrays: dict[str, NDArray[Any]]) -> tuple[int, bool]:
    """The number of items in the request, and whether its tensors have a batch axis."""
    found = {key: a.shape[0] if a.ndim > len(model.takes[key].shape) else None for key, a in arrays.items()}
    counts = set(found.values())
    if len(counts) > 1:
        said = ", ".join(f"{key}: {'no batch axis' if n is None else n}" for key, n in found.items())
        said = f"model {model.name!r}: all inputs must have the same batch size ({said})"
        raise RequestError(said, field="inputs", given=found)
    items = counts.pop()
    return items or 1, items is not None


def _outputs(model: Served, request: RequestBody) -> list[Output]:
    everything = _flag(request.parameters, "binary_data_output", False)
    if not request.outputs:
        return [Output(key, everything) for key in model.gives]
    found: dict[str, Output] = {}
    for each in request.outputs:
        spec = model.gives.get(each.name)
        if spec is None or each.name in found:
            problem = "is not an output of" if spec is None else "is asked for twice of"
            said = f"{short(each.name)} {problem} model {model.name!r}; it has {', '.join(model.gives)}"
            raise RequestError(said, field="outputs", limit=list(model.gives), given=each.name)
        where = Where(model.name, each.name, "output")
        for name in _UNSUPPORTED:
            if name in each.parameters:
                raise where.error(f"{name} is not supported; outputs are sent in the body", name)
        classes = each.parameters.get("classification", 0)
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
            said = f"classification is {short(classes)}; it must be a whole number from 0"
            raise where.error(said, "classification", given=classes)
        if classes and (len(spec.shape) != 1 or spec.dtype.kind not in "fiu"):
            raise where.error("it has no classes: only vectors of floats or integers have them", "classification")
        binary = _flag(each.parameters, "binary_data", everything, f"outputs.{each.name}")
        found[each.name] = Output(each.name, binary, classes)
    return list(found.values())


def _flag(parameters: Parameters, name: str, default: bool, of: str = "parameters") -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        said = f"the parameter {name} is {short(value)}; it must be true or false"
        raise RequestError(said, field=f"{of}.{name}", given=value)
    return value


def scheduling(parameters: Parameters) -> tuple[int | None, float | None]:
    """The priority and the timeout in microseconds."""
    level, timeout_us = parameters.get("priority"), parameters.get("timeout")
    if parameters.get("sequence_id"):
        said = "sequences are not supported: no model keeps a state between requests; leave out sequence_id"
        raise RequestError(said, field="parameters.sequence_id", given=parameters["sequence_id"])
    if level is not None and (type(level) is not int or not 0 <= level <= PRIORITY_LEVELS):
        said = f"it must be a whole number up to {PRIORITY_LEVELS}: 1 goes first, then 2 …; 0 means none"
        said = f"the parameter priority is {short(level)}; {said}"
        raise RequestError(said, field="parameters.priority", limit=PRIORITY_LEVELS, given=level)
    if timeout_us is not None and (type(timeout_us) not in (int, float) or not 0 <= timeout_us <= MOST_TIMEOUT_US):
        said = f"it must be microseconds up to {MOST_TIMEOUT_US}; 0 means none"
        said = f"the parameter timeout is {short(timeout_us)}; {said}"
        raise RequestError(said, field="parameters.timeout", limit=MOST_TIMEOUT_US, given=timeout_us)
    return level, timeout_us or None


def engine_priority(own: int, level: int | None) -> int | None:
    """The engine's priority for the protocol's level, where the model's is `own`; None: the model's."""
    return own + DEFAULT_LEVEL - level if level else None


# Answers of the Open Inference Protocol v2: JSON, the binary tensor extension, and the classification extension.

_encode = msgspec.json.Encoder().encode


class ResponseTensor(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET


class ResponseBody(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[ResponseTensor]
    id: str = ""


def known_answer(request: Request) -> bytes | None:
    """The JSON of the answer, if an earlier one was equal and only binary tensors follow it."""
    repeated = request.repeated
    known = None if repeated is None else repeated.answer
    return known[0] if known is not None and len(known) == 1 else None


def values_in_json(request: Request, results: dict[str, NDArray[Any]]) -> int:
    """The number of values that `encode` must write as text, or sort."""
    return sum(results[output.name].size for output in request.outputs if output.classes or not output.binary)


def encode(
    model: Served,
    version: str,
    request: Request,
    results: dict[str, NDArray[Any]],
    claim: Callable[[int], None] = lambda nbytes: None,
) -> tuple[Pieces, int | None]:
    """The answer's body in pieces, and the length of its JSON if binary tensors follow.

    `results` maps each output to an array [items, …]. `claim` is called with the bytes of text made so far.
    """
    arrays = [
        classify(results[output.name], output.classes) if output.classes else results[output.name]
        for output in request.outputs
    ]
    tail: Pieces = [
        text_bytes(array) if array.dtype.kind == "O" else _raw(array)
        for output, array in zip(request.outputs, arrays, strict=True)
        if output.binary
    ]
    repeated = request.repeated
    around = None if repeated is None else repeated.answer
    if around is None:
        around = _around(model, version, request, arrays, list(map(len, tail)))
        if repeated is not None and not any(array.dtype.kind == "O" for array in arrays):
            repeated.answer = around
    header: Pieces = [around[0]]
    lists = ((output, array) for output, array in zip(request.outputs, arrays, strict=True) if not output.binary)
    for (output, array), text in zip(lists, around[1:], strict=True):
        header += (_values(array, Where(model.name, output.name, "output"), claim), text)
    return header + tail, sum(map(len, header)) if tail else None


def _around(model: Served, version: str, request: Request, arrays: list[NDArray[Any]], sizes: list[int]) -> list[bytes]:
    """The answer's JSON around its lists of values. `sizes`: of the binary tensors that follow."""
    tensors, left = [], iter(sizes)
    for output, array in zip(request.outputs, arrays, strict=True):
        name = "BYTES" if output.classes else datatype(model.gives[output.name].dtype)
        shape = list(array.shape if request.batched else array.shape[1:])
        if output.binary:
            tensors.append(ResponseTensor(output.name, name, shape, {"binary_data_size": next(left)}))
        else:
            tensors.append(ResponseTensor(output.name, name, shape, data=[]))
    # This text cannot occur inside a JSON string, where quotation marks are escaped.
    texts = _encode(ResponseBody(model.name, version, tensors, request.id)).split(b'"data":[]')
    return [b'%b"data":' % text for text in texts[:-1]] + texts[-1:]


def _values(array: NDArray[Any], where: Where, claim: Callable[[int], None]) -> bytes | bytearray:
    """A JSON list of the values. A long one is made piece by piece: between two pieces other threads can run."""
    flat = array.reshape(-1)
    if flat.size <= PIECE_VALUES:
        return _encode(_plain(flat, where))
    text = bytearray(b"[")
    for at in range(0, flat.size, PIECE_VALUES):
        text += memoryview(_encode(_plain(flat[at : at + PIECE_VALUES], where)))[1:-1]
        text += b","
        claim(len(text))
    text[-1:] = b"]"
    return text


def _plain(array: NDArray[Any], where: Where) -> list[Any]:
    if array.dtype.kind == "O":
        return text_values(array, where)
    found: list[Any] = (array.astype(np.float32) if array.dtype.char in "eE" else array).tolist()
    return found


def _raw(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def classify(scores: NDArray[Any], classes: int) -> NDArray[Any]:
    """The classification extension: the best classes of every item as "score:index".

    >>> classify(np.array([[0.25, 0.75]]), 1)[0, 0]
    '0.750000:1'
    """
    # Negated integers may not fit into their type; ~ reverses the order of all integers.
    downwards = ~scores if scores.dtype.kind in "iu" else -scores
    best = np.argsort(downwards, axis=1, kind="stable")[:, :classes]
    score = str if scores.dtype.kind in "iu" else "{:f}".format
    texts = [[f"{score(row[k].item())}:{k}" for k in ks] for row, ks in zip(scores, best, strict=True)]
    return np.array(texts, dtype=object)
