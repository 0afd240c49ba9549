"""A PyTorch module's weights from a safetensors file: mapped into memory, checked by name, and not copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.torch_tensors import as_tensor
from paellapy.scheduler.models.weight_files import map_weights

_NAMED = 5  # names of each kind in an error


def load_file(torch: Any, title: str, module: Any, path: str | Path, dtype: Any) -> list[NDArray[Any]]:
    """Gives a module, which may be on the meta device, the tensors of a file; returns them as arrays.

    The tensors are the mapped file: it is read where and when they are used. `dtype` is the type to which the module is
    converted next, so the file may have any floating-point type; None: the file must have the module's types.
    """
    if not isinstance(path, str | Path):
        raise ModelError(
            f"model {title!r}: weights is a {type(path).__name__}: give the path of a safetensors file, or call "
            "load_state_dict() on the module"
        )
    arrays = map_weights(path, private=True)
    given = {name: as_tensor(torch, array) for name, array in arrays.items()}
    expected = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    tied = _tied(expected)
    _check(title, path, expected, given, tied, dtype)
    module.load_state_dict(given, strict=False, assign=True)
    for names in tied:
        _tie(module, names, [name for name in names if name in given][-1])  # as load_state_dict(), the last counts
    _check_values(torch, title, path, module)
    module._apply(lambda t: t.cpu())  # the tensors that no file holds, of a module on a GPU
    return list(arrays.values())


def _tied(expected: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names of the same tensor; a file may have it under one of them only."""
    groups: dict[int, list[str]] = {}
    for name, t in expected.items():
        groups.setdefault(id(t), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(module: Any, names: Sequence[str], given: str) -> None:
    """Makes these names one tensor again, the one with the given name."""

    def table(name: str) -> tuple[dict[str, Any], str]:
        path, _, key = name.rpartition(".")
        part = module.get_submodule(path)
        return (part._parameters if key in part._parameters else part._buffers), key

    held, key = table(given)
    for name in names:
        others, own = table(name)
        others[own] = held[key]


def _check(
    title: str, path: str | Path, expected: Mapping[str, Any], given: Mapping[str, Any], tied: Iterable[Sequence[str]],
    dtype: Any,
) -> None:  # fmt: skip
    """Raises one ModelError for all tensors of the file that do not fit the module's."""
    known = set(given)
    for names in tied:
        known.update(names if known & set(names) else ())
    both = [name for name in given if name in expected]
    shapes = {n: (given[n].shape, expected[n].shape) for n in both if given[n].shape != expected[n].shape}
    types = {n: (given[n].dtype, expected[n].dtype) for n in both if not _converts(given[n], expected[n], dtype)}
    found = [
        _listed("missing in the file", [n for n in expected if n not in known]),
        _listed("unknown to the module", [n for n in given if n not in expected]),
        _listed("of another shape", [f"{n} ({_shape(a)} in the file, {_shape(b)} in the module)"
                                     for n, (a, b) in shapes.items()]),
        _listed("of another type", [f"{n} ({a} in the file, {b} in the module)" for n, (a, b) in types.items()]),
    ]  # fmt: skip
    if any(found):
        remedy = "give a file of this module's state_dict(), or build the module that the file was made from"
        if types:
            remedy += "; to convert floating-point weights, give dtype, for example dtype=torch.float16"
        raise ModelError(
            f"model {title!r}: {path} does not fit the module. {' '.join(filter(None, found))} To load it, {remedy}."
        )


def _converts(given: Any, expected: Any, dtype: Any) -> bool:
    """Whether a tensor has the module's type, or is converted like the module."""
    if given.dtype == expected.dtype:
        return True
    return dtype is not None and given.is_floating_point() and expected.is_floating_point()


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"Tensors {what}: {', '.join(names[:_NAMED])}{more}." if names else ""


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _check_values(torch: Any, title: str, path: str | Path, module: Any) -> None:
    """Raises ModelError if tensors that no file holds have no values either."""
    empty = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    for prefix, part in module.named_modules():
        plain = [key for key, t in vars(part).items() if isinstance(t, torch.Tensor) and t.is_meta]
        empty += [f"{prefix}.{key}" if prefix else key for key in plain]
    if empty:
        raise ModelError(
            f"model {title!r}: {_listed('without values', empty)} They are no part of the module's state_dict(), so "
            f"{path} does not hold them, and the meta device holds no values: create these tensors on the CPU, or "
            "build the whole module on the CPU"
        )
