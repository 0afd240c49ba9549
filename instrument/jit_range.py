"""Loops over `range`, translated as a C compiler would: a value that is compared with the end, and no count.

Numba computes the number of iterations first, with two divisions, and checks that the step is not 0. The hot path has
no such step, and LLVM would only remove all that again.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

_STATE, _ITERATOR = types.range_state64_type, types.range_iter64_type
# Fields of Numba's structures: of a range, and of its iterator.
_START, _STOP, _STEP = range(3)
_AT, _END, _BY = range(3)


def _begin(context: Any, builder: Any, signature: Any, args: Any, loc: Any = None) -> Any:
    """`iter(range)`"""
    at = cgutils.alloca_once(builder, ir.IntType(64))
    builder.store(builder.extract_value(args[0], _START), at)
    made = ir.Constant(context.get_value_type(_ITERATOR), ir.Undefined)
    made = builder.insert_value(made, at, _AT)
    for field, of in ((_END, _STOP), (_BY, _STEP)):
        made = builder.insert_value(made, builder.extract_value(args[0], of), field)
    return made


def _next(context: Any, builder: Any, signature: Any, args: Any, loc: Any = None) -> Any:
    """`next(iterator)`: a pair of the value, and whether there was one."""
    at, end, step = (builder.extract_value(args[0], field) for field in (_AT, _END, _BY))
    value = builder.load(at)
    upwards = builder.icmp_signed(">", step, ir.Constant(step.type, 0))
    below, above = builder.icmp_signed("<", value, end), builder.icmp_signed(">", value, end)
    builder.store(builder.add(value, step), at)
    pair = ir.Constant(context.get_value_type(signature.return_type), ir.Undefined)
    return builder.insert_value(builder.insert_value(pair, value, 0), builder.select(upwards, below, above), 1)


LOOPS = {("getiter", (_STATE,)): _begin, ("iternext", (_ITERATOR,)): _next}
