"""Triton's driver where there is no GPU: it answers Triton's own tools for the virtual GPU.

Triton looks for a driver when its autotuner times a kernel, when `triton.testing` measures, and when a script asks for
the active device or its properties. Where it finds no GPU, driver_search.py lets it find this one.
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

_TIMES = 3  # repetitions: the virtual GPU takes the same time in every run but the first


class VirtualDriver(DriverBase):  # type: ignore[misc]
    """A driver for the device `pp.Device.current()`."""

    def __init__(self) -> None:
        self.utils = _Utils()

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise LaunchError(
            f"the virtual GPU has no C++ launcher, which the argument type {ty} would need", field="argument", given=ty
        )

    def get_current_target(self) -> GPUTarget:
        major, minor = Device.current().capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Does nothing: there is only one device."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return Device.current().capability

    def get_current_stream(self, device: int = 0) -> int:
        """Called by Triton's own launch, which cannot run here."""
        caller = sys._getframe(1).f_locals.get("self")  # noqa: SLF001  CPython's own
        name = getattr(caller, "__name__", "a kernel")
        raise LaunchError(
            f"kernel {name!r} is not a pp.kernel, and there is no GPU on which Triton could run it: put @pp.kernel "
            "above its @triton.jit to run it on the virtual GPU", kernel=name
        )

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark

    def get_device_interface(self) -> type[_Interface]:
        Device.current().clock_ns()  # raises errors of earlier launches before the measurement begins
        return _Interface

    def get_empty_cache_for_benchmark(self) -> None:
        """Returns nothing to clear: the virtual GPU's L2 is assumed to be warm."""

    def clear_cache(self, cache: None) -> None:
        """Does nothing."""


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
            # Triton computes bandwidth as clock × bus width × 2 / 8; only the product is known for a part.
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
        """Time in milliseconds."""
        if self._event is None or later._event is None:
            raise LaunchError("elapsed_time needs two recorded events: call record() on both first", field="event")
        return later._event.elapsed_ns(self._event) / 1e6


class _Interface:
    """The parts of `torch.cuda` that `triton.testing` uses."""

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
    """A kernel's time on the virtual GPU, in milliseconds, for Triton's autotuner."""
    device, times = Device.current(), []
    with device.untraced():
        for _attempt in range(_TIMES):
            start, end = _TimedEvent(), _TimedEvent()
            start.record()
            call()
            end.record()
            times.append(start.elapsed_time(end))
    times = times[1:]
    return [float(q) for q in np.quantile(times, quantiles)] if quantiles else float(np.mean(times))
