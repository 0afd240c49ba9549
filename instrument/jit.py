"""Compilation of the hot path: without Python objects and the GIL, cached on disk, repeated when any part changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

from paellapy.instrument import jit_progress  # noqa: F401  shows progress
from paellapy.instrument.jit_cache import EntryCache
from paellapy.instrument.jit_library import EntryCompiler, LoopCompiler, PartCompiler

Function = TypeVar("Function", bound=Callable[..., Any])

# Reference counts on the arrays of a state would cost ten times the work on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def _plain(kind: Any) -> Any:
    """A 64-bit number type in place of a constant or a shorter number."""
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def _called_with_plain_numbers(entry: Any) -> Any:
    """Compiles a function once for all integers with which other compiled functions call it.

    Numba would compile it again for every constant, even for constants that appear only during type inference. LLVM
    still folds constants where it inlines the function.
    """
    resolve = entry.get_call_template

    def get_call_template(given: Any, named: Any) -> Any:
        return resolve(tuple(map(_plain, given)), {name: _plain(kind) for name, kind in named.items()})

    entry.get_call_template = get_call_template
    return entry


def _entry(function: Function, pipeline_class: type = EntryCompiler, **options: Any) -> Function:
    entry: Any = numba.njit(pipeline_class=pipeline_class, **_OPTIONS | options)(function)
    entry._cache = EntryCache(function, (pipeline_class.__name__, *sorted(map(str, options.items()))))
    return _called_with_plain_numbers(entry)  # type: ignore[no-any-return]


def compiled(function: Function) -> Function:
    """Compiles an entry point: without Python objects and the GIL, cached on disk."""
    return _entry(function)


def brief(function: Function) -> Function:
    """As `compiled`, for an entry point that takes less time than giving the GIL away and waiting for it again."""
    return _entry(function, nogil=False)


def loop(function: Function) -> Function:
    """As `compiled`, for a loop over arrays, which LLVM may vectorise. The loop must not allocate, and cannot fail."""
    return _entry(function, LoopCompiler)


def part(function: Function) -> Function:
    """A part of entry points, which LLVM inlines where that pays.

    It has no machine code of its own, so Python reaches it only as `.py_func`. On disk it is stored with the entry
    points.
    """
    made = numba.njit(no_cpython_wrapper=True, pipeline_class=PartCompiler, **_OPTIONS)(function)
    return _called_with_plain_numbers(made)  # type: ignore[no-any-return]


def reachable(function: Function) -> Function:
    """An entry point that others call by its address (`address_of`), and therefore need not contain."""
    return _entry(function, no_cfunc_wrapper=False)


def address_of(entry: Any, *kinds: Any) -> int:
    """The address of the machine code of a reachable entry point, for arguments of these types: a C function."""
    entry.compile(kinds)
    made = entry.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


def compile_for(entry: Any, *given: Any) -> None:
    """Makes an entry point ready for these arguments, from disk or by compiling it now, without calling it."""
    entry.compile(tuple(entry.typeof_pyval(each) for each in given))
