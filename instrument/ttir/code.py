"""Lowered code: steps over a file of slots, and how blocks of a GPU grid run through them.

A step is a closure `run(active blocks, slots)`. Control flow in which the active blocks disagree is handled in one way
everywhere: the blocks that disagree are split off, run separately, and merged again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.types import Array
from paellapy.instrument.ttir.values import Value, is_array

Slots = list[Any]
Run = Callable[[Active, Slots], None]


@dataclass(slots=True)
class Step:
    run: Run
    note: str  # op and line, for unexpected errors
    dead: tuple[int, ...] = ()  # slots read here for the last time


@dataclass(slots=True)
class Code:
    """One basic block. `ends`: how it leaves; `values`: slots it passes on; `targets`: successors, with arguments."""

    args: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    ends: str = ""
    values: tuple[int, ...] = ()
    targets: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    free: tuple[int, ...] = ()  # slots it reads that are defined outside


@dataclass(slots=True)
class Function:
    name: str
    args: tuple[int, ...] = ()
    template: Slots = field(default_factory=list)  # with constants already in their slots
    blocks: list[Code] = field(default_factory=list)
    result_ranks: tuple[int, ...] = ()


def execute(code: Code, active: Active, slots: Slots) -> None:
    step = None
    try:
        for step in code.steps:
            step.run(active, slots)
            for i in step.dead:
                slots[i] = None
    except Exception as error:
        if step is not None and not getattr(error, "__notes__", None):
            error.add_note(f"while evaluating {step.note}")
        raise


def assign(slots: Slots, targets: Sequence[int], values: Sequence[Value]) -> None:
    for target, value in zip(targets, values, strict=True):
        slots[target] = value


def branch(active: Active, slots: Slots, free: Sequence[int], index: Array) -> tuple[Active, Slots]:
    """The state of some of the active blocks, ready to take a different branch."""
    own = list(slots)
    for i in free:
        own[i] = active.select(slots[i], index)
    return active.subset(index), own


def partition(condition: Any) -> tuple[Array, Array]:
    return np.flatnonzero(condition), np.flatnonzero(~condition)


def call(function: Function, active: Active, values: Sequence[Value]) -> tuple[Value, ...]:
    """Runs a function for all active blocks; returns its merged results."""
    slots = list(function.template)
    assign(slots, function.args, values)
    return _follow(function, 0, active, slots)


def _follow(function: Function, index: int, active: Active, slots: Slots) -> tuple[Value, ...]:
    while True:
        code = function.blocks[index]
        execute(code, active, slots)
        if code.ends in ("return", "yield"):
            return tuple(slots[i] for i in code.values)
        if code.ends == "br":
            choice = 0
        else:
            condition = active.machine.known(slots[code.values[0]])
            if is_array(condition) and condition.any() and not condition.all():
                return _fork(function, code, active, slots, np.broadcast_to(condition, (active.nb,)))
            choice = 0 if np.all(condition) else 1
        index, sources = code.targets[choice]
        assign(slots, function.blocks[index].args, [slots[i] for i in sources])


def _fork(function: Function, code: Code, active: Active, slots: Slots, condition: Array) -> tuple[Value, ...]:
    parts = []
    live = [i for i, value in enumerate(slots) if value is not None]
    for (target, sources), index in zip(code.targets, partition(condition), strict=True):
        group, own = branch(active, slots, live, index)
        assign(own, function.blocks[target].args, [own[i] for i in sources])
        parts.append((index, _follow(function, target, group, own)))
        group.settle()
    return active.merge(parts, function.result_ranks)


def if_else(condition: int, then: Code, other: Code | None, outs: Sequence[int], ranks: Sequence[int]) -> Run:
    def one(code: Code | None, active: Active, slots: Slots) -> tuple[Value, ...]:
        if code is None:
            return ()
        execute(code, active, slots)
        return tuple(slots[i] for i in code.values)

    def run(active: Active, slots: Slots) -> None:
        c = active.machine.known(slots[condition])
        if not is_array(c) or c.all() or not c.any():
            assign(slots, outs, one(then if np.all(c) else other, active, slots))
            return
        parts = []
        for code, index in zip((then, other), partition(np.broadcast_to(c, (active.nb,))), strict=True):
            if code is None:
                parts.append((index, ()))
                continue
            group, own = branch(active, slots, code.free, index)
            parts.append((index, one(code, group, own)))
            group.settle()
        assign(slots, outs, active.merge(parts, ranks))

    return run


def for_loop(
    bounds: Sequence[int], initial: Sequence[int], body: Code, outs: Sequence[int], ranks: Sequence[int]
) -> Run:
    induction, carried = body.args[0], body.args[1:]

    def run(active: Active, slots: Slots) -> None:
        low, high, step = (active.machine.known(slots[i]) for i in bounds)
        values = tuple(slots[i] for i in initial)
        if is_array(low) or is_array(high) or is_array(step):
            low, high, step = (np.broadcast_to(x, (active.nb,)) for x in (low, high, step))
            assign(slots, outs, ragged(active, slots, low, high, step, values))
            return
        for i in range(int(low), int(high), int(step)):
            slots[induction] = low.dtype.type(i)
            assign(slots, carried, values)
            execute(body, active, slots)
            values = tuple(slots[i] for i in body.values)
        assign(slots, outs, values)

    def ragged(
        active: Active, slots: Slots, low: Array, high: Array, step: Array, values: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        """Runs a loop with differing trip counts: blocks leave as they finish."""
        trips = np.maximum(0, -((low - high) // step))
        group, own, members = active, slots, np.arange(active.nb)
        parts: list[tuple[Array, tuple[Value, ...]]] = []
        for i in range(int(trips.max())):
            if not (trips > i).all():
                stay, leave = partition(trips > i)
                parts.append((members[leave], tuple(group.select(v, leave) for v in values)))
                values = tuple(group.select(v, stay) for v in values)
                before = group
                group, own = branch(group, own, body.free, stay)
                if before is not active:
                    before.settle()
                members, trips, low, step = members[stay], trips[stay], low[stay], step[stay]
            at = low + low.dtype.type(i) * step
            own[induction] = at[0] if (at == at[0]).all() else at
            assign(own, carried, values)
            execute(body, group, own)
            values = tuple(own[i] for i in body.values)
        if group is not active:
            group.settle()
        return active.merge([*parts, (members, values)], ranks)

    return run


def while_loop(
    initial: Sequence[int], before: Code, after: Code, outs: Sequence[int], ranks: Sequence[int], waits: bool
) -> Run:
    """`before.values` has the condition, then values for `after` or the exit. `waits`: it waits for other blocks."""
    free = tuple(dict.fromkeys((*before.free, *after.free)))

    def run(active: Active, slots: Slots) -> None:
        group, own, members = active, slots, np.arange(active.nb)
        parts: list[tuple[Array, tuple[Value, ...]]] = []
        values = tuple(slots[i] for i in initial)
        while True:
            assign(own, before.args, values)
            execute(before, group, own)
            condition = group.machine.known(own[before.values[0]])
            values = tuple(own[i] for i in before.values[1:])
            if not np.all(condition):
                stay, leave = partition(np.broadcast_to(condition, (group.nb,)))
                if not parts and not len(stay):
                    assign(slots, outs, values)
                    return
                parts.append((members[leave], tuple(group.select(v, leave) for v in values)))
                finished = group
                if len(stay):
                    values = tuple(group.select(v, stay) for v in values)
                    group, own = branch(group, own, free, stay)
                    members = members[stay]
                if finished is not active:
                    finished.settle()
                if not len(stay):
                    assign(slots, outs, active.merge(parts, ranks))
                    return
            assign(own, after.args, values)
            execute(after, group, own)
            values = tuple(own[i] for i in after.values)
            if waits:
                group.machine.give_way()

    return run
