"""How the hot path is compiled: without Python objects and the GIL, kept on disk, anew after an edit of any part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from paellapy.instrument.device import jit_progress  # noqa: F401  says what takes its time
from paellapy.instrument.device.jit_cache import EntryCache
from paellapy.instrument.device.jit_library import EntryCompiler, PartCompiler

Function = TypeVar("Function", bound=Callable[..., Any])

# Reference counts on the arrays of a state cost ten times the work done on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Compile an entry point: no Python objects, free of the GIL, kept on disk between runs."""
    entry: Any = numba.njit(pipeline_class=EntryCompiler, **_OPTIONS)(function)
    entry._cache = EntryCache(function)
    return entry  # type: ignore[no-any-return]


def part(function: Function) -> Function:
    """A part of entry points, which LLVM folds in where that pays.

    It has no machine code of its own, so Python reaches it as `.py_func` only. It is on disk with the entry points.
    """
    result: Function = numba.njit(no_cpython_wrapper=True, pipeline_class=PartCompiler, **_OPTIONS)(function)
    return result


def reachable(function: Function) -> Function:
    """An entry point that others call by its address (`address_of`), and so need not hold a copy of."""
    entry: Any = numba.njit(pipeline_class=EntryCompiler, **{**_OPTIONS, "no_cfunc_wrapper": False})(function)
    entry._cache = EntryCache(function)
    return entry  # type: ignore[no-any-return]


def address_of(entry: Any, *kinds: Any) -> int:
    """Where the machine code of a reachable entry point is, for arguments of these types: a C function."""
    entry.compile(kinds)
    made = entry.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


def compile_for(entry: Any, *given: Any) -> None:
    """Have an entry point ready for such arguments, from the disk or compiled now, without calling it."""
    entry.compile(tuple(entry.typeof_pyval(each) for each in given))
