"""Arrays in a captured function: they allow kernels and views, and refuse to be computed with on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from paellapy.instrument.device.virtual import VirtualArray
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.users_line import users_line

REMEDY = (
    "a captured function only launches kernels: pass constants as weights, and read results from the outputs"
)


class GuardedArray(VirtualArray):
    """An array in a captured function. It allows kernels and views only, since nothing has been computed yet."""

    def _refuse(self, doing: str) -> Any:
        raise CaptureError(f"{doing} at {users_line()} while its launches are captured; {REMEDY}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._refuse(f"computes numpy.{ufunc.__name__} on the host")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._refuse(f"calls numpy.{function.__name__} on the host")

    def numpy(self) -> Any:
        return self._refuse("copies an array to the host")

    def set(self, data: Any) -> None:
        self._refuse("copies an array to the GPU")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse("writes to an array from the host")

    def __float__(self) -> float:
        return float(self._refuse("reads a number from the GPU"))

    def __int__(self) -> int:
        return int(self._refuse("reads a number from the GPU"))

    def __bool__(self) -> bool:
        return bool(self._refuse("branches on data"))

    def item(self, *args: Any) -> Any:
        return self._refuse("reads a number from the GPU")

    def tolist(self) -> Any:
        return self._refuse("copies an array to the host")

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(found, np.ndarray):
            return self._refuse("reads a number from the GPU")
        return self._view_of(found, "picks elements on the host")

    def reshape(self, *shape: Any, **how: Any) -> Any:
        return self._view_of(super().reshape(*shape, **how), "copies an array on the host")

    def _view_of(self, found: Any, doing: str) -> Any:
        """The result, if it is a view of the same memory. A copy made now would be stale at the next launch."""
        low, high = byte_bounds(self.view(np.ndarray))
        return found if not found.size or low <= found.ctypes.data < high else self._refuse(doing)


def _on_the_host(name: str) -> Callable[..., Any]:
    def method(self: GuardedArray, *_: Any, **__: Any) -> Any:
        return self._refuse(f"computes {name}() on the host")

    return method


# Methods of an array that do not go through the two NumPy protocols above.
for _name in (
    "argpartition", "argsort", "astype", "byteswap", "choose", "compress", "copy", "fill", "flatten", "itemset",
    "nonzero", "partition", "put", "ravel", "repeat", "resize", "searchsorted", "sort", "take", "tobytes", "tofile",
    "__copy__", "__deepcopy__",
):  # fmt: skip
    setattr(GuardedArray, _name, _on_the_host(_name))


def without_guard(value: Any) -> Any:
    """A launch argument with its arrays without the guard."""
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, tuple):
        items = [without_guard(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
