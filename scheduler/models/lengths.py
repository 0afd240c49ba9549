"""Lengths: an axis whose extent differs from request to request, such as the words of a text.

A model is captured at several sizes of this axis. A request is padded to one of them, a mask says what is padding, and
the outputs are cut back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.models.tensors import TensorSpec, wrong

MOST_SIZES = 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """Axes are negative, so they are the same with and without a batch axis."""

    sizes: tuple[int, ...]  # ascending; the model's own shapes have the last
    inputs: dict[str, int]  # axis by input
    outputs: dict[str, int]  # axis by output, whose extent is proportional to the size
    pads: dict[str, float]  # values behind the end, by input
    mask: str | None = None  # the input that is 1 where data are, and may be left out of requests

    @property
    def longest(self) -> int:
        return self.sizes[-1]

    def specs(self, specs: Mapping[str, TensorSpec], axes: Mapping[str, int], size: int) -> dict[str, TensorSpec]:
        """The tensors of one request at a size, given those at the largest."""
        found = {}
        for key, spec in specs.items():
            shape = list(spec.shape)
            if key in axes:
                shape[axes[key]] = shape[axes[key]] * size // self.longest
            found[key] = TensorSpec(shape, spec.dtype, low=spec.low, high=spec.high)
        return found

    def padded(
        self, model: str, specs: Mapping[str, TensorSpec], inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """The inputs at the largest size, and their length. An InputError says which extent is wrong."""
        try:
            arrays = {key: np.asarray(value) for key, value in inputs.items()}
        except (AttributeError, TypeError, ValueError):  # the check of inputs says what is wrong
            return inputs, self.longest  # type: ignore[return-value]
        found: dict[int, str] = {}
        for key, axis in self.inputs.items():
            array = arrays.get(key)
            if array is None or key not in specs:
                continue
            rank = len(specs[key].shape)
            if array.ndim not in (rank, rank + 1):
                raise InputError(
                    f"model {model!r}, input {key!r} has shape {array.shape}; it must be {specs[key].shape} or shorter "
                    f"along axis {rank + axis}", model=model, field=key, given=array.shape, limit=specs[key].shape,
                )  # fmt: skip
            found.setdefault(array.shape[axis], key)
        if not found:
            return arrays, self.longest
        length, key = next(iter(found.items()))
        if len(found) > 1:
            said = " and ".join(f"{n} in {name!r}" for n, name in found.items())
            raise InputError(
                f"model {model!r} takes inputs of one length; the request has {said}", model=model, field=key,
                given=list(found),
            )  # fmt: skip
        if not 1 <= length <= self.longest:
            raise InputError(
                f"model {model!r}, input {key!r} has the length {length}; the model takes 1 to {self.longest}: split "
                "or shorten it, or load the model with larger lengths", model=model, field=key, given=length,
                limit=self.longest,
            )  # fmt: skip
        if self.mask is not None and self.mask not in arrays:
            like = arrays[key]
            batch = like.shape[: like.ndim - len(specs[key].shape)]
            arrays[self.mask] = np.ones((*batch, length), specs[self.mask].dtype)
        return {key: self._filled(key, array) for key, array in arrays.items()}, length

    def wanted(self, key: str, largest: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that one item of an input must have, where the request gives a shape with or without a batch."""
        axis = self.inputs.get(key)
        if axis is None or len(given) not in (len(largest), len(largest) + 1):
            return largest
        shape = list(largest)
        if 1 <= given[axis] <= self.longest:
            shape[axis] = given[axis]
        return tuple(shape)

    def _filled(self, key: str, array: NDArray[Any]) -> NDArray[Any]:
        axis = self.inputs.get(key)
        if axis is None or array.shape[axis] == self.longest:
            return array
        shape = list(array.shape)
        shape[axis] = self.longest
        made = np.full(shape, self.pads[key], array.dtype)
        made[first(axis, array.shape[axis])] = array
        return made

    def at(self, inputs: Mapping[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
        """Inputs of the largest size at a smaller one."""
        if size == self.longest:
            return dict(inputs)
        return {key: a[first(self.inputs[key], size)] if key in self.inputs else a for key, a in inputs.items()}

    def cut(self, outputs: Mapping[str, NDArray[Any]], length: int, size: int) -> dict[str, NDArray[Any]]:
        """Outputs of a size without those of the padding."""
        found = dict(outputs)
        for key, axis in self.outputs.items():
            extent = outputs[key].shape[axis]
            found[key] = outputs[key][first(axis, -(-length * extent // size))]
        return found

    def shape(self, kind: str, key: str, spec: TensorSpec) -> list[int]:
        """The shape of one request's tensor, -1 where it has any length; `kind`: "inputs" or "outputs"."""
        shape = list(spec.shape)
        axes = self.inputs if kind == "inputs" else self.outputs
        if key in axes:
            shape[axes[key]] = -1
        return shape


def first(axis: int, count: int) -> tuple[Any, ...]:
    """An index that takes the first elements along an axis counted from the end.

    >>> first(-1, 3)
    (Ellipsis, slice(None, 3, None))
    """
    return (..., slice(count), *[slice(None)] * (-axis - 1))


def asked_lengths(
    title: str, given: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, int]]:
    """The sizes, and the axis of each input that has them, of `lengths={"input_ids": {1: (32, 64, 128)}}`. `shapes` are
    those of the example, with the batch. Other inputs with the same extent at the same place vary too.
    """

    def refuse(why: str) -> Exception:
        form = 'lengths={"input_ids": {1: (32, 64, 128)}}: sizes by input and axis, where axis 0 is the batch'
        return wrong(title, "lengths", given, f"lengths={given!r}: {why}; give {form}")

    if not isinstance(given, Mapping) or not given:
        raise refuse("it is no dict")
    sizes: tuple[int, ...] = ()
    axes: dict[str, int] = {}
    for key, by_axis in given.items():
        if key not in shapes:
            raise refuse(f"{key!r} is not an input; there are {', '.join(shapes)}")
        if not isinstance(by_axis, Mapping) or len(by_axis) != 1:
            raise refuse(f"{key!r} needs one axis with its sizes")
        ((axis, found),) = by_axis.items()
        rank = len(shapes[key])
        if not isinstance(axis, int) or not 1 <= axis < rank:
            raise refuse(f"axis {axis!r} of {key!r}, which has the axes 1 to {rank - 1}")
        found = tuple(found) if isinstance(found, tuple | list) else ()
        whole = all(isinstance(n, int) and n > 0 for n in found)
        if not whole or not 1 <= len(found) <= MOST_SIZES or list(found) != sorted(set(found)):
            raise refuse(f"the sizes of {key!r} must be 1 to {MOST_SIZES} increasing integers above 0")
        if sizes and found != sizes:
            raise refuse("inputs vary together, so they have the same sizes")
        sizes = found
        axes[key] = axis - rank
    for key, shape in shapes.items():
        for other, axis in list(axes.items()):
            place = len(shapes[other]) + axis
            if key not in axes and len(shape) > place and shape[place] == shapes[other][axis]:
                axes[key] = place - len(shape)
    return sizes, axes
