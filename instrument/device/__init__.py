"""Devices: the real GPU and the virtual one, behind one interface; arrays and streams of the current one."""

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from paellapy.instrument.device.base import Array, Device, Event, Launcher, Stream
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.virtual import VirtualDevice, as_array, numpy_dtype
from paellapy.instrument.errors import NoDeviceError
from paellapy.instrument.gpu_model.parts import PARTS

__all__ = [
    "Array", "CudaDevice", "Device", "Event", "Launcher", "Stream", "VirtualDevice", "array", "devices", "empty",
    "empty_like", "stream", "zeros",
]  # fmt: skip


def devices() -> list[str]:
    """Names of the devices that can be opened on this machine: GPUs first, then the virtual parts.

    >>> "virtual:h200" in devices()
    True
    """
    from paellapy.instrument.device.driver import check, driver

    try:
        found = [f"cuda:{i}" for i in range(check(driver().cuDeviceGetCount(), "counting GPUs"))]
    except NoDeviceError:
        found = []
    return found + [f"virtual:{name}" for name in PARTS]


def array(data: Any) -> Array:
    """A copy of `data`, an array or a PyTorch tensor on the CPU, in the current device's memory.

    >>> array([[1.0, 2.0]]).numpy()
    array([[1., 2.]])
    """
    return Device.current().array(as_array(data.detach()) if _is_tensor(data) else np.asarray(data))


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Uninitialised memory on the current device.

    >>> empty((2, 3)).shape
    (2, 3)
    """
    return Device.current().empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Memory of zeros on the current device.

    >>> zeros(3, np.int32).numpy()
    array([0, 0, 0], dtype=int32)
    """
    return Device.current().array(np.zeros(shape, dtype))


def empty_like(other: Any, dtype: DTypeLike | None = None) -> Array:
    """Uninitialised memory on the current device, with another array's shape, and its type unless `dtype` is given.

    >>> empty_like(zeros(4, np.int32)).dtype
    dtype('int32')
    """
    own = numpy_dtype(other.dtype) if _is_tensor(other) else other.dtype
    return Device.current().empty(tuple(other.shape), own if dtype is None else dtype)


def _is_tensor(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def stream(priority: int = 0) -> Stream:
    """A new stream of the current device; `with stream:` makes it current. Larger priorities go first.

    >>> with stream(priority=1):
    ...     x = zeros(4)
    """
    return Device.current().stream(priority)
