"""Ranges of a PyTorch module's inputs: an input that is an index into a table must lie within the table.

A GPU does not check indices: beyond the table it reads other memory, or fails for all requests. The example run shows
which inputs (unchanged, reshaped or converted) are indices for `embedding`, `gather` and similar operations. The range
of such an input is the size of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paellapy.scheduler.models.torch_watch import watching

Range = tuple[int, int]

# Operations with the argument positions of their table, of their indices, and of the table's dimension (None: dimension
# 0).
_LOOKUPS: dict[str, tuple[int, int, int | None]] = {
    "aten::embedding": (0, 1, None),
    "aten::_embedding_bag": (0, 1, None),
    "aten::_embedding_bag_forward_only": (0, 1, None),
    "aten::index_select": (0, 2, 1),
    "aten::gather": (0, 2, 1),
    **{
        f"aten::{name}{in_place}": (0, 2, 1)
        for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
        for in_place in ("", "_")
    },
}
# Operations that do not change values.
_SAME = {
    "aten::_to_copy", "aten::alias", "aten::clone", "aten::contiguous", "aten::detach", "aten::expand", "aten::flatten",
    "aten::lift_fresh", "aten::permute", "aten::repeat", "aten::reshape", "aten::select", "aten::slice", "aten::split",
    "aten::squeeze", "aten::t", "aten::transpose", "aten::unbind", "aten::unsqueeze", "aten::view",
    "aten::_unsafe_view",
}  # fmt: skip


def find_ranges(torch: Any, given: Mapping[str, Any], run: Callable[[], Any]) -> tuple[Any, dict[str, Range]]:
    """The result of the run, and the ranges of its inputs as far as the run shows them."""
    whose = {id(t): name for name, t in given.items() if not t.is_floating_point() and t.dtype is not torch.bool}
    kept: list[Any] = []  # keeps tensors alive, so that their ids stay unique
    found: dict[str, Range] = {}

    def see(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in _SAME and args and (source := whose.get(id(args[0]))) is not None:
            for each in out if isinstance(out, tuple | list) else (out,):
                if not each.is_floating_point():
                    whose[id(each)] = source
                    kept.append(each)
        for indices, least, most in _looked_up(name, args):
            if (source := whose.get(id(indices))) is not None:
                low, high = found.get(source, (least, most))
                found[source] = max(low, least), min(high, most)
        return out

    if not whose:
        return run(), {}
    with watching(see):
        results = run()
    return results, found


def _looked_up(name: str, args: Any) -> list[tuple[Any, int, int]]:
    """The indices of an operation, each with the smallest and the largest valid index of its table."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"):
        table, indices = args[0], args[1]
        return [(each, -table.shape[k], table.shape[k] - 1) for k, each in enumerate(indices) if each is not None]
    if name not in _LOOKUPS:
        return []
    table_at, index_at, along_at = _LOOKUPS[name]
    table = args[table_at]
    size = int(table.shape[0 if along_at is None else args[along_at]])
    return [(args[index_at], 0, size - 1)]
