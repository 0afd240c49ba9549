"""Compiles a policy's plain Python functions, and explains why a function cannot be compiled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numba
from numba.core.errors import NumbaError

from paellapy.scheduler.core.job import (
    READS_CLIENT,
    READS_DEFICIT,
    READS_PARAMS,
    READS_SEGMENT,
    READS_SHARES,
    READS_TOP,
    READS_USE,
    READS_WEIGHTS,
)
from paellapy.scheduler.policies.code import fields_read, forbidden, outside, steps, text_in
from paellapy.scheduler.policies.roles import ROLES, Layout, PolicyError, arguments, place
from paellapy.scheduler.policies.source import problem_in
from paellapy.scheduler.policies.words import reason

_FACTS = {
    "segment": READS_SEGMENT,
    "top": READS_TOP,
    "lower_ns": READS_TOP,
    "params": READS_PARAMS,
    "compute": READS_SHARES,
    "memory": READS_SHARES,
    "missing_bytes": READS_WEIGHTS,
    "ready_ns": READS_WEIGHTS,
    "deficit_ns": READS_DEFICIT,
    "share": READS_CLIENT,
    "client_deficit_ns": READS_CLIENT,
    "occupancy": READS_USE,
    "used_ns": READS_USE,
}

_OF_CLIENT = {"client", "tenant", "share", "deficit_ns", "client_deficit_ns", "client_start_ns"}


def compile_function(role: str, function: Any, layout: Layout, cache: bool = False, looked_at: bool = False) -> Any:
    """The function as compiled code, which the core calls by its address."""
    names = arguments(role, function, layout)
    where = place(function)
    if not (cache or looked_at):  # the package's own policies are cached on disk, and checked by the tests
        problem = forbidden(function, role) or problem_in(role, function, names, layout)
        if problem:
            raise PolicyError(f"{where} {problem}.")
    try:
        signature = layout.signature(role, names)
        compiled = numba.cfunc(signature, cache=cache, error_model="numpy", nogil=True)(function)
    except KeyError as e:  # how Numba reports that a record has no such field
        fields = "; ".join(f"in {name} {', '.join(layout.fields(name))}" for name in names)
        raise PolicyError(f"{where} reads the field {e}, which does not exist; the fields are: {fields}") from e
    except NumbaError as e:
        returns = ROLES[role].returns
        raise PolicyError(
            f"{where} {reason(e, returns, function)}. Use numbers, fields of ({', '.join(names)}) and the math module "
            f"only, and return {returns} on every path."
        ) from e
    problem = None if cache else text_in(function)  # after Numba, which explains more about text that does not compile
    if problem:
        raise PolicyError(f"{where} {problem}.")
    return compiled


def facts_read(functions: Iterable[Any]) -> int:
    """The facts that the core must compute for a policy with these functions: READS_SEGMENT …"""
    found = 0
    for each in functions:
        for name in fields_read(each):
            found |= _FACTS.get(name, 0)
    return found


def reads_client(function: Any) -> bool:
    """Whether the function reads a field of the job that depends on the client."""
    return not _OF_CLIENT.isdisjoint(fields_read(function))


def may_loop(function: Any) -> bool:
    """Whether the function could run for ever: it jumps back, or calls a function that is not known to return."""
    if any(
        each.opname in {"FOR_ITER", "JUMP_ABSOLUTE"} or "BACKWARD" in each.opname
        for each, _ in steps(function.__code__)
    ):
        return True
    return calls_others(function)


def calls_others(function: Any) -> bool:
    """Whether the function refers to any function that is neither a builtin nor from the math module."""
    known = {value for value in vars(math).values() if callable(value)}
    return any(callable(value) and value not in known for value in outside(function).values())
