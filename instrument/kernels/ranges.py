"""Ranges in Triton kernels: `pp.range_begin("load")`, `pp.range_end("load")`, and `with pp.range("mma"):`.

Outside a trace they compile to nothing: the machine code is that of the kernel without them. Inside a trace the kernel
is compiled again with markers, which the range pass turns into events.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType, TracebackType
from typing import Any

from triton.language import core
from triton.runtime.jit import JITFunction

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.ptx.ranges import Marker


class _Marking(threading.local):
    on = False


_marking = _Marking()


@contextlib.contextmanager
def marking(on: bool) -> Iterator[None]:
    """Whether ranges leave markers in kernels that this thread compiles."""
    before, _marking.on = _marking.on, on
    try:
        yield
    finally:
        _marking.on = before


@core.builtin  # type: ignore[untyped-decorator]
def range_begin(name: Any, per_warp: Any = False, _semantic: Any = None) -> None:
    """In a Triton kernel: begins a range of this name. `per_warp`: every warp records it, not only the first."""
    _mark(True, name, per_warp, _semantic)


@core.builtin  # type: ignore[untyped-decorator]
def range_end(name: Any, per_warp: Any = False, _semantic: Any = None) -> None:
    """In a Triton kernel: ends the range of this name."""
    _mark(False, name, per_warp, _semantic)


class range:
    """In a Triton kernel: `with pp.range("mma"):` is a range around these statements."""

    __triton_builtin__ = True  # makes Triton's dependency search skip it

    def __init__(self, name: Any, per_warp: Any = False, _semantic: Any = None) -> None:
        if _semantic is None:
            raise ArgumentError(
                "pp.range marks a part of a Triton kernel: write it inside the @triton.jit function. "
                "Around launches, on the host, use pp.trace().", field="range"
            )
        self._marked = (name, per_warp, _semantic)

    def __enter__(self) -> None:
        _mark(True, *self._marked)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _mark(False, *self._marked)


_OURS = (range_begin, range_end, range)


def _mark(begins: bool, name: Any, per_warp: Any, semantic: Any) -> None:
    plain = core._unwrap_if_constexpr  # noqa: SLF001  Triton's own
    marker = Marker(begins, bool(plain(per_warp)), plain(name))
    if _marking.on:
        # Triton's inline assembly must have a result. It is not pure, so that it keeps its place among loads and
        # stores.
        text = f"{marker.ptx} mov.u32 $0, 0;"
        core.inline_asm_elementwise(text, "=r", [], core.int32, False, 1, _semantic=semantic)


def has_ranges(fn: JITFunction) -> bool:
    """Whether a kernel, or a function that it calls, has ranges."""
    return _mentions(fn, set())


def given_with_ranges(values: Iterable[Any]) -> bool:
    """Whether a function among the arguments of a launch has ranges."""
    for value in values:
        if isinstance(value, tuple):
            if given_with_ranges(value):
                return True
            continue
        given = _function(value)
        if given is not None and has_ranges(given):
            return True
    return False


def _function(thing: Any) -> JITFunction | None:
    """A function that kernels can call: of Triton, or a kernel of ours around one."""
    return thing if isinstance(thing, JITFunction) else None


def _mentions(fn: JITFunction, seen: set[int]) -> bool:
    if id(fn) in seen:
        return False
    seen.add(id(fn))
    scope = fn.get_capture_scope() if hasattr(fn, "get_capture_scope") else fn.__globals__
    for dotted in set(re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", fn.src)):
        found = _resolve(dotted, scope)
        if any(found is ours for ours in _OURS):
            return True
        called = _function(found)
        if called is not None and _mentions(called, seen):
            return True
    return False


def _resolve(dotted: str, scope: Any) -> Any:
    root, *rest = dotted.split(".")
    found = scope.get(root)
    for name in rest:
        if not isinstance(found, ModuleType):
            return found  # for example a method of a tensor
        found = getattr(found, name, None)
    return found


# Macros for CUDA C, so that the name reaches the assembly as text.
CUDA_PRELUDE = r"""
#ifdef PAELLAPY_RANGES
#define PAELLAPY_MARK(what, name) asm volatile(".pragma \"paellapy " what " " name "\";" ::: "memory")
#else
#define PAELLAPY_MARK(what, name) do { } while (0)
#endif
#define pp_range_begin(name) PAELLAPY_MARK("begin block", name)
#define pp_range_end(name) PAELLAPY_MARK("end block", name)
#define pp_warp_range_begin(name) PAELLAPY_MARK("begin warp", name)
#define pp_warp_range_end(name) PAELLAPY_MARK("end warp", name)
#line 1
"""


def cuda_has_ranges(text: str) -> bool:
    return re.search(r"\bpp_(warp_)?range_(begin|end)\b", text) is not None
