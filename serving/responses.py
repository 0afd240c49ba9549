"""Answers of the Open Inference Protocol v2: JSON, the binary tensor extension, and the classification extension."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.models.model import Model
from paellapy.serving.datatypes import datatype
from paellapy.serving.protocol import Parameters, Request

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


def encode(
    model: Model, version: str, request: Request, results: dict[str, NDArray[Any]]
) -> tuple[list[bytes | memoryview], int | None]:
    """The answer's body in pieces, and the length of its JSON if binary tensors follow.

    `results` maps each output to an array [items, …].
    """
    repeated = request.repeated
    if repeated is not None and repeated.answer is not None:
        known = repeated.answer
        if len(known) == 1:
            return [known[0], *(_raw(results[output.name]) for output in request.outputs)], len(known[0])
        pieces: list[bytes | memoryview] = [known[0]]
        for output, text in zip(request.outputs, known[1:], strict=True):
            pieces += (_encode(_values(results[output.name])), text)
        return pieces, None
    tensors: list[ResponseTensor] = []
    tail: list[bytes | memoryview] = []
    for output in request.outputs:
        array = results[output.name]
        name = datatype(model.outputs[output.name].dtype)
        if output.classes:
            array, name = classify(array, output.classes), "BYTES"
        shape = list(array.shape if request.batched else array.shape[1:])
        if output.binary:
            data = _texts(array) if name == "BYTES" else _raw(array)
            tail.append(data)
            tensors.append(ResponseTensor(output.name, name, shape, {"binary_data_size": len(data)}))
        else:
            tensors.append(ResponseTensor(output.name, name, shape, data=_values(array)))
    header = _encode(ResponseBody(model.name, version, tensors, request.id))
    if repeated is not None and not any(output.classes for output in request.outputs):
        if len(tail) == len(tensors):
            repeated.answer = [header]
        elif not tail:
            for tensor in tensors:
                tensor.data = []
            # This text cannot occur inside a JSON string, where quotation marks are escaped.
            empty = _encode(ResponseBody(model.name, version, tensors, request.id)).split(b'"data":[]')
            repeated.answer = [b'%b"data":' % text for text in empty[:-1]] + empty[-1:]
    return [header, *tail], len(header) if tail else None


def _values(array: NDArray[Any]) -> list[Any]:
    """The values as JSON numbers."""
    flat: list[Any] = (array.astype(np.float32) if array.dtype.char in "eE" else array).reshape(-1).tolist()
    return flat


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


def _texts(array: NDArray[Any]) -> bytes:
    """BYTES: each element is its length in four bytes, followed by the text."""
    parts = (str(each).encode() for each in array.reshape(-1))
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
