"""Refuses operations that would wait for a GPU, where PyTorch computes on the CPU in its place.

A real GPU refuses them while a module is captured (`gpu_waits.py`). The CPU never waits, so this module
checks the calls themselves: those that bring the model's data to the host, or whose shape depends on the data. Other
tensors, which would be on the host beside a GPU too, may be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.users_line import users_line

_TO_HOST = ("cpu", "numpy", "tolist", "__array__")
_DECIDES = (
    "_local_scalar_dense", "allclose", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
)  # fmt: skip


class Waits:
    """Checks every operation of one run, in order; `memory` has the addresses of inputs and weights."""

    def __init__(self, torch: Any, memory: Iterable[int]) -> None:
        self._torch = torch
        self._device = set(memory)  # addresses of data that would be on a GPU

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises if the operation waits for the GPU."""
        if self._waits(func.overloadpacket.__name__, args, kwargs):
            self.refuse(args, kwargs)

    def after(self, args: Any, kwargs: Any, out: Any) -> None:
        """Records results made from the model's data as GPU data; other results may reuse memory of such data."""
        change = self._device.update if self._on_device(args, kwargs) else self._device.difference_update
        change(map(_address, self._tensors(out)))

    def refuse(self, *values: Any) -> None:
        """Raises if one of the values is on the GPU."""
        if self._on_device(*values):
            raise CaptureError(
                f"waits for the GPU at {users_line()} (.item(), .cpu(), a condition on data, a shape that depends on "
                "it); a captured module only launches: keep these values on the GPU, or compute them before"
            )

    @contextlib.contextmanager
    def refusing_copies(self) -> Iterator[None]:
        """Makes `.cpu()` and similar methods raise. On the CPU they do nothing, so only the call can be detected."""
        from torch.overrides import TorchFunctionMode

        named, refuse = {getattr(self._torch.Tensor, name) for name in _TO_HOST}, self.refuse

        class Watch(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in named:
                    refuse(args)
                return func(*args, **(kwargs or {}))

        with Watch():
            yield

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in _DECIDES:
            return True
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        masked = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (self._torch.bool, self._torch.uint8) for each in args[1]
        )
        # assigning one value is a masked fill, whose shape does not depend on the data
        return masked and (name == "index" or args[2].numel() != 1)

    def _on_device(self, *values: Any) -> bool:
        return any(_address(each) in self._device for each in self._tensors(values))

    def _tensors(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return self._tensors(list(value.values()))
        if isinstance(value, tuple | list):
            return [leaf for each in value for leaf in self._tensors(each)]
        return [value] if isinstance(value, self._torch.Tensor) else []


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
