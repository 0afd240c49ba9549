"""Steps that most builders make: a value computed from others, or given another name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.elementwise import elementwise
from paellapy.instrument.ttir.machine import Active


def pure(fn: Callable[..., Any], args: Sequence[int], out: int, flops: int = 0) -> Run:
    """A step that computes one value from others."""
    if len(args) == 1:
        (a,) = args

        def run1(active: Active, slots: Slots) -> None:
            slots[out] = active.machine.call(fn, slots[a])
            active.flops += flops

        return run1
    if len(args) == 2:
        x, y = args

        def run2(active: Active, slots: Slots) -> None:
            slots[out] = active.machine.call(fn, slots[x], slots[y])
            active.flops += flops

        return run2

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[slots[i] for i in args])
        active.flops += flops

    return run


def each(fn: Callable[..., Any], args: Sequence[int], out: int, flops: int = 0) -> Run:
    """As `pure`, element by element."""
    return pure(elementwise(fn), args, out, flops)


def copy_slot(source: int, out: int) -> Run:
    """A step that only gives a value another name."""

    def run(active: Active, slots: Slots) -> None:
        slots[out] = slots[source]

    return run
