"""Checks of a request: its model, inputs, deadline and priority; and the number that identifies its inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import DeadlineError, InputError, UnknownModelError
from paellapy.scheduler.models.model import Model

Inputs = Mapping[str, Any]
AnyModel = TypeVar("AnyModel")


def find_model(loaded: Mapping[str, AnyModel], name: str) -> AnyModel:
    """The loaded model of this name."""
    found = loaded.get(name)
    if found is None:
        raise UnknownModelError(f"no model named {name!r} is loaded; loaded: {', '.join(loaded) or 'none'}")
    return found


def request_times(deadline_ms: float | None) -> tuple[int, int]:
    """Arrival and deadline (ns) of a request that arrives now."""
    now = time.monotonic_ns()
    if deadline_ms is None:
        return now, codes.NEVER
    try:
        if not deadline_ms > 0:
            raise DeadlineError(f"deadline_ms={deadline_ms}: the deadline counts from now and must be above 0")
        return now, min(codes.NEVER, now + int(min(deadline_ms, 1e12) * 1e6))
    except (TypeError, ValueError):
        raise InputError(
            f"deadline_ms={deadline_ms!r}: the deadline must be a number of milliseconds from now, or None"
        ) from None


def request_rank(priority: int) -> int:
    """A request's own priority, as a number that the core can hold."""
    try:
        rank = int(priority)
    except (TypeError, ValueError, OverflowError):
        rank = codes.NEVER
    if not -codes.NEVER < rank < codes.NEVER:
        raise InputError(
            f"priority={priority!r}: the priority must be an integer between -2⁶² and 2⁶², or None for the model's own"
        )
    return rank


def check_inputs(model: Model, inputs: Inputs) -> dict[str, NDArray[Any]]:
    """The inputs in the model's order; an InputError says what is wrong with them."""
    try:
        given = inputs.keys()
    except AttributeError:
        raise InputError(
            f"model {model.name!r} takes a dict of arrays ({', '.join(model.inputs)}), not a {type(inputs).__name__}"
        ) from None
    if given != model.inputs.keys():
        missing, extra = sorted(model.inputs.keys() - given), sorted(map(str, given - model.inputs.keys()))
        problem = [f"no {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(extra)}"] * bool(extra)
        raise InputError(
            f"model {model.name!r} takes {', '.join(model.inputs)}; the request has {' and '.join(problem)}"
        )
    arrays = {}
    for key, spec in model.inputs.items():
        try:
            array = np.asarray(inputs[key])
        except (TypeError, ValueError) as e:
            raise InputError(f"model {model.name!r}, input {key!r} cannot be converted to an array: {e}") from e
        if array.shape != spec.shape:
            raise InputError(
                f"model {model.name!r}, input {key!r} has shape {array.shape}; it must be {spec.shape}, without the "
                "batch dimension"
            )
        if array.dtype != spec.dtype:
            raise InputError(f"model {model.name!r}, input {key!r} is {array.dtype.name}; it must be {spec.dtype.name}")
        arrays[key] = array
    if model.ranges:
        check_ranges(model, arrays)
    return arrays


def check_ranges(model: Model, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Checks the values of inputs that have a range; an InputError names the first value outside it."""
    for key, spec in model.ranges.items():
        if (wrong := spec.outside(arrays[key])) is not None:
            raise InputError(f"model {model.name!r}, input {key!r} {wrong}")


def digest_of(name: str, inputs: Mapping[str, NDArray[Any]]) -> int:
    """A number that identifies one item of a model: equal inputs have equal numbers."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    for array in inputs.values():
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") or 1


def digest_of_all(digests: Sequence[int]) -> int:
    """A number that identifies a request of these items, in this order."""
    if len(digests) == 1:
        return digests[0]
    joined = b"".join(each.to_bytes(8, "little") for each in digests)
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little") or 1
