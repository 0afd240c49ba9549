"""Tensors around a model's function: their shapes and types, and what captures and lanes ask of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import ModelError

Arrays = dict[str, Any]
ModelFunction = Callable[[Arrays, Arrays, Arrays], None]


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """Shape and element type of one tensor of one request: without the batch dimension.

    `low` and `high`, the least and the largest value that an input takes, are checked before it runs: a GPU does not
    notice that an index is beyond its table until the device is lost.

    >>> TensorSpec((3, 8), "float16").nbytes
    48
    >>> TensorSpec((128,), "int64", low=0, high=30521)
    TensorSpec((128,), 'int64', low=0, high=30521)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: float | None
    high: float | None

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.float32,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(n, int | np.integer) and n > 0 for n in extents):
            raise ModelError(f"a tensor of shape {shape!r}: extents are whole numbers above zero")
        object.__setattr__(self, "shape", tuple(int(n) for n in extents))
        try:
            object.__setattr__(self, "dtype", np.dtype(dtype))
        except TypeError:
            raise ModelError(f"a tensor of {dtype!r}: that is no element type; give one of NumPy's") from None
        for name, value in (("low", low), ("high", high)):
            if value is not None and (not isinstance(value, Real) or isinstance(value, bool) or value != value):
                raise ModelError(f"a tensor with {name}={value!r}: a bound is a number, or None")
            object.__setattr__(self, name, value)
        if low is not None and high is not None and low > high:
            raise ModelError(f"a tensor with low={low} and high={high}: no value lies between them")
        if (low is not None or high is not None) and self.dtype.kind not in "iuf":
            raise ModelError(f"a tensor of {self.dtype.name} with a range: only whole and real numbers have one")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_range(self) -> bool:
        return self.low is not None or self.high is not None

    @property
    def neutral(self) -> float:
        """The value next to zero that is in the range: what a trial run is given."""
        return min(max(0, -np.inf if self.low is None else self.low), np.inf if self.high is None else self.high)

    def outside(self, array: NDArray[Any]) -> str | None:
        """What is wrong with values that are not in the range; None: nothing is. Not-a-number is in no range.

        >>> TensorSpec((2,), "int64", low=0, high=9).outside(np.array([3, 11]))
        'has the value 11; it takes 0 to 9'
        """
        inside = np.ones((), bool)
        if self.low is not None:
            inside = array >= self.low
        if self.high is not None:
            inside = inside & (array <= self.high)
        if inside.all():
            return None
        first = array.reshape(-1)[int(np.argmin(np.broadcast_to(inside, array.shape).reshape(-1)))]
        takes = f"{self.low} to {self.high}"
        if self.low is None or self.high is None:
            takes = f"{self.low} and above" if self.high is None else f"up to {self.high}"
        return f"has the value {first}; it takes {takes}"

    def __repr__(self) -> str:
        bounds = "".join(f", {k}={v}" for k, v in (("low", self.low), ("high", self.high)) if v is not None)
        return f"TensorSpec({self.shape}, {self.dtype.name!r}{bounds})"


class Capturable(Protocol):
    """A model as captures, lanes and programs see it: `Model`, which is built on them, is one."""

    name: str
    batch: tuple[int, ...]
    priority: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]

    @property
    def fn(self) -> Callable[[Arrays, Arrays, Arrays], object]: ...  # a user's may return something, and is refused
    @property
    def max_batch(self) -> int: ...
    @property
    def uses_torch(self) -> bool: ...
    @property
    def stateful(self) -> bool: ...
    @property
    def source(self) -> Any: ...


class Weights(Protocol):
    """Weights that know how to get onto a device: those of a PyTorch module."""

    uses_torch: bool  # whether the model's function calls PyTorch
    stateful: bool  # whether its function changes them

    @property
    def nbytes(self) -> int: ...
    def place(self, model: str, device: Device) -> Arrays:
        """What the model's function is given as weights; `model` is the name that errors mention."""
    def preserved(self) -> AbstractContextManager[None]:
        """What is run inside leaves the weights as they were."""


@runtime_checkable
class MovableWeights(Protocol):
    """Weights that can lie in memory that comes and goes."""

    def parts(self) -> list[Any]:
        """The bytes of each piece of memory that weights lie in, on the host; in about the order of use."""

    def place_over(self, model: str, device: Device, at: Callable[[int, int], Any]) -> Arrays:
        """As `place`, in memory that is there: `at(k, nbytes)` is the array of bytes for part k."""
