"""Kernel arguments on the virtual GPU: NumPy arrays and PyTorch's CPU tensors, read and written in place."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.arguments import SCALARS, Handler, Handlers, pointer_keys
from paellapy.instrument.errors import ArgumentError

_TORCH_TYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
}  # fmt: skip


def virtual_handlers() -> Handlers:
    """The handlers of arguments for kernels that run on a virtual GPU."""
    return Handlers({**SCALARS}, _find)


def _find(kind: type) -> Handler | None:
    if issubclass(kind, np.ndarray):
        return _array_handler()
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor_handler()
    if hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "data_ptr"):

        def refuse(_: Any) -> tuple[Any, Any]:
            raise ArgumentError(
                f"a {kind.__module__}.{kind.__name__} cannot be passed to a kernel on the virtual GPU: "
                "pass NumPy arrays or PyTorch's CPU tensors, which the kernel then reads and writes in place"
            )

        return refuse
    return None


def _array_handler() -> Handler:
    aligned, lookup = pointer_keys()

    def handle(a: NDArray[Any]) -> tuple[Any, Any]:
        a = np.asarray(a)  # the memory itself: NumPy would pass a subclass on to every intermediate result
        if a.ctypes.data & 15:
            return a, lookup(a.dtype, False)
        return a, aligned.get(a.dtype) or lookup(a.dtype, True)

    return handle


def _tensor_handler() -> Handler:
    """Handles PyTorch's CPU tensors like NumPy arrays: the kernel works on their own memory."""
    handle = _array_handler()
    return lambda t: handle(as_array(t))


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype for one of PyTorch.

    >>> numpy_dtype("torch.bfloat16").name
    'bfloat16'
    """
    found = _TORCH_TYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ArgumentError(f"a kernel cannot take tensors of {dtype}: convert them to another type")
    return found


def as_array(tensor: Any) -> NDArray[Any]:
    """A CPU tensor's own memory as a NumPy array, for any strides and type; its base is the whole storage."""
    import torch

    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor on {tensor.device} cannot be passed to the virtual GPU: move it with .cpu()")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"a kernel cannot take tensors of layout {tensor.layout}: pass a dense one, or its parts")
    dtype = numpy_dtype(tensor.dtype)
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.empty(tuple(tensor.shape), dtype)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    size = dtype.itemsize
    strides = tuple(size * s for s in tensor.stride())
    return np.ndarray(tuple(tensor.shape), dtype, memory.data, size * tensor.storage_offset(), strides)
