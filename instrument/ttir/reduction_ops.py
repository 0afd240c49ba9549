"""Translations of reductions, scans and dots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import reduction
from paellapy.instrument.ttir.code import Code, Run, Slots
from paellapy.instrument.ttir.conversion import rounder
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.steps import pure
from paellapy.instrument.ttir.tree import Op, walk
from paellapy.instrument.ttir.types import Type

Ints = tuple[int, ...]


def combine_region(low: Lowering, op: Op) -> tuple[reduction.Combine, Code]:
    """A combine region as a function of arrays. It never touches memory, so it runs the same in every mode."""
    body = low.nested(op.regions[0])
    if body.free:
        low.refuse(op, "its combine function reads values from outside, which is not supported")
    template = low.function.template

    def combine(*operands: Any) -> tuple[Any, ...]:
        slots = list(template)
        for slot, value in zip(body.args, operands, strict=True):
            slots[slot] = value
        for step in body.steps:
            step.run(_PURE, slots)
        return tuple(slots[i] for i in body.values)

    return combine, body


class _PureActive:
    """Stands in for the active blocks in code that only does arithmetic."""

    flops = 0

    class machine:
        call = staticmethod(lambda fn, *args: fn(*args))


_PURE: Any = _PureActive()


def combine_flops(op: Op) -> int:
    return sum(ew.FLOAT[o.name][1] for o in walk(op.regions[0]) if o.name in ew.FLOAT)


def rounded_many(fn: Callable[..., Any], types: list[Type]) -> Callable[..., Any]:
    to = rounder(types[0].element)
    return fn if to is None or len(types) > 1 else lambda *xs: to(fn(*xs))


@builds("tt.reduce", "tt.scan")
def reduce_or_scan(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    axis, shape = op.integer("axis"), op.in_types[0].shape
    scan, reverse = op.name == "tt.scan", op.flag("reverse")
    flops = combine_flops(op) * (op.in_types[0].size - op.in_types[0].size // shape[axis])
    ufunc = reduction.as_ufunc(op.regions[0])
    if ufunc is not None and len(args) == 1:
        one = reduction.scan_ufunc(ufunc, axis, shape, reverse) if scan else reduction.reduce_ufunc(ufunc, axis, shape)
        return pure(rounded_many(one, op.out_types), args, outs[0], flops)
    combine, _ = combine_region(low, op)
    pick = None if scan else reduction.as_arg_reduction(op.regions[0])
    if scan:
        many = reduction.scan_general(combine, axis, shape, reverse)
    elif pick is not None:
        many = reduction.reduce_arg(pick, combine, axis, shape)
    else:
        many = reduction.reduce_general(combine, axis, shape)

    def run(active: Active, slots: Slots) -> None:
        values = active.machine.call_many(many, len(outs), *[slots[i] for i in args])
        for out, value in zip(outs, values, strict=True):
            slots[out] = value
        active.flops += flops

    return run


@builds("tt.dot")
def dot(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    a, b = op.in_types[:2]
    low.facts.dot_dtype = low.facts.dot_dtype or a.element.name
    result = op.out_types[0]
    product = reduction.Dot(a.shape, b.shape, not a.element.is_float, result.element.compute)
    flops = 2 * result.size * a.shape[-1]
    (out,) = outs
    fn = ew.rounded(product, result.element)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[slots[i] for i in args])
        active.dot_flops += flops

    return run
