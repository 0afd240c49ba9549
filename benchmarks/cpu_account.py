"""Charges the CPU time of a process to its parts: Numba, LLVM, Triton, imports, tools, and the rest.

`begin` wraps the functions in which these parts work. Each thread's time is charged to the innermost of them.
"""

from __future__ import annotations

import builtins
import collections
import functools
import resource
import threading
import time
from typing import Any

REST, IMPORTS, NUMBA, LLVM, TRITON, TOOLS = "rest", "imports", "Numba", "LLVM for Numba", "Triton", "ptxas"
_spent: dict[str, float] = collections.defaultdict(float)
_lock = threading.Lock()
_own = threading.local()


def _charge(name: str) -> None:
    now = time.thread_time()
    with _lock:
        _spent[name] += now - getattr(_own, "since", now)
    _own.since = now


def _counted(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        before = getattr(_own, "name", REST)
        _charge(before)
        _own.name = name
        try:
            return function(*given, **named)
        finally:
            _charge(name)
            _own.name = before

    return call


def begin() -> None:
    _own.since = 0.0  # from the thread's beginning
    builtins.__import__ = _counted(builtins.__import__, IMPORTS)  # lazy imports come through this too
    from numba.core import codegen, compiler

    from paellapy.instrument.numba_ext import link

    for library in (codegen.CPUCodeLibrary, link.EntryLibrary):
        library.finalize = _counted(library.finalize, LLVM)  # type: ignore[method-assign]
    for kind in (compiler.CompilerBase, link.EntryCompiler):
        kind._compile_core = _counted(kind._compile_core, NUMBA)  # type: ignore[method-assign]


def begin_triton() -> None:
    """Separate, since only some tasks use Triton, whose import takes time."""
    from paellapy.instrument.kernels import triton_source

    triton_source.translate = _counted(triton_source.translate, TRITON)  # type: ignore[attr-defined]


def end() -> dict[str, float]:
    """CPU-seconds by part; those of threads that are not done, and of the process's start, are in the rest."""
    _charge(REST)
    builtins.__import__ = builtins.__import__.__wrapped__  # type: ignore[attr-defined]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {**_spent, TOOLS: children.ru_utime + children.ru_stime}
    known = sum(seconds for name, seconds in found.items() if name not in (REST, TOOLS))
    return {**found, REST: time.process_time() - known}
