"""What a run of PyTorch code does with tensors that exist before it, wherever the code finds them.

A function may reach a module or an optimizer through other functions and objects. The operations of a run show every
tensor that it writes to, with the contents before; and the order in which it uses its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paellapy.scheduler.models.torch_watch import watching

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
    made = {_address(t) for t in given}  # in the run, or for it
    others: dict[int, None] = {}  # addresses in order
    before: dict[int, tuple[Any, Any]] = {}  # by address: memory, and its contents

    def see(func: Any, args: Any, named: dict[str, Any]) -> Any:
        if func._schema.name == _FRESH:
            made.update(map(_address, _tensors(torch, args)))
        others.update(dict.fromkeys(at for at in map(_address, _tensors(torch, (args, named))) if at not in made))
        written = list(_written(torch, func._schema, args, named))
        if written and writing is not None:
            writing()
        for t in written:
            at = _address(t)
            if at in others and at not in before:
                memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
                before[at] = memory, memory.clone()
        out = func(*args, **named)
        made.update({_address(t) for t in _tensors(torch, out)} - others.keys())
        return out

    try:
        with watching(see):
            results = run()
    finally:
        with torch.no_grad():
            for memory, contents in before.values():
                memory.copy_(contents)
    return results, Touched(list(others), [memory for memory, _ in before.values()])


def _address(tensor: Any) -> int:
    """Where the tensor's memory begins; 0: it has none, as those that stand for other tensors."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    """Tensors with memory among the arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and _address(value):
            yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(torch, each)
    elif isinstance(value, dict):
        yield from _tensors(torch, tuple(value.values()))


def _written(torch: Any, schema: Any, args: Any, named: dict[str, Any]) -> Iterator[Any]:
    """The tensors among an operation's arguments that it writes to."""
    unsaid = next((names for part, names in _UNSAID.items() if part in schema.name), ())
    for k, each in enumerate(schema.arguments):
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in unsaid:
            yield from _tensors(torch, args[k] if k < len(args) else named.get(each.name))
