"""Compiled entry points on disk, which are reused only if nothing that went into them has changed.

Numba checks only the file of an entry point. This cache checks the code of every function that an entry point calls,
directly or indirectly, and the value of every name that these functions take from their modules. An edit of a comment
recompiles nothing; an edit of a constant in another file recompiles the functions that use it.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import FunctionCache

from paellapy.instrument.cache import trusted

_OURS = __name__.partition(".")[0] + "."
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), np.generic, np.dtype)


class EntryCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one entry point, stamped with a digest of all its code and of the way it is compiled."""

    def __init__(self, function: Any, way: tuple[str, ...] = ()) -> None:
        super().__init__(function)
        self._way = way

    def _stamp(self) -> None:
        self._cache_file._source_stamp = " ".join((fingerprint(self._py_func), *self._way))  # noqa: SLF001  Numba's own

    def _trusted(self) -> bool:
        """Beside the sources the cache is as safe as Python's byte code, which lies in the same folder."""
        folder = Path(self.cache_path)
        return folder.name == "__pycache__" or trusted(folder, "NUMBA_CACHE_DIR")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        if not self._trusted():
            return None
        self._stamp()
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except (AttributeError, ImportError, EOFError, TypeError, ValueError, pickle.UnpicklingError):
            self.flush()  # written by another version, whose classes no longer exist
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._trusted():
            self._stamp()
            super().save_overload(sig, data)


def fingerprint(function: FunctionType) -> str:
    """A digest of the function and of everything that it refers to.

    >>> def area(radius): return radius * radius * FACTOR
    >>> area.__globals__["FACTOR"] = 3.0
    >>> before = fingerprint(area)
    >>> area.__globals__["FACTOR"] = 3.14
    >>> before == fingerprint(area)
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for each in _versions():
        digest.update(each.encode())
    for each in _facts(function, set()):
        digest.update(each.encode())
        digest.update(b"\0")
    return digest.hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """Versions of the compilers, and the sources that configure them, which are not part of the compiled code."""
    sources = (Path(__file__).with_name(name) for name in ("link.py", "tables.py"))
    return (numba.__version__, llvmlite.__version__, np.__version__, *(each.read_text() for each in sources))


def _facts(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    yield function.__qualname__
    yield _text(function.__code__)
    for name, value in sorted(_names(function)):
        yield name
        yield from _value(value, seen)


@cache
def _text(code: CodeType) -> str:
    return "\0".join(_code(code))


def _code(code: CodeType) -> Iterator[str]:
    """Instructions and constants, without line numbers and docstrings."""
    for step in dis.get_instructions(code):
        if step.opname not in ("NOP", "RESUME", "CACHE", "EXTENDED_ARG"):
            yield step.opname
            if isinstance(step.argval, CodeType):
                yield from _code(step.argval)
            else:
                yield repr(step.argval)


def _names(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names that the function takes from its module, and from those of our modules that it names."""
    outside = inspect.getclosurevars(function)
    for name, value in {**outside.globals, **outside.nonlocals}.items():
        if isinstance(value, ModuleType) and value.__name__.startswith(_OURS):
            known = vars(value)
            for attribute in sorted(_all_names(function.__code__) & known.keys()):
                yield f"{name}.{attribute}", known[attribute]
        else:
            yield name, value


def _all_names(code: CodeType) -> set[str]:
    inside = [_all_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inside)


def _value(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(getattr(value, "py_func", None), FunctionType):  # a compiled function
        yield from _facts(value.py_func, seen)
    elif isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _value(each, seen)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {value.tobytes()!r}"
    elif callable(value) or isinstance(value, ModuleType | numba.types.Type):
        yield from _by_module(value)
        yield str(getattr(value, "made_for", ""))  # an intrinsic that was made for one type
    else:
        raise TypeError(
            f"compiled code uses {value!r}, whose changes cannot be detected: use numbers, arrays or compiled functions"
        )


def _by_module(value: Any) -> Iterator[str]:
    """An object that is not compiled: from a library, identified by its version; or our intrinsic, by its file."""
    where = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
    yield f"{where}.{getattr(value, '__qualname__', '')}"
    file = getattr(sys.modules.get(where), "__file__", None)
    if where.startswith(_OURS) and file:
        yield Path(file).read_text()
