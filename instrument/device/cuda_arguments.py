"""Kernel arguments on a real GPU: arrays of ours, of PyTorch and of CuPy become addresses and facts about alignment."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from paellapy.instrument.arguments import SCALARS, Handler, Handlers, pointer_keys
from paellapy.instrument.device.cuda_memory import CudaArray, Gpu
from paellapy.instrument.errors import ArgumentError


def cuda_handlers(device: Gpu) -> Handlers:
    """The handlers of arguments for kernels that run on this GPU."""
    known = {**SCALARS, CudaArray: _cuda_array_handler(device), np.ndarray: _refuse_numpy}
    return Handlers(known, functools.partial(_find, device))


def _find(device: Gpu, kind: type) -> Handler | None:
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _torch_handler(device)
    if kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray":
        return _cupy_handler(device)
    if hasattr(kind, "__cuda_array_interface__"):
        return _interface_handler
    if issubclass(kind, np.ndarray):
        return _refuse_numpy
    return None


def _cuda_array_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()

    def handle(a: CudaArray) -> tuple[int, Any]:
        if a.device is not device:
            raise ArgumentError(
                f"the array is on {a.device.name}, but the kernel runs on {device.name}: copy the array there"
            )
        return a.ptr, aligned.get(a.dtype) or lookup(a.dtype, True)  # the driver aligns to 256

    return handle


def _torch_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()
    index = device.index

    def handle(t: Any) -> tuple[int, Any]:
        if t.get_device() != index:
            raise ArgumentError(
                f"the tensor is on {t.device}, but the kernel runs on {device.name}: move it with .to()"
            )
        ptr = t.data_ptr()
        if ptr & 15:
            return ptr, lookup(t.dtype, False)
        return ptr, aligned.get(t.dtype) or lookup(t.dtype, True)

    return handle


def _cupy_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()
    index = device.index

    def handle(a: Any) -> tuple[int, Any]:
        data = a.data
        if data.device_id != index:
            raise ArgumentError(
                f"the array is on cuda:{data.device_id}, but the kernel runs on {device.name}: copy the array there"
            )
        ptr = data.ptr
        if ptr & 15:
            return ptr, lookup(a.dtype, False)
        return ptr, aligned.get(a.dtype) or lookup(a.dtype, True)

    return handle


def _interface_handler(a: Any) -> tuple[int, Any]:
    _, lookup = pointer_keys()
    interface = a.__cuda_array_interface__
    ptr = interface["data"][0]
    return ptr, lookup(np.dtype(interface["typestr"]), not ptr & 15)


def _refuse_numpy(a: Any) -> tuple[int, Any]:
    raise ArgumentError(
        "a NumPy array is in host memory, but the kernel runs on the GPU: copy it with pp.array(x) or cupy.asarray(x), "
        'or run the kernel on the virtual GPU: with pp.Device("virtual:h200"): …'
    )
