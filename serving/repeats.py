"""Requests whose JSON was seen before. Clients that send tensors in binary send the same JSON again and again.

What it says has been checked then, and does not depend on the tensors' bytes: only their number is looked at again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from scheduler.model import Model

REMEMBERED = 256  # of a model
LONGEST = 4096  # bytes; a longer one is read again


class Repeated:
    """One JSON header of a model's requests: where its tensors are in what follows, and what is made of it."""

    __slots__ = ("answer", "meaning", "nbytes", "tensors")

    def __init__(self, arrays: Mapping[str, NDArray[Any]], meaning: Any) -> None:
        """`arrays` lie one after the other, in this order; `meaning` is the caller's."""
        self.tensors: list[tuple[str, np.dtype[Any], int, int, tuple[int, ...]]] = []
        self.nbytes = 0
        for name, array in arrays.items():
            self.tensors.append((name, array.dtype, array.size, self.nbytes, array.shape))
            self.nbytes += array.nbytes
        self.meaning = meaning
        self.answer: bytes | None = None  # the JSON before the answer's tensors, which is the same every time too

    def arrays(self, tail: memoryview) -> dict[str, NDArray[Any]]:
        return {
            name: np.frombuffer(tail, dtype, count, offset).reshape(shape)
            for name, dtype, count, offset, shape in self.tensors
        }


_repeats: WeakKeyDictionary[Model, dict[bytes, Repeated]] = WeakKeyDictionary()


def find(model: Model, header: bytes, nbytes: int) -> Repeated | None:
    """As it was kept, where `nbytes` of tensors follow it as they did then."""
    known = _repeats.get(model)
    found = None if known is None else known.get(header)
    return found if found is not None and found.nbytes == nbytes else None


def keep(model: Model, header: bytes, repeated: Repeated) -> None:
    known = _repeats.setdefault(model, {})
    if len(known) >= REMEMBERED:  # clients that number their requests
        known.clear()
    known[header] = repeated
