"""PyTorch's tensors and our arrays: one over the memory of the other, and their element types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.tensors import wrong
from paellapy.scheduler.models.weights import map_weights

_NAMED = 5  # names of each kind in an error


def needs_torch() -> Any:
    """The torch package; a ModelError says how to install it."""
    try:
        import torch
    except ImportError:
        raise ModelError("Model.from_torch needs PyTorch: pip install torch") from None
    return torch


def numpy_dtype(torch: Any, dtype: Any) -> np.dtype[Any]:
    """NumPy's equivalent of one of PyTorch's element types."""
    name = str(dtype).removeprefix("torch.")
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    except TypeError:
        raise ModelError(
            f"tensors of {dtype} have no NumPy equivalent, so requests cannot carry them: convert them to another type",
            field="dtype", given=dtype,
        ) from None  # fmt: skip


def as_tensor(torch: Any, array: Any) -> Any:
    """A tensor over the memory of one of our arrays, on the GPU or on the host."""
    name = array.dtype.name
    plain = getattr(np, name, None) is not None or name == "bool"
    if isinstance(array, np.ndarray):
        raw = array.view(np.ndarray)
        found = torch.from_numpy(raw if plain else raw.view(f"u{raw.itemsize}"))
    else:
        found = torch.as_tensor(array if plain else _Bits(array), device=f"cuda:{array.device.index}")
    return found if plain else found.view(getattr(torch, name))


def as_array(torch: Any, tensor: Any) -> NDArray[Any]:
    """A copy of a tensor as an array on the host, also of types that PyTorch itself does not convert."""
    made: NDArray[Any] = np.empty(tuple(tensor.shape), numpy_dtype(torch, tensor.dtype))
    as_tensor(torch, made).copy_(tensor.detach())
    return made


class _Bits:
    """An array of a type that CUDA's array interface cannot name, presented as integers of the same width."""

    def __init__(self, array: Any) -> None:
        kind = {1: "|u1", 2: "<i2"}[array.dtype.itemsize]  # older versions of torch have int16 but not uint16
        self._keep = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "typestr": kind}


def torch_dtype(torch: Any, title: str, what: str, given: Any) -> Any:
    """A floating-point type of PyTorch, given as such or by its name."""
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise wrong(title, what, given, f"{what}={given!r}; it must be a floating-point type, such as torch.float16")
    return found


def storages(torch: Any, call: Any) -> dict[int, Any]:
    """The memory of a module's parameters and buffers by address; tensors that share memory appear once."""
    if not isinstance(call, torch.nn.Module):
        return {}
    tensors = [t for part in call.modules() for t in (*part.parameters(False), *part.buffers(False))]
    found = (t.untyped_storage() for t in tensors if t.numel())
    return {s.data_ptr(): s for s in found}


def as_bytes(torch: Any, storage: Any) -> Any:
    """A storage as an array on the host."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))
    return flat.cpu().numpy()


def total_bytes(tensors: Iterable[Any]) -> int:
    """The bytes of tensors; memory that several of them share counts once."""
    return sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in tensors}.values())


def tensors_in(torch: Any, value: Any) -> Iterator[Any]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(torch, each)


def by_name(given: Any, word: str) -> dict[str, Any]:
    """Values by name: those of a dict, several numbered as in `output0`, or one under the word itself."""
    if isinstance(given, Mapping):
        return dict(given)
    return {f"{word}{k}": each for k, each in enumerate(given)} if isinstance(given, tuple | list) else {word: given}


def address_of(tensor: Any) -> int:
    """Where the tensor's memory begins; 0: it has none, like tensors that stand for others."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


# -- PyTorch's own attributes that have no public name


def schema_of(operation: Any) -> Any:
    """The arguments and results of an operation, and which of them it writes to."""
    return operation._schema  # noqa: SLF001  PyTorch's own


def change_tensors(module: Any, change: Callable[[Any], Any]) -> None:
    """Replaces every parameter and buffer of a module."""
    module._apply(change)  # noqa: SLF001  PyTorch's own


def _holders(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers  # noqa: SLF001  PyTorch's own


# -- weights from a safetensors file: mapped into memory, checked by name, and not copied


def load_file(torch: Any, title: str, module: Any, path: str | Path, dtype: Any) -> list[NDArray[Any]]:
    """Gives a module, which may be on the meta device, the tensors of a file; returns them as arrays.

    The tensors are the mapped file: it is read where and when they are used. `dtype` is the type to which the module is
    converted next, so the file may have any floating-point type; None: the file must have the module's types.
    """
    if not isinstance(path, str | Path):
        why = "give the path of a safetensors file, or call load_state_dict() on the module"
        raise wrong(title, "weights", path, f"weights is a {type(path).__name__}: {why}")
    arrays = map_weights(path, private=True)
    given = {name: as_tensor(torch, array) for name, array in arrays.items()}
    expected = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    tied = _tied(expected)
    _check(title, path, expected, given, tied, dtype)
    module.load_state_dict(given, strict=False, assign=True)
    for names in tied:
        _tie(module, names, [name for name in names if name in given][-1])  # as load_state_dict(), the last counts
    _check_values(torch, title, path, module)
    change_tensors(module, lambda t: t.cpu())  # the tensors that no file holds, of a module on a GPU
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
        parameters, buffers = _holders(module.get_submodule(path))
        return (parameters if key in parameters else buffers), key

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
    missing, unknown = [n for n in expected if n not in known], [n for n in given if n not in expected]
    found = [
        _listed("missing in the file", missing), _listed("unknown to the module", unknown),
        _listed("of another shape", [f"{n} ({_shape(a)} in the file, {_shape(b)} in the module)"
                                     for n, (a, b) in shapes.items()]),
        _listed("of another type", [f"{n} ({a} in the file, {b} in the module)" for n, (a, b) in types.items()]),
    ]  # fmt: skip
    if any(found):
        remedy = "give a file of this module's state_dict(), or build the module that the file was made from"
        if types:
            remedy += "; to convert floating-point weights, give dtype, for example dtype=torch.float16"
        raise ModelError(
            f"model {title!r}: {path} does not fit the module. {' '.join(filter(None, found))} To load it, {remedy}.",
            model=title, field="weights", given=path, missing=missing, unknown=unknown, shapes=shapes, types=types,
        )  # fmt: skip


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
        raise wrong(
            title, "weights", empty, f"{_listed('without values', empty)} They are no part of the module's "
            f"state_dict(), so {path} does not hold them, and the meta device holds no values: create these tensors on "
            "the CPU, or build the whole module on the CPU"
        )  # fmt: skip
