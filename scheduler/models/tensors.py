"""The tensors of a model's function, and the parts of a model that captures and instances use."""

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


def wrong(model: str, field: str, given: Any, why: str) -> ModelError:
    """The error for an option or a tensor that a model cannot have."""
    return ModelError(f"model {model!r}: {why}", model=model, field=field, given=given)


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """Shape and element type of one tensor of one request, without the batch dimension.

    `low` and `high`, the smallest and the largest value of an input, are checked before it runs: a GPU that reads
    beyond a table may fail for all requests, and does not report which index was wrong.

    >>> TensorSpec((3, 8), "float16").nbytes
    48
    >>> TensorSpec((128,), "int64", low=0, high=30521)
    TensorSpec((128,), 'int64', low=0, high=30521)

    Requests with steps before the model may also hold texts and files: `TensorSpec((), str)`, `TensorSpec((), bytes)`.
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
            raise ModelError(f"shape={shape!r}: extents must be integers above 0", field="shape", given=shape)
        object.__setattr__(self, "shape", tuple(int(n) for n in extents))
        try:
            object.__setattr__(self, "dtype", np.dtype(dtype))
        except TypeError:
            raise ModelError(f"dtype={dtype!r}: it must be one of NumPy's types", field="dtype", given=dtype) from None
        for name, value in (("low", low), ("high", high)):
            if value is not None and (not isinstance(value, Real) or isinstance(value, bool) or value != value):
                raise ModelError(f"{name}={value!r}: a bound must be a number, or None", field=name, given=value)
            object.__setattr__(self, name, value)
        if low is not None and high is not None and low > high:
            raise ModelError(f"low={low} and high={high}: `low` must not be above `high`", field="low", limit=high)
        if (low is not None or high is not None) and self.dtype.kind not in "iuf":
            raise ModelError(
                f"dtype {self.dtype.name} cannot have low or high: only integers and real numbers have a range",
                field="dtype", given=dtype,
            )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_text(self) -> bool:
        """Whether its elements are texts or bytes, of any length."""
        return self.dtype.kind in "SU"

    @property
    def has_range(self) -> bool:
        return self.low is not None or self.high is not None

    @property
    def neutral(self) -> float:
        """The value in the range that is closest to zero, used for trial runs."""
        return min(max(0, -np.inf if self.low is None else self.low), np.inf if self.high is None else self.high)

    def outside(self, array: NDArray[Any]) -> str | None:
        """Describes the first value outside the range; None if there is none. Not-a-number is outside every range.

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
    """The parts of a model that captures, instances and programs use; implemented by `Model`."""

    name: str
    batch: tuple[int, ...]
    priority: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]

    @property
    def fn(self) -> Callable[[Arrays, Arrays, Arrays], object]: ...  # may return a value, which is refused
    @property
    def max_batch(self) -> int: ...
    @property
    def uses_torch(self) -> bool: ...
    @property
    def stateful(self) -> bool: ...
    @property
    def whole_batches(self) -> bool: ...
    @property
    def source(self) -> Any: ...


class Weights(Protocol):
    """Weights that can be put on a device, such as those of a PyTorch module."""

    uses_torch: bool  # whether the model's function calls PyTorch
    stateful: bool  # whether the model's function changes them

    whole_batches: bool  # whether each request is a batch of its own

    @property
    def keeps_state(self) -> bool:
        """Whether runs of the function may change anything that later runs see."""

    @property
    def nbytes(self) -> int: ...
    def place(self, model: str, device: Device) -> Arrays:
        """The weights that the model's function is given; `model` is the name for error messages."""

    def preserved(self) -> AbstractContextManager[None]:
        """A context in which runs of the function leave the weights unchanged."""


@runtime_checkable
class MovableWeights(Protocol):
    """Weights that can lie in memory that is mapped and unmapped."""

    def parts(self) -> list[Any]:
        """The bytes, on the host, of each piece of memory that holds weights, in about the order of use."""

    def place_over(self, model: str, device: Device, at: Callable[[int, int], Any]) -> Arrays:
        """As `place`, in given memory: `at(k, nbytes)` is the array of bytes for part k."""
