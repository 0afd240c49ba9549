"""How the hot path is compiled: without Python objects and the GIL, kept on disk, anew after an edit of any part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Reference counts on the arrays of a state cost ten times the work done on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Compile an entry point: no Python objects, free of the GIL, kept on disk between runs."""
    result: Function = numba.njit(cache=True, **_OPTIONS)(function)
    return result


def inlined(function: Function) -> Function:
    """A part of entry points, folded into them: passing a state of thirty arrays costs more than most bodies.

    It has no wrapper of its own, so Python reaches it as `.py_func` only. It is on disk with the entry points, and not
    by itself.
    """
    result: Function = numba.njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function)
    return result


def compile_for(entry: Any, *given: Any) -> None:
    """Have an entry point ready for such arguments, from the disk or compiled now, without calling it."""
    entry.compile(tuple(entry.typeof_pyval(each) for each in given))


def notice_edits(*entries: Any, parts: Iterable[Path]) -> None:
    """The disk cache looks at the file of an entry point only: let it see those that are folded into it too."""
    for entry in entries:
        files = (Path(entry.py_func.__code__.co_filename), *parts)
        stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
        cache: Any = getattr(entry, "_cache", None)
        if hasattr(cache, "_cache_file"):
            cache._cache_file._source_stamp = stamp
