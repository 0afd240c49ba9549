"""Tensors around a model's function: their shapes and types, and what captures and lanes ask of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import ModelError

Arrays = dict[str, Any]
ModelFunction = Callable[[Arrays, Arrays, Arrays], None]


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """Shape and element type of one tensor of one request: without the batch dimension.

    >>> TensorSpec((3, 8), "float16").nbytes
    48
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __init__(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> None:
        extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(n, int | np.integer) and n > 0 for n in extents):
            raise ModelError(f"a tensor of shape {shape!r}: extents are whole numbers above zero")
        object.__setattr__(self, "shape", tuple(int(n) for n in extents))
        try:
            object.__setattr__(self, "dtype", np.dtype(dtype))
        except TypeError:
            raise ModelError(f"a tensor of {dtype!r}: that is no element type; give one of NumPy's") from None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"TensorSpec({self.shape}, {self.dtype.name!r})"


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
