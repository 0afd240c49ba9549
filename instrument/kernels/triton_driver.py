"""Triton's driver where there is no GPU: what Triton's own tools ask for, answered by the virtual GPU.

Triton looks for a driver when its autotuner times a kernel, when `triton.testing` measures, and when a script asks for
the active device or its properties. Without a GPU it finds none and fails; with `stand_in()` it finds this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from paellapy.instrument.device.base import Device, Event
from paellapy.instrument.errors import LaunchError

_TIMES = 3  # the virtual GPU takes the same time every time, but for the first


class VirtualDriver(DriverBase):  # type: ignore[misc]
    """Answers for the device that `pp.Device.current()` is."""

    def __init__(self) -> None:
        self.utils = _Utils()

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise LaunchError(f"the virtual GPU has no launcher in C++ to pass a {ty} to")

    def get_current_target(self) -> GPUTarget:
        major, minor = Device.current().capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return Device.current().capability

    def get_current_stream(self, device: int = 0) -> int:
        """Asked for by Triton's own launch, which cannot run here."""
        caller = sys._getframe(1).f_locals.get("self")
        name = getattr(caller, "__name__", "a kernel")
        raise LaunchError(
            f"kernel {name!r} is not a pp.kernel, and there is no GPU for Triton to run it on: put @pp.kernel above "
            "its @triton.jit, and it runs on the virtual GPU"
        )

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark

    def get_device_interface(self) -> type[_Interface]:
        return _Interface

    def get_empty_cache_for_benchmark(self) -> None:
        """The virtual GPU's L2 is taken to be warm; there is nothing to clear."""

    def clear_cache(self, cache: None) -> None:
        """Nothing to clear."""


class _Utils:
    @staticmethod
    def get_device_properties(device: int = 0) -> dict[str, int]:
        opened: Any = Device.current()
        part = getattr(opened, "part", None)
        return {
            "max_shared_mem": opened.limits.shared_bytes_per_block,
            "max_num_regs": opened.limits.registers,
            "multiprocessor_count": opened.sm_count,
            "warpSize": 32,
            "sm_clock_rate": int(1000 * part.clock_mhz) if part else 0,
            # Triton takes bandwidth to be clock × bus width × 2 / 8; only the product is known of a part.
            "mem_clock_rate": int(part.bandwidth_gbps * 1e6 * 8 / 2 / 4096) if part else 0,
            "mem_bus_width": 4096,
        }


class _TimedEvent:
    """`torch.cuda.Event` on the virtual GPU's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._event: Event | None = None

    def record(self, stream: Any = None) -> None:
        self._event = Device.current().record()

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def elapsed_time(self, later: _TimedEvent) -> float:
        """Milliseconds."""
        if self._event is None or later._event is None:
            raise LaunchError("an event that was never recorded has no time: call record() on both")
        return later._event.elapsed_ns(self._event) / 1e6


class _Interface:
    """What `triton.testing` uses of `torch.cuda`."""

    Event = _TimedEvent

    @staticmethod
    def synchronize(device: Any = None) -> None:
        Device.current().synchronize()

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return Device.current().capability


def _benchmark(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
    """A kernel's time on the virtual GPU, in milliseconds: what Triton's autotuner compares."""
    device, times = Device.current(), []
    session, device.session = device.session, None  # trials are not part of a trace
    try:
        for _attempt in range(_TIMES):
            start, end = _TimedEvent(), _TimedEvent()
            start.record()
            call()
            end.record()
            times.append(start.elapsed_time(end))
    finally:
        device.session = session
    times = times[1:]
    return [float(q) for q in np.quantile(times, quantiles)] if quantiles else float(np.mean(times))


def stand_in() -> None:
    """Lets Triton find this driver where it finds no other. Nothing is looked for before Triton asks."""
    module: Any = sys.modules["triton.runtime.driver"]
    search = module._create_driver
    if getattr(search, "stands_in", False):
        return

    def create_driver() -> DriverBase:
        try:
            return search()
        except RuntimeError as error:
            if not str(error).startswith("0 active drivers"):
                raise
            return VirtualDriver()

    create_driver.stands_in = True  # type: ignore[attr-defined]
    module._create_driver = create_driver
