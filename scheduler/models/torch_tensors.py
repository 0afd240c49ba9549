"""PyTorch's tensors and our arrays: one over the memory of the other, and their element types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import ModelError


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
            f"tensors of {dtype} have no NumPy equivalent, so requests cannot carry them: convert them to another type"
        ) from None


def as_tensor(torch: Any, array: Any) -> Any:
    """A tensor over the memory of one of our arrays, on the GPU or on the host."""
    name = array.dtype.name
    plain = getattr(np, name, None) is not None or name == "bool"
    if isinstance(array, np.ndarray):
        raw = array.view(np.ndarray)
        return torch.from_numpy(raw) if plain else torch.from_numpy(raw.view(f"u{raw.itemsize}")).view(_of(torch, name))
    if plain:
        return torch.as_tensor(array, device=f"cuda:{array.device.index}")
    bits = _Bits(array)
    return torch.as_tensor(bits, device=f"cuda:{array.device.index}").view(_of(torch, name))


def as_array(torch: Any, tensor: Any) -> NDArray[Any]:
    """A copy of a tensor as an array on the host, also of types that PyTorch itself does not convert."""
    made: NDArray[Any] = np.empty(tuple(tensor.shape), numpy_dtype(torch, tensor.dtype))
    as_tensor(torch, made).copy_(tensor.detach())
    return made


def _of(torch: Any, name: str) -> Any:
    return getattr(torch, name)


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
        raise ModelError(f"model {title!r}: {what}={given!r}; it must be a floating-point type, such as torch.float16")
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
