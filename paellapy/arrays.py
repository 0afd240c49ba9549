"""Arrays and streams of the current device: `pp.array`, `pp.empty`, `pp.zeros` and `pp.stream`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.device import Array, Device, Stream


def array(data: NDArray[Any]) -> Array:
    """A copy of `data` in the current device's memory."""
    return Device.current().array(np.asarray(data))


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Uninitialised memory on the current device."""
    return Device.current().empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Memory of zeros on the current device."""
    return Device.current().array(np.zeros(shape, dtype))


def empty_like(other: Any, dtype: DTypeLike | None = None) -> Array:
    """Uninitialised memory on the current device, with another array's shape, and its type unless `dtype` is given."""
    return Device.current().empty(tuple(other.shape), other.dtype if dtype is None else dtype)


def stream(priority: int = 0) -> Stream:
    """A new stream of the current device; `with stream:` makes it current. Larger priorities go first."""
    return Device.current().stream(priority)
