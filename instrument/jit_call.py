"""Calls of compiled functions by their address: a caller then need not contain them, nor wait until they are compiled.

A function called by its address keeps the caller cacheable on disk; a ctypes function does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
Generated = tuple[Any, Callable[..., Any]]


def call(returns: Any, parameters: list[Any], signature: Any) -> Generated:
    """Code for a call of args[0] with the other arguments; u64 arguments become pointers where C takes them."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(returns, parameters).as_pointer())
        passed = [
            builder.inttoptr(arg, parameter) if isinstance(parameter, ir.PointerType) and arg.type == _I64 else arg
            for arg, parameter in zip(args[1:], parameters, strict=True)
        ]
        result = builder.call(function, passed)
        return context.get_dummy_value() if isinstance(returns, ir.VoidType) else result

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def call_with(typing: Any, function: Any, tables: Any, number: Any) -> Generated:
    """int64 f(tables, int64): a reachable entry point that takes a state and one number"""
    return call(_I64, [_I64.as_pointer(), _I64], types.int64(types.uint64, tables, types.int64))
