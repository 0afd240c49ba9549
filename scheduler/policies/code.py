"""Finds operations that compile but must not be in a policy, by reading the bytecode of the policy and its helpers."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

import numba

# These need Python's global lock, which the thread that waits for the compiled code may hold.
_OF_PYTHON = {builtins.print: "print", builtins.input: "input", builtins.open: "open", numba.objmode: "objmode"}


def forbidden(function: Any, role: str) -> str | None:
    """The first operation that a policy must not do, phrased to follow the function's name; None if there is none.

    >>> def loud(job):
    ...     print(job.batch)
    ...     return 1.0
    >>> forbidden(loud, "rank").partition(":")[0]
    'calls `print` in line 2'
    """
    for each in with_helpers(function):
        values = {**vars(builtins), **outside(each)}
        for step, line in steps(each.__code__):
            if step.opname == "RAISE_VARARGS":
                instead = "return False" if role == "admit" else "return a large number, which puts it last"
                return f"raises in line {line}: {role} must answer for every job, so {instead}"
            name = step.argval if isinstance(step.argval, str) else ""
            found = _of_python(values.get(name)) if step.opname in _LOADS else None
            if found or (step.opname in _ATTRIBUTES and name == "objmode"):
                return (
                    f"calls `{found or name}` in line {line}: a policy runs without Python; to see what it computes, "
                    "call the plain function with a job of your own, or look at the jobs in the result of pp.simulate"
                )
    return None


def text_in(function: Any) -> str | None:
    """The first use of text, phrased to follow the function's name. In compiled code, no number equals a text."""
    for each in with_helpers(function):
        values = {**vars(builtins), **outside(each)}
        for (step, line), (after, _) in pairwise(steps(each.__code__)):
            value = step.argval if step.opname == "LOAD_CONST" else None
            if step.opname in _LOADS and isinstance(step.argval, str):
                value = values.get(step.argval)
            several = value if isinstance(value, tuple | frozenset) else (value,)
            text = next((v for v in several if isinstance(v, str)), None)
            # job["batch"] is fine; so are names of arguments, which Python 3.13 and later load like a value
            if text is not None and after.opname not in ("BINARY_SUBSCR", "CALL_KW") and after.argrepr != "[]":
                return (
                    f"has the text {text!r} in line {line}, which equals no field of a job: all fields are numbers, "
                    "job.model too (in simulations its place in the list, from 0); compare with numbers, or tell "
                    "models apart by job.priority"
                )
    return None


_LOADS = {"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


def _of_python(value: Any) -> str | None:
    if value is None:
        return None
    for each, name in _OF_PYTHON.items():
        if value is each or value is getattr(builtins, name, None):  # libraries such as Ray replace some builtins
            return name
    return None


def fields_read(function: Any) -> set[str]:
    """All fields that the function reads, as `job.batch` or as `job["batch"]`, also in comprehensions.

    >>> sorted(fields_read(lambda job: job["segment"]["ns"] + job.batch))
    ['batch', 'ns', 'segment']
    """
    found = (step.argval for step, _ in steps(function.__code__) if step.opname in (*_ATTRIBUTES, "LOAD_CONST"))
    return {each for each in found if isinstance(each, str)}


def outside(function: Any) -> dict[str, Any]:
    """The values of the names, other than builtins, that the function takes from outside, also in comprehensions."""
    # Python 3.11 compiles a comprehension to a function of its own, which inspect does not look into.
    read = {step.argval for step, _ in steps(function.__code__) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    found = {name: function.__globals__[name] for name in read if name in function.__globals__}
    return {**found, **inspect.getclosurevars(function).nonlocals}


def with_helpers(function: Any) -> Iterator[Any]:
    """The function, and the functions compiled by Numba that it calls, each once."""
    waiting, seen = [function], {function}
    while waiting:
        each = waiting.pop()
        yield each
        for value in outside(each).values():
            helper = getattr(value, "py_func", None)
            if inspect.isfunction(helper) and helper not in seen:
                seen.add(helper)
                waiting.append(helper)


def steps(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Instructions with their lines, including those of nested functions."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = getattr(step.positions, "lineno", None) or line
        yield step, line
        if isinstance(step.argval, CodeType):
            yield from steps(step.argval)
