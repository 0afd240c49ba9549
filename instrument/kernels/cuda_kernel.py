"""`CudaKernel`: a CUDA C kernel that reports. It is launched with a grid and a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from paellapy.instrument.device.base import Device
from paellapy.instrument.device.launcher import Launcher
from paellapy.instrument.device.occupancy import Occupancy
from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.kernels.cuda_source import CudaSource, bind_values
from paellapy.instrument.kernels.kernel import (
    Kernel,
    all_values,
    as_grid,
    blocks_at_once,
    check_part,
    occupancy_of,
    work_of,
)
from paellapy.instrument.kernels.preempt import Prepared
from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.pass_config import Exits, PassConfig, Report


class CudaKernel(Kernel):
    """A CUDA C kernel: launch it as `kernel[grid, block](…)` or `kernel[grid, block, shared_bytes](…)`."""

    _launched = "[grid, block]"

    def __init__(self, source: CudaSource, report: Report | None, exits: Exits) -> None:
        super().__init__(report, exits)
        self._source, self.name = source, source.name

    def __getitem__(self, configuration: Any) -> Callable[..., Any]:
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, None)

    def slice(self, configuration: Any, first: int, count: int) -> Callable[..., Any]:
        """Launches blocks `first … first + count - 1` of the logical grid only; `configuration` as in `kernel[…]`."""
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, (first, count))

    def _configuration(self, given: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ArgumentError(
                f"launch CUDA kernel {self.name!r} as {self.name}[grid, block](…): grid and block are both needed"
            )
        grid, block, *rest = given
        return as_grid(grid), as_grid(block), int(rest[0]) if rest else 0

    def _run(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        part: tuple[int, int] | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._refuse_keywords(kwargs)
        device = Device.current()
        launcher = self._launchers.get((device.session is None, part is None, device))
        source = self._source.source(device.target, marked=device.session is not None)
        if launcher is None:
            launcher = device.prepare(source, self._config(device, part is not None), all_values)
            self._launchers[device.session is None, part is None, device] = launcher
        values = bind_values(self.name, source.metadata["codes"], args, device.handlers)
        if part is not None:
            check_part(self.name, grid, part)
        return launcher(grid, values, block, shared_bytes, part)

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        self._refuse_keywords(kwargs)
        grid, block, shared_bytes = self._configuration(configuration)
        source = self._source.source(device.target, marked=device.session is not None)

        def launcher(sliced: bool) -> Launcher:
            key = (device.session is None, not sliced, device, "preempt")
            if key not in self._launchers:
                self._launchers[key] = device.prepare(source, self._config(device, sliced, preempt=True), all_values)
            return self._launchers[key]

        values = bind_values(self.name, source.metadata["codes"], args, device.handlers)
        work = replace(work_of(self.name, grid, values, device), block=block, shared_bytes=shared_bytes)
        held = functools.partial(blocks_at_once, device, launcher, work)
        return Prepared(self.name, work, launcher, held, self._waves, (block, shared_bytes, device), args)

    def _refuse_keywords(self, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ArgumentError(
                f"CUDA kernel {self.name!r} takes arguments by position only: pass {next(iter(kwargs))} without its "
                "name"
            )

    def compile(
        self, target: str | None = None, report: Report | Literal["own"] | None = "own", sliced: bool = False
    ) -> Compiled:
        """Compiles for any target, without a GPU and without launching; `report=None` gives the plain kernel."""
        source = self._source.source(target or Device.current().target)
        return source.build(PassConfig(self.report if report == "own" else report, sliced, self.exits))

    def theoretical_occupancy(
        self, block: int | tuple[int, ...], shared_bytes: int = 0, target: str | None = None
    ) -> Occupancy:
        """Blocks of this kernel that an SM can hold, and the resource that limits them; as for Triton kernels."""
        limits = self._limits(target) if target else Device.current().limits
        threads = functools.reduce(lambda a, b: a * b, as_grid(block))
        return occupancy_of(limits, threads, self.compile(target), shared_bytes)
