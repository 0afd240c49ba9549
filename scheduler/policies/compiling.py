"""From a policy's plain Python functions to compiled code, and why some cannot be compiled."""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core.errors import NumbaError

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.job import GPU, JOB
from paellapy.scheduler.policies.code import forbidden, text_in
from paellapy.scheduler.policies.words import reason

Rank = Callable[[Any], float]
Admit = Callable[[Any, Any], bool]
_JOB = numba.from_dtype(JOB)
_GPU = numba.from_dtype(GPU)
_SIGNATURES = {"rank": types.float64(_JOB), "order": types.float64(_JOB), "admit": types.uint8(_JOB, _GPU)}


class PolicyError(PaellaError):
    """A policy cannot be used; the message names the function, the line and the reason."""


def compile_function(role: str, function: Any, cache: bool = False) -> Any:
    """The function as compiled code that the core calls by its address."""
    wanted = len(_SIGNATURES[role].args)
    arguments = "(job)" if wanted == 1 else "(job, gpu)"
    if not inspect.isfunction(function):
        raise PolicyError(f"{role} is {function!r}: give a plain function {role}{arguments}")
    where = place(function)
    if len(inspect.signature(function).parameters) != wanted:
        raise PolicyError(f"{where}: {role} takes {arguments}")
    problem = None if cache else forbidden(function, role)  # ours are kept on disk, and checked by the tests
    if problem:
        raise PolicyError(f"{where} {problem}.")
    try:
        compiled = numba.cfunc(_SIGNATURES[role], cache=cache, error_model="numpy", nogil=True)(function)
    except KeyError as e:  # how Numba says that a record has no such field
        fields = ", ".join(JOB.names or ())
        if wanted == 2:
            fields = f"in job {fields}, in gpu {', '.join(GPU.names or ())}"
        raise PolicyError(f"{where} reads the field {e}, which there is not; there are {fields}") from e
    except NumbaError as e:
        returns = "a number" if role != "admit" else "True or False"
        raise PolicyError(
            f"{where} {reason(e, returns)}. Use numbers, fields of {arguments} and the math module only, and return "
            f"{returns} on every path."
        ) from e
    problem = None if cache else text_in(function)  # after Numba, which says more of text that does not compile
    if problem:
        raise PolicyError(f"{where} {problem}.")
    return compiled


def place(function: Any) -> str:
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


def may_loop(function: Any) -> bool:
    """Whether the function could run for ever: it jumps back, or calls something that is not known to return."""
    if any(
        each.opname in {"FOR_ITER", "JUMP_ABSOLUTE"} or "BACKWARD" in each.opname
        for each in dis.get_instructions(function)
    ):
        return True
    return calls_others(function)


def calls_others(function: Any) -> bool:
    """Whether the function refers to any that is neither a builtin nor of the math module."""
    outside = inspect.getclosurevars(function)
    known = {value for value in vars(math).values() if callable(value)}
    values = [*outside.globals.values(), *outside.nonlocals.values()]
    return any(callable(value) and value not in known for value in values)
