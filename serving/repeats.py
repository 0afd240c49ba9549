"""Requests whose JSON was seen before. Clients send the same JSON again and again, around tensors that differ.

What it says has been checked then, and does not depend on the tensors. Where those follow the JSON in binary, only
their length is looked at again; where they are numbers in it, one flat list of them, only that list is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.models.model import Model

REMEMBERED = 256  # of a model
LONGEST = 4096  # bytes; a longer one is read again

Around = tuple[bytes, bytes]  # JSON before and after what may differ


class Repeated:
    """The JSON of a model's requests: where its tensors are in what follows, and what is made of it."""

    __slots__ = ("answer", "meaning", "nbytes", "tensors")

    def __init__(self, arrays: Mapping[str, NDArray[Any]], meaning: Any, nbytes: int) -> None:
        """`arrays` lie one after the other in the `nbytes` that follow, in this order; `meaning` is the caller's."""
        self.tensors: list[tuple[str, np.dtype[Any], int, int, tuple[int, ...]]] = []
        self.nbytes = nbytes
        at = 0
        for name, array in arrays.items():
            self.tensors.append((name, array.dtype, array.size, at, array.shape))
            at += array.nbytes
        self.meaning = meaning
        # The answer's JSON, which is the same every time too: before its binary tensors, or around its lists.
        self.answer: list[bytes] | None = None

    def arrays(self, tail: memoryview) -> dict[str, NDArray[Any]]:
        return {
            name: np.frombuffer(tail, dtype, count, offset).reshape(shape)
            for name, dtype, count, offset, shape in self.tensors
        }


_repeats: WeakKeyDictionary[Model, dict[Around, Repeated]] = WeakKeyDictionary()


def parts(body: bytes) -> tuple[Around | None, bytes]:
    """JSON around what may be its list of numbers, and that list. It is one if `starts_at` said so of the same JSON.

    >>> parts(b'{"data": [1, 2], "x": 3}')
    ((b'{"data": ', b', "x": 3}'), b'[1, 2]')
    """
    start = body.find(b"[", body.find(b'"data"') + 1)
    end = body.find(b"]", start) + 1
    if start < 0 or end <= 0 or len(body) - (end - start) > LONGEST:
        return None, b""
    return (body[:start], body[end:]), body[start:end]


def starts_at(value: msgspec.Raw, body: memoryview, around: Around) -> bool:
    """Whether this value of the JSON is exactly what lies between. Any other list there makes JSON of the same meaning.

    Its text alone does not tell: the same list may be somewhere else too.
    """
    before, after = around
    place = _address(value) - _address(body)
    return place == len(before) and len(memoryview(value)) == len(body) - len(before) - len(after)


def _address(of: Any) -> int:
    return int(np.frombuffer(of, np.uint8).ctypes.data)


def find(model: Model, around: Around, nbytes: int) -> Repeated | None:
    """As it was kept, where `nbytes` of tensors follow it as they did then."""
    known = _repeats.get(model)
    found = None if known is None else known.get(around)
    return found if found is not None and found.nbytes == nbytes else None


def keep(model: Model, around: Around, repeated: Repeated) -> None:
    known = _repeats.setdefault(model, {})
    if len(known) >= REMEMBERED:  # clients that number their requests
        known.clear()
    known[around] = repeated
