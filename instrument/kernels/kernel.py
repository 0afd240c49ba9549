"""`Kernel`: the common part of Triton and CUDA C kernels, and of their launches.

A kernel exists in variants: plain, or reporting at some level, whole or sliced. Outside a trace it runs at its own
level; inside `trace()` it runs at level `trace`. `kernel.preemptible` launches variants that can be preempted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NoReturn

from paellapy.instrument.device.base import Device, Launcher, Work, check_grid
from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.gpu_model.parts import Occupancy, limits_for_capability, occupancy
from paellapy.instrument.kernels.preempt import Preemptible, Prepared, Wave
from paellapy.instrument.kernels.triton_source import target_capability
from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.descriptor import Exits, PassConfig, Report


class Kernel:
    """A kernel that reports. Launch it as `kernel[grid](…)`, like any Triton kernel."""

    def __init__(self, report: Report | None, exits: Exits) -> None:
        self.report, self.exits = report, exits
        PassConfig(report, exits=exits)  # an unknown level is refused here, not at the first launch
        self._launchers: dict[Any, Launcher] = {}
        self._waves: dict[Any, Wave] = {}  # duration of a wave of each preemptible variant

    name: str
    _launched = "[grid]"  # launch syntax, shown after the kernel's name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(
            f"kernel {self.name!r} was called without a grid: launch it as {self.name}{self._launched}(…)",
            kernel=self.name, field="grid",
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{self._launched}>"

    @property
    def preemptible(self) -> Preemptible:
        """`kernel.preemptible[grid](…)` launches so that the launch can be preempted and resumed."""
        return Preemptible(self)

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        """A launch that can be preempted, ready to be made."""
        raise NotImplementedError

    def _config(self, device: Device, sliced: bool, preempt: bool = False) -> PassConfig:
        level: Report | None = "trace" if device.session is not None else self.report
        return PassConfig(level, sliced, self.exits, preempt=preempt)

    def _limits(self, target: str) -> Any:
        number = target_capability(target)
        return limits_for_capability((number // 10, number % 10))


def occupancy_of(limits: Any, threads: int, compiled: Compiled, shared_bytes: int = 0) -> Occupancy:
    """Occupancy of the plain kernel, together with that of the reporting one."""
    plain = compiled.source.build(PassConfig())
    found = [
        occupancy(limits, threads, each.registers, each.shared_bytes + shared_bytes, each.source.cluster)
        for each in (plain, compiled)
    ]
    return replace(found[0], reporting=found[1])


def all_values(values: Sequence[Any]) -> Sequence[Any]:
    return values


def as_grid(grid: Any) -> tuple[int, ...]:
    if grid.__class__ is tuple and 1 <= len(grid) <= 3:  # the usual case, on every launch
        for extent in grid:
            if extent.__class__ is not int:
                break
        else:
            return grid
    try:
        found = tuple(map(index, grid)) if isinstance(grid, (tuple, list)) else (index(grid),)
    except TypeError:
        found = ()
    if not 1 <= len(found) <= 3:
        raise ArgumentError(f"a grid is one to three integers, not {grid!r}", field="grid", given=grid)
    return found


def work_of(name: str, grid: tuple[int, ...], values: Sequence[Any], device: Device) -> Work:
    x, y, z = (*grid, 1, 1)[:3]
    check_grid(name, (x, y, z))
    return Work((x, y, z), values, device.current_stream())


def blocks_at_once(device: Device, launcher: Callable[[bool], Launcher], work: Work) -> int:
    """Blocks of a preemptible variant that the GPU holds at once."""
    compiled = launcher(True).compiled
    threads = compiled.source.threads or functools.reduce(lambda a, b: a * b, work.block)
    shared_bytes = compiled.shared_bytes + work.shared_bytes
    return occupancy(device.limits, threads, compiled.registers, shared_bytes).blocks_per_sm * device.sm_count


def check_part(name: str, grid: Sequence[int], part: tuple[int, int]) -> None:
    first, count = part
    total = functools.reduce(lambda a, b: a * b, grid)
    if first < 0 or count < 1 or first + count > total:
        raise ArgumentError(
            f"kernel {name!r}: blocks {first}…{first + count - 1} are not all in a grid of {total} blocks",
            kernel=name, field="part", given=part, limit=total,
        )
