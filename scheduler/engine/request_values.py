"""The values of one request: checked against what its model takes, and the number that identifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.tensors import TensorSpec

Values = Mapping[str, Any]


def check_inputs(model: Model, inputs: Values) -> dict[str, Any]:
    """The model's own inputs in its order; an InputError says what is wrong with them. Where lengths vary, the inputs
    have their own length, and the mask that they may lack.
    """
    arrays = fitting(model, inputs)
    if model.ranges:
        check_ranges(model, arrays)
    return arrays


def fitting(model: Model, inputs: Values) -> dict[str, Any]:
    """As `check_inputs`, without the ranges of values."""
    if model.lengths is None:
        return checked(model.name, model.inputs, inputs)
    padded, length = model.lengths.padded(model.name, model.inputs, inputs)
    return model.lengths.at(checked(model.name, model.inputs, padded), length)


def check_taken(model: Model, given: Values) -> dict[str, Any]:
    """What a model with functions before or after it takes: of the function before it, or its own inputs."""
    return check_inputs(model, given) if model.before is None else checked(model.name, model.takes, given)


def checked(model: str, specs: Mapping[str, TensorSpec], given: Any) -> dict[str, Any]:
    """The values in the order of `specs`; an InputError says what is wrong with them."""
    try:
        names = given.keys()
    except AttributeError:
        raise InputError(
            f"model {model!r} takes a dict of arrays ({', '.join(specs)}), not a {type(given).__name__}", model=model,
            given=type(given).__name__,
        ) from None  # fmt: skip
    if names != specs.keys():
        missing, extra = sorted(specs.keys() - names), sorted(map(str, names - specs.keys()))
        problem = [f"no {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(extra)}"] * bool(extra)
        raise InputError(
            f"model {model!r} takes {', '.join(specs)}; the request has {' and '.join(problem)}", model=model,
            missing=missing, unknown=extra,
        )  # fmt: skip
    return {key: _texts(model, key, spec, given[key]) if spec.is_text else _array(model, key, spec, given[key])
            for key, spec in specs.items()}  # fmt: skip


def _array(model: str, key: str, spec: TensorSpec, given: Any) -> Any:
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as e:
        raise wrong_input(model, key, f"cannot be converted to an array: {e}", given, spec.dtype) from e
    if array.shape != spec.shape:
        wrong = f"has shape {array.shape}; it must be {spec.shape}, without the batch dimension"
        raise wrong_input(model, key, wrong, array.shape, spec.shape)
    if array.dtype != spec.dtype:
        wrong = f"is {array.dtype.name}; it must be {spec.dtype.name}"
        raise wrong_input(model, key, wrong, array.dtype, spec.dtype)
    return array


def _texts(model: str, key: str, spec: TensorSpec, given: Any) -> Any:
    """A text or bytes, or an array of them as lists."""
    array = np.empty((), object)
    if spec.shape:
        array = np.array(given, object)
    else:
        array[()] = given
    if array.shape != spec.shape:
        wrong = f"has shape {array.shape}; it must be {spec.shape}, without the batch dimension"
        raise wrong_input(model, key, wrong, array.shape, spec.shape)
    kind = str if spec.dtype.kind == "U" else bytes
    for each in array.reshape(-1):
        if not isinstance(each, kind):
            wrong = f"has a {type(each).__name__} in it; it must be {spec.dtype.name}"
            raise wrong_input(model, key, wrong, type(each).__name__, spec.dtype.name)
    return array.tolist() if spec.shape else given


def wrong_input(model: str, key: str, wrong: str, given: Any, limit: Any) -> InputError:
    return InputError(f"model {model!r}, input {key!r} {wrong}", model=model, field=key, given=given, limit=limit)


class Ranged(Protocol):
    """A model or a pipeline; some of its inputs have a range."""

    name: str

    @property
    def ranges(self) -> Mapping[str, Any]: ...


def check_ranges(model: Ranged, arrays: Values) -> None:
    """Checks the values of inputs that have a range; an InputError names the first value outside it."""
    for key, spec in model.ranges.items():
        if (wrong := spec.outside(arrays[key])) is not None:
            raise wrong_input(model.name, key, wrong, arrays[key], (spec.low, spec.high))


def digest_of(name: str, inputs: Values) -> int:
    """A number that identifies one item of a model: equal inputs have equal numbers."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    for each in inputs.values():
        array = np.asarray(each)
        if array.dtype.kind in "SUO":  # texts
            digest.update(repr(array.tolist()).encode("utf-8", "surrogatepass"))
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") or 1


def digest_of_all(digests: Sequence[int]) -> int:
    """A number that identifies a request of these items, in this order."""
    if len(digests) == 1:
        return digests[0]
    joined = b"".join(each.to_bytes(8, "little") for each in digests)
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little") or 1
