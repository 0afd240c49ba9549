"""The state that a PyTorch step changes: found in modules, optimizers and similar objects, copied, and restored.

Captured graphs hold addresses, so tensors are overwritten and never replaced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from paellapy.instrument.env import live_instances
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.torch_tensors import address_of, schema_of, tensors_in

GROUPS = "number of parameter groups"
_DEEPEST = 4  # functions that call each other, as far as an optimizer's name is looked for


def wrong_job(name: str, field: str, given: Any, why: str) -> ModelError:
    """The error for data, state or a step that a job cannot have."""
    return ModelError(f"job {name!r}: {why}", job=name, field=field, given=given)


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
            raise unlisted(name, label, label)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            raise stands_still(name, label)


def unlisted(name: str, optimizer: str, variable: str) -> ModelError:
    return wrong_job(
        name, "state", optimizer, f"its step uses the optimizer {optimizer}, which state=[…] does not have: give "
        f"everything that the step changes, for example state=[net, {variable}]"
    )  # fmt: skip


def stands_still(name: str, schedule: str) -> ModelError:
    return wrong_job(
        name, "step", schedule, f"its step uses the schedule {schedule}, which would stand still, because a captured "
        f"step runs no Python code: call {schedule}.step() in the callback, with every=1, and make the learning rate a "
        "tensor (lr=torch.tensor(1e-3))"
    )  # fmt: skip


def check_capturable(torch: Any, name: str, values: Any) -> None:
    """Raises ModelError for optimizers that count their steps on the host, which cannot be captured on a GPU."""
    for optimizer in optimizers_of(torch, values):
        groups = optimizer.param_groups
        on_gpu = any(p.is_cuda for group in groups for p in group["params"])
        if on_gpu and any(group.get("capturable") is False for group in groups):
            raise wrong_job(
                name, "state", type(optimizer).__name__, f"{type(optimizer).__name__} counts its steps on the host, so "
                "a captured step would repeat the same step: create the optimizer with capturable=True"
            )  # fmt: skip


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


# -- every operation that PyTorch's dispatcher makes in a run, also those of the backward pass

# Makes an operation of PyTorch, given its arguments by place and by name, and returns its result.
See = Callable[[Any, Any, dict[str, Any]], Any]


@contextlib.contextmanager
def watching(see: See) -> Iterator[None]:
    """A context in which `see` makes every operation of this thread, and of the backward passes that it starts.
    Compiled code runs as it was written: its kernels could not be seen.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Avoids the import of PyTorch's compiler (2.5 s), which would only exclude this mode from it."""
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    with _as_written(), Watch():
        yield


def _as_written() -> AbstractContextManager[Any]:
    """A context in which functions that `torch.compile` has made run as they were written. With `fullgraph=True` they
    would otherwise raise an error under a watch.
    """
    compiler = sys.modules.get("torch.compiler")
    stance = getattr(compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    made: AbstractContextManager[Any] = contextlib.nullcontext() if stance is None else stance("force_eager")
    return made


# -- what a run of PyTorch code does with tensors that exist before it, wherever the code finds them
#
# A function may reach a module or an optimizer through other functions and objects. The operations of a run show every
# tensor that it writes to, with the contents before; and the order in which it uses its weights.

# Operations whose schema does not say that they write to these arguments.
_UNSAID = {"batch_norm": ("running_mean", "running_var")}
_FRESH = "aten::lift_fresh"  # its argument was made just before, by torch.tensor(…), which is no operation


@dataclass(slots=True)
class Touched:
    """Memory of tensors that a run did not make: addresses in the order of their first use, and the memory that it
    changes, as tensors of bytes.
    """

    used: list[int]
    changed: list[Any]


def find_touched(
    torch: Any, given: Iterable[Any], run: Callable[[], Any], writing: Callable[[], None] | None = None
) -> tuple[Any, Touched]:
    """The result of a run, and the memory of others that it touched; changes are put back. `given` has the inputs of
    the run, which do not count. `writing` is called before every operation that writes to a tensor.
    """
    made = {address_of(t) for t in given}  # in the run, or for it
    others: dict[int, None] = {}  # addresses in order
    before: dict[int, tuple[Any, Any]] = {}  # by address: memory, and its contents

    def see(func: Any, args: Any, named: dict[str, Any]) -> Any:
        schema = schema_of(func)
        if schema.name == _FRESH:
            made.update(map(address_of, _tensors(torch, args)))
        others.update(dict.fromkeys(at for at in map(address_of, _tensors(torch, (args, named))) if at not in made))
        written = list(_written(torch, schema, args, named))
        if written and writing is not None:
            writing()
        for t in written:
            at = address_of(t)
            if at in others and at not in before:
                memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
                before[at] = memory, memory.clone()
        out = func(*args, **named)
        made.update({address_of(t) for t in _tensors(torch, out)} - others.keys())
        return out

    try:
        with watching(see):
            results = run()
    finally:
        with torch.no_grad():
            for memory, contents in before.values():
                memory.copy_(contents)
    return results, Touched(list(others), [memory for memory, _ in before.values()])


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    """Tensors with memory among the arguments or results of an operation."""
    return (t for t in tensors_in(torch, value) if t.layout is torch.strided and address_of(t))


def _written(torch: Any, schema: Any, args: Any, named: dict[str, Any]) -> Iterator[Any]:
    """The tensors among an operation's arguments that it writes to."""
    unsaid = next((names for part, names in _UNSAID.items() if part in schema.name), ())
    for k, each in enumerate(schema.arguments):
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in unsaid:
            yield from _tensors(torch, args[k] if k < len(args) else named.get(each.name))


# -- what a step changes that its `state` does not have: seen in one run of the step
#
# Tensors are found by the operations that write to them, and are put back after loading like those of `state`. An
# optimizer is refused by name, since its settings must be known; so are counters and schedules in Python, which would
# stand still in a captured step. Kernels that are launched without PyTorch's dispatcher are not seen.


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
        raise unlisted(name, label or type(optimizer).__name__, label or "optimizer")
    for schedule, count in schedules:
        if id(getattr(schedule, "optimizer", None)) in listed and _count(schedule) != count:
            raise stands_still(name, _label(step, schedule) or type(schedule).__name__)
    for what, now in _numbers(torch, state).items():
        if now != numbers.get(what, now):
            raise wrong_job(
                name, "step", (numbers[what], now), f"its step counts {what} in Python ({numbers[what]}, then {now}), "
                "and a captured step runs no Python code: keep the number in a tensor on the device of the parameters"
            )  # fmt: skip
    return touched.changed


def _note_optimizer(torch: Any, listed: dict[int, Any], found: dict[int, Any]) -> None:
    """Adds the optimizer whose code is running, unless it is listed or works for one that is."""
    optimizers = []
    at: Any = inspect.currentframe()
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
