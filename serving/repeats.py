"""Requests whose JSON was seen before. Clients send the same JSON again and again, around tensors that differ.

The JSON was checked the first time, and its meaning does not depend on the tensors. If the tensors follow it in binary,
only their length is checked again; if they are one flat list of numbers inside it, only that list is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.models.model import Model

REMEMBERED = 256  # per model
LONGEST = 4096  # bytes; longer JSON is not remembered

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
        # The answer's JSON is the same each time too: the part before its binary tensors, or around its lists.
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


def find(model: Model, around: Around, nbytes: int) -> Repeated | None:
    """The remembered JSON, if as many bytes of tensors follow it as before."""
    known = _repeats.get(id(model))
    found = None if known is None else known.get(around)
    return found if found is not None and found.nbytes == nbytes else None


def keep(model: Model, around: Around, repeated: Repeated) -> None:
    known = _repeats.get(id(model))
    if known is None:
        known = _repeats.setdefault(id(model), {})  # another thread may be here too
        finalize(model, _repeats.pop, id(model), None).atexit = False
    if len(known) >= REMEMBERED:  # e.g. by a client that numbers its requests
        known.clear()
    known[around] = repeated
