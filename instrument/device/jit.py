"""How the hot path is compiled: without Python objects and the GIL, kept on disk, anew after an edit of any part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

from paellapy.instrument.device import jit_progress  # noqa: F401  says what takes its time
from paellapy.instrument.device.jit_cache import EntryCache
from paellapy.instrument.device.jit_library import EntryCompiler, PartCompiler

Function = TypeVar("Function", bound=Callable[..., Any])

# Reference counts on the arrays of a state cost ten times the work done on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def _plain(kind: Any) -> Any:
    """A number of 64 bits in place of a constant and of a shorter one."""
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def _called_with_plain_numbers(entry: Any) -> Any:
    """Compile a function once for all integers that other compiled functions call it with.

    Numba compiles it anew for every constant, also for one that a variable has only while its type is worked out. LLVM
    folds constants in all the same where it folds in the function.
    """
    resolve = entry.get_call_template

    def get_call_template(given: Any, named: Any) -> Any:
        return resolve(tuple(map(_plain, given)), {name: _plain(kind) for name, kind in named.items()})

    entry.get_call_template = get_call_template
    return entry


def _entry(function: Function, **options: Any) -> Function:
    entry: Any = numba.njit(pipeline_class=EntryCompiler, **_OPTIONS | options)(function)
    entry._cache = EntryCache(function)
    return _called_with_plain_numbers(entry)  # type: ignore[no-any-return]


def compiled(function: Function) -> Function:
    """Compile an entry point: no Python objects, free of the GIL, kept on disk between runs."""
    return _entry(function)


def part(function: Function) -> Function:
    """A part of entry points, which LLVM folds in where that pays.

    It has no machine code of its own, so Python reaches it as `.py_func` only. It is on disk with the entry points.
    """
    made = numba.njit(no_cpython_wrapper=True, pipeline_class=PartCompiler, **_OPTIONS)(function)
    return _called_with_plain_numbers(made)  # type: ignore[no-any-return]


def reachable(function: Function) -> Function:
    """An entry point that others call by its address (`address_of`), and so need not hold a copy of."""
    return _entry(function, no_cfunc_wrapper=False)


def address_of(entry: Any, *kinds: Any) -> int:
    """Where the machine code of a reachable entry point is, for arguments of these types: a C function."""
    entry.compile(kinds)
    made = entry.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


def compile_for(entry: Any, *given: Any) -> None:
    """Have an entry point ready for such arguments, from the disk or compiled now, without calling it."""
    entry.compile(tuple(entry.typeof_pyval(each) for each in given))
