"""The state that a PyTorch step changes: found in modules, optimizers and similar objects, copied, and restored.

Captured graphs hold addresses, so tensors are overwritten and never replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paellapy.scheduler.core.errors import ModelError

GROUPS = "number of parameter groups"


def _parts(torch: Any, value: Any, depth: int = 3) -> Iterator[Any]:
    """The tensors, modules, optimizers and random generators in an object: in dicts, lists and attributes."""
    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer | torch.Generator):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _parts(torch, each, depth)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for each in value:
            yield from _parts(torch, each, depth)
    elif depth > 0 and not isinstance(value, type) and not inspect.isroutine(value):
        for each in _attributes(value):  # for example those of a gradient scaler or a dataclass
            yield from _parts(torch, each, depth - 1)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def tensors_of(torch: Any, value: Any, depth: int = 3) -> Iterator[Any]:
    """Tensors that a step may change through this object; a tensor may appear more than once."""
    for part in _parts(torch, value, depth):
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, torch.nn.Module):
            yield from part.parameters()
            yield from part.buffers()
        elif isinstance(part, torch.optim.Optimizer):
            yield from tensors_of(torch, part.param_groups, depth + 2)
            yield from tensors_of(torch, dict(part.state), depth + 2)


def generators_of(torch: Any, value: Any) -> list[Any]:
    """Random generators in an object, each once."""
    return list({id(part): part for part in _parts(torch, value) if isinstance(part, torch.Generator)}.values())


def default_generators(torch: Any) -> list[Any]:
    """PyTorch's default generators: the CPU's, and those of GPUs in use."""
    cuda = list(torch.cuda.default_generators) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.default_generator, *cuda]


def settings_of(torch: Any, values: Any) -> dict[str, Any]:
    """Numbers of optimizers that a capture would freeze, because they are not tensors."""
    found: dict[str, Any] = {}
    for k, optimizer in enumerate(optimizers_of(torch, values)):
        found[f"optimizer {k}: {GROUPS}"] = len(optimizer.param_groups)
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                numbers = value if isinstance(value, tuple | list) else (value,)
                if key != "params" and all(isinstance(each, int | float) for each in numbers):
                    found[f"optimizer {k}, group {g}: {key}"] = value
    return found


def optimizers_of(torch: Any, value: Any) -> list[Any]:
    """Optimizers in an object, each once."""
    found = {id(part): part for part in _parts(torch, value) if isinstance(part, torch.optim.Optimizer)}
    return list(found.values())


def named_in(step: Callable[..., Any]) -> dict[str, Any]:
    """Objects that a step uses by name: of its module, of the functions around it, of its `self`, or given by partial.
    """
    if isinstance(step, functools.partial):
        given = {f"argument {k}": each for k, each in enumerate(step.args)}
        return {**named_in(step.func), **given, **step.keywords}
    plain = inspect.unwrap(step)
    try:
        found = inspect.getclosurevars(plain)
    except TypeError:  # not a Python function, for example an object that can be called
        return {}
    own = vars(plain.__self__) if inspect.ismethod(plain) and hasattr(plain.__self__, "__dict__") else {}
    used = {label: own[label] for label in plain.__code__.co_names if label in own}
    return {**found.globals, **found.nonlocals, **used}


def check_complete(torch: Any, name: str, step: Callable[..., Any], values: Any) -> None:
    """Raises ModelError for an optimizer that the step uses by name and that is not among the values: capturing and
    measuring run the step, and would leave the optimizer's state changed. A schedule, whose counter is in Python, would
    stand still in a captured step.
    """
    known = {id(each) for each in optimizers_of(torch, values)}
    for label, value in named_in(step).items():
        if isinstance(value, torch.optim.Optimizer) and id(value) not in known:
            raise ModelError(
                f"job {name!r}: its step uses the optimizer {label}, which state=[…] does not have: give everything "
                f"that the step changes, for example state=[net, {label}]"
            )
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            raise stands_still(name, label)


def stands_still(name: str, schedule: str) -> ModelError:
    return ModelError(
        f"job {name!r}: its step uses the schedule {schedule}, which would stand still, because a captured step runs "
        f"no Python code: call {schedule}.step() in the callback, with every=1, and make the learning rate a "
        "tensor (lr=torch.tensor(1e-3))"
    )


def check_capturable(torch: Any, name: str, values: Any) -> None:
    """Raises ModelError for optimizers that count their steps on the host, which cannot be captured on a GPU."""
    for optimizer in optimizers_of(torch, values):
        groups = optimizer.param_groups
        on_gpu = any(p.is_cuda for group in groups for p in group["params"])
        if on_gpu and any(group.get("capturable") is False for group in groups):
            raise ModelError(
                f"job {name!r}: {type(optimizer).__name__} counts its steps on the host, so a captured step would "
                f"repeat the same step: create the optimizer with capturable=True"
            )


class Kept:
    """A copy of all tensors of some objects that a step may change, and of PyTorch's random generator states."""

    def __init__(self, torch: Any, values: Any) -> None:
        self._torch = torch
        leaves = {id(t): t for t in tensors_of(torch, values) if t.is_leaf and t.grad is not None}
        unique = {id(t): t for t in (*tensors_of(torch, values), *(t.grad for t in leaves.values()))}.values()
        with torch.no_grad():
            self._tensors = [(t, t.detach().clone()) for t in unique]
        kept = {id(t): value for t, value in self._tensors}
        self._grads = [(leaf, kept[id(leaf.grad)]) for leaf in leaves.values()]
        generators = {id(g): g for g in (*default_generators(torch), *generators_of(torch, values))}.values()
        self._generators = [(g, g.get_state()) for g in generators]

    @property
    def tensors(self) -> list[Any]:
        return [t for t, _ in self._tensors]

    @property
    def addresses(self) -> list[int]:
        """The addresses that a GPU would use. Single numbers, such as an optimizer's step count, may be on the host."""
        return [t.untyped_storage().data_ptr() for t, _ in self._tensors if t.dim()]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t, _ in self._tensors)

    def put_back(self) -> None:
        with self._torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
            for leaf, value in self._grads:  # `zero_grad` drops gradients, so a run may have made other tensors
                if leaf.grad is not None:
                    leaf.grad.copy_(value)
        for generator, state in self._generators:
            generator.set_state(state)


def state_behind(torch: Any, function: Callable[..., Any]) -> list[Any]:
    """Modules, optimizers and tensors that a function reaches by name: through its closure, its globals, `self`, or the
    arguments of partial; and dicts, lists and tuples of them.
    """
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return [*state_behind(torch, function.func), *(each for each in given if _has_state(torch, each))]
    own = getattr(function, "__self__", None)
    code = getattr(function, "__func__", function)
    try:
        seen = inspect.getclosurevars(code)
    except (TypeError, ValueError):  # a callable object
        named, own = [function], function if own is None else own
    else:
        named = [*seen.nonlocals.values(), *seen.globals.values()]
    inside = [] if own is None else list(getattr(own, "__dict__", {}).values())
    return [each for each in (*named, own, *inside) if _has_state(torch, each)]


def _has_state(torch: Any, value: Any, depth: int = 2) -> bool:
    """Whether running a function may change tensors in this value. A module of a dict or list counts only in training:
    there may be many more of them than the function uses.
    """
    if isinstance(value, torch.nn.Module):
        return depth == 2 or value.training
    if isinstance(value, torch.optim.Optimizer | torch.Tensor):
        return True
    values = value.values() if isinstance(value, Mapping) else value
    inner = isinstance(value, Mapping | list | tuple) and depth > 0
    return inner and any(_has_state(torch, each, depth - 1) for each in values)
