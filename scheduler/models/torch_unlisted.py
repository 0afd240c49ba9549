"""What a step changes that its `state` does not have, wherever its code finds it: seen in one run of the step.

Tensors are found by the operations that write to them, and are put back after loading like those of `state`. An
optimizer is refused by name, since its settings must be known; so are counters and schedules in Python, which would
stand still in a captured step. Kernels that are launched without PyTorch's dispatcher are not seen.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from paellapy.instrument.live_instances import live_instances
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.torch_state import Kept, named_in, optimizers_of, stands_still
from paellapy.scheduler.models.torch_touched import find_touched

_DEEPEST = 4  # functions that call each other, as far as an optimizer's name is looked for


def find_unlisted(
    torch: Any, name: str, step: Callable[..., Any], run: Callable[[], Any], state: list[Any], given: list[Any]
) -> list[Any]:
    """Memory that `run`, a run of the step, changes and that `state` does not have. The run leaves nothing changed.
    `given` has the data of the run. Raises ModelError for an optimizer that `state` lacks, and for counters in Python.
    """
    listed = {id(each): each for each in optimizers_of(torch, state)}
    found: dict[int, Any] = {}  # optimizers that write and that state lacks
    # Nothing leads from an optimizer to its schedules.
    schedules = [(each, _count(each)) for each in live_instances(torch.optim.lr_scheduler.LRScheduler)]
    numbers = _numbers(torch, state)
    kept = Kept(torch, state)
    try:
        _, touched = find_touched(torch, [*kept.tensors, *given], run, partial(_note_optimizer, torch, listed, found))
    finally:
        kept.put_back()
    for optimizer in found.values():
        label = _label(step, optimizer)
        raise ModelError(
            f"job {name!r}: its step uses the optimizer {label or type(optimizer).__name__}, which state=[…] does not "
            f"have: give everything that the step changes, for example state=[net, {label or 'optimizer'}]"
        )
    for schedule, count in schedules:
        if id(getattr(schedule, "optimizer", None)) in listed and _count(schedule) != count:
            raise stands_still(name, _label(step, schedule) or type(schedule).__name__)
    for what, now in _numbers(torch, state).items():
        if now != numbers.get(what, now):
            raise ModelError(
                f"job {name!r}: its step counts {what} in Python ({numbers[what]}, then {now}), and a captured step "
                "runs no Python code: keep the number in a tensor on the device of the parameters"
            )
    return touched.changed


def _note_optimizer(torch: Any, listed: dict[int, Any], found: dict[int, Any]) -> None:
    """Adds the optimizer whose code is running, unless it is listed or works for one that is."""
    optimizers = []
    at: Any = sys._getframe(1)
    while at is not None:
        if "self" in at.f_code.co_varnames:
            own = at.f_locals.get("self")
            if isinstance(own, torch.optim.Optimizer):
                optimizers.append(own)
        at = at.f_back
    if optimizers and not any(id(each) in listed for each in optimizers):
        found[id(optimizers[-1])] = optimizers[-1]


def _count(schedule: Any) -> tuple[Any, Any]:
    return getattr(schedule, "last_epoch", None), getattr(schedule, "_step_count", None)


def _numbers(torch: Any, state: list[Any]) -> dict[str, Any]:
    """Numbers that optimizers keep for each parameter, such as a count of steps, and that are not tensors."""
    found: dict[str, Any] = {}
    for k, optimizer in enumerate(optimizers_of(torch, state)):
        for p, held in enumerate(optimizer.state.values()):
            numbers = held.items() if isinstance(held, dict) else ()
            found |= {f"{key!r} of optimizer {k}, parameter {p}," if p or k else f"{key!r} of its optimizer": value
                      for key, value in numbers if isinstance(value, int | float)}  # fmt: skip
    return found


def _label(step: Callable[..., Any], wanted: Any, depth: int = _DEEPEST) -> str | None:
    """The name under which the step, or a function that it calls, finds an object."""
    names = named_in(step)
    for label, value in names.items():
        if value is wanted:
            return label
        inside = {} if isinstance(value, ModuleType | type) else getattr(value, "__dict__", {})
        for attribute, each in list(inside.items()):
            if each is wanted:
                return f"{label}.{attribute}"
    called = [value for value in names.values() if inspect.isroutine(value) or isinstance(value, partial)]
    deeper = (_label(each, wanted, depth - 1) for each in called) if depth else iter(())
    return next((label for label in deeper if label is not None), None)
