"""Errors of ours that are of Triton's own classes too, for code that catches those: Triton's autotuner, for example."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from paellapy.instrument.errors import LaunchError, PaellaError

Ours = TypeVar("Ours", bound=PaellaError)


def also(ours: Ours, theirs: type[Exception], **facts: Any) -> Ours:
    """The same error, of Triton's class too and with the attributes that it has there."""
    made: Ours = _both(type(ours), theirs)(*ours.args)  # type: ignore[arg-type]
    made.__dict__.update(facts)
    return made


def out_of_resources(message: str, name: str, required: int, limit: int) -> LaunchError:
    """For a block that fits on no SM: Triton's autotuner goes on to the next configuration."""
    from triton.runtime.errors import OutOfResources

    return also(LaunchError(message), OutOfResources, name=name, required=required, limit=limit)


@functools.cache
def _both(ours: type[PaellaError], theirs: type[Exception]) -> Any:
    def reduce(self: PaellaError) -> tuple[type[PaellaError], tuple[Any, ...]]:
        return ours, self.args  # for pickle, which cannot find a class made at run time

    body = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__reduce__": reduce}
    return type(ours.__name__, (ours, theirs), {**body, "__module__": ours.__module__})
